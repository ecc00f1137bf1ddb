"""The guard beside the loop: every step's instances compared with the order, the losses with the held-out trend."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.support import runs
from tests.support.corpus import sized
from tests.support.memory_store import MemoryStore
from trainer.data.explain import double_sharded
from trainer.data.hashes import ids_hash
from trainer.data.order import BatchOrder, open_order
from trainer.errors import StorageUnavailable
from trainer.guard import Guard
from trainer.rundir.alarms import Trend, acknowledge
from trainer.rundir.records import CommitRef, StepLine
from trainer.rundir.rundir import RunDirectory

EVERY, EPOCH = 5, 400
Losses = Callable[[int], float]


def order() -> BatchOrder:
    return open_order(sized(8 * EPOCH))


def line(of: BatchOrder, step: int, loss: float, ids: np.ndarray | None = None) -> StepLine:
    read = of.batch_ids(step - 1) if ids is None else ids
    return StepLine(
        step=step, loss=loss, grad_norm=1.0, lr=0.1, skipped=False, ids=ids_hash(read), data="0", seconds=0.1
    )


class Driven:
    """A guard on a run directory in memory, driven step by step."""

    def __init__(self, rundir: RunDirectory, restored: CommitRef | None = None) -> None:
        self.rundir, self.order = rundir, order()
        self.told: list[tuple[str, ...]] = []
        self.guard = Guard(rundir, self.order, 1, 1, restored, self.told.append, same_text=True)
        self.guard.begin()

    def train(self, first: int, last: int, loss: Losses, held_out: Losses, wrong: bool = False) -> None:
        for step in range(first, last + 1):
            ids = double_sharded(self.order, step - 1, (1, 4, 2)) if wrong else None
            self.guard.stepped(line(self.order, step, loss(step), ids))
            if step % EVERY == 0:
                self.guard.evaluated(CommitRef(attempt=1, start=1, step=step), held_out(step), 10**9)

    def finish(self) -> tuple[str, ...]:
        self.guard.finish()
        return self.rundir.open_alarms()


@pytest.fixture
def rundir() -> RunDirectory:
    return runs.begun(MemoryStore())


def falling(step: int) -> float:
    return 2 + 3 * step**-0.3


def scattered(step: int) -> float:
    return falling(step) + 0.01 * float(np.random.default_rng(step).normal())


def memorised(step: int) -> float:
    return scattered(step) - (0.2 if step > 150 else 0.0)


def test_a_right_run_is_silent(rundir: RunDirectory) -> None:
    run = Driven(rundir)
    run.train(1, 300, scattered, falling)
    assert run.finish() == ()
    assert run.told == []
    trend = rundir.read("trend/1.1/300.json", Trend)
    assert trend is not None and len(trend.points) == 60
    assert (trend.points[1].first, trend.points[1].step) == (6, 10)


def test_wrong_instances_are_named_once(rundir: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run = Driven(rundir)
    run.train(1, 20, scattered, falling)
    run.train(21, 40, scattered, falling, wrong=True)
    assert run.finish() == ("coverage-21",)
    alarm = rundir.read_alarm("coverage-21")
    assert alarm is not None
    assert "double sharding over 4 processes" in alarm.message
    assert "untildone verify" in alarm.message
    assert run.told == [("coverage-21",)]
    assert capsys.readouterr().err.count('"event": "alarm"') == 1


def test_repeats_are_heard_by_the_losses_alone(rundir: RunDirectory) -> None:
    run = Driven(rundir)
    run.train(1, 250, memorised, falling)
    (name,) = run.finish()
    alarm = rundir.read_alarm(name)
    assert alarm is not None and alarm.kind == "memorisation"
    assert 150 < alarm.step < 200
    assert alarm.figures["expected"] - alarm.figures["training_loss"] == pytest.approx(0.2, abs=0.05)


def test_the_trend_survives_a_restart(rundir: RunDirectory) -> None:
    """What the next start goes on from is the trend of the commit it restored, and nothing else is read."""
    claim = runs.claim(rundir)
    first = Driven(rundir)
    first.train(1, 150, memorised, falling)
    assert first.finish() == ()
    runs.commit(claim, 150)
    runs.commit(claim, 152)  # one without an evaluation: the trend is that of a commit before
    second = Driven(rundir, CommitRef(attempt=1, start=1, step=152))
    second.train(153, 250, memorised, falling)
    (name,) = second.finish()
    assert name.startswith("memorisation-")
    trend = rundir.read("trend/1.1/155.json", Trend)
    assert trend is not None
    assert [point.step for point in trend.points] == list(range(5, 156, 5))
    assert trend.points[-1].first == 153


def test_an_acknowledged_alarm_is_not_raised_again(rundir: RunDirectory) -> None:
    run = Driven(rundir)
    run.train(1, 250, memorised, falling)
    (name,) = run.finish()
    acknowledge(rundir, name, "we know")
    claim = runs.claim(rundir)
    runs.commit(claim, 250)
    again = Driven(rundir, CommitRef(attempt=1, start=1, step=250))
    again.train(251, 300, memorised, falling)
    assert again.finish() == ()


def test_a_second_epoch_repeats_on_purpose(rundir: RunDirectory) -> None:
    run = Driven(rundir)
    run.train(EPOCH + 1, EPOCH + 100, scattered, falling)
    run.train(EPOCH + 101, EPOCH + 300, lambda step: scattered(step) - 0.5, falling)
    assert run.finish() == ()


def test_a_store_that_fails_costs_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    class Failing(MemoryStore):
        def list(self, prefix: str) -> list[str]:
            if prefix == "alarms":
                raise StorageUnavailable("gone")
            return super().list(prefix)

    rundir = runs.begun(Failing(), patience_seconds=0, sleep=lambda _: None)
    run = Driven(rundir)
    run.train(1, 10, scattered, falling)
    run.guard.finish()
    assert "could not be watched; the training goes on" in capsys.readouterr().err
