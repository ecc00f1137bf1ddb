"""Recipes: short Python files with constants on top. One file is one stage of one training."""
