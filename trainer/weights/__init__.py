"""Weights in the formats of others: Hugging Face's safetensors, OLMo-core's checkpoints. Needs neither torch nor them."""
