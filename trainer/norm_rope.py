"""RMSNorm of all heads together and the rotation of each, in one pass over memory: Pallas kernels for a TPU.

As trainer.model.rms_norm and trainer.rope.apply_rope one after the other, rounded where they round. XLA makes more than
ten passes of the two with their gradients, as half a head is half a vector register to it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trainer.rope import Rope

ROWS = 256  # positions per grid step
VMEM_BYTES = 56 * 2**20


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def norm_rope(x: jax.Array, weight: jax.Array, rope: Rope, head_dim: int, eps: float) -> jax.Array:
    """x [batch, length, heads · head_dim], normed over all of it by f32 `weight` and turned head by head by `rope`.

    length a multiple of 128, head_dim one of 128. The backward pass keeps x as it came.
    """
    return _forward(x, weight, rope, head_dim, eps)[0]


def _tables(rope: Rope) -> list[jax.Array]:
    """f32 [length, head_dim] each: what x is multiplied with, and what the other half of x is."""
    cos, sin = rope
    return [jnp.concatenate([cos, cos], axis=1), jnp.concatenate([-sin, sin], axis=1)]


def _heads(width: int, head_dim: int) -> list[Any]:
    return [pl.ds(start, head_dim) for start in range(0, width, head_dim)]


def _scale(x: jax.Array, eps: float) -> jax.Array:
    return jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=1, keepdims=True) + eps)


def _forward_kernel(
    head_dim: int, eps: float, x_ref: Any, weight_ref: Any, cos_ref: Any, sin_ref: Any, out_ref: Any
) -> None:
    scale = _scale(x_ref[...].astype(jnp.float32), eps)
    for head in _heads(x_ref.shape[1], head_dim):
        normed = x_ref[:, head].astype(jnp.float32) * scale * weight_ref[:, head]
        normed = normed.astype(out_ref.dtype).astype(jnp.float32)
        turned = normed * cos_ref[...] + pltpu.roll(normed, head_dim // 2, 1) * sin_ref[...]
        out_ref[:, head] = turned.astype(out_ref.dtype)


def _backward_kernel(
    head_dim: int,
    eps: float,
    x_ref: Any,
    weight_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    g_ref: Any,
    dx_ref: Any,
    dw_ref: Any,
) -> None:
    """As trainer.model's; the gradient of the normed x waits in dx_ref until the mean over all heads is known."""
    heads = _heads(x_ref.shape[1], head_dim)
    scale = _scale(x_ref[...].astype(jnp.float32), eps)
    along = jnp.zeros_like(scale)
    for head in heads:
        g, x = g_ref[:, head].astype(jnp.float32), x_ref[:, head].astype(jnp.float32)
        normed_g = (g * cos_ref[...] - pltpu.roll(g, head_dim // 2, 1) * sin_ref[...]).astype(dx_ref.dtype)
        dx_ref[:, head] = normed_g
        wide = normed_g.astype(jnp.float32)
        along += jnp.sum(wide * weight_ref[:, head] * x, axis=1, keepdims=True)
        dw_ref[:, head] = jnp.sum(wide * (x * scale), axis=0, keepdims=True)
    along = along / x_ref.shape[1] * jnp.square(scale)
    for head in heads:
        x = x_ref[:, head].astype(jnp.float32)
        weighted = dx_ref[:, head].astype(jnp.float32) * weight_ref[:, head]
        dx_ref[:, head] = (scale * (weighted - x * along)).astype(dx_ref.dtype)


def _call(
    kernel: Any, name: str, operations: int, wide: list[jax.Array], weight: jax.Array, rope: Rope, sums: bool
) -> list[jax.Array]:
    """`kernel` over blocks of ROWS positions of the `wide` arrays; with `sums` also one f32 [width] per block."""
    batch, length, width = wide[0].shape
    rows = next(r for r in (ROWS, ROWS // 2) if length % r == 0)
    blocks = length // rows
    tables = _tables(rope)
    block = pl.BlockSpec((None, rows, width), lambda b, i: (b, i, 0))
    table = pl.BlockSpec((rows, tables[0].shape[1]), lambda b, i: (i, 0))
    out = [jax.ShapeDtypeStruct(wide[0].shape, wide[0].dtype)]
    out_specs = [block]
    if sums:
        out.append(jax.ShapeDtypeStruct((batch, blocks, 1, width), jnp.float32))
        out_specs.append(pl.BlockSpec((None, None, 1, width), lambda b, i: (b, i, 0, 0)))
    operands = [wide[0], weight[None], *tables, *wide[1:]]
    return pl.pallas_call(
        kernel,
        grid=(batch, blocks),
        in_specs=[block, pl.BlockSpec((1, width), lambda b, i: (0, 0)), table, table, *[block] * (len(wide) - 1)],
        out_specs=out_specs,
        out_shape=out,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM_BYTES),
        cost_estimate=pl.CostEstimate(
            flops=operations * wide[0].size,
            transcendentals=batch * length,
            bytes_accessed=sum(a.size * a.dtype.itemsize for a in [*operands, *out]),
        ),
        name=name,
    )(*operands)


def _forward(x, weight, rope, head_dim, eps):  # type: ignore[no-untyped-def]
    (out,) = _call(partial(_forward_kernel, head_dim, eps), "norm_rope_forward", 11, [x], weight, rope, False)
    return out, (x, weight, rope)


def _backward(head_dim, eps, kept, g):  # type: ignore[no-untyped-def]
    x, weight, rope = kept
    dx, dw = _call(partial(_backward_kernel, head_dim, eps), "norm_rope_backward", 22, [x, g], weight, rope, True)
    return dx, jnp.sum(dw, axis=(0, 1, 2)), None


norm_rope.defvjp(_forward, _backward)
