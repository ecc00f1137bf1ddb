"""RMSNorm with float32 inside, and a gradient that keeps what came in."""

from functools import partial

import jax
import jax.numpy as jnp


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the last axis, in float32 including the weight, then cast back.

    The backward pass keeps x as it came and 1 / rms, float32 [..., 1]: nothing of x's size in float32.
    """
    return _rms_norm(x, weight, eps)[0]


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale * weight).astype(x.dtype), scale


def _rms_norm_forward(x: jax.Array, weight: jax.Array, eps: float) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    normed, scale = _rms_norm(x, weight, eps)
    return normed, (x, scale, weight)


def _rms_norm_backward(_: float, kept: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    """y = x·r·w with r = (mean x² + ε)^-½, so that dx = r·(g·w - x·r²·mean(g·w·x)) and dw = Σ g·x·r."""
    x, scale, weight = kept
    wide, g = x.astype(jnp.float32), gradient.astype(jnp.float32)
    weighted = g * weight
    along = jnp.mean(weighted * wide, axis=-1, keepdims=True) * jnp.square(scale)
    d_x = scale * (weighted - wide * along)
    return d_x.astype(x.dtype), jnp.sum(g * (wide * scale), axis=tuple(range(x.ndim - 1)))


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)
