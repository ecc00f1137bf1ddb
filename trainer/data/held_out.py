"""The held-out set must never be trained on: the same files are refused by the recipe, the same text here.

What is compared: whole instances, by a 128-bit hash of their tokens, at the places where training would read them.
Every held-out instance is hashed. Of the training files at most TRAINING_BYTES are read:
- a corpus up to that size is read in full, and the answer is exact;
- of a larger one, the first and the last instance of every file and others evenly spaced between. A training file that
  begins or ends with a held-out file's instances (a copy, a link, a concatenation) is still found for certain; a
  shared stretch inside a larger file only by chance, and text shared at other offsets not at all.
"""

from collections.abc import Iterator
from hashlib import blake2b

import numpy as np

from trainer.data.hashes import U64
from trainer.data.mix import Mix
from trainer.errors import ConfigurationError

TRAINING_BYTES = 256 << 20
_ROWS = 256  # instances read and hashed at a time


def check_held_out(train: Mix, held_out: Mix, training_bytes: int = TRAINING_BYTES) -> bool:
    """Refuse a corpus that contains a held-out instance. True when the whole corpus was looked at, False for a sample.

    Takes about a second per GiB from page cache. Raises ConfigurationError naming both files.
    """
    known: dict[bytes, int] = {}
    for ids, digests in _hashed(held_out, np.arange(len(held_out), dtype=np.uint64)):
        for instance, digest in zip(ids.tolist(), digests, strict=True):
            known.setdefault(digest, instance)
    if not known:
        return True
    looked_at = sample(train, training_bytes)
    for ids, digests in _hashed(train, looked_at):
        for instance, digest in zip(ids.tolist(), digests, strict=True):
            if digest in known:
                raise ConfigurationError(_overlap(train, instance, held_out, known[digest]))
    return looked_at.size == len(train)


def sample(mix: Mix, limit_bytes: int) -> U64:
    """uint64[n]: the instances of `mix` to look at, ascending: all within the limit, else spread over every file."""
    total = len(mix)
    fitting = max(1, limit_bytes // (mix.recipe.sequence_length * mix.token_bytes))
    if total <= fitting:
        return np.arange(total, dtype=np.uint64)
    chosen = []
    for first, end in mix.file_ranges():
        count = max(2, fitting * (end - first) // total)
        chosen.append(np.unique(np.linspace(first, end - 1, count).astype(np.uint64)))
    return np.concatenate(chosen)


def _hashed(mix: Mix, ids: U64) -> Iterator[tuple[U64, list[bytes]]]:
    """(ids, hash of the tokens of each), a few hundred at a time."""
    for start in range(0, len(ids), _ROWS):
        part = ids[start : start + _ROWS]
        yield part, [blake2b(row, digest_size=16).digest() for row in mix.instances(part)]


def _overlap(train: Mix, instance: int, held_out: Mix, other: int) -> str:
    (file, window), (held_file, held_window) = train.locate(instance), held_out.locate(other)
    return (
        f"held-out text is in the training data: window {window} of {train.files[file].path} (data.files) equals "
        f"window {held_window} of {held_out.files[held_file].path} (data.held_out); take the file out of one of them"
    )
