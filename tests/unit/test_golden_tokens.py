"""Tokens against AI2's `dolma tokens`, and batches of a mix that we tokenised against OLMo-core's loader."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from tests.golden import inputs, texts
from tests.support.corpus import plan, recipe
from trainer.data.loader import Loader, global_ids
from trainer.data.mix import Mix
from trainer.data.order import open_order
from trainer.data.tokenize import DTYPE
from trainer.data.tokenizer import SpecialTokens, TokenizerFile, find_tokenizer
from trainer.data.tokenizing import tokenize
from trainer.freezing import freeze
from trainer.recipe import DataFile, Recipe

EOS = 100257
DOLMA = np.load(inputs.HERE / "dolma_tokens.npz")
BATCHES = json.loads((inputs.HERE / "olmo_core_batches.json").read_text())


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return texts.write_inputs(tmp_path_factory.mktemp("dolma"))


@pytest.fixture(scope="module")
def dolma2() -> TokenizerFile:
    return find_tokenizer()


@pytest.fixture(scope="module")
def mix_folder(sources: list[Path], dolma2: TokenizerFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each input tokenised by itself, with the real tokenizer: five token files."""
    out = tmp_path_factory.mktemp("mix")
    for source in sources:
        tokenize([str(source)], str(out / source.name.partition(".")[0]), dolma2)
    return out


def test_tokens_are_those_of_dolma(mix_folder: Path, dolma2: TokenizerFile) -> None:
    assert dolma2.eos_id == EOS
    for number in range(texts.INPUTS):
        ours = (mix_folder / str(number) / "part-00000.npy").read_bytes()
        assert ours == DOLMA[f"text/{number}"].astype("<u4").tobytes()


@pytest.mark.parametrize("special", ["text", "ids"])
def test_a_whole_folder_is_the_same_stream(
    sources: list[Path], dolma2: TokenizerFile, tmp_path: Path, special: SpecialTokens
) -> None:
    made, other = tokenize([str(sources[0].parent)], str(tmp_path), dolma2, special_tokens=special)
    expected = np.concatenate([DOLMA[f"{special}/{number}"] for number in range(texts.INPUTS)])
    assert np.array_equal(np.fromfile(tmp_path / "part-00000.npy", "<u4"), expected)
    blank = sum(not text.strip() for text in texts.documents())
    assert (made.documents, made.empty, made.bad, other) == (len(texts.documents()) - blank, blank, 0, 0)
    assert made.tokens == len(expected)


def mix_recipe(folder: Path) -> Recipe:
    base = recipe(kind="olmo_core", seed=texts.SEED, batch=texts.BATCH, length=texts.LENGTH, dtype=DTYPE, vocab=100_278)
    files = tuple(DataFile(path=f"{number}/part-00000.npy") for number in range(texts.INPUTS))
    data = base.data.model_copy(update={"files": files, "eos_id": EOS})
    return freeze(base.model_copy(update={"data": data}), str(folder))


def test_batch_t_of_a_mix_that_we_tokenised_is_olmo_core_s(mix_folder: Path) -> None:
    frozen = mix_recipe(mix_folder)
    mix, order = Mix(frozen, str(mix_folder)), open_order(frozen)
    assert (len(mix), [list(pair) for pair in mix.file_ranges()]) == (BATCHES["instances"], BATCHES["offsets"])
    assert {run["world"] for run in BATCHES["runs"]} == {1, 2, 4}
    for run in BATCHES["runs"]:
        first, world = (run["epoch"] - 1) * order.batches_per_epoch, run["world"]
        for rank, theirs in enumerate(run["ranks"]):
            assert theirs["batches"] == order.batches_per_epoch
            ours = [order.batch_ids(first + t)[rank::world] for t in range(order.batches_per_epoch)]
            assert [ids.tolist() for ids in (ours if world == 1 else ours[:3] + ours[-1:])] == theirs["ids"]
            tokens = hashlib.sha256(b"".join(mix.instances(ids).astype("<u4").tobytes() for ids in ours))
            assert tokens.hexdigest() == theirs["tokens"]


def test_the_loader_s_batches_are_olmo_core_s_on_any_number_of_processes(mix_folder: Path) -> None:
    """What the devices get, row by row, from 1, 2 and 4 processes."""
    frozen = mix_recipe(mix_folder)
    mix, order = Mix(frozen, str(mix_folder)), open_order(frozen)
    theirs = next(run for run in BATCHES["runs"] if run["world"] == 1 and run["epoch"] == 1)["ranks"][0]["ids"]
    for processes in (1, 2, 4):
        shape = plan(processes=processes, data_parallel=4, micro_batch=3, accumulation=2)
        loaders = [Loader(mix, order, frozen, shape, process) for process in range(processes)]
        for ids in theirs[:4]:
            shares = [next(loader)[1]["ids"] for loader in loaders]
            assert global_ids(shares, shape).tolist() == ids
        for loader in loaders:
            loader.close()
