"""The audit: exact counts from hashes alone, and every way a log can be wrong is named."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.corpus import sized
from tests.support.step_lines import line, lines, texts
from trainer.data.coverage import Coverage, cover
from trainer.data.hashes import hash_text, ids_hashes
from trainer.data.order import open_order
from trainer.recipe import Recipe
from trainer.rundir.records import StepLine

BATCH = 8


def covered(recipe: Recipe, log: list[StepLine], last: int, first: int = 0) -> Coverage:
    return cover(open_order(recipe), (("log", entry) for entry in log), first, last)


def counted(
    recipe: Recipe, log: list[StepLine], last: int, ids_of: Callable[[StepLine], np.ndarray | None]
) -> list[tuple[int, int, int]]:
    """(read, repeated, missed) per epoch, counted the slow way from the ids each line stands for."""
    order = open_order(recipe)
    result = []
    for epoch in range(order.epoch_of(last - 1) + 1):
        counts = np.zeros(order.instances, int)
        for entry in log:
            ids = ids_of(entry)
            if order.epoch_of(entry.step - 1) == epoch and ids is not None:
                np.add.at(counts, ids.astype(int), 1)
        steps = [t for t in range(last) if order.epoch_of(t) == epoch]
        due = np.unique(np.concatenate([order.batch_ids(t) for t in steps])).astype(int)
        result.append((int((counts > 0).sum()), int((counts > 1).sum()), int((counts[due] == 0).sum())))
    return result


# -- the pure part


@pytest.mark.parametrize("kind", ["olmo_core", "feistel"])
@pytest.mark.parametrize("instances", [8, 9, 67, 64 * 8 + 3])
def test_a_right_log_of_several_epochs_is_clean(kind: str, instances: int) -> None:
    recipe = sized(instances, kind=kind)
    per_epoch = instances // BATCH
    last = 2 * per_epoch + max(1, per_epoch // 2)
    found = covered(recipe, lines(recipe, 1, last), last)
    assert not found.problem_count
    assert (found.steps, found.repeated_instances, found.missed_instances) == (last, 0, 0)
    assert found.read_instances == last * BATCH
    assert [e.whole for e in found.epochs][:2] == [True, True]
    assert sum(e.steps for e in found.epochs) == last


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(BATCH, 100))
def test_counts_are_exact_whatever_was_lost_doubled_or_misread(data: st.DataObject, instances: int) -> None:
    """Each step is logged rightly, not at all, twice, as the batch before or as garbage; compared with a slow count."""
    recipe = sized(instances)
    order = open_order(recipe)
    per_epoch = order.batches_per_epoch
    last = data.draw(st.integers(1, min(3 * per_epoch, 30)))
    log, read, problems = [], {}, 0
    for step in range(1, last + 1):
        what = data.draw(st.sampled_from(["right"] * 4 + ["missing", "twice", "before", "garbage"]))
        same_epoch = step >= 2 and order.epoch_of(step - 2) == order.epoch_of(step - 1)
        if what == "before" and same_epoch:
            log.append(line(step, order.batch_ids(step - 2)))
            read[step] = order.batch_ids(step - 2)
        elif what == "garbage":
            log.append(line(step, "0123456789abcdef"))
            read[step] = None
        elif what != "missing":
            log += lines(recipe, step, step) * (
                2 if what == "twice" and order.epoch_of(step) == order.epoch_of(step - 1) else 1
            )
            read[step] = order.batch_ids(step - 1)
        problems += what != "right"
    found = covered(recipe, log, last)
    assert [(e.read, e.repeated, e.missed) for e in found.epochs] == counted(recipe, log, last, lambda e: read[e.step])
    if found.repeated_instances or found.missed_instances:
        assert found.problem_count
    if not problems:
        assert not found.problem_count


def test_a_step_in_the_middle_that_is_missing_is_named() -> None:
    recipe = sized(800)
    log = lines(recipe, 1, 60)
    del log[40:43]
    found = covered(recipe, log, 60)
    assert texts(found) == "steps 41..43 are not in the log, so nothing proves what was read"
    assert (found.missed_instances, found.repeated_instances, found.steps) == (3 * BATCH, 0, 57)


def test_steps_missing_at_the_end_and_the_beginning_are_named() -> None:
    recipe = sized(800)
    found = covered(recipe, lines(recipe, 3, 50), 60)
    assert "steps 1..2 are not in the log" in texts(found)
    assert "steps 51..60 are not in the log" in texts(found)
    assert found.missed_instances == 12 * BATCH
    assert covered(recipe, [], 5).missed_instances == 5 * BATCH


def test_a_doubled_step_is_named() -> None:
    recipe = sized(800)
    found = covered(recipe, lines(recipe, 1, 20) + lines(recipe, 18, 30), 30)
    assert [p.step for p in found.problems] == [18, 19, 20]
    assert "step 18 is logged twice" in texts(found)
    assert (found.repeated_instances, found.missed_instances) == (3 * BATCH, 0)


def test_a_step_doubled_after_its_epoch_counts_in_its_epoch() -> None:
    recipe = sized(40)
    found = covered(recipe, [*lines(recipe, 1, 7), *lines(recipe, 2, 2), *lines(recipe, 8, 8)], 8)
    assert [(e.repeated, e.missed) for e in found.epochs] == [(BATCH, 0), (0, 0)]


def test_lines_in_the_wrong_place_are_named_but_count() -> None:
    recipe = sized(800)
    log = lines(recipe, 1, 10)
    log[3], log[7] = log[7], log[3]
    found = covered(recipe, log, 10)
    assert found.problem_count
    assert (found.missed_instances, found.repeated_instances) == (0, 0)


def test_steps_beyond_the_commit_are_not_counted() -> None:
    recipe = sized(800)
    found = covered(recipe, lines(recipe, 1, 22), 20)
    assert found.steps == 20
    assert found.problem_count == 2


def test_a_run_that_began_at_a_later_step() -> None:
    recipe = sized(800)
    found = covered(recipe, lines(recipe, 41, 60), 60, first=40)
    assert not found.problem_count
    assert found.read_instances == 20 * BATCH


# -- broken loaders: the hash and the audit notice, and usually say which


def broken(read: Callable[[Any, int], np.ndarray], first: int = 1, steps: int = 40, instances: int = 8000) -> Coverage:
    recipe = sized(instances)
    order = open_order(recipe)
    log = [line(s, read(order, s - 1)) for s in range(first, first + steps)]
    return covered(recipe, log, first + steps - 1, first - 1)


def test_off_by_one_after_a_resume() -> None:
    """Batch s is read again on resume, and all later data shift by one."""
    found = broken(lambda order, t: order.batch_ids(t if t < 20 else t - 1))
    assert [p.step for p in found.problems] == list(range(21, 41))
    assert "step 21 did not read batch 20" in texts(found)
    assert "the batch 1 before (read before)" in texts(found)
    assert (found.repeated_instances, found.missed_instances) == (BATCH, BATCH)


def test_rewound_to_a_fraction_of_the_step() -> None:
    found = broken(lambda order, t: order.batch_ids(t // 16), first=801)
    assert found.problem_count == 40
    assert "the batch at step / 16" in texts(found)


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_double_sharding(processes: int) -> None:
    """Each process slices its rows and Grain slices again: it reads every P-th element of its own share."""
    share = BATCH // processes

    def read(order: Any, t: int) -> np.ndarray:
        return np.concatenate(
            [order.batch_ids(t * processes + p).reshape(processes, share)[p] for p in range(processes)]
        )

    found = broken(read)
    assert found.problem_count == 40
    assert f"double sharding over {processes} processes" in texts(found)
    assert found.missed_instances >= 160


def test_rows_dealt_in_strides() -> None:
    found = broken(lambda order, t: np.concatenate([order.batch_ids(t)[p::4] for p in range(4)]))
    assert found.problem_count == 40
    assert "dealt to 4 processes in strides" in texts(found)
    assert (found.missed_instances, found.repeated_instances) == (0, 0)


def test_the_order_of_another_seed() -> None:
    other = open_order(sized(8000, seed=1))
    found = broken(lambda order, t: other.batch_ids(t))
    assert found.problem_count == 40
    assert "known mistakes do not explain it" in texts(found)
    assert found.missed_instances == 40 * BATCH


def test_an_order_that_is_no_bijection_shows_as_repeats() -> None:
    recipe = sized(80)
    order = open_order(recipe)
    twice = np.arange(80, dtype=np.uint64)
    twice[70] = twice[3]
    order._epochs[0] = lambda first, count: twice[first : first + count]  # type: ignore[assignment]
    log = [line(s, order.batch_ids(s - 1)) for s in range(1, 11)]
    found = cover(order, (("log", entry) for entry in log), 0, 10)
    assert (found.repeated_instances, found.read_instances) == (1, 79)


def test_many_steps_are_audited_quickly() -> None:
    """The block-wise path: OLMo 3's 1.4 million steps of 512 take some minutes."""
    steps = 20_000
    recipe = sized(steps * BATCH + 5)
    order = open_order(recipe)
    log = [line(k, hash_text(lanes)) for k, lanes in enumerate(ids_hashes(order.block(0, steps)), 1)]
    began = time.perf_counter()
    found = covered(recipe, log, steps)
    assert time.perf_counter() - began < 2
    assert not found.problem_count
    assert found.read_instances == steps * BATCH
