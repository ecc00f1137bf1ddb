"""Hashes that are integer sums, so that they come out the same on any mesh: of a batch, and of the training state.

Equal digests are how two runs, or a save and its restore, are compared bit for bit. All arithmetic is uint32, wrapping.
The numpy twins are the definition in the plainest form; tests hold the two together.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LANE = 0x7F4A7C15  # tells the two lanes of a hash apart: in the weight of a position ...
SALT = 0x9E3779B9  # ... and in the value


def mix32(x: jax.Array) -> jax.Array:
    """A bijection of uint32 that spreads every input bit (the finaliser of MurmurHash3)."""
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x85EBCA6B)
    x = x ^ (x >> 13)
    x = x * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def position_weight(position: jax.Array, lane: int = 0) -> jax.Array:
    """An odd weight per position: times an odd number, no change of a value is lost modulo 2³²."""
    return jnp.uint32(2) * mix32(position + jnp.uint32(lane * LANE & 0xFFFFFFFF)) + jnp.uint32(1)


def ids_hash(ids: jax.Array, rows: jax.Array, real: jax.Array | None = None) -> jax.Array:
    """uint32 [2]: both lanes of the hash of instance ids uint32 [..., 2] (lo, hi) in batch rows `rows` uint32 [...].

    A plain sum over rows, or those that are `real` bool [...]: the parts of a batch may be hashed apart and added.
    """
    lo, hi = ids[..., 0], ids[..., 1]
    lanes = [
        _sum(mix32(lo ^ mix32(hi + jnp.uint32(lane * SALT & 0xFFFFFFFF))) * position_weight(rows, lane), real)
        for lane in (0, 1)
    ]
    return jnp.stack(lanes)


def data_hash(tokens: jax.Array, rows: jax.Array, real: jax.Array | None = None) -> jax.Array:
    """uint32 [2]: both lanes of the hash of tokens int32 [..., S] in rows `rows` uint32 [...]; adds like `ids_hash`."""
    length = tokens.shape[-1]
    position = rows[..., None] * jnp.uint32(length) + jnp.arange(length, dtype=jnp.uint32)
    values = tokens.astype(jnp.uint32)
    of_tokens = None if real is None else real[..., None]
    lanes = [
        _sum(mix32(values + jnp.uint32(lane * SALT & 0xFFFFFFFF)) * position_weight(position, lane), of_tokens)
        for lane in (0, 1)
    ]
    return jnp.stack(lanes)


def _sum(terms: jax.Array, real: jax.Array | None) -> jax.Array:
    return jnp.sum(terms if real is None else jnp.where(real, terms, 0), dtype=jnp.uint32)


def hash_text(lanes: Any) -> str:
    """The text form of a hash: 16 hex digits."""
    first, second = (int(lane) for lane in np.asarray(lanes))
    return f"{first:08x}{second:08x}"


def _bits(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.floating):
        width = jnp.dtype(x.dtype).itemsize
        if width > 4:
            raise TypeError(f"no digest for {x.dtype}: the state has no numbers wider than 32 bits")
        return jax.lax.bitcast_convert_type(x, {4: jnp.uint32, 2: jnp.uint16, 1: jnp.uint8}[width]).astype(jnp.uint32)
    if jnp.dtype(x.dtype).itemsize > 4:
        raise TypeError(f"no digest for {x.dtype}: the state has no numbers wider than 32 bits")
    return x.astype(jnp.uint32)


def _leaf_digest(x: jax.Array) -> jax.Array:
    index = jnp.zeros(x.shape, jnp.uint32)
    stride = 1
    for dim in range(x.ndim - 1, -1, -1):
        iota = jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim)
        index = index + iota * jnp.uint32(stride & 0xFFFFFFFF)
        stride *= x.shape[dim]
    return jnp.sum(_bits(x) * position_weight(index), dtype=jnp.uint32)


@jax.jit
def _digests(leaves: list[jax.Array]) -> jax.Array:
    """One leaf after the other: XLA for CPUs would hold the products of all at once, as large as the state."""
    sums, last = [], jnp.zeros((), jnp.uint32)
    for leaf in leaves:
        leaf, _ = jax.lax.optimization_barrier((leaf, last))
        last = _leaf_digest(leaf)
        sums.append(last)
    return jnp.stack(sums)


def _named_leaves(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def state_digest(tree: Any) -> dict[str, int]:
    """Per leaf (key: "/"-joined path) Σ bits(x_i) · odd(hash(i)) mod 2³², i the row-major index in the whole leaf.

    Computed where the leaves live, the same on any mesh; any single flipped bit changes it. In a gang of several
    processes all must call it.
    """
    named = _named_leaves(tree)
    if not named:
        return {}
    values = np.asarray(_digests(list(named.values())))
    return {name: int(value) for name, value in zip(named, values, strict=True)}


def state_digest_numpy(tree: Any) -> dict[str, int]:
    """The same from arrays on the host."""
    return {name: _leaf_digest_numpy(np.asarray(leaf)) for name, leaf in _named_leaves(tree).items()}


def _mix32_numpy(x: np.ndarray) -> np.ndarray:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x85EBCA6B)
    x = x ^ (x >> np.uint32(13))
    x = x * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _leaf_digest_numpy(x: np.ndarray) -> int:
    x = np.atleast_1d(x)
    floating = x.dtype.kind == "f" or x.dtype.name == "bfloat16"
    bits = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}") if floating else x
    index = np.arange(x.size, dtype=np.uint64).astype(np.uint32)
    weights = np.uint32(2) * _mix32_numpy(index) + np.uint32(1)
    return int(np.sum(bits.reshape(-1).astype(np.uint32) * weights, dtype=np.uint32))
