"""Profiles of real trainers: traces that open and show the steps, the program that ran, and the undisturbed numbers."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from orchestrator.verify import verify
from tests.support.gang import Run, until
from trainer.rundir.profiles import Profile, profiles
from trainer.rundir.records import Request

TARGET = 24
# A process that dies of its profiler, as far as anybody can see.
CRASHES = """
import os, time
from trainer import profiles
profiles.Profiles.end = lambda *_: os._exit(9)
from trainer.cli import main
main(time.monotonic(), ["train"])
"""


def ask(run: Run, name: str, kind: Any = "profile", **fields: Any) -> None:
    run.rundir().request(name, Request(kind=kind, attempt=1, time=0.0, **fields))


def asked(run: Run, name: str) -> Profile:
    return next(one for one in profiles(run.rundir()) if one.identifier == name)


def steps_in(trace: Path) -> list[int]:
    """The numbers of the steps that a trace shows, each once."""
    found = set()
    for plane in ProfileData.from_file(str(trace)).planes:
        for line in plane.lines:
            for event in line.events:
                if event.name == "train":
                    found.add(int(dict(event.stats)["step_num"]))
    return sorted(found)


def test_profiles_show_the_steps_and_change_nothing(new_run: Callable[..., Run]) -> None:
    """Two processes, a trace of each; a commit falls into it, collection comes after it, and the run is verified."""
    reference = new_run("reference")
    reference.train("cpu-4", TARGET)

    run = new_run("run")
    ask(run, "profile-a", at=7, steps=3, everybody=True)
    ask(run, "profile-b", kind="dump")
    ask(run, "profile-c", at=TARGET, steps=5)  # the target cuts it short
    run.train("cpu-4", TARGET, keep={"last": 1, "min_age_seconds": 0})

    first = asked(run, "profile-a")
    assert first.done is not None
    assert (first.status, first.done.first, first.done.step) == ("done", 7, 9), first
    folder = run.folder / first.done.place
    assert first.done.place == "attempts/1/1/profiles/step-7"
    traces = sorted((folder / "plugins" / "profile" / "profile-a").iterdir())
    assert [trace.name[:6] for trace in traces] == ["00000-", "00001-"]
    for trace in traces:
        assert trace.stat().st_size > 10_000
        assert steps_in(trace) == [7, 8, 9]
    text = (folder / "train_step.hlo.txt").read_text()
    assert text.startswith("HloModule jit_train_step") and "all-gather" in text

    program = asked(run, "profile-b")
    assert program.status == "done" and program.done is not None
    assert [p.name for p in (run.folder / program.done.place).iterdir()] == ["train_step.hlo.txt"]
    last = asked(run, "profile-c")
    assert last.status == "done" and last.done is not None
    assert (last.done.first, last.done.step) == (TARGET, TARGET)

    assert run.numbers() == reference.numbers()
    assert run.committed().digest == reference.committed().digest  # type: ignore[union-attr]
    verdict, _ = verify(run.rundir())
    assert {check.name: check.text for check in verdict.checks if not check.passed}.keys() <= {
        "ledger"
    }  # nobody keeps one


def test_a_signal_asks_for_a_profile(new_run: Callable[..., Run]) -> None:
    run = new_run("run")
    gang = run.launch(run.submit("cpu-2", 100_000, commit_every=100_000, progress_seconds=0.1))
    until(lambda: (run.progress().get("step") or 0) >= 2, gang)
    gang.signal(signal.SIGUSR1)
    until(lambda: [one for one in profiles(run.rundir()) if one.done], gang)
    gang.signal(signal.SIGUSR2)
    until(lambda: len([one for one in profiles(run.rundir()) if one.done]) == 2, gang)
    gang.signal(signal.SIGTERM)
    assert gang.wait() == [75], gang.logs()
    traced, program = profiles(run.rundir())
    assert (traced.status, program.status) == ("done", "done")
    assert traced.done is not None and traced.done.first is not None
    (trace,) = (run.folder / traced.done.place).rglob("*.xplane.pb")
    assert steps_in(trace) == list(range(traced.done.first, traced.done.step + 1))
    assert "profile on request" in gang.logs()


def test_a_profiler_that_kills_is_not_asked_again(new_run: Callable[..., Run]) -> None:
    run = new_run("run")
    spec = run.submit("cpu-2", 12)
    ask(run, "profile-a", at=6, steps=3)
    gang = run.launch(spec, program=("-c", CRASHES))
    assert gang.wait() == [9], gang.logs()
    assert asked(run, "profile-a").status == "begun"
    gang = run.launch(spec, restart_attempt=1)
    assert gang.wait() == [0], gang.logs()
    found = asked(run, "profile-a")
    assert found.done is not None
    assert "start 1.1 ended in the midst" in found.done.failed
    assert run.committed_step() == 12
