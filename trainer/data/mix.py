"""The corpus as a list of instances: files in the recipe's order, each cut into whole windows of S tokens.

File f gives floor(tokens / S) instances; what is left at its end is never read, and no instance spans two files (as
in OLMo-core's NumpyFSLDataset). Files are raw little-endian tokens without a header.
"""

from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from trainer.data.hashes import U64
from trainer.data_root import DataRoot, GcsRoot, KeptFiles, open_root
from trainer.errors import ConfigurationError
from trainer.freezing import check_files
from trainer.recipe import DTYPE_BYTES, UNTRAINED, Recipe

I32 = npt.NDArray[np.int32]
KEPT_BYTES = 64 << 20  # a corpus in a bucket up to this size is read once and kept in memory


class Mix:
    """The training files of a frozen recipe below a data root, or its held-out files. Thread-safe, picklable not."""

    def __init__(self, recipe: Recipe, data_root: str | DataRoot, part: Literal["files", "held_out"] = "files") -> None:
        """Reads nothing yet; `check` does. Raises ConfigurationError for a missing root or an unfrozen recipe."""
        self.recipe = recipe
        self.root = open_root(data_root) if isinstance(data_root, str) else data_root
        self.part = part
        self.files = recipe.data.files if part == "files" else recipe.data.held_out
        sizes = {file.path: file.bytes or 0 for file in self.files}
        small = isinstance(self.root, GcsRoot) and sum(sizes.values()) <= KEPT_BYTES
        self._source = KeptFiles(self.root, sizes) if small else self.root
        self._starts = list(accumulate((recipe.instances_in(f) for f in self.files), initial=0))
        self._dtype = np.dtype(recipe.data.dtype).newbyteorder("<")
        self.token_bytes = DTYPE_BYTES[recipe.data.dtype]
        self._instance_bytes = self.token_bytes * recipe.sequence_length

    def __len__(self) -> int:
        """Instances."""
        return self._starts[-1]

    def check(self) -> None:
        """Look at every file again: missing, empty, truncated or changed ones are named in one ConfigurationError."""
        check_files(self.recipe, self.files, self.root)

    def file_ranges(self) -> list[tuple[int, int]]:
        """(first, end) instance of each file."""
        return list(pairwise(self._starts))

    def locate(self, instance: int) -> tuple[int, int]:
        """(file number, window in that file) of an instance. Raises IndexError for one that does not exist."""
        if not 0 <= instance < len(self):
            raise IndexError(f"instance {instance} is not below {len(self)}")
        file = bisect_right(self._starts, instance) - 1
        return file, instance - self._starts[file]

    def instance(self, instance: int) -> I32:
        """int32[S]: the tokens of one instance."""
        return self.instances(np.array([instance], np.uint64))[0]

    def instances(self, ids: U64) -> I32:
        """int32[n, S]: the tokens of the instances `ids` (uint64[n]), row by row.

        Raises ConfigurationError for a file that ends too early and for tokens that the model has no row for.
        """
        raw = np.empty((len(ids), self.recipe.sequence_length), self._dtype)
        if self._consecutive(ids):
            file, window = self.locate(int(ids[0]))
            self._source.read_into(self.files[file].path, window * self._instance_bytes, memoryview(raw).cast("B"))
        elif self._source.read_threads > 2 and len(ids) > 1:
            list(self._pool.map(self._read_row, ids.tolist(), raw))
        else:
            for instance, row in zip(ids.tolist(), raw, strict=True):
                self._read_row(instance, row)
        known = raw & np.uint32(UNTRAINED - 1) if self.recipe.data.untrained_bit else raw
        if raw.size and int(known.max()) >= self.recipe.model.vocab_size:
            self._refuse(ids, known)
        # uint32 has the same bits as int32 (the untrained bit is the sign): no second copy for the large dtype.
        return raw.view(np.int32) if raw.dtype == np.dtype("<u4") else raw.astype(np.int32)

    def _consecutive(self, ids: U64) -> bool:
        """Whether `ids` are one stretch of one file, which one read gets."""
        if len(ids) < 2 or int(ids[-1]) - int(ids[0]) != len(ids) - 1 or not (ids[1:] > ids[:-1]).all():
            return False
        return self.locate(int(ids[0]))[0] == self.locate(int(ids[-1]))[0]

    def _read_row(self, instance: int, row: npt.NDArray[np.unsignedinteger]) -> None:
        file, window = self.locate(instance)
        self._source.read_into(self.files[file].path, window * self._instance_bytes, memoryview(row).cast("B"))

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._source.read_threads, thread_name_prefix="mix")

    def _refuse(self, ids: U64, raw: npt.NDArray[np.unsignedinteger]) -> None:
        vocab = self.recipe.model.vocab_size
        row = int(np.argmax(raw.max(axis=1) >= vocab))
        file, window = self.locate(int(ids[row]))
        raise ConfigurationError(
            f"data file {self.files[file].path}: token {int(raw[row].max())} in window {window} is not below "
            f"model.vocab_size {vocab}; the file is damaged, or data.dtype {self.recipe.data.dtype} is not its dtype"
        )
