"""The safetensors format: 8 bytes of header length, a JSON header with dtype, shape and place of each tensor, the bytes.

Our own reader and writer because the package's read only from local files and write only what is in memory whole; tests
hold both against it. https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from trainer.errors import ConfigurationError
from trainer.weights.folder import Folder
from trainer.weights.slots import DTYPES

MAX_HEADER = 100_000_000  # the format's own limit
_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_CODES = {name: code for code, name in _NAMES.items()}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Tensor(NamedTuple):
    """Where a tensor lies."""

    file: str
    dtype: str  # "float32", …; as the header has it when it is none of the known ones
    shape: tuple[int, ...]
    offset: int
    bytes: int


class SafetensorsFolder:
    """The tensors of model.safetensors, or of the files that its index names."""

    def __init__(self, folder: Folder) -> None:
        self.folder, self.uri = folder, folder.uri
        self._tensors: dict[str, Tensor] = {}
        index = folder.read_json(INDEX)
        if index is None:
            if folder.size(SINGLE) is None:
                raise ConfigurationError(f"{folder.uri}: neither {SINGLE} nor {INDEX} is there")
            self._tensors = read_header(folder, SINGLE)
            return
        places = index.get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise ConfigurationError(f"{folder.uri}/{INDEX}: weight_map is not a mapping of tensor names to files")
        for file in sorted(set(places.values())):
            if "/" in file or folder.size(file) is None:
                raise ConfigurationError(f"{folder.uri}: {file} is missing, which {INDEX} names")
            self._tensors |= read_header(folder, file)
        for name, file in places.items():
            if name not in self._tensors:
                raise ConfigurationError(f"{folder.uri}: {file} does not hold {name}, which {INDEX} says it does")

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name → (dtype, shape)."""
        return {name: (t.dtype, t.shape) for name, t in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """The tensor in its own dtype."""
        t = self._tensors[name]
        return self.folder.read(t.file, t.offset, t.bytes).view(DTYPES[t.dtype]).reshape(t.shape)

    def in_order(self, names: list[str]) -> list[str]:
        """`names` in the order of the files, which is the fastest to read them in."""
        return sorted(names, key=lambda name: (self._tensors[name].file, self._tensors[name].offset))


def read_header(folder: Folder, file: str) -> dict[str, Tensor]:
    """The tensors of one file. Raises ConfigurationError for a truncated or malformed one."""
    where = f"{folder.uri}/{file}"
    size = folder.size(file)
    if size is None or size < 8:
        raise ConfigurationError(f"{where} is no safetensors file: it has {size or 0} bytes")
    (length,) = struct.unpack("<Q", folder.read(file, 0, 8).tobytes())
    if length > min(MAX_HEADER, size - 8):
        raise ConfigurationError(f"{where} is no safetensors file: a header of {length} bytes in a file of {size}")
    try:
        header = json.loads(folder.read(file, 8, length).tobytes())
        tensors = {
            name: Tensor(
                file,
                _NAMES.get(body["dtype"], body["dtype"]),
                tuple(int(n) for n in body["shape"]),
                8 + length + int(body["data_offsets"][0]),
                int(body["data_offsets"][1]) - int(body["data_offsets"][0]),
            )
            for name, body in header.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ConfigurationError(f"{where}: malformed safetensors header: {type(error).__name__}: {error}") from None
    end = max((t.offset + t.bytes for t in tensors.values()), default=8 + length)
    if end != size:
        what = "truncated" if end > size else "longer than its header says"
        raise ConfigurationError(f"{where} is {what}: {size} bytes, its header needs {end}; copy it again")
    for name, t in tensors.items():
        if t.dtype in DTYPES and (t.bytes != math.prod(t.shape) * DTYPES[t.dtype].itemsize or t.offset < 8 + length):
            raise ConfigurationError(f"{where}: {name} takes {t.bytes} bytes, not those of {t.dtype} {list(t.shape)}")
    return tensors


class SafetensorsWriter:
    """One file whose tensors are known beforehand and written in any order, each as soon as it is there."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """`tensors`: name → (dtype, shape). Makes the file with its header."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
        self._places: dict[str, tuple[int, int, str]] = {}
        at = 0
        for name, (dtype, shape) in tensors.items():
            size = math.prod(shape) * DTYPES[dtype].itemsize
            header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
            self._places[name] = (at, size, dtype)
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self._missing = set(tensors)
        self.bytes = at
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        _write(self._descriptor, struct.pack("<Q", len(text)) + text, 0)
        os.ftruncate(self._descriptor, self._start + at)

    def write(self, name: str, tensor: np.ndarray) -> None:
        """The tensor's values, contiguous, in the dtype that was announced."""
        offset, size, dtype = self._places[name]
        if tensor.nbytes != size or tensor.dtype != DTYPES[dtype] or not tensor.flags.c_contiguous:
            raise ValueError(f"{self._path}: {name} is not the {size} bytes of {dtype} that were announced")
        _write(self._descriptor, memoryview(tensor.reshape(-1).view(np.uint8)), self._start + offset)
        self._missing.discard(name)

    def leave_zero(self, name: str) -> None:
        """All zeros, which take no room on disk."""
        self._missing.discard(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if self._missing:
                    raise ValueError(f"{self._path}: never written: {', '.join(sorted(self._missing)[:5])}")
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


def _write(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view[: 2**30], offset)
        view, offset = view[done:], offset + done
