"""Writing weights in the formats of others, tensor by tensor, in any order."""

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from trainer.weights.description import Description, to_config
from trainer.weights.safetensors import INDEX, SINGLE, SafetensorsWriter
from trainer.weights.slots import DTYPES, Slot, from_ours, slots

SHARD_BYTES = 5_000_000_000  # what transformers 4 writes


def write_hugging_face(
    path: Path,
    description: Description,
    values: Iterator[tuple[Slot, np.ndarray]],
    dtype: str,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """A folder that `AutoModelForCausalLM.from_pretrained` reads; no tokenizer. `path` is an empty folder.

    `values` gives every tensor once, as float32 slices of our parameters; `dtype` is what they are stored as.
    """
    config = to_config(description, dtype)
    wanted = slots(description.model)
    width = DTYPES[dtype].itemsize
    files: list[list[Slot]] = [[]]
    room = shard_bytes
    for slot in wanted:
        size = math.prod(slot.shape) * width
        if files[-1] and size > room:
            files.append([])
            room = shard_bytes
        files[-1].append(slot)
        room -= size
    names = (
        [SINGLE]
        if len(files) == 1
        else [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    )
    places = {slot.hf: name for name, members in zip(names, files, strict=True) for slot in members}
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(
                SafetensorsWriter(path / name, {slot.hf: (dtype, slot.shape) for slot in members})
            )
            for name, members in zip(names, files, strict=True)
        }
        for slot, value in values:
            writers[places[slot.hf]].write(slot.hf, from_ours(slot, value, DTYPES[dtype]))
        total = sum(writer.bytes for writer in writers.values())
    if len(files) > 1:
        _write_json(path / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    ids = {"bos_token_id": None, "eos_token_id": description.eos_id, "pad_token_id": description.pad_id}
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"_from_model_config": True, **ids})


def write_olmo_core(
    path: Path, description: Description, values: Iterator[tuple[Slot, np.ndarray]], dtype: str
) -> None:
    """model.safetensors with OLMo-core's names, as its `unshard_checkpoint(use_safetensors=True)` writes it.

    The vocabulary keeps its padding, as OLMo-core trains with it.
    """
    model = description.model
    shapes = {
        slot.olmo_core: (model.padded_vocab_size, *slot.shape[1:]) if slot.vocabulary else slot.shape
        for slot in slots(model)
    }
    with SafetensorsWriter(path / SINGLE, {name: (dtype, shape) for name, shape in shapes.items()}) as writer:
        for slot, value in values:
            writer.write(slot.olmo_core, from_ours(slot, value, DTYPES[dtype], padded=True))


def _write_json(path: Path, body: dict[str, object]) -> None:
    path.write_text(json.dumps(body, indent=2, sort_keys=True) + "\n")
