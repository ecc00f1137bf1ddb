"""An instance's sequence divided over devices: which positions each holds, and attention across them.

Everything but attention looks at one position at a time. For attention a device gathers keys and values of the whole
sequence and keeps its own queries (context parallelism as in Llama 3, arXiv 2407.21783, section 3.3.2); what it finds as
the gradients of keys and values is summed over the devices, each keeping its part.

A query at position x sees x keys. So that all devices have as much to do, the sequence is cut into twice as many chunks
as devices, and device i holds the i-th from the front and the i-th from the back.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from trainer.attention import Attention, attention_at

AXIS = "sequence"  # of the mesh; inside a shard_map over it


def chunks_held(count: int) -> np.ndarray:
    """int32 [count, 2]: the chunks of each of `count` devices, of 2·count in all."""
    first = np.arange(count, dtype=np.int32)
    return np.stack([first, 2 * count - 1 - first], axis=1)


def part[X: (jax.Array, np.ndarray)](x: X, count: int, axis: int) -> jax.Array:
    """Of x, whose `axis` is the positions of whole sequences, those that this device holds, in their order."""
    length = x.shape[axis]
    chunks = jnp.asarray(x).reshape(*x.shape[:axis], 2 * count, length // (2 * count), *x.shape[axis + 1 :])
    mine = jnp.asarray(chunks_held(count))[jax.lax.axis_index(AXIS)]
    kept = jnp.take(chunks, mine, axis=axis)
    return kept.reshape(*x.shape[:axis], length // count, *x.shape[axis + 1 :])


def gather(x: jax.Array) -> jax.Array:
    """All of [batch, length, …] from every device's part, in the order of devices. Its transpose sums and scatters."""
    return jax.lax.all_gather(x, AXIS, axis=1, tiled=True)


def in_order(x: jax.Array, count: int) -> jax.Array:
    """What was gathered [batch, length, …], in the order of positions."""
    chunks = x.reshape(x.shape[0], 2 * count, x.shape[1] // (2 * count), *x.shape[2:])
    return chunks[:, np.argsort(chunks_held(count).reshape(-1))].reshape(x.shape)


def plain_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array | None, head_dim: int, window: int, count: int
) -> jax.Array:
    """As trainer.attention.whole_attention, of this device's part of q, k and v; `documents` of whole sequences."""
    chunk = q.shape[1] // 2
    heads = [x.reshape(*x.shape[:2], -1, head_dim) for x in (q, in_order(gather(k), count), in_order(gather(v), count))]
    starts = jnp.asarray(chunks_held(count) * chunk)[jax.lax.axis_index(AXIS)]
    of_queries = None if documents is None else part(documents, count, 1)
    return attention_at(*heads, [starts[0], starts[1]], window, of_queries, documents).reshape(q.shape)


def divided(attend: Attention, count: int, attention: Callable[..., jax.Array] = plain_attention) -> Attention:
    """`attend` where `count` devices share each sequence; `attention` is `plain_attention` or computes the same."""
    return attend._replace(
        attention=partial(attention, count=count), devices=count, part=lambda x, axis: part(x, count, axis)
    )
