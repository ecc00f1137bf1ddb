"""Freezing a recipe: its data files are looked at once, and their sizes become part of it and of its fingerprint.

Used by the orchestrator before the first attempt. The trainer checks the same sizes again before it trains
(trainer/data/mix.py). Importable without JAX and without numpy.
"""

from concurrent.futures import ThreadPoolExecutor

from trainer.data_root import DataRoot, open_root
from trainer.errors import ConfigurationError
from trainer.recipe import DTYPE_BYTES, DataFile, Recipe

SHOWN_PROBLEMS = 20


def freeze(recipe: Recipe, data_root: str) -> Recipe:
    """`recipe` with the size of each data file, training and held-out, as found below `data_root` (folder or gs://).

    Raises ConfigurationError naming every file that is missing, empty, unreadable, no whole number of tokens, shorter
    than one instance, or of another size than an already frozen recipe says; and for a corpus smaller than one
    global batch. Raises StorageUnavailable when the store does not answer.
    """
    root = open_root(data_root)
    every = recipe.data.files + recipe.data.held_out
    measured = _measure(root, recipe, every)
    count = len(recipe.data.files)
    data = recipe.data.model_copy(update={"files": measured[:count], "held_out": measured[count:]})
    frozen = recipe.model_copy(update={"data": data})
    if frozen.instances < frozen.global_batch:
        raise ConfigurationError(
            f"global_batch {frozen.global_batch} is larger than the corpus: {len(data.files)} files below {data_root} "
            f"hold {frozen.instances} instances of {frozen.sequence_length} tokens; "
            "lower global_batch or sequence_length, or add data files"
        )
    return frozen


def check_files(recipe: Recipe, files: tuple[DataFile, ...], root: DataRoot) -> None:
    """Compare `files` of a frozen recipe with what lies below `root`; errors as `freeze` gives them."""
    for file in files:
        if file.bytes is None:
            raise ConfigurationError(f"data file {file.path}: size not measured yet; freeze the recipe first")
    _measure(root, recipe, files)


def _measure(root: DataRoot, recipe: Recipe, files: tuple[DataFile, ...]) -> tuple[DataFile, ...]:
    """`files` with their sizes; one ConfigurationError for all that is wrong with them."""
    if not files:
        return ()
    with ThreadPoolExecutor(min(root.read_threads, len(files))) as pool:
        found = list(pool.map(lambda file: _look(root, recipe, file), files))
    problems = [result for result in found if isinstance(result, str)]
    if problems:
        more = len(problems) - SHOWN_PROBLEMS
        shown = problems[:SHOWN_PROBLEMS] + ([f"… and {more} more"] if more > 0 else [])
        raise ConfigurationError(f"data root {root.uri}: " + "; ".join(shown))
    return tuple(result for result in found if isinstance(result, DataFile))


def _look(root: DataRoot, recipe: Recipe, file: DataFile) -> DataFile | str:
    """`file` with its size, or what is wrong with it."""
    try:
        size = root.size(file.path)
    except ConfigurationError as error:
        return str(error).replace(f" below {root.uri}", "")
    width = DTYPE_BYTES[recipe.data.dtype]
    instance = width * recipe.sequence_length
    if size == 0:
        return f"data file {file.path} is empty; write its tokens again, or move it to data.omitted_files"
    if file.bytes is not None and size != file.bytes:
        return (
            f"data file {file.path} has {size} bytes, but the frozen recipe says {file.bytes}: it was "
            f"{'truncated' if size < file.bytes else 'changed'} since; put the original file back, or begin a new run"
        )
    if size % width:
        return (
            f"data file {file.path} is truncated or of another dtype: {size} bytes are no whole number of "
            f"{recipe.data.dtype} tokens; write it again or set data.dtype"
        )
    if size < instance:
        return (
            f"data file {file.path} is smaller than one instance: {size // width} tokens, sequence_length is "
            f"{recipe.sequence_length}; leave it out or lower sequence_length"
        )
    return file.model_copy(update={"bytes": size})
