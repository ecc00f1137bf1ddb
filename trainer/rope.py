"""Rotary position embedding, half-split layout (the one of Hugging Face and OLMo-core), in float32."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from trainer.recipe import Yarn


def frequencies(head_dim: int, theta: float, yarn: Yarn | None) -> np.ndarray:
    """f64 [head_dim / 2]: radians per position, theta^(-2i / head_dim), blended with 1 / factor of it under YaRN."""
    pairs = np.arange(0, head_dim, 2, dtype=np.float64)
    plain = theta ** (-pairs / head_dim)
    if yarn is None:
        return plain

    def pair_that_turns(times: float) -> float:
        turned = math.log(yarn.old_length / (times * 2 * math.pi))
        return head_dim * turned / (2 * math.log(theta))

    # As OLMo-core: whole pairs, and at most the last one. Hugging Face caps at head_dim - 1, beyond the last pair.
    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), head_dim // 2 - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def rope_table(length: int, head_dim: int, theta: float, yarn: Yarn | None = None) -> tuple[jax.Array, jax.Array]:
    """cos and sin, each f32 [length, head_dim / 2], of position × frequency, times YaRN's attention factor.

    The angles are computed on the host in float64: at position 8191 a float32 angle is already off by 5e-4.
    """
    angle = np.arange(length, dtype=np.float64)[:, None] * frequencies(head_dim, theta, yarn)
    factor = yarn.attention_factor if yarn is not None else 1.0
    return jnp.asarray(factor * np.cos(angle), jnp.float32), jnp.asarray(factor * np.sin(angle), jnp.float32)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the pairs (x[i], x[i + head_dim/2]) of `x` [batch, length, heads, head_dim]; float32 inside, dtype kept."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
