"""Batches against OLMo-core's data loader on a real mix of several files, at several world sizes, over two epochs."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from tests.golden import inputs
from tests.support.corpus import plan, recipe
from trainer.data.loader import Loader, global_ids
from trainer.data.mix import Mix
from trainer.data.order import BatchOrder, open_order
from trainer.freezing import freeze
from trainer.recipe import DataFile, Recipe, load

GOLDEN = json.loads((inputs.HERE / "olmo_core_order.json").read_text())
Corpus = tuple[Recipe, Mix, BatchOrder]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    paths = inputs.write_mix(tmp_path)
    base = recipe(
        kind="olmo_core",
        seed=inputs.MIX_SEED,
        batch=inputs.MIX_BATCH,
        length=inputs.MIX_LENGTH,
        dtype="uint32",
        vocab=320,
    )
    files = tuple(DataFile(path=path.name) for path in paths)
    frozen = freeze(base.model_copy(update={"data": base.data.model_copy(update={"files": files})}), str(tmp_path))
    return frozen, Mix(frozen, str(tmp_path)), open_order(frozen)


def test_files_are_cut_into_the_same_instances(corpus: Corpus) -> None:
    _, mix, order = corpus
    assert [list(pair) for pair in mix.file_ranges()] == GOLDEN["offsets"]
    assert order.instances == GOLDEN["instances"]
    rests = [len(tokens) % inputs.MIX_LENGTH for tokens in inputs.mix_files()]
    assert sum(rest > 0 for rest in rests) >= 3, "what is left at the end of a file is never read"


@pytest.mark.parametrize("run", GOLDEN["runs"], ids=lambda run: f"world {run['world']}, epoch {run['epoch']}")
def test_batch_t_is_olmo_core_s_batch_t(corpus: Corpus, run: dict) -> None:  # type: ignore[type-arg]
    """Rank r of D reads rows r, r + D, … of our batch, and these tokens, in every batch of the epoch."""
    _, mix, order = corpus
    first, world = (run["epoch"] - 1) * order.batches_per_epoch, run["world"]
    for rank, theirs in enumerate(run["ranks"]):
        assert theirs["batches"] == order.batches_per_epoch
        ours = [order.batch_ids(first + t)[rank::world] for t in range(order.batches_per_epoch)]
        told = theirs["ids"]
        assert [ids.tolist() for ids in (ours if world == 1 else ours[:3] + ours[-1:])] == told
        tokens = hashlib.sha256(b"".join(mix.instances(ids).astype("<u4").tobytes() for ids in ours))
        assert tokens.hexdigest() == theirs["tokens"]


def test_the_loader_hands_out_the_same_after_a_resume_on_another_world(corpus: Corpus) -> None:
    frozen, mix, order = corpus
    resumed = GOLDEN["resumed"]
    shape = plan(processes=2, data_parallel=4, micro_batch=3, accumulation=2)
    loaders = [Loader(mix, order, frozen, shape, p, resumed["batch"]) for p in range(2)]
    shares = [next(loader)[1]["ids"] for loader in loaders]
    for loader in loaders:
        loader.close()
    assert global_ids(shares, shape)[resumed["rank"] :: resumed["world"]].tolist() == resumed["ids"]


@pytest.mark.parametrize(
    ("name", "mix", "part"),
    [
        ("olmo3_7b_stage1", "OLMo-mix-0625-official", "files"),
        ("olmo3_7b_stage2", "OLMo-midtraining-mix-0625-100B", "files"),
        ("olmo3_7b_stage3", "OLMo-longmino-mix-0625 permuted with 123", "sources"),
    ],
)
def test_the_recipes_name_the_files_of_the_mixes_in_their_order(name: str, mix: str, part: str) -> None:
    data, golden = load(name).data, GOLDEN["mixes"][mix]
    paths = [file.path for file in data.files] if part == "files" else list(data.packing.sources)  # type: ignore[union-attr]
    assert len(paths) == golden["files"]
    assert (paths[0], paths[-1]) == (golden["first"], golden["last"])
    assert hashlib.sha256("\n".join(paths).encode()).hexdigest() == golden["sha256"]


def test_the_seed_of_stage_1_gives_ai2_s_first_batch() -> None:
    """One order for any number of instances: what its first batch has of the 723,872,768 and more is not known here,
    but the generator is, and so is the rule: PCG64(34521 + epoch 1)."""
    stage_1 = load("olmo3_7b_stage1")
    assert (stage_1.data.order.kind, stage_1.data.order.seed) == ("olmo_core", 34521)
    indices = np.arange(1000, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(34522)).shuffle(indices)
    frozen = recipe(bytes_per_file=(32 * 1000,), kind="olmo_core", seed=34521)
    assert open_order(frozen).batch_ids(0).tolist() == indices[:8].tolist()
