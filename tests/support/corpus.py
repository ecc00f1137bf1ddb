"""Small corpora and recipes for tests: token files whose content says where they come from."""

from pathlib import Path

import numpy as np

from trainer.freezing import freeze
from trainer.plan import Plan
from trainer.recipe import Data, DataFile, Model, Order, Recipe, SchedulePiece
from trainer.rundir.store import NotFound


def recipe(
    *,
    bytes_per_file: tuple[int | None, ...] = (None,),
    held_out: tuple[str, ...] = (),
    kind: str = "feistel",
    seed: int = 34521,
    batch: int = 8,
    length: int = 16,
    dtype: str = "uint16",
    vocab: int = 257,
) -> Recipe:
    """A recipe over files f0.bin, f1.bin, …; sizes may be given as if it had been frozen."""
    return Recipe(
        name="test",
        model=Model(
            vocab_size=vocab,
            padded_vocab_size=vocab,
            d_model=8,
            n_layers=1,
            n_heads=1,
            n_kv_heads=1,
            head_dim=8,
            mlp_hidden=8,
        ),
        data=Data(
            files=tuple(DataFile(path=f"f{i}.bin", bytes=size) for i, size in enumerate(bytes_per_file)),
            held_out=tuple(DataFile(path=path) for path in held_out),
            dtype=dtype,
            eos_id=min(255 if dtype == "uint8" else 256, vocab - 1),
            order=Order(kind=kind, seed=seed),
        ),
        schedule=(SchedulePiece(shape="constant", peak=1e-3, warmup_steps=0, total_steps=10, alpha_f=1.0),),
        global_batch=batch,
        sequence_length=length,
    )


def sized(instances: int, *, batch: int = 8, kind: str = "feistel", seed: int = 34521, length: int = 16) -> Recipe:
    """A frozen recipe of exactly `instances` instances, without any file: enough for an order."""
    return recipe(bytes_per_file=(2 * length * instances,), kind=kind, seed=seed, batch=batch, length=length)


def write(folder: Path, tokens: tuple[int, ...], names: tuple[str, ...] | None = None, dtype: str = "uint16") -> None:
    """Random files of the given token counts, each other than the others."""
    for i, count in enumerate(tokens):
        name = names[i] if names else f"f{i}.bin"
        seed = int.from_bytes(name.encode(), "little")
        np.random.default_rng(seed).integers(0, 257 if dtype != "uint8" else 256, count).astype(dtype).tofile(
            folder / name
        )


def frozen(folder: Path, tokens: tuple[int, ...] = (1000, 777, 4100), **options: object) -> Recipe:
    """Files written and measured: f0.bin, f1.bin, … and a held-out file h.bin of 200 tokens."""
    write(folder, tokens)
    write(folder, (200,), ("h.bin",))
    return freeze(recipe(bytes_per_file=(None,) * len(tokens), held_out=("h.bin",), **options), str(folder))  # type: ignore[arg-type]


def plan(processes: int = 1, data_parallel: int = 4, micro_batch: int = 1, accumulation: int = 2) -> Plan:
    """A plan of any shape; its device type is only a name here."""
    return Plan(
        device_type=f"cpu-{data_parallel}",
        processes=processes,
        devices=data_parallel,
        global_batch=data_parallel * micro_batch * accumulation,
        data_parallel=data_parallel,
        micro_batch=micro_batch,
        accumulation=accumulation,
    )


class FakeStore:
    """Objects in a dictionary of bytes or of files on disk, with reads by range."""

    uri = "memory"

    def __init__(self) -> None:
        self.objects: dict[str, bytes | Path] = {}
        self.reads: list[tuple[str, int, int]] = []

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self.reads.append((key, offset, length))
        if key not in self.objects:
            raise NotFound(key)
        content = self.objects[key]
        if isinstance(content, bytes):
            return content[offset : offset + length]
        with content.open("rb") as file:
            file.seek(offset)
            return file.read(length)
