"""Keeps one training run going until a committed checkpoint at the target step exists. Never imports JAX."""
