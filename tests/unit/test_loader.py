"""The loader: each process's rows of batch t from any start, and no way to read others unnoticed."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.corpus import frozen, plan
from trainer.data.coverage import cover
from trainer.data.hashes import data_hash, ids_hash, join_ids
from trainer.data.loader import (
    PADDING_ID,
    BatchSource,
    Element,
    Loader,
    WrongInstances,
    global_ids,
    held_out_batches,
    process_rows,
)
from trainer.data.mix import Mix
from trainer.data.order import BatchOrder, open_order
from trainer.errors import ConfigurationError
from trainer.plan import Plan
from trainer.recipe import Recipe
from trainer.rundir.records import StepLine

PLANS = [
    plan(processes=1, data_parallel=8, micro_batch=1, accumulation=1),
    plan(processes=2, data_parallel=4, micro_batch=1, accumulation=2),
    plan(processes=2, data_parallel=2, micro_batch=2, accumulation=2),
    plan(processes=4, data_parallel=8, micro_batch=1, accumulation=1),
    plan(processes=1, data_parallel=1, micro_batch=1, accumulation=8),
]


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[Recipe, Mix, BatchOrder]:
    recipe = frozen(tmp_path)
    return recipe, Mix(recipe, str(tmp_path)), open_order(recipe)


def gang(recipe: Recipe, mix: Mix, order: BatchOrder, shape: Plan, first: int) -> list[Loader]:
    return [Loader(mix, order, recipe, shape, p, first) for p in range(shape.processes)]


@pytest.mark.parametrize("shape", PLANS, ids=lambda p: f"{p.processes}x{p.data_parallel}x{p.accumulation}")
@pytest.mark.parametrize("first", [0, 1, 44, 45, 1000])
def test_the_gang_reads_the_same_batch_on_any_plan_and_from_any_start(
    corpus: tuple[Recipe, Mix, BatchOrder], shape: Plan, first: int
) -> None:
    recipe, mix, order = corpus
    assert order.batches_per_epoch == 45
    loaders = gang(recipe, mix, order, shape, first)
    for t in range(first, first + 3):
        shares = [next(loader) for loader in loaders]
        assert {s[0] for s in shares} == {t}
        assert np.array_equal(global_ids([b["ids"] for _, b in shares], shape), order.batch_ids(t))
        rows = shape.data_parallel * shape.micro_batch // shape.processes
        for _, batch in shares:
            assert batch["tokens"].shape == (shape.accumulation, rows, 16)
            assert (batch["tokens"].dtype, batch["ids"].dtype) == (np.int32, np.uint32)
        tokens = np.concatenate([b["tokens"] for _, b in shares], axis=1).reshape(8, 16)
        assert np.array_equal(tokens, mix.instances(order.batch_ids(t)))
    for loader in loaders:
        loader.close()


def test_a_process_owns_a_contiguous_part_of_each_forward_pass() -> None:
    shape = plan(processes=2, data_parallel=4, micro_batch=1, accumulation=2)
    assert process_rows(shape, 0).tolist() == [[0, 1], [4, 5]]
    assert process_rows(shape, 1).tolist() == [[2, 3], [6, 7]]


def test_unequal_shares_and_another_batch_are_refused(corpus: tuple[Recipe, Mix, BatchOrder]) -> None:
    recipe, mix, order = corpus
    uneven = plan(processes=2, data_parallel=8).model_copy(update={"data_parallel": 1, "accumulation": 8})
    with pytest.raises(ConfigurationError, match="do not divide among 2 processes"):
        process_rows(uneven, 0)
    with pytest.raises(ConfigurationError, match="global_batch 16, the recipe 8"):
        Loader(mix, order, recipe, plan(data_parallel=16, accumulation=1), 0)


def test_reading_ahead_ends_with_the_loader(corpus: tuple[Recipe, Mix, BatchOrder]) -> None:
    recipe, mix, order = corpus
    with Loader(mix, order, recipe, PLANS[0], 0) as loader:
        next(loader)
        assert any(t.name.startswith("grain-prefetch") for t in threading.enumerate())
    until = time.monotonic() + 5
    while any(t.name.startswith("grain-prefetch") for t in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_file_that_shrinks_reaches_the_caller_as_one_clear_error(
    corpus: tuple[Recipe, Mix, BatchOrder], tmp_path: Path
) -> None:
    recipe, mix, order = corpus
    (tmp_path / "f2.bin").write_bytes(b"")
    with Loader(mix, order, recipe, PLANS[0], 0) as loader, pytest.raises(ConfigurationError, match=r"f2\.bin .* ends"):
        list(loader)


# -- loaders broken on purpose


class DoubleSharded(BatchSource):
    """As if Grain had been given shard options too: element i of process p is element i·P + p of its share."""

    process, processes = 0, 1

    def __getitem__(self, index: int) -> Element:
        return super().__getitem__(index * self.processes + self.process)


class OffByOne(BatchSource):
    """Resumes one batch early and says nothing."""

    def __getitem__(self, index: int) -> Element:
        element = self.read(self._first + index - 1)
        return element._replace(t=self._first + index)


class OtherTokens(BatchSource):
    """Right ids, tokens of the next batch: the ids do not come from the array that was read."""

    def read(self, t: int) -> Element:
        return super().read(t)._replace(tokens=super().read(t + 1).tokens)


def sharded_twice(mix: Mix, order: BatchOrder, shape: Plan, p: int, first: int) -> DoubleSharded:
    source = DoubleSharded(mix, order, process_rows(shape, p), first)
    source.process, source.processes = p, shape.processes
    return source


@pytest.mark.parametrize("make", [
    lambda mix, order, shape, p: sharded_twice(mix, order, shape, p, 3),
    lambda mix, order, shape, p: OffByOne(mix, order, process_rows(shape, p), 3),
    lambda mix, order, shape, p: BatchSource(mix, order, process_rows(shape, 1 - p), 3),
    lambda mix, order, shape, p: BatchSource(mix, order, process_rows(shape, p), 0),
], ids=["double sharding", "off by one", "another process's rows", "first batch ignored"])  # fmt: skip
def test_the_loader_hands_out_nothing_that_the_order_does_not_say(
    corpus: tuple[Recipe, Mix, BatchOrder], make: Callable[..., BatchSource]
) -> None:
    recipe, mix, order = corpus
    shape, p = PLANS[1], 1
    with (
        Loader(mix, order, recipe, shape, p, 3, source=make(mix, order, shape, p)) as loader,
        pytest.raises(WrongInstances, match="batch 3: the reader returned batch"),
    ):
        next(loader)


def test_double_sharding_past_the_guard_is_caught_by_the_ids_hash_and_the_audit(
    corpus: tuple[Recipe, Mix, BatchOrder],
) -> None:
    """What the devices hash and log gives it away, whatever the loader believes."""
    _, mix, order = corpus
    shape = PLANS[1]
    sources = [sharded_twice(mix, order, shape, p, 0) for p in range(shape.processes)]
    log = []
    for t in range(20):
        ids = np.concatenate([source[t].ids for source in sources], axis=1).reshape(-1)
        assert ids_hash(ids) != ids_hash(order.batch_ids(t))
        log.append(_line(t + 1, ids_hash(ids), "0"))
    found = cover(order, (("log", entry) for entry in log), 0, 20)
    assert found.problem_count == 20
    assert "double sharding over 2 processes" in found.problems[0].text
    assert found.missed_instances > 0


def test_tokens_that_do_not_belong_to_the_ids_are_caught_by_the_data_hash(
    corpus: tuple[Recipe, Mix, BatchOrder],
) -> None:
    recipe, mix, order = corpus
    hashes = []
    for source in (BatchSource, OtherTokens):
        with Loader(mix, order, recipe, PLANS[0], 0, source=source(mix, order, process_rows(PLANS[0], 0), 0)) as loader:
            _, batch = next(loader)
            hashes.append((ids_hash(join_ids(batch["ids"]).reshape(-1)), data_hash(batch["tokens"].reshape(8, 16))))
    assert hashes[0][0] == hashes[1][0]
    assert hashes[0][1] != hashes[1][1]


def _line(step: int, ids: str, data: str) -> StepLine:
    return StepLine(step=step, loss=1.0, grad_norm=1.0, lr=1e-3, skipped=False, ids=ids, data=data, seconds=0.1)


def test_grain_is_given_no_shards_no_shuffle_and_no_repeats(corpus: tuple[Recipe, Mix, BatchOrder]) -> None:
    """Grain reads indices 0, 1, 2, … of our source, each once: nothing of its own between the step and the batch."""
    recipe, mix, order = corpus
    asked: list[int] = []

    class Watched(BatchSource):
        def __getitem__(self, index: int) -> Element:
            asked.append(index)
            return super().__getitem__(index)

    source = Watched(mix, order, process_rows(PLANS[0], 0), 7)
    with Loader(mix, order, recipe, PLANS[0], 0, 7, source=source, threads=2, prefetch=4) as loader:
        assert [next(loader)[0] for _ in range(10)] == list(range(7, 17))
    assert sorted(asked) == list(range(len(asked)))
    assert 10 <= len(asked) <= 10 + 4


def test_importing_the_loader_does_not_import_jax() -> None:
    code = (
        "import sys, trainer.data.loader, trainer.data.audit, trainer.data.commands; "
        "print([m for m in ('jax', 'grain', 'orbax') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# -- the held-out set


@pytest.mark.parametrize("shape", PLANS, ids=lambda p: f"{p.processes}x{p.data_parallel}x{p.accumulation}")
def test_held_out_instances_come_once_in_file_order_on_any_plan(
    corpus: tuple[Recipe, Mix, BatchOrder], tmp_path: Path, shape: Plan
) -> None:
    held_out = Mix(corpus[0], str(tmp_path), "held_out")
    assert len(held_out) == 12
    for _ in range(2):
        passes: list[list[dict[str, Any]]] = [
            list(held_out_batches(held_out, shape, p)) for p in range(shape.processes)
        ]
        assert len({len(batches) for batches in passes}) == 1
        ids, tokens, weights = (
            np.concatenate([np.concatenate([b[name] for b in step], axis=1) for step in zip(*passes, strict=True)])
            for name in ("ids", "tokens", "weights")
        )
        flat = join_ids(ids).reshape(-1)
        real = weights.reshape(-1) == 1
        assert flat[real].tolist() == list(range(12))
        assert set(flat[~real].tolist()) <= {PADDING_ID}
        assert np.array_equal(tokens.reshape(-1, 16)[real], held_out.instances(np.arange(12, dtype=np.uint64)))
        assert (tokens.reshape(-1, 16)[~real] == 256).all()
