"""The audit: exact counts from hashes alone, and every way a log can be wrong is named."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.corpus import plan, sized
from trainer.data.audit import NoSuchRun, audit, compare
from trainer.data.commands import data, report
from trainer.data.coverage import Coverage, cover
from trainer.data.hashes import hash_text, ids_hash, ids_hashes
from trainer.data.order import open_order
from trainer.plan import Plan
from trainer.recipe import Recipe
from trainer.rundir.records import (
    AttemptSpec,
    CommitRecord,
    CommitRef,
    InitRecord,
    RecipeRecord,
    StartRecord,
    StepLine,
    StepLogFile,
)
from trainer.rundir.rundir import RunDirectory
from trainer.settings import InitFrom, Settings

BATCH = 8


def line(step: int, read: np.ndarray | str, **changes: Any) -> StepLine:
    """The line of a step that read these ids (or whose ids have this hash)."""
    body: dict[str, Any] = {
        "step": step, "loss": 5.0 - step / 1000, "grad_norm": 1.0, "lr": 1e-3, "skipped": False,
        "ids": read if isinstance(read, str) else ids_hash(read), "data": f"{step:016x}", "seconds": 0.1,
    }  # fmt: skip
    return StepLine(**(body | changes))


def lines(recipe: Recipe, first: int, last: int, **changes: Any) -> list[StepLine]:
    """A right log of steps first..last."""
    order = open_order(recipe)
    return [line(s, order.batch_ids(s - 1), **changes) for s in range(first, last + 1)]


def covered(recipe: Recipe, log: list[StepLine], last: int, first: int = 0) -> Coverage:
    return cover(open_order(recipe), (("log", entry) for entry in log), first, last)


def texts(coverage: Coverage) -> str:
    return "\n".join(problem.text for problem in coverage.problems)


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


# -- run directories


class Run:
    """A run directory written by hand: starts with logs and commits."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.recipe, self.uri = recipe, str(folder)
        self.rundir = RunDirectory.open(self.uri, create=True)
        self.rundir.create_recipe(recipe)
        self.parent: CommitRef | None = None
        self.files: list[StepLogFile] = []
        self.settings = Settings(target_step=100, data_root="/data")

    def attempt(self, number: int, shape: Plan) -> None:
        self.plan, self.number = shape, number
        self.rundir.adopt_spec(
            AttemptSpec(attempt=number, nonce="n", gang=f"g{number}", plan=shape, settings=self.settings, image="i")
        )
        self.rundir.swap_to_attempt(number)
        self.start_number = 0

    def start(self, versions: str = "1") -> None:
        self.start_number += 1
        self.claim = self.rundir.claim(self.number, "n", f"pod-{self.start_number}", self.start_number - 1)
        self.rundir.create_start(
            StartRecord(
                attempt=self.number, start=self.start_number, pod_uid="p", restart_attempt=0, processes=1, devices=1,
                device_kind="cpu", restored=self.parent, versions={"jax": versions},
                fingerprint=self.recipe.fingerprint(),                settings=self.settings, plan=self.plan, time=0.0,
            )
        )  # fmt: skip
        self.files = []

    def log(self, log: list[StepLine]) -> None:
        self.files.append(self.rundir.append_step_log(self.number, self.start_number, log))

    def commit(self, step: int, digest: int = 0) -> None:
        ref = CommitRef(attempt=self.number, start=self.start_number, step=step)
        self.claim.commit(
            CommitRecord(
                ref=ref, parent=self.parent, checkpoint=ref.checkpoint, files=(), digest={"w": step + digest},
                step_log=tuple(self.files), fingerprint=self.recipe.fingerprint(), versions={},
                save_seconds=0.1, time=0.0,
            )
        )  # fmt: skip
        self.parent, self.files = ref, []


def interrupted(folder: Path, again: dict[str, Any] | None = None, resize: bool = False, versions: str = "1") -> Run:
    """Steps 1..20 committed, 21..25 lost and done again (with `again` changed), then 40 committed. Two epochs of 25."""
    recipe = sized(203)
    run = Run(folder, recipe)
    run.attempt(1, plan())
    run.start()
    run.log(lines(recipe, 1, 10))
    run.log(lines(recipe, 11, 20))
    run.commit(20)
    run.log(lines(recipe, 21, 25))
    if resize:
        run.attempt(2, plan(data_parallel=2, accumulation=4))
    run.start(versions)
    run.log([*lines(recipe, 21, 22), *lines(recipe, 23, 23, **(again or {})), *lines(recipe, 24, 40)])
    run.commit(40)
    return run


def test_an_interrupted_run_is_clean_and_its_redone_steps_are_equal(tmp_path: Path) -> None:
    found = audit(interrupted(tmp_path).rundir)
    assert found.ok, report(found)
    assert (found.steps, found.commits, found.instances) == (40, 2, 203)
    assert (found.redone_steps, found.redone_steps_compared, found.redone_steps_bitwise_equal) == (5, 5, 5)
    assert [(e.epoch, e.steps, e.whole, e.read) for e in found.epochs] == [(0, 25, True, 200), (1, 15, False, 120)]
    assert "every instance due was read, none twice" in report(found)


@pytest.mark.parametrize(
    ("field", "value"), [("loss", math.nextafter(4.977, 5)), ("grad_norm", -1.0), ("skipped", True)]
)
def test_one_bit_in_a_step_done_again_is_a_problem(tmp_path: Path, field: str, value: float) -> None:
    found = audit(interrupted(tmp_path, {field: value}).rundir)
    assert not found.ok
    assert (found.redone_steps, found.redone_steps_bitwise_equal) == (5, 4)
    assert f"step 23 was done by start 1.1 and again by 1.2, with other {field}" in texts(found)


@pytest.mark.parametrize("how", [{"resize": True}, {"versions": "2"}])
def test_other_hardware_or_versions_may_change_the_loss_but_not_the_data(tmp_path: Path, how: dict[str, Any]) -> None:
    found = audit(interrupted(tmp_path / "a", {"loss": 4.0}, **how).rundir)
    assert found.ok, report(found)
    assert (found.redone_steps, found.redone_steps_compared, found.redone_steps_bitwise_equal) == (5, 0, 0)
    found = audit(interrupted(tmp_path / "b", {"data": "f" * 16}, **how).rundir)
    assert not found.ok
    assert "with other data" in texts(found)


def test_a_damaged_or_missing_log_file_is_named(tmp_path: Path) -> None:
    run = interrupted(tmp_path)
    file = tmp_path / "steps/1.1/11-20.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"lr":0.001', b'"lr":0.002', 1))
    found = audit(run.rundir)
    assert "is damaged" in texts(found)
    assert found.missed_instances == 80
    file.unlink()
    assert "is missing" in texts(audit(run.rundir))


def test_nothing_committed_yet(tmp_path: Path) -> None:
    run = Run(tmp_path, sized(203))
    assert audit(run.rundir).steps == 0
    run.attempt(1, plan())
    run.start()
    run.log(lines(run.recipe, 1, 4))
    found = audit(run.rundir)
    assert (found.ok, found.steps, found.redone_steps) == (True, 0, 0)
    assert "nothing committed yet" in report(found)


def test_a_carried_over_step_counter(tmp_path: Path) -> None:
    run = Run(tmp_path, sized(203))
    source = InitFrom(run="/other", step=True)
    run.rundir.create_init(InitRecord(source=source, commit=CommitRef(attempt=1, start=1, step=12)))
    run.attempt(1, plan())
    run.start()
    run.log(lines(run.recipe, 13, 20))
    run.commit(20)
    found = audit(run.rundir)
    assert found.ok, report(found)
    assert (found.first_step, found.steps) == (12, 8)


def test_against_another_run(tmp_path: Path) -> None:
    """Equal to the reference up to the step where the loss first differs; digests at commits of both."""
    one = interrupted(tmp_path / "one")
    recipe = one.recipe
    other = Run(tmp_path / "other", recipe)
    other.attempt(1, plan())
    other.start()
    other.log(lines(recipe, 1, 10))
    other.commit(10)
    other.log(lines(recipe, 11, 20))
    other.commit(20)
    other.log([*lines(recipe, 21, 29), *lines(recipe, 30, 40, loss=1.0)])
    other.commit(40, digest=1)
    found = compare(one.rundir, other.rundir)
    assert (found.steps_compared, found.digests_compared) == (40, 2)
    assert (found.ids_equal_until_step, found.data_equal_until_step) == (40, 40)
    assert (found.loss_equal_until_step, found.grad_norm_equal_until_step) == (29, 40)
    assert (found.digest_equal_until_step, found.first_unequal_digest_step) == (20, 40)


def test_the_command(tmp_path: Path) -> None:
    good, bad = interrupted(tmp_path / "good"), interrupted(tmp_path / "bad", {"loss": 0.0})
    run = CliRunner()
    result = run.invoke(data, ["audit", good.uri])
    assert result.exit_code == 0, result.output
    assert "40 logged, 2 commits" in result.output
    result = run.invoke(data, ["audit", bad.uri, "--against", good.uri])
    assert result.exit_code == 1
    assert "NOT clean" in result.output
    assert "loss 22" in result.output
    result = run.invoke(data, ["audit", good.uri, "--json", "--against", bad.uri])
    body = json.loads(result.stdout)
    assert (result.exit_code, body["ok"], body["against"]["loss_equal_until_step"]) == (0, True, 22)
    for name in ("steps", "read_instances", "repeated_instances", "missed_instances", "redone_steps_bitwise_equal"):
        assert name in body
    result = run.invoke(data, ["audit", str(tmp_path / "nowhere")])
    assert result.exit_code == 4
    (tmp_path / "empty").mkdir()
    assert run.invoke(data, ["audit", str(tmp_path / "empty")]).exit_code == 4
    with pytest.raises(NoSuchRun):
        audit(RunDirectory.open(str(tmp_path / "empty")))


def test_a_recipe_is_stored_with_its_run(tmp_path: Path) -> None:
    run = Run(tmp_path, sized(203))
    stored = run.rundir.read_recipe()
    assert isinstance(stored, RecipeRecord)
    assert stored.recipe == run.recipe


def test_files_left_out_on_purpose_are_part_of_the_audit(tmp_path: Path) -> None:
    """Every instance due was read, and the whole mix was not: both are said."""
    base = sized(203)
    left_out = base.model_copy(update={"data": base.data.model_copy(update={"omitted_files": ("pdfs/7.npy",)})})
    run = Run(tmp_path, left_out)
    run.attempt(1, plan())
    run.start()
    run.log(lines(left_out, 1, 10))
    run.commit(10)
    found = audit(run.rundir)
    assert found.ok
    assert found.omitted_files == ("pdfs/7.npy",)
    assert "left out of the mix by the recipe, and not among the instances: 1 files (pdfs/7.npy)" in report(found)
