"""A keyed bijection on [0, N), computed per index: a shuffle of any corpus that needs no memory.

The construction is a Feistel network on pairs (x, y) in Z_a × Z_b with a = ceil(√N) and b = ceil(N / a), whose rounds
add a keyed hash of one half to the other, modulo its size. Each round can be undone by subtracting the same hash, so
the network is a bijection on [0, a·b) for any round function at all. Indices that land outside [0, N) walk on
through the network until they land inside ("cycle-walking"), which restricts the bijection to [0, N).

Bounds, stated and tested:
- N ≤ a·b < N + a, so fewer than one index in √N walks at all (a network on whole bits walks up to 3 in 4).
- The halves are below 2^21 for N ≤ 2^42 (MAX_SIZE; 4 billion times a billion tokens). The round function draws 32
  bits and scales them to the half's size, so a value is more likely than another by at most a / 2^32 < 2^-11 per round.
- 8 rounds. 4 rounds with ideal round functions cannot be told from a random permutation in about √a queries
  (Luby, Rackoff), 6 or more in about a queries (Patarin); ours are only hashes, and the halves of small corpora are
  only a few bits, so two rounds are added on top. The tests measure what training needs: neighbours in the order are
  unrelated, each batch spreads over the whole corpus, and two epochs share no structure. It is no cipher.

Version 1 is fixed by the known answers in tests/unit/test_feistel.py: a change that moves any of them is version 2.
"""

import hashlib
import math

import numpy as np

from trainer.data.hashes import U32, U64, mix32

ROUNDS = 8
MAX_SIZE = 1 << 42
_32 = np.uint64(32)


class Feistel:
    """The permutation of [0, `size`) keyed by any `key` text. Immutable and thread-safe.

    Raises ValueError for a size outside [1, 2^42].
    """

    def __init__(self, size: int, key: str) -> None:
        if not 1 <= size <= MAX_SIZE:
            raise ValueError(f"a Feistel permutation needs a size from 1 to 2^42, not {size}")
        self.size = size
        self.a = math.isqrt(size - 1) + 1
        self.b = -(-size // self.a)
        words = np.frombuffer(
            hashlib.shake_256(f"untildone feistel v1|{size}|{key}".encode()).digest(8 * ROUNDS), "<u4"
        )
        self._keys = words.reshape(ROUNDS, 2)

    def __call__(self, indices: U64) -> U64:
        """Images of `indices` (uint64[...], each below `size`), same shape. Raises IndexError for one that is not."""
        flat = np.asarray(indices, np.uint64).reshape(-1)
        if flat.size and int(flat.max()) >= self.size:
            raise IndexError(f"index {int(flat.max())} is not below the permutation's size {self.size}")
        out = self._network(flat)
        outside = np.flatnonzero(out >= self.size)
        while outside.size:
            out[outside] = self._network(out[outside])
            outside = outside[out[outside] >= self.size]
        return out.reshape(np.shape(indices))

    def _network(self, index: U64) -> U64:
        """One pass of all rounds over uint64[n] in [0, a·b): again in [0, a·b), a bijection."""
        b = np.uint64(self.b)
        quotient = index // b
        x, y = quotient.astype(np.uint32), (index - quotient * b).astype(np.uint32)
        for round_, (k0, k1) in enumerate(self._keys):
            if round_ % 2 == 0:
                x = _add(x, y, k0, k1, self.a)
            else:
                y = _add(y, x, k0, k1, self.b)
        return x.astype(np.uint64) * b + y


def _add(half: U32, other: U32, k0: np.uint32, k1: np.uint32, modulus: int) -> U32:
    """(half + F(other)) mod `modulus`, F uniform in [0, modulus) up to modulus / 2^32. Both halves are below 2^31."""
    hashed = mix32(mix32(other ^ k0) + k1)
    scaled = ((hashed.astype(np.uint64) * np.uint64(modulus)) >> _32).astype(np.uint32)
    scaled += half
    # scaled < 2·modulus < 2^32: one conditional subtraction is the modulo, without a division.
    scaled -= np.where(scaled >= modulus, np.uint32(modulus), np.uint32(0))
    return scaled
