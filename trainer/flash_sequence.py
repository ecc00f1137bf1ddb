"""Attention of devices that share a sequence, by our TPU kernels, which go by where each stretch of keys lies.

A full layer gathers all keys and values. A windowed one needs, for each of a device's two chunks, no more than the window
before it, which is the end of the chunk before.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from trainer import flash
from trainer.sequence import AXIS, chunks_held, gather, part, plain_attention


def divided_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array | None, head_dim: int, window: int, count: int
) -> jax.Array:
    """As trainer.sequence.plain_attention, which also computes what there are no kernels for; lowers for TPU only."""
    chunk = q.shape[1] // 2
    before = -(-window // flash.LANES) * flash.LANES
    if not flash.fits(chunk, head_dim):
        return plain_attention(q, k, v, documents, head_dim, window, count)
    if 0 < before <= chunk and flash.fits(math.gcd(before, chunk), head_dim):
        return _with_neighbours(q, k, v, documents, head_dim, window, count, before)
    return _with_all(q, k, v, documents, head_dim, window, count)


def _with_all(
    q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array | None, head_dim: int, window: int, count: int
) -> jax.Array:
    """Every key is gathered, and stays in the order of devices."""
    chunk, held = q.shape[1] // 2, chunks_held(count)
    keys, values = gather(k), gather(v)
    everywhere = _starts(np.tile(held.reshape(-1), (count, 1)) * chunk)
    of_queries = of_keys = None
    if documents is not None:
        of_queries = part(documents, count, 1)
        of_keys = documents.reshape(-1, 2 * count, chunk)[:, held.reshape(-1)].reshape(documents.shape)
    # Both chunks at once where the kernels can: then no device has more to do than another.
    at_once = 2 if flash.fits(2 * chunk, head_dim) else 1
    out = []
    for first in range(0, 2, at_once):
        mine = slice(first * chunk, (first + at_once) * chunk)
        division = flash.Division(AXIS, chunk, _starts(held[:, first : first + at_once] * chunk), everywhere)
        pair = None if of_queries is None or of_keys is None else (of_queries[:, mine], of_keys)
        out.append(flash.flash(q[:, mine], keys, values, pair, head_dim, window, division))
    return jnp.concatenate(out, axis=1)


def _with_neighbours(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    documents: jax.Array | None,
    head_dim: int,
    window: int,
    count: int,
    before: int,
) -> jax.Array:
    """Each chunk with the last `before` positions of the one before it."""
    chunk, held = q.shape[1] // 2, chunks_held(count)
    unit = math.gcd(before, chunk)
    out = []
    for side, (keys, values) in enumerate(zip(_extended(k, before, count), _extended(v, before, count), strict=True)):
        begin = held[:, side, None] * chunk
        division = flash.Division(
            AXIS,
            unit,
            _starts(begin + np.arange(0, chunk, unit)),
            _starts(begin + np.arange(-before, chunk, unit)),
        )
        pair = None
        if documents is not None:
            padded = jnp.pad(documents, ((0, 0), (before, 0)))  # what lies before the first chunk is never looked at
            at = jnp.asarray(begin[:, 0])[jax.lax.axis_index(AXIS)]
            of_keys = jax.lax.dynamic_slice_in_dim(padded, at, before + chunk, axis=1)
            pair = (of_keys[:, before:], of_keys)
        out.append(flash.flash(q[:, side * chunk : (side + 1) * chunk], keys, values, pair, head_dim, window, division))
    return jnp.concatenate(out, axis=1)


def _extended(x: jax.Array, before: int, count: int) -> tuple[jax.Array, jax.Array]:
    """This device's two chunks of x [batch, 2 · chunk, width], each behind the last `before` positions of the one before it.

    Before the i-th chunk from the front is one of the device before; before the i-th from the back, one of the device
    after. The last device has both of the middle; nothing is before the very first.
    """
    first, second = jnp.split(x, 2, axis=1)
    ends = first[:, -before:], second[:, -before:]
    upward, downward = [(i, i + 1) for i in range(count - 1)], [(i + 1, i) for i in range(count - 1)]
    of_first, of_second = jax.lax.ppermute(ends[0], AXIS, upward), jax.lax.ppermute(ends[1], AXIS, downward)
    of_second = jnp.where(jax.lax.axis_index(AXIS) == count - 1, ends[0], of_second)
    return jnp.concatenate([of_first, first], axis=1), jnp.concatenate([of_second, second], axis=1)


def _starts(positions: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, positions.tolist()))
