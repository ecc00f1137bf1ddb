"""Held-out text must never be trained on: the same files are refused by the recipe or here, the same text here.

That holds for the recipe's own held-out files and for those of the named sets in the settings.

What is compared: whole instances, at the places where training would read them. Every held-out instance is hashed
and its hash looked for among those of training instances; where one is found, the tokens are compared. Of the
training files at most TRAINING_BYTES are read:
- a corpus up to that size is read in full, and the answer is exact;
- of a larger one, the first and the last instance of every file and others evenly spaced between. A training file that
  begins or ends with a held-out file's instances (a copy, a link, a concatenation) is still found for certain; a
  shared stretch inside a larger file only by chance, and text shared at other offsets not at all.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from trainer.data.hashes import U64
from trainer.data.mix import Mix
from trainer.data_root import open_root
from trainer.errors import ConfigurationError
from trainer.evaluation_settings import expand
from trainer.recipe import DataFile, Recipe
from trainer.rundir.records import AttemptSpec
from trainer.rundir.rundir import RunDirectory

TRAINING_BYTES = 256 << 20
_BLOCK_BYTES = 4 << 20  # read and hashed at a time


def check_corpus(recipe: Recipe, data_root: str, sets: Mapping[str, Sequence[str]] | None = None) -> tuple[int, bool]:
    """Everything that is looked at before the first start: sizes as frozen, held-out text apart from training text.

    `sets` are the files of named sets. Returns the number of held-out instances and whether the whole corpus was searched
    for them. Raises ConfigurationError naming the file, StorageUnavailable.
    """
    train = Mix(recipe, data_root)
    train.check()
    if recipe.data.held_out:
        Mix(recipe, data_root, "held_out").check()
    if not recipe.data.held_out and not sets:
        return 0, True
    held_out = with_sets(recipe, data_root, sets or {})
    return len(held_out), check_held_out(train, held_out)


def check_start(rundir: RunDirectory, spec: AttemptSpec, recipe: Recipe) -> None:
    """What a start looks at before it claims: that held-out text is there, and apart from what is trained on.

    The text is compared before the run's first start, and before the first one of an attempt that has new sets: no other
    one reads other files. Raises ConfigurationError, StorageUnavailable.
    """
    settings = spec.settings
    sets = expand(settings.evaluation.sets)
    first = rundir.read_init() is None
    if not first and sets:
        before = rundir.read_spec(spec.attempt - 1) if spec.attempt > 1 else None
        known = expand(before.settings.evaluation.sets) if before is not None else {}
        fresh = {name for name, files in sets.items() if known.get(name) != files}
        first = bool(fresh) and rundir.read_start(spec.attempt, 1) is None
    if recipe.data.held_out or sets:
        held_out = with_sets(recipe, settings.data_root, sets)
        if first:
            check_held_out(Mix(recipe, settings.data_root), held_out)


def with_sets(recipe: Recipe, data_root: str, sets: Mapping[str, Sequence[str]]) -> Mix:
    """All held-out text as if it were training data: the recipe's files and those of `sets`.

    Raises ConfigurationError for a file that is missing, or also one of data.files.
    """
    train = {file.path for file in recipe.data.files}
    root = open_root(data_root)
    files = {file.path: file for file in recipe.data.held_out}
    for name, paths in sets.items():
        for path in paths:
            if path in train:
                raise ConfigurationError(
                    f"set {name}: {path} is also in data.files; held-out text must never be trained on"
                )
            files.setdefault(path, DataFile(path=path, bytes=root.size(path)))
    data = recipe.data.model_copy(update={"held_out": tuple(files.values())})
    return Mix(recipe.model_copy(update={"data": data}), root, "held_out")


def check_held_out(train: Mix, held_out: Mix, training_bytes: int = TRAINING_BYTES) -> bool:
    """Refuse a corpus that contains a held-out instance. True when the whole corpus was looked at, False for a sample.

    Takes about a second per GiB from page cache. Raises ConfigurationError naming both files.
    """
    hashes = [hashed for _, hashed in _hashed(held_out, np.arange(len(held_out), dtype=np.uint64))]
    if not hashes:
        return True
    known = np.concatenate(hashes)
    ascending = np.sort(known)
    looked_at = sample(train, training_bytes)
    for ids, hashed in _hashed(train, looked_at):
        nearest = ascending[np.searchsorted(ascending, hashed).clip(max=len(known) - 1)]
        for k in np.flatnonzero(nearest == hashed):
            instance = int(ids[k])
            tokens = train.instance(instance)
            for other in np.flatnonzero(known == hashed[k]).tolist():
                if np.array_equal(tokens, held_out.instance(other)):
                    raise ConfigurationError(_overlap(train, instance, held_out, other))
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


def _hashed(mix: Mix, ids: U64) -> Iterator[tuple[U64, U64]]:
    """(ids, uint64 hash of the tokens of each), a few MiB at a time and one file at a time.

    The hash is Σ token · weight mod 2^64 with random odd weights: cheap, and a hit is verified anyway.
    """
    length = mix.recipe.sequence_length
    weights = np.random.default_rng(0).integers(0, 2**64, length, np.uint64) | np.uint64(1)
    rows = max(1, _BLOCK_BYTES // (8 * length))
    for first, end in mix.file_ranges():
        of_file = ids[np.searchsorted(ids, first) : np.searchsorted(ids, end)]
        for start in range(0, len(of_file), rows):
            part = of_file[start : start + rows]
            yield part, (mix.instances(part).astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64)


def _overlap(train: Mix, instance: int, held_out: Mix, other: int) -> str:
    (file, window), (held_file, held_window) = train.locate(instance), held_out.locate(other)
    return (
        f"held-out text is in the training data: window {window} of {train.files[file].path} (data.files) equals "
        f"window {held_window} of {held_out.files[held_file].path} (held out); take the file out of one of them"
    )
