"""Hashes of what a batch contained: instance ids and tokens. The numpy twins of those computed on device.

All arithmetic is in uint32 and wraps, and a hash is a plain sum over positions, so the same bits come out of any
split of the batch over devices and of any order of adding up. A swapped pair of rows changes the hash (each position
has its own odd weight); two lanes make it 64 bits wide. They find mistakes, not adversaries.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

LANES = (0, 1)
_POSITION_LANE = 0x7F4A7C15  # separates the weights of the two lanes
_VALUE_LANE = 0x9E3779B9  # separates the values of the two lanes
_LOW_32 = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def mix32(x: U32) -> U32:
    """The 32-bit finaliser of MurmurHash3: a bijection in which every input bit reaches every output bit."""
    x = x ^ (x >> np.uint32(16))
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x


@lru_cache(maxsize=64)
def position_weights(count: int, lane: int) -> U32:
    """uint32[count]: W(p) = 2·mix32(p + lane·0x7F4A7C15) + 1, an odd number for each position p. Read-only."""
    p = np.arange(count, dtype=np.uint64).astype(np.uint32)
    weights = mix32(p + np.uint32(lane * _POSITION_LANE)) * np.uint32(2) + np.uint32(1)
    weights.flags.writeable = False
    return weights


def split_ids(ids: U64) -> U32:
    """uint64[...] instance ids to uint32[..., 2] as they travel with a batch: (low, high) halves."""
    return np.stack([(ids & _LOW_32).astype(np.uint32), (ids >> _32).astype(np.uint32)], axis=-1)


def join_ids(halves: U32) -> U64:
    """The inverse of `split_ids`: uint32[..., 2] to uint64[...]."""
    return halves[..., 0].astype(np.uint64) | (halves[..., 1].astype(np.uint64) << _32)


def ids_hashes(ids: U64) -> U32:
    """uint32[n, 2]: both lanes of the ids hash of each of n batches; `ids` is uint64[n, B] in row order."""
    low, high = (ids & _LOW_32).astype(np.uint32), (ids >> _32).astype(np.uint32)
    # Below 2^32 instances every high half is 0 and its term a constant: half of the audit's work.
    tops = high if high.any() else np.zeros(1, np.uint32)
    out = np.empty((ids.shape[0], 2), np.uint32)
    for lane in LANES:
        values = mix32(low ^ mix32(tops + np.uint32(lane * _VALUE_LANE)))
        values *= position_weights(ids.shape[1], lane)
        out[:, lane] = values.sum(axis=1, dtype=np.uint32)
    return out


def ids_hash(ids: U64) -> str:
    """Text form of the ids hash of one batch; `ids` is uint64[B] in row order."""
    return hash_text(ids_hashes(ids[None])[0])


def data_hash(tokens: npt.NDArray[np.integer]) -> str:
    """Text form of the hash of the tokens of one batch: int[B, S] in row order, position q = row·S + column."""
    flat = np.ascontiguousarray(tokens).reshape(-1).astype(np.uint32)
    lanes = []
    for lane in LANES:
        values = mix32(flat + np.uint32(lane * _VALUE_LANE))
        values *= position_weights(flat.size, lane)
        lanes.append(values.sum(dtype=np.uint32))
    return hash_text(np.array(lanes, np.uint32))


def hash_text(lanes: U32) -> str:
    """16 hex digits of uint32[2], as the step log writes them."""
    return f"{int(lanes[0]):08x}{int(lanes[1]):08x}"
