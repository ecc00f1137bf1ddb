"""Causal attention over a window, exact, with the blocks that the mask empties left out.

The queries are cut into blocks; each block sees only the keys that at least one of its queries may see. So a full
causal layer costs a little over half of S², a windowed one about S·(window + block).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trainer.rope import Rope, norm_rope

# Names (jax.ad_checkpoint) of what an attention kernel keeps for its backward pass beside its inputs.
KEPT_BY_ATTENTION = ("attention", "attention_sums")


class Attention(NamedTuple):
    """How attention is computed, from what the projections give: arrays [batch, length, heads · head_dim].

    `norm_rope(x, weight, rope, head_dim, eps)` as trainer.rope's; `attention(q, k, v, documents, head_dim, window)` as
    `attention` below for q, k and v that are not cut into heads. Where several `devices` share a sequence, the model
    computes the positions that `part(x, axis)` takes of whole sequences (trainer.sequence).
    """

    norm_rope: Callable[[jax.Array, jax.Array, Rope, int, float], jax.Array]
    attention: Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None, int, int], jax.Array]
    turn_again: bool = False  # the backward pass norms and turns again instead of keeping q and k as they come out
    devices: int = 1
    part: Callable[[Any, int], Any] = lambda x, axis: x


BLOCKS = 4  # query blocks of a sequence: more leave out more of the mask, but make smaller matrix products
MIN_BLOCK, MAX_BLOCK = 64, 1024  # queries per block; the upper bound is one on the scores in memory


def visible[X: (np.ndarray, jax.Array)](queries: X, keys: X, window: int) -> X:
    """bool [queries, keys]: which positions a query may attend to. The window includes the query itself; -1 is full."""
    distance = queries[:, None] - keys[None, :]
    return (distance >= 0) & ((distance < window) if window > 0 else True)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, window: int, documents: jax.Array | None = None) -> jax.Array:
    """softmax(q kᵀ) v under the causal window, within documents where they are given; q is scaled already.

    q [batch, length, heads, head_dim]; k, v [batch, length, kv_heads, head_dim], heads a multiple of kv_heads (query
    head h reads kv head h // (heads / kv_heads)); documents int32 [batch, length], positions see those of an equal
    number. Scores and softmax in float32; returns q's shape and dtype.
    """
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    block = min(MAX_BLOCK, max(MIN_BLOCK, -(-length // BLOCKS)))
    out = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        first = 0 if window < 0 else max(0, start - window + 1)
        mask: np.ndarray | jax.Array = visible(np.arange(start, stop), np.arange(first, stop), window)
        if documents is not None:
            same = documents[:, start:stop, None] == documents[:, None, first:stop]
            mask = (mask & same)[:, None, None]
        out.append(_block(q[:, start:stop], k[:, first:stop], v[:, first:stop], mask))
    return jnp.concatenate(out, axis=1).reshape(batch, length, heads, head_dim)


def attention_at(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: Sequence[jax.Array],
    window: int,
    of_queries: jax.Array | None = None,
    of_keys: jax.Array | None = None,
) -> jax.Array:
    """`attention` of some queries, in as many equal stretches of positions as there are `starts`, int32 [] each.

    k and v have all positions; documents are given for both. Where the queries are is known to the device alone, so that a
    full layer leaves out nothing: every query meets every key.
    """
    batch, length, heads, head_dim = q.shape
    whole, kv_heads = k.shape[1:3]
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    stretch = length // len(starts)
    block = min(MAX_BLOCK, max(MIN_BLOCK, -(-stretch // BLOCKS)))
    out = []
    for number, begin in enumerate(starts):
        for start in range(0, stretch, block):
            stop = min(start + block, stretch)
            seen = whole if window < 0 else min(whole, window + stop - start - 1)
            first = jnp.clip(begin + stop - seen, 0, whole - seen)
            mask = visible(begin + jnp.arange(start, stop), first + jnp.arange(seen), window)
            mine = slice(number * stretch + start, number * stretch + stop)
            keys, values = (jax.lax.dynamic_slice_in_dim(x, first, seen, axis=1) for x in (k, v))
            if of_queries is not None and of_keys is not None:
                others = jax.lax.dynamic_slice_in_dim(of_keys, first, seen, axis=1)
                mask = (mask & (of_queries[:, mine, None] == others[:, None]))[:, None, None]
            out.append(_block(q[:, mine], keys, values, mask))
    return jnp.concatenate(out, axis=1).reshape(batch, length, heads, head_dim)


def whole_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array | None, head_dim: int, window: int
) -> jax.Array:
    """`attention` of q, k and v [batch, length, heads · head_dim]."""
    rows = [x.reshape(*x.shape[:2], -1, head_dim) for x in (q, k, v)]
    return attention(*rows, window, documents).reshape(q.shape)


PLAIN = Attention(norm_rope, whole_attention)


def _block(q: jax.Array, k: jax.Array, v: jax.Array, mask: np.ndarray | jax.Array) -> jax.Array:
    """q [b, s, kv, group, d], k and v [b, t, kv, d], mask bool [s, t] or [b, 1, 1, s, t] -> q's shape."""
    scores = jnp.einsum("bskgd,btkd->bkgst", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask, scores, -jnp.inf)
    return jnp.einsum("bkgst,btkd->bskgd", _softmax(scores).astype(v.dtype), v)


def _softmax(scores: jax.Array) -> jax.Array:
    """Over the last axis, multiplied with the reciprocal of the sum: XLA turns some divisions by a broadcast value into
    that, and which ones depends on the number of devices, so that the last bits would too (trainer.reduction).
    """
    exp = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    return exp * (1 / jnp.sum(exp, axis=-1, keepdims=True))
