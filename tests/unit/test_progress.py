"""The progress line and the one estimate of the time left."""

import json
import sys
import time
from typing import Any

import pytest

from trainer.progress import FEWEST_STEPS, Monitor, Pace, PhaseClock, progress_line
from trainer.rundir.records import Phase, Progress


class Time:
    """A clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("trainer.progress.time.monotonic", lambda: self.now)

    def visit(self, clock: PhaseClock, phase: Phase, seconds: float) -> None:
        clock.enter(phase)
        self.now += seconds
        clock.enter("Training")


def paced(pace: Pace, steps: int, seconds: float) -> None:
    for _ in range(steps):
        pace.stepped(seconds)


def test_a_slow_step_does_not_move_the_pace() -> None:
    clock, pace = PhaseClock(0.0), Pace()
    paced(pace, 50, 2.0)
    paced(pace, 5, 300.0)
    assert pace.seconds_per_step(clock) == 2.0


def test_no_pace_from_the_first_steps() -> None:
    clock, pace = PhaseClock(0.0), Pace()
    paced(pace, FEWEST_STEPS - 1, 2.0)
    assert pace.seconds_per_step(clock) is None


def test_saves_and_evaluations_count_as_often_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute of evaluation at the very beginning is a minute in 10,000 steps, not in the first three."""
    at, pace = Time(monkeypatch), Pace(commit_every=1000, evaluate_every=10_000)
    clock = PhaseClock(0.0)
    at.visit(clock, "Evaluating", 60.0)
    paced(pace, 3, 0.7)
    assert pace.seconds_per_step(clock) == pytest.approx(0.7 + 60 / 10_000)
    for seconds in (5.0, 5.0, 500.0):
        at.visit(clock, "Saving", seconds)
    assert pace.seconds_per_step(clock) == pytest.approx(0.7 + 60 / 10_000 + 5 / 1000)


def test_the_estimate_comes_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with regular saves and evaluations, some slow steps: the ETA at a quarter is within 3 % of what it took."""
    at, clock = Time(monkeypatch), PhaseClock(0.0)
    pace, estimate, target = Pace(commit_every=10, evaluate_every=50), None, 1000
    for step in range(1, target + 1):
        seconds = 20.0 if step % 97 == 0 else 1.0
        at.now += seconds
        pace.stepped(seconds)
        if step % 10 == 0:
            at.visit(clock, "Saving", 2.0)
        if step % 50 == 0:
            at.visit(clock, "Evaluating", 30.0)
        if step == target // 4:
            per_step = pace.seconds_per_step(clock)
            estimate = Progress(phase="Training", step=step, pace_seconds=per_step, beats=1, time=0).seconds_left(
                target
            )
            then = at.now
    assert estimate is not None
    # The slow steps are the neighbours' doing and are not foreseen: 8 of them, 19 s each.
    assert at.now - then - 8 * 19 == pytest.approx(estimate, rel=0.03)


def now(**changes: Any) -> Progress:
    fields: dict[str, Any] = {
        "phase": "Training", "step": 25_000, "target_step": 1_413_814, "committed_step": 24_000, "loss": 2.51234,
        "tokens_per_second": 5_678_901.0, "mfu": 0.4512, "step_seconds": 9.0, "pace_seconds": 0.74, "skipped_steps": 3,
        "beats": 1, "time": 0.0,
    }  # fmt: skip
    return Progress(**(fields | changes))


def test_a_line_for_a_person() -> None:
    assert progress_line(now()) == (
        "  1.8 %  step 25,000/1,413,814  loss 2.5123  5,678,901 tok/s  MFU 45.1 % (causal)  3 skipped  "
        "eta 11 d 21 h  Training"
    )


def test_what_is_not_known_is_left_out() -> None:
    bare = now(loss=None, tokens_per_second=None, mfu=None, pace_seconds=None, skipped_steps=0, step=None)
    assert progress_line(bare) == "  0.0 %  step 0/1,413,814  Training"


@pytest.mark.parametrize(
    ("left", "said"), [(5, "5 s"), (125, "2 m 05 s"), (3 * 3600 + 120, "3 h 02 m"), (50 * 3600, "2 d 02 h")]
)
def test_the_time_left(left: int, said: str) -> None:
    assert f"eta {said}  " in progress_line(now(step=0, target_step=left, pace_seconds=1.0))


def test_an_open_alarm_is_on_the_line() -> None:
    assert progress_line(now(alarms=("memorisation-9",))).endswith("ALARM memorisation-9")


def test_plain_when_piped_and_one_live_line_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = Monitor(PhaseClock(time.monotonic()), 10, lambda _: None, target_step=200, line=True)
    monitor.step, monitor.loss, monitor.skipped_steps = 50, 2.0, 1
    paced(monitor.pace, 3, 2.0)
    monitor._say()
    said = json.loads(capsys.readouterr().err)
    assert (said["event"], said["step"], said["percent"], said["eta_seconds"]) == ("progress", 50, 25.0, 300)
    assert said["skipped_steps"] == 1 and "alarms" not in said
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monitor.stepped()
    monitor.stepped()
    text = capsys.readouterr().err
    assert text.count("\r\x1b[2K") == 2 and "\n" not in text
    assert "eta 5 m 00 s" in text
    assert monitor.record().beats == 1, "saying something is no heartbeat"
