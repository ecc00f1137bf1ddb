"""The same attention as trainer.attention, by the TPU kernel that ships with JAX (splash attention).

The kernel keeps no scores in memory and skips blocks that the mask empties, in the forward and in the backward pass.
"""

import math

import jax
import jax.numpy as jnp

from trainer.attention import Attention, attention

BLOCK = 1024  # with a 4096 window and the fused backward pass, 2048 exceeds the scoped VMEM
LANES = 128  # the kernel wants sequence and head dimension in multiples of a vector register's width


def attention_for(platform: str) -> Attention:
    """The attention to compile for devices of this platform (`jax.Device.platform`)."""
    return splash_attention if platform == "tpu" else attention


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
