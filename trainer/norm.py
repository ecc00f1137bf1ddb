"""RMSNorm with float32 inside, and a gradient that keeps what came in."""

from functools import partial

import jax
import jax.numpy as jnp


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm(x: jax.Array, weight: jax.Array, eps: float, over: str | None = None) -> jax.Array:
    """RMSNorm over the last axis, in float32 including the weight, then cast back.

    With `over`, an axis of the mesh, its devices have equal parts of the last axis, and the mean is over all of them.
    The backward pass keeps x as it came and 1 / rms, float32 [..., 1]: nothing of x's size in float32.
    """
    return _rms_norm(x, weight, eps, over)[0]


def _mean(x: jax.Array, over: str | None) -> jax.Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return mean if over is None else jax.lax.pmean(mean, over)


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float, over: str | None) -> tuple[jax.Array, jax.Array]:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(_mean(jnp.square(wide), over) + eps)
    return (wide * scale * weight).astype(x.dtype), scale


def _rms_norm_forward(
    x: jax.Array, weight: jax.Array, eps: float, over: str | None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    normed, scale = _rms_norm(x, weight, eps, over)
    return normed, (x, scale, weight)


def _rms_norm_backward(
    _: float, over: str | None, kept: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """y = x·r·w with r = (mean x² + ε)^-½, so that dx = r·(g·w - x·r²·mean(g·w·x)) and dw = Σ g·x·r."""
    x, scale, weight = kept
    wide, g = x.astype(jnp.float32), gradient.astype(jnp.float32)
    weighted = g * weight
    along = _mean(weighted * wide, over) * jnp.square(scale)
    d_x = scale * (weighted - wide * along)
    return d_x.astype(x.dtype), jnp.sum(g * (wide * scale), axis=tuple(range(x.ndim - 1)))


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)
