"""Rotary position embedding, half-split layout (the one of Hugging Face and OLMo-core), in float32."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from trainer.norm import rms_norm
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


Rope = tuple[jax.Array, jax.Array]  # cos and sin, as `rope_table` gives them


def rope_table(length: int, head_dim: int, theta: float, yarn: Yarn | None = None) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, each f32 [length, head_dim / 2], of position × frequency, times YaRN's attention factor.

    The angles are computed on the host in float64: at position 8191 a float32 angle is already off by 5e-4. The tables
    stay on the host, so that what is made from them is: XLA divides constants by one, and multiplies with the
    reciprocal what it does not see to be constant, as in a loop on several devices.
    """
    angle = np.arange(length, dtype=np.float64)[:, None] * frequencies(head_dim, theta, yarn)
    factor = yarn.attention_factor if yarn is not None else 1.0
    return (factor * np.cos(angle)).astype(np.float32), (factor * np.sin(angle)).astype(np.float32)


@jax.custom_vjp
def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the pairs (x[i], x[i + head_dim/2]) of `x` [batch, length, heads, head_dim]; float32 inside, dtype kept.

    Linear in x: the backward pass turns back, and keeps the tables alone, which are not differentiated.
    """
    return _turn(x, cos, sin)


def _turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


apply_rope.defvjp(
    lambda x, cos, sin: (_turn(x, cos, sin), (cos, sin)),
    lambda tables, gradient: (_turn(gradient, tables[0], -tables[1]), None, None),
)


def norm_rope(
    x: jax.Array, weight: jax.Array, rope: Rope, head_dim: int, eps: float, over: str | None = None
) -> jax.Array:
    """x [batch, length, heads · head_dim], normed over all of it by f32 `weight`, then turned head by head.

    With `over` the devices along that axis of the mesh have equal parts of the heads (trainer.norm).
    """
    batch, length, width = x.shape
    heads = rms_norm(x, weight, eps, over).reshape(batch, length, width // head_dim, head_dim)
    return apply_rope(heads, *rope).reshape(x.shape)
