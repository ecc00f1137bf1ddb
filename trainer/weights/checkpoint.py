"""Our checkpoints, parameter by parameter and layer by layer: never the whole of one in memory.

Reading goes to TensorStore directly, in Orbax's layout: Orbax itself gives whole parameters only, and one of a 7B model
takes 5.8 GB. Writing goes through Orbax, whose leaves here write themselves one layer at a time.
"""

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainer.errors import ConfigurationError
from trainer.params import param_specs
from trainer.weights.description import Description
from trainer.weights.folder import Folder
from trainer.weights.slots import Slot, slots

GROUP_BYTES = (
    3 * 2**30
)  # layers of a parameter read together: a chunk of a checkpoint holds all layers of a column range
DESCRIPTION = "untildone.json"  # in a checkpoint folder that `convert` wrote, beside what Orbax wrote


class CheckpointSource:
    """The parameters of a checkpoint folder, on disk or in a bucket."""

    dtype = "float32"

    def __init__(self, folder: Folder, description: Description) -> None:
        """Raises ConfigurationError naming each parameter that is missing or has another shape."""
        import tensorstore

        self.uri, self.description = folder.uri, description
        metadata = folder.read_json("_METADATA")
        if metadata is None:
            raise ConfigurationError(f"{folder.uri} is no checkpoint: it has no _METADATA")
        base = folder.uri if "://" in folder.uri else f"file://{Path(folder.uri).absolute()}"
        zarr = "zarr3" if metadata.get("use_zarr3") else "zarr"
        packed = folder.size("manifest.ocdbt") is not None
        # One chunk at a time: those of a run on few devices are as large as a parameter.
        context = tensorstore.Context({"data_copy_concurrency": {"limit": 1}, "cache_pool": {"total_bytes_limit": 0}})
        self._arrays: dict[str, Any] = {}
        problems = []
        for name, spec in param_specs(description.model).items():
            key = f"params.{name}/"
            store = {"driver": "ocdbt", "base": f"{base}/", "path": key} if packed else f"{base}/{key}"
            try:
                array = tensorstore.open({"driver": zarr, "kvstore": store}, context=context, read=True).result()
            except ValueError as error:
                problems.append(f"{name} is missing, expected {list(spec.shape)} ({str(error).split('[')[0].strip()})")
                continue
            if tuple(array.shape) != spec.shape:
                problems.append(f"{name} is {list(array.shape)}, expected {list(spec.shape)}")
            self._arrays[name] = array
        if problems:
            raise ConfigurationError(f"{folder.uri} is not a checkpoint of this model: {'; '.join(problems)}")

    def read(self, slot: Slot) -> np.ndarray:
        """One layer of a parameter, float32."""
        array = self._arrays[slot.parameter]
        if slot.layer is None:
            return self._block(array)
        return self._block(array[slot.layer : slot.layer + 1])[0]

    def stream(self) -> Iterator[tuple[Slot, np.ndarray]]:
        """Every tensor once, a group of layers of one parameter after the other."""
        by_parameter: dict[str, list[Slot]] = {}
        for slot in slots(self.description.model):
            by_parameter.setdefault(slot.parameter, []).append(slot)
        for name, members in by_parameter.items():
            array = self._arrays[name]
            if members[0].layer is None:
                yield members[0], self._block(array)
                continue
            chunk = int(array.chunk_layout.read_chunk.shape[0])
            together = max(1, GROUP_BYTES // (4 * math.prod(array.shape[1:]))) if chunk > 1 else 1
            for first in range(0, len(members), together):
                block = self._block(array[first : min(first + together, len(members))])
                for i, slot in enumerate(members[first : first + together]):
                    yield slot, block[i]

    @staticmethod
    def _block(array: Any) -> np.ndarray:
        """`array` in memory, read chunk column by chunk column: the largest thing beside the result is one chunk."""
        import tensorstore

        array = array[tensorstore.d[:].translate_to[0]]
        out = np.empty(array.shape, np.float32)
        if out.ndim == 1:
            out[...] = array.read().result()
            return out
        chunk = [int(n) or size for n, size in zip(array.chunk_layout.read_chunk.shape, array.shape, strict=True)]
        (height, width), (rows, columns) = out.shape[-2:], chunk[-2:]
        for row in range(0, height, rows):
            for column in range(0, width, columns):
                part = (..., slice(row, min(row + rows, height)), slice(column, min(column + columns, width)))
                out[part] = array[part].read().result()
        return out


def read_description(folder: Folder) -> Description | None:
    """What `convert` wrote about a checkpoint folder; None for one that a run wrote."""
    body = folder.read_all(DESCRIPTION)
    return None if body is None else Description.parse(body, f"{folder.uri}/{DESCRIPTION}")


def write_checkpoint(path: Path, description: Description, values: Iterator[tuple[Slot, np.ndarray]]) -> None:
    """A checkpoint folder with the parameters alone, for `initFrom: {checkpoint: …}`. `path` must not exist.

    `values` gives every tensor once, as float32 slices of our parameters, in any order.
    """
    import orbax.checkpoint as ocp

    # It warns that no handler writes jax.Arrays, and that nothing is to be merged: both are meant.
    logging.getLogger("absl").setLevel(logging.ERROR)
    registry = ocp.type_handlers.create_type_handler_registry((_Leaf, _handler(values)))
    specs = param_specs(description.model)
    leaves = {name: _Leaf(spec.shape, spec.axes[0] == "layer") for name, spec in specs.items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, type_handler_registry=registry)) as saver:
        saver.save(path.absolute(), args=ocp.args.PyTreeSave({"params": leaves}))
    (path / DESCRIPTION).write_text(json.dumps(description.model_dump(mode="json"), indent=2) + "\n")


class _Leaf:
    """Stands for a parameter that is nowhere whole; what Orbax wants to know of an array."""

    def __init__(self, shape: tuple[int, ...], layered: bool) -> None:
        self.chunk = (1, *shape[1:]) if layered else shape
        self.shape, self.dtype, self.ndim, self.size = shape, np.dtype(np.float32), len(shape), math.prod(shape)
        self.nbytes = 4 * self.size


def _handler(values: Iterator[tuple[Slot, np.ndarray]]) -> Any:
    """Orbax's handler of `_Leaf`s. What it writes reads as arrays, one chunk per layer."""
    import orbax.checkpoint as ocp
    import tensorstore

    class Handler(ocp.type_handlers.TypeHandler):  # type: ignore[misc]
        def typestr(self) -> str:
            return "jax.Array"

        async def serialize(self, leaves: Any, infos: Any, args: Any = None) -> Any:
            return [ocp.future.CommitFutureAwaitingContractedSignals(self._write(leaves, infos), name="weights")]

        async def _write(self, leaves: list[_Leaf], infos: Any) -> None:
            arrays = {}
            for leaf, info in zip(leaves, infos, strict=True):
                await info.await_path_creation()
                name = info.name.removeprefix("params.")
                arrays[name] = await tensorstore.open(_zarr(info.path.as_posix(), leaf), create=True)
            for slot, value in values:
                array = arrays[slot.parameter]
                await (array if slot.layer is None else array[slot.layer]).write(value)

        async def metadata(self, infos: Any) -> Any:
            raise NotImplementedError("leaves that write themselves are never read")

        async def deserialize(self, infos: Any, args: Any = None) -> Any:
            raise NotImplementedError("leaves that write themselves are never read")

        def memory_size(self, leaves: Any) -> Any:
            return [(leaf.nbytes, leaf.nbytes) for leaf in leaves]

    return Handler()


def _zarr(path: str, leaf: _Leaf) -> dict[str, Any]:
    """TensorStore's specification of one array, as Orbax writes them."""
    return {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "metadata": {
            "shape": list(leaf.shape),
            "chunks": list(leaf.chunk),
            "dtype": "<f4",
            "compressor": {"id": "zstd", "level": 1},
        },
    }
