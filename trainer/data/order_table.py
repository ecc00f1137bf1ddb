"""The table of an `olmo_core` order: made once per run and epoch, written create-only, then read by range.

For OLMo 3's 724 million instances it is 2.9 GB of little-endian uint32 and takes about a minute; every later start
reads 2 KB of it per batch. An order that is computed has no table.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from trainer.data.order import IN_MEMORY_INSTANCES, olmo_core_permutation, table_key
from trainer.errors import ConfigurationError
from trainer.recipe import Recipe
from trainer.rundir.store import AlreadyExists, NotFound, Store

_PART = 1 << 22  # ids compared at a time


def needs_table(recipe: Recipe, in_memory: int = IN_MEMORY_INSTANCES) -> bool:
    """Whether the order of a frozen recipe is read from a table."""
    return recipe.data.order.kind == "olmo_core" and recipe.instances > in_memory


def build_table(
    store: Store, recipe: Recipe, epoch: int, progress: Callable[[str], None] | None = None
) -> tuple[str, bool]:
    """Make the table of one epoch; returns its key and whether it was written now. Needs 4 bytes per instance of memory
    and of temporary disk space.

    A table that is there is compared in full. Raises ConfigurationError when it is another one (it is left alone: a
    run may be reading it), or when the temporary folder is too small; StorageUnavailable.
    """
    say = progress or (lambda text: None)
    key = table_key(recipe.instances, recipe.data.order.seed, epoch)
    say(f"shuffling {recipe.instances:,} instances of epoch {epoch}")
    indices = olmo_core_permutation(recipe.instances, recipe.data.order.seed, epoch)
    if _exists(store, key):
        say(f"comparing with {key}")
        _compare(store, key, indices)
        return key, False
    with tempfile.TemporaryDirectory(prefix="untildone-order-") as scratch:
        path = Path(scratch) / "table"
        try:
            indices.astype("<u4", copy=False).tofile(path)
        except OSError as error:
            raise ConfigurationError(
                f"the order's table needs {4 * recipe.instances:,} bytes in the temporary folder {scratch}: "
                f"{error.strerror or error}; set TMPDIR to a larger one"
            ) from error
        say(f"writing {key}")
        try:
            store.create_from_file(key, path)
        except AlreadyExists:  # somebody else just made it
            _compare(store, key, indices)
            return key, False
    return key, True


def _exists(store: Store, key: str) -> bool:
    try:
        store.get_range(key, 0, 1)
    except NotFound:
        return False
    return True


def _compare(store: Store, key: str, indices: np.ndarray) -> None:
    """Every id of the stored table, and that it ends where it should."""
    for first in range(0, indices.size + 1, _PART):
        part = indices[first : first + _PART]
        found = store.get_range(key, 4 * first, 4 * _PART if part.size == _PART else 4 * part.size + 1)
        if found != part.astype("<u4", copy=False).tobytes():
            raise ConfigurationError(
                f"{store.uri}: {key} exists, but is not this order (it differs between positions {first:,} and "
                f"{first + _PART:,}); if no run uses it, remove it and run this again"
            )
