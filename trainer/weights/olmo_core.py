"""Reading OLMo-core's checkpoints (torch.distributed.checkpoint) without torch: the model's tensors, in full precision.

`.metadata` is a pickle: for each tensor its shape, dtype and pieces, and for each piece a range of bytes in one of the
.distcp files. Such a range is what torch.save writes, a zip archive with the raw values uncompressed. Both are unpickled
with every class replaced by a bag of attributes, so that nothing in them is ever run.
"""

import io
import math
import pickle
import zipfile
from typing import Any

import numpy as np

from trainer.errors import ConfigurationError
from trainer.weights.folder import Folder
from trainer.weights.slots import DTYPES

PREFIX = "model."  # the optimizer's state lies beside the model's
_STORAGES = {"FloatStorage": "float32", "BFloat16Storage": "bfloat16", "HalfStorage": "float16"}


class _Bag:
    """Stands for an instance of any class of torch or OLMo-core."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})

    def __hash__(self) -> int:
        return id(self)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *_: (storage, offset, tuple(size), tuple(stride))
        if module == "torch" and (name in DTYPES or name in _STORAGES):
            return _STORAGES.get(name, name)
        if module.split(".")[0] in ("torch", "olmo_core"):
            return _Bag
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")

    def persistent_load(self, identifier: Any) -> Any:
        return identifier  # ("storage", dtype, key, device, elements)


class OlmoCoreCheckpoint:
    """The model's tensors of one checkpoint, by OLMo-core's names."""

    def __init__(self, folder: Folder, below: str = "") -> None:
        """`below`: the prefix of .metadata in the folder. Raises ConfigurationError when that cannot be understood."""
        self.uri = f"{folder.uri}/{below}".rstrip("/")
        self._folder, self._below = folder, below
        data = folder.read_all(f"{below}.metadata")
        if data is None:
            raise ConfigurationError(f"{self.uri}: .metadata is missing")
        try:
            metadata = _Unpickler(io.BytesIO(data)).load()
            self._shapes = {
                name.removeprefix(PREFIX): (_dtype(entry), entry.size)
                for name, entry in metadata.state_dict_metadata.items()
                if name.startswith(PREFIX) and hasattr(entry, "size")
            }
            self._pieces: dict[str, list[tuple[tuple[int, ...], str, int, int]]] = {}
            for index, place in metadata.storage_data.items():
                if index.fqn.startswith(PREFIX) and index.fqn.removeprefix(PREFIX) in self._shapes:
                    piece = (index.offset or (), place.relative_path, place.offset, place.length)
                    self._pieces.setdefault(index.fqn.removeprefix(PREFIX), []).append(piece)
        except (pickle.UnpicklingError, AttributeError, EOFError, TypeError, IndexError, ValueError) as error:
            raise ConfigurationError(f"{self.uri}/.metadata is not OLMo-core's: {error}") from None

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name → (dtype, shape)."""
        return dict(self._shapes)

    def in_order(self, names: list[str]) -> list[str]:
        """`names`; the pieces of one lie in many files, so that no order is better than another."""
        return names

    def read(self, name: str) -> np.ndarray:
        """The tensor, put together from its pieces. Raises ConfigurationError when they do not cover it."""
        dtype, shape = self._shapes[name]
        out = np.empty(shape, DTYPES[dtype])
        covered = 0
        for offset, file, start, length in self._pieces.get(name, ()):
            piece = self._piece(name, file, start, length)
            where = tuple(
                slice(at, at + size) for at, size in zip(offset or (0,) * piece.ndim, piece.shape, strict=True)
            )
            if out[where].shape != piece.shape or piece.dtype != out.dtype:
                raise ConfigurationError(f"{self.uri}/{file}: a piece of {name} does not fit its {dtype} {list(shape)}")
            out[where] = piece
            covered += piece.size
        if covered != math.prod(shape):
            raise ConfigurationError(
                f"{self.uri}: the pieces of {name} hold {covered} of its {math.prod(shape)} values"
            )
        return out

    def _piece(self, name: str, file: str, start: int, length: int) -> np.ndarray:
        path = f"{self._below}{file}"
        if self._folder.size(path) is None:
            raise ConfigurationError(f"{self.uri}: {file} is missing, which holds a piece of {name}")
        data = self._folder.read(path, start, length)
        try:
            return _saved_tensor(data)
        except (zipfile.BadZipFile, pickle.UnpicklingError, KeyError, ValueError, StopIteration) as error:
            raise ConfigurationError(f"{self.uri}/{file}: the piece of {name} is damaged: {error}") from None


def _dtype(entry: Any) -> str:
    """A dtype in the state of TensorProperties, whose first item it is."""
    return str(entry.properties.state[0])


def _saved_tensor(data: np.ndarray) -> np.ndarray:
    """The tensor in the bytes that torch.save wrote, without a copy of its values where they are contiguous."""
    with zipfile.ZipFile(io.BytesIO(memoryview(data))) as archive:
        entries = {info.filename.split("/", 1)[1]: info for info in archive.infolist()}
        if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
            raise ValueError("its bytes are big-endian")
        storage, offset, size, stride = _Unpickler(io.BytesIO(archive.read(entries["data.pkl"]))).load()
        _, dtype, key, _, elements = storage
        info = entries[f"data/{key}"]
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != elements * DTYPES[dtype].itemsize:
            raise ValueError(f"{info.filename} does not hold {elements} values of {dtype}")
    head = data[info.header_offset : info.header_offset + 30]
    names = int(head[26]) + 256 * int(head[27]) + int(head[28]) + 256 * int(head[29])
    begin = info.header_offset + 30 + names
    values = data[begin : begin + info.file_size].view(DTYPES[dtype])
    step = values.itemsize
    if offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) >= elements:
        raise ValueError("its strides leave its storage")
    return np.lib.stride_tricks.as_strided(values[offset:], size, tuple(s * step for s in stride), writeable=False)
