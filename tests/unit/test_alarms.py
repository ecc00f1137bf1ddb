"""Alarms about the data: documents that stay open until acknowledged, told by the start, shown by orchestrators."""

import time
from dataclasses import replace

import pytest

from orchestrator.commands.progress import PlainWatch
from orchestrator.daemon import Caretaker, Look
from orchestrator.explain import explanation, render
from orchestrator.operating.happenings import happenings, told_before
from orchestrator.status import status_of
from tests.support import runs
from tests.support.memory_store import MemoryStore
from tests.support.story import World, a_world, caretaker
from trainer.errors import ConfigurationError
from trainer.rundir.alarms import Alarm, AlarmKind, acknowledge, raise_alarm
from trainer.rundir.records import Progress
from trainer.rundir.rundir import RunDirectory


def an_alarm(kind: AlarmKind = "memorisation", step: int = 3) -> Alarm:
    return Alarm(kind=kind, step=step, attempt=1, start=1, message=f"{kind} since step {step}", time=0.0)


def test_an_alarm_is_open_until_somebody_has_looked_at_it() -> None:
    rundir = runs.begun(MemoryStore())
    assert rundir.open_alarms() == ()
    assert raise_alarm(rundir, an_alarm())
    later = an_alarm().model_copy(update={"attempt": 2})
    assert not raise_alarm(rundir, later), "raised once, whoever meets it again"
    raise_alarm(rundir, an_alarm("coverage", 7))
    assert rundir.open_alarms() == ("coverage-7", "memorisation-3")
    acknowledge(rundir, "coverage-7", "the loader is repaired")
    assert rundir.open_alarms() == ("memorisation-3",)
    assert rundir.read_alarm("coverage-7") is not None
    with pytest.raises(ConfigurationError, match="no alarm 'coverage-8'; open alarms: memorisation-3"):
        acknowledge(rundir, "coverage-8", "?")


def test_old_progress_has_none() -> None:
    old = b'{"version":1,"phase":"Training","step":3,"step_seconds":2.0,"beats":1,"time":0.0}'
    progress = Progress.read(old, "progress.json")
    assert progress.alarms == ()
    assert progress.seconds_left(10) is None
    assert progress.model_copy(update={"pace_seconds": 2.5}).seconds_left(10) == 17.5


def training(world: World, *alarms: Alarm) -> tuple[Caretaker, Look]:
    """A run whose start reports these alarms."""
    keeper = caretaker(world)
    for _ in range(20):
        look = keeper.step()
        start = look.observation.current_start
        if start is not None and start.progress is not None:
            break
        world.tick()
    assert start is not None and start.progress is not None
    for alarm in alarms:
        raise_alarm(world.trainers, alarm)
    told = start.progress.model_copy(
        update={"alarms": world.trainers.open_alarms(), "pace_seconds": 2.0, "time": time.time()}
    )
    world.trainers.put_progress(look.observation.attempt, start.start, told)
    return keeper, keeper.look()


def test_a_run_with_an_alarm_is_degraded_and_says_why_everywhere() -> None:
    with a_world() as world:
        keeper, look = training(world, an_alarm(), an_alarm("coverage", 2))
        text = render(explanation(keeper.run, look.observation, look.decision, look.now))
        assert "Warning  memorisation since step 3" in text
        assert "left at this pace" in text
        status = status_of(keeper.run, look.observation, look.decision, None, look.now)
        degraded = status.condition("Degraded")
        assert (degraded.status, degraded.reason) == ("True", "WrongInstances")
        assert "memorisation since step 3" in degraded.message
        # It trains on: an alarm decides nothing.
        assert status.condition("Succeeded").reason == "Training"
        told = [h for h in happenings(keeper.run, look) if h.what.startswith("alarm/")]
        assert [(h.reason, h.warning) for h in told] == [("WrongInstances", True), ("Memorising", True)]
        assert not any(told_before(h, None) for h in told)
        assert all(told_before(h, status) for h in told), "the written status shows it"
        lines: list[str] = []
        watch = PlainWatch(keeper.run, lines.append)
        for _ in range(2):
            watch.show(look)
        assert sum("alarm: memorisation since step 3" in line for line in lines) == 1


def test_an_acknowledged_alarm_is_gone_from_the_next_report_on() -> None:
    with a_world() as world:
        keeper, look = training(world, an_alarm())
        assert [alarm.kind for alarm in look.observation.alarms] == ["memorisation"]
        acknowledge(world.trainers, "memorisation-3", "known")
        keeper, after = training(world)
        assert after.observation.alarms == ()
        assert after.mark != replace(after, observation=look.observation).mark
        status = status_of(keeper.run, after.observation, after.decision, None, after.now)
        assert status.condition("Degraded").status == "False"


def test_a_report_that_names_an_alarm_nobody_can_read_is_no_alarm() -> None:
    rundir: RunDirectory = runs.begun(MemoryStore())
    assert rundir.read_alarm("memorisation-9") is None
