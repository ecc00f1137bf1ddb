"""Profiles on request: the same steps on all processes, one try each whatever fails, and no run that ends of it."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import runs
from tests.support.memory_store import MemoryStore
from trainer.commands import train
from trainer.distributed import Gang
from trainer.errors import ConfigurationError
from trainer.profiles import Order, Profiles, Wanted
from trainer.requests import Agreement, Requests, verdict
from trainer.rundir.profiles import profiles
from trainer.rundir.records import MOST_PROFILED_STEPS, Request, RequestDone
from trainer.rundir.rundir import RunDirectory
from trainer.rundir.store import StorageFull

ALONE = Gang(0, 1, None, 1.0)
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
NAME = "profile-1"


class Session:
    """In place of JAX's profiler: writes a file as it does."""

    def __init__(self, name: str = "") -> None:
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True

    def export_profile_data(self, folder: str, session_id: str) -> None:
        assert self.stopped
        place = Path(folder) / "plugins" / "profile" / session_id
        place.mkdir(parents=True)
        (place / "host.xplane.pb").write_bytes(b"trace")


def broken(*_: Any) -> Any:
    raise RuntimeError("no profiler here")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def rundir(store: MemoryStore) -> RunDirectory:
    return runs.begun(store, patience_seconds=0)


def ask(rundir: RunDirectory, name: str = NAME, kind: Any = "profile", **fields: Any) -> None:
    rundir.request(name, Request(kind=kind, attempt=1, time=0.0, **fields))


class Start:
    """A start without devices: its requests, its agreement, its profiles, and a loop that is stepped by hand."""

    def __init__(self, rundir: RunDirectory, step: int = 0, new_session: Callable[[str], Any] = Session) -> None:
        claim = runs.claim(rundir)
        self.agreement = Agreement(step)
        self.requests = Requests(claim, rundir, ALONE, self.agreement)
        self.profiles = Profiles(
            gang=ALONE,
            rundir=rundir,
            attempt=claim.attempt,
            start=claim.start,
            program=lambda: "HloModule jit_train_step",
            orders=self.agreement,
            new_session=new_session,
        )
        self.requests.dump = self.profiles.dump
        self.step = step
        self.traced: list[int] = []

    def look(self) -> "Start":
        self.requests.look()
        self.requests._start_profiles()
        return self

    def run(self, steps: int) -> "Start":
        for _ in range(steps):
            self.step += 1
            if self.profiles.taking:
                self.traced.append(self.step)
            self.agreement.reached(self.step)
            if self.profiles.ends_with(self.step):
                self.profiles.end(self.step)
            if (order := self.profiles.due()) is not None:
                self.profiles.begin(order)
        self.profiles.drain(10)
        return self


def answer(rundir: RunDirectory, name: str = NAME) -> RequestDone:
    done = rundir.read_answer(name)
    assert done is not None
    return done


# --- which steps


@UNTIMED
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4)), min_size=1, max_size=3),
    st.randoms(use_true_random=True),
)
def test_all_processes_trace_the_same_steps(count: int, wanted: list[tuple[int, int]], random: Random) -> None:
    """Whatever the order in which loops step and threads hear; two profiles never overlap."""
    agreements = [Agreement(0) for _ in range(count)]
    active: list[Order | None] = [None] * count
    taken: list[list[tuple[str, int, int]]] = [[] for _ in range(count)]

    def step(rank: int) -> None:
        agreement = agreements[rank]
        step = agreement.step + 1
        if agreement.holds(step):
            return
        agreement.reached(step)
        order = active[rank]
        if order is not None and step >= order.last:
            active[rank] = None
        if active[rank] is None and (order := agreement.profile_due()) is not None:
            active[rank] = order
            taken[rank].append((order.wanted.identifier, order.first, order.last))

    def between() -> None:
        for _ in range(random.randrange(6)):
            step(random.randrange(count))

    for number, (at, steps) in enumerate(wanted, 1):
        between()
        promises: dict[int, int] = {}
        for rank in random.sample(range(count), count):
            promises[rank] = agreements[rank].promise()
            between()
        agreed = verdict(promises.values())
        for rank in random.sample(range(count), count):
            agreements[rank].settle(agreed, number, Wanted(str(number), at, steps, False))
            between()
    for rank in range(count):
        while agreements[rank].step < 40:
            step(rank)
    assert all(found == taken[0] for found in taken)
    assert sorted(name for name, _, _ in taken[0]) == [str(n) for n in range(1, len(wanted) + 1)]
    for (_, _, last), (_, first, _) in zip(taken[0], taken[0][1:], strict=False):
        assert first > last
    for name, first, last in taken[0]:
        at, steps = wanted[int(name) - 1]
        assert first >= at and last - first + 1 == steps


def test_a_profile_is_of_the_steps_that_were_asked_for(rundir: RunDirectory, store: MemoryStore) -> None:
    ask(rundir, at=7, steps=3)
    start = Start(rundir).look().run(12).look().run(12)
    assert start.traced == [7, 8, 9]
    done = answer(rundir)
    assert (done.first, done.step, done.failed) == (7, 9, "")
    assert done.place == "attempts/1/1/profiles/step-7"
    trace, program = sorted(store.list(done.place))
    assert trace.startswith(f"{done.place}/plugins/profile/{NAME}/00000-") and trace.endswith(".xplane.pb")
    assert store.get(trace).data == b"trace"
    assert program == f"{done.place}/train_step.hlo.txt"
    assert store.get(program).data == b"HloModule jit_train_step"


def test_without_a_step_or_after_it_the_next_ones_are_taken(rundir: RunDirectory) -> None:
    ask(rundir, steps=2)
    ask(rundir, "profile-2", at=3, steps=2)
    start = Start(rundir, step=10).look().run(10)
    assert start.traced == [12, 13, 14, 15]
    assert (answer(rundir).first, answer(rundir, "profile-2").first) == (12, 14)


def test_the_program_alone(rundir: RunDirectory, store: MemoryStore) -> None:
    ask(rundir, kind="dump")
    start = Start(rundir, step=4)
    dump, start.requests.dump = start.requests.dump, None
    start.look()  # nothing is compiled yet
    assert rundir.read_answer(NAME) is None
    start.requests.dump = dump
    start.look().run(3)
    assert not start.traced
    assert store.list("attempts/1/1/profiles") == ["attempts/1/1/profiles/step-4/train_step.hlo.txt"]
    assert (answer(rundir).failed, answer(rundir).first) == ("", None)


def test_a_signal_asks_like_a_file(rundir: RunDirectory) -> None:
    start = Start(rundir)
    start.requests._signalled.put("profile")
    start.requests._write_signalled()
    start.look().run(10)
    (found,) = profiles(rundir)
    assert (found.status, found.request.reason, len(start.traced)) == ("done", "signal", found.request.steps)


def test_a_signal_that_comes_too_early_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asking = (signal.SIGUSR1, signal.SIGUSR2)
    found: list[object] = []
    before = [signal.signal(one, signal.SIG_DFL) for one in asking]  # ends the process, as in one that has just begun

    def prepare(*_: object, **__: object) -> str:
        found.extend(signal.getsignal(one) for one in asking)
        return "done already"

    monkeypatch.setattr("trainer.standalone.prepare", prepare)
    try:
        train.main(["--recipe", "tiny"], standalone_mode=False, obj=0.0)
    finally:
        for one, handler in zip(asking, before, strict=True):
            signal.signal(one, handler)
    assert found == [signal.SIG_IGN] * 2


def test_the_size_is_bounded() -> None:
    with pytest.raises(ConfigurationError, match="steps"):
        Request.parse({"kind": "profile", "attempt": 1, "steps": MOST_PROFILED_STEPS + 1, "time": 0.0}, "request")


# --- once


def test_an_answered_profile_is_not_taken_again(rundir: RunDirectory) -> None:
    ask(rundir, at=3, steps=1)
    Start(rundir).look().run(6)
    assert Start(rundir).look().run(6).traced == []


def test_a_start_that_ended_before_leaves_it_to_the_next(rundir: RunDirectory) -> None:
    ask(rundir, at=20, steps=1)
    assert Start(rundir).look().run(10).traced == []
    assert Start(rundir).look().run(30).traced == [20]
    assert (answer(rundir).attempt, answer(rundir).start) == (1, 2)


def test_a_start_that_ended_in_the_midst_is_not_imitated(rundir: RunDirectory) -> None:
    """What made it end may have been the profiler."""
    ask(rundir, at=5, steps=4)
    first = Start(rundir).look().run(6)
    assert first.traced == [5, 6]
    second = Start(rundir).look().run(30)
    assert second.traced == []
    assert "start 1.1 ended in the midst" in answer(rundir).failed


def test_a_fenced_start_writes_nothing(rundir: RunDirectory) -> None:
    ask(rundir, at=5, steps=2)
    old = Start(rundir).look()
    new = Start(rundir)
    old.run(10)
    assert old.traced == []
    assert rundir.read_begun(NAME) is None and rundir.read_answer(NAME) is None
    assert new.look().run(10).traced == [5, 6]


def test_what_the_run_never_got_to_is_answered_at_its_end(rundir: RunDirectory) -> None:
    ask(rundir, at=90)
    start = Start(rundir).look().run(10)
    start.requests.close()
    assert "reached its target" in answer(rundir).failed


def test_a_trace_that_is_not_written_when_the_run_ends_was_begun_all_the_same(rundir: RunDirectory) -> None:
    ask(rundir, at=5, steps=2)
    start = Start(rundir).look().run(5)
    start.requests.close()
    assert "start 1.1 ended in the midst of it (what there is: attempts/1/1/profiles/step-5)" in answer(rundir).failed


# --- whatever fails


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda session: broken, "did not start"),
        (lambda session: type("S", (session,), {"stop": broken}), "did not stop"),
        (lambda session: type("S", (session,), {"export_profile_data": broken}), "could not be written"),
        (lambda session: type("S", (session,), {"export_profile_data": lambda *_, **__: None}), "wrote no trace"),
    ],
)
def test_a_profiler_that_fails_is_an_answer(rundir: RunDirectory, spoil: Callable[[Any], Any], words: str) -> None:
    ask(rundir, at=3, steps=2)
    ask(rundir, "profile-2", at=9, steps=2)
    start = Start(rundir, new_session=spoil(Session)).look().run(12)
    assert words in answer(rundir).failed
    assert start.step == 12 and answer(rundir, "profile-2").first == 9
    Start(rundir).look().run(12)
    assert words in answer(rundir).failed


def test_a_full_disk_is_an_answer(rundir: RunDirectory, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise StorageFull("no space left")

    monkeypatch.setattr(store, "create_from_file", full)
    ask(rundir, steps=2)
    Start(rundir).look().run(6)
    assert "no space left" in answer(rundir).failed


def test_a_run_directory_that_cannot_be_written_holds_nothing_up(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is traced that could be traced again by the next start."""
    ask(rundir, at=3, steps=2)
    start = Start(rundir).look()
    monkeypatch.setattr(rundir, "begin", broken)
    monkeypatch.setattr(rundir, "answer", broken)
    assert start.run(6).traced == []
    assert "could not be completed" in capsys.readouterr().err
    monkeypatch.undo()
    assert Start(rundir).look().run(6).traced == [3, 4]


def test_a_store_that_hangs_holds_the_training_up_for_a_moment_only(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.profiles.MARK_SECONDS", 0.05)
    released = threading.Event()
    monkeypatch.setattr(rundir, "begin", lambda *_: released.wait(10))
    ask(rundir, at=3, steps=2)
    assert Start(rundir).look().run(6).traced == []
    assert "did not answer" in answer(rundir).failed
    released.set()


def test_a_beginning_that_cannot_be_read_is_not_repeated_and_holds_up_nobody(
    rundir: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(rundir)
    ask(rundir, "profile-2")
    rundir.create_bytes(f"requests/{NAME}.begun.json", b"torn")
    start = Start(rundir).look().run(8)
    assert (rundir.read_answer(NAME), answer(rundir, "profile-2").failed) == (None, "")
    assert len(start.traced) == 5 and "not begun again" in capsys.readouterr().err
