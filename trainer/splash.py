"""Which attention a device gets: on a TPU our own kernels, the one that ships with JAX (splash attention) for sequences
too long for ours, and XLA's for shapes without kernels; elsewhere trainer.attention.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp

from trainer.attention import PLAIN, Attention, attention, whole_attention
from trainer.rope import Rope
from trainer.rope import norm_rope as plain_norm_rope
from trainer.sequence import divided
from trainer.tensor import AXIS

BLOCK = 1024  # with a 4096 window and the fused backward pass, 2048 exceeds the scoped VMEM
LANES = 128  # the kernels want sequence and head dimension in multiples of a vector register's width


def attention_for(platform: str, sharing: int = 1, tensor: int = 1) -> Attention:
    """The attention to compile for devices of this platform (`jax.Device.platform`), `sharing` of which share a sequence,
    and `tensor` the heads."""
    of_parts = partial(plain_norm_rope, over=AXIS)  # the kernel knows no norm over several devices
    if platform != "tpu":
        attend = PLAIN if tensor == 1 else PLAIN._replace(norm_rope=of_parts)
        return attend if sharing == 1 else divided(attend, sharing)
    attend = Attention(tpu_norm_rope if tensor == 1 else of_parts, tpu_attention, turn_again=True)
    if sharing == 1:
        return attend
    from trainer.flash_sequence import divided_attention

    return divided(attend, sharing, divided_attention)


def tpu_norm_rope(x: jax.Array, weight: jax.Array, rope: Rope, head_dim: int, eps: float) -> jax.Array:
    """As trainer.rope.norm_rope; lowers for TPU only."""
    from trainer.norm_rope import norm_rope

    if x.shape[1] % LANES or head_dim % LANES:
        return plain_norm_rope(x, weight, rope, head_dim, eps)
    return norm_rope(x, weight, rope, head_dim, eps)


def tpu_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array | None, head_dim: int, window: int
) -> jax.Array:
    """As trainer.attention.whole_attention; lowers for TPU only."""
    from trainer import flash

    length = q.shape[1]
    if flash.fits(length, head_dim):
        return flash.flash_attention(q, k, v, documents, head_dim, window)
    if length % LANES or head_dim % LANES:
        return whole_attention(q, k, v, documents, head_dim, window)
    rows = [x.reshape(*x.shape[:2], -1, head_dim) for x in (q, k, v)]
    return splash_attention(*rows, window, documents).reshape(q.shape)


def splash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, window: int, documents: jax.Array | None = None
) -> jax.Array:
    """As `trainer.attention.attention`, which also computes what the kernel has no blocks for. Lowers for TPU only."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    length, heads, head_dim = q.shape[1:]
    block = math.gcd(length, BLOCK)
    if block % LANES or head_dim % LANES:
        return attention(q, k, v, window, documents)
    whole = (length, length)
    mask = splash.CausalMask(whole) if window < 0 else splash.LocalMask(whole, (window - 1, 0), 0)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=block,
            use_fused_bwd_kernel=True,
        ),
        head_shards=1,
        q_seq_shards=1,
    )
    # The kernel takes one sequence, heads first, and does not scale either.
    rows = [jnp.swapaxes(x, 1, 2) for x in (q, k, v)]
    if documents is not None:
        rows.append(splash.SegmentIds(q=documents, kv=documents))
    out = jax.vmap(kernel)(*rows)
    return jnp.swapaxes(out, 1, 2).astype(q.dtype)
