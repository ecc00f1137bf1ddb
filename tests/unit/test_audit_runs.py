"""The audit of run directories: interrupted, resized, damaged, compared with another; and the command."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.corpus import plan, sized
from tests.support.step_lines import lines, texts
from trainer.data.audit import NoSuchRun, audit, compare
from trainer.data.commands import data, report
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
