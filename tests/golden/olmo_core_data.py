"""What OLMo-core's data classes answer: order and instances, packing, the repetition filter. For make_olmo_core.py."""

import hashlib
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import olmo_core.data.utils as olmo_utils
import torch
from olmo_core.data import (
    DataCollator,
    DataMix,
    NumpyFSLDatasetConfig,
    NumpyPackedFSLDatasetConfig,
    TokenizerConfig,
)
from olmo_core.data.data_loader import NumpyFSLDataLoader
from olmo_core.data.numpy_dataset import InstanceFilterConfig, NumpyDatasetBase

from tests.golden import inputs
from tests.golden.answers import write_json

TOKENIZER = TokenizerConfig(vocab_size=320, eos_token_id=inputs.EOS, pad_token_id=inputs.PAD, identifier="bytes")

# --- order and instances


def write_order() -> None:
    found: dict[str, Any] = {"seed": inputs.MIX_SEED, "runs": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        paths = [str(path) for path in inputs.write_mix(folder)]
        config = NumpyFSLDatasetConfig(
            tokenizer=TOKENIZER,
            paths=paths,
            sequence_length=inputs.MIX_LENGTH,
            max_target_sequence_length=inputs.MIX_LENGTH,
            dtype="uint32",
            work_dir=scratch,
        )
        dataset = config.build()
        dataset.prepare()
        found["instances"], found["offsets"] = len(dataset), dataset.offsets
        for world in (1, 3, 8):
            for epoch in (1, 2):
                batches = [_read(dataset, folder, world, rank, epoch) for rank in range(world)]
                found["runs"].append({"world": world, "epoch": epoch, "ranks": batches})
        first = _loader(dataset, folder, 2, 0)
        first.reshuffle(epoch=1)
        for _ in zip(range(7), first, strict=False):
            pass
        saved = first.state_dict()
        resumed = _loader(dataset, folder, 4, 1)
        resumed.load_state_dict(saved)
        resumed.reshuffle(epoch=1)
        found["resumed"] = {"batch": 7, "world": 4, "rank": 1, "ids": next(iter(resumed))["index"].tolist()}
    mixes = {}
    for mix in ("OLMo-mix-0625-official", "OLMo-midtraining-mix-0625-100B", "OLMo-longmino-mix-0625"):
        files, _ = DataMix(mix).build("", TokenizerConfig.dolma2().identifier)
        mixes[mix] = _listing(files)
    files, _ = DataMix("OLMo-longmino-mix-0625").build("", TokenizerConfig.dolma2().identifier)
    order = list(range(len(files)))
    random.Random(123).shuffle(order)
    mixes["OLMo-longmino-mix-0625 permuted with 123"] = _listing([files[i] for i in order])
    found["mixes"] = mixes
    write_json("order", found)


def _listing(files: list[str]) -> dict[str, Any]:
    files = [file.lstrip("/") for file in files]
    text = "\n".join(files)
    return {
        "files": len(files),
        "first": files[0],
        "last": files[-1],
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def _loader(dataset: NumpyDatasetBase, folder: Path, world: int, rank: int) -> NumpyFSLDataLoader:
    return loader(dataset, folder, inputs.MIX_BATCH * inputs.MIX_LENGTH, inputs.MIX_SEED, inputs.PAD, world, rank)


def loader(
    dataset: NumpyDatasetBase, folder: Path, batch_tokens: int, seed: int, pad: int, world: int, rank: int
) -> NumpyFSLDataLoader:
    """One rank's loader."""
    return NumpyFSLDataLoader(
        dataset,
        collator=DataCollator(pad_token_id=pad),
        global_batch_size=batch_tokens,
        work_dir=folder / f"{world}.{rank}",
        seed=seed,
        dp_world_size=world,
        dp_rank=rank,
        num_threads=2,
    )


def _read(dataset: NumpyDatasetBase, folder: Path, world: int, rank: int, epoch: int) -> dict[str, Any]:
    return read_batches(_loader(dataset, folder, world, rank), world, epoch)


def read_batches(loader: NumpyFSLDataLoader, world: int, epoch: int) -> dict[str, Any]:
    """Every batch of one rank: instance ids, and a hash over all tokens in the order they came."""
    loader.reshuffle(epoch=epoch)
    ids, tokens = [], hashlib.sha256()
    for batch in loader:
        ids.append(batch["index"].tolist())
        tokens.update(batch["input_ids"].numpy().astype("<u4").tobytes())
    return {"ids": ids if world == 1 else ids[:3] + ids[-1:], "batches": len(ids), "tokens": tokens.hexdigest()}


# --- packing


def write_packing() -> None:
    found: dict[str, Any] = {}
    for name, distinct in (("distinct", True), ("ties", False)):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            dataset = NumpyPackedFSLDatasetConfig(
                tokenizer=TOKENIZER,
                paths=[str(path) for path in inputs.write_mix(folder, distinct)],
                sequence_length=inputs.PACKED_LENGTH,
                generate_doc_lengths=True,
                source_group_size=inputs.PACKED_GROUP,
                dtype="uint32",
                work_dir=scratch,
            ).build()
            dataset.prepare()
            items = [dataset[i] for i in range(len(dataset))]
        found[name] = {
            "groups": [list(pair) for pair in dataset.source_instance_offsets],
            "lengths": [item["doc_lens"].tolist() for item in items],
            "targets": [int(item["label_mask"].sum()) for item in items],
            "tokens": [_hash(item["input_ids"]) for item in items],
        }
    # Any lengths at all: bins by document number, from the algorithm alone.
    algorithm = []
    for case in range(40):
        size = 2 ** (3 + case % 6)
        count = int(1 + inputs.uniform(40_000 + case, 1)[0] * 120)
        lengths = np.unique((1 + inputs.uniform(41_000 + case, count) * size).astype(np.int64).clip(max=size))
        lengths = lengths[np.argsort(inputs.uniform(42_000 + case, len(lengths)))]
        ends = np.cumsum(lengths)
        bins, documents, _ = olmo_utils.InstancePacker(size).pack_documents(np.stack([ends - lengths, ends], axis=1))
        starts = (ends - lengths).tolist()
        algorithm.append(
            {
                "size": size,
                "lengths": lengths.tolist(),
                "bins": [[starts.index(int(documents[d][0])) for d in one] for one in bins],
            }
        )
    found["algorithm"] = algorithm
    write_json("packing", found)


def _hash(tokens: torch.Tensor) -> str:
    return hashlib.sha256(tokens.numpy().astype("<u4").tobytes()).hexdigest()[:16]


# --- repetition filter


def write_filter() -> None:
    rows = torch.tensor(inputs.filter_rows())
    config = InstanceFilterConfig()  # periods 1 to 13, 32 times: the values of OLMo-core's scripts that use it
    keeps = [NumpyDatasetBase._validate_instance(None, row, config) for row in rows]
    strict = InstanceFilterConfig(repetition_min_period=2, repetition_max_period=5, repetition_max_count=8)
    keeps_strict = [NumpyDatasetBase._validate_instance(None, row, strict) for row in rows]
    write_json("filter", {"keeps": [int(k) for k in keeps], "keeps_2_5_8": [int(k) for k in keeps_strict]})
