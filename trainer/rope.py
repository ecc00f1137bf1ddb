"""Rotary position embedding, half-split layout (the one of Hugging Face and OLMo-core), in float32."""

import jax
import jax.numpy as jnp
import numpy as np


def rope_table(length: int, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin, each f32 [length, head_dim / 2], of position × theta^(-2i / head_dim).

    The angles are computed on the host in float64: at position 8191 a float32 angle is already off by 5e-4.
    """
    frequency = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angle = np.arange(length, dtype=np.float64)[:, None] * frequency
    return jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the pairs (x[i], x[i + head_dim/2]) of `x` [batch, length, heads, head_dim]; float32 inside, dtype kept."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
