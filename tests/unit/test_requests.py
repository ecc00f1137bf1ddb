"""Commit now: one step for all processes whatever the timing, one commit for all who ask, one answer each."""

import threading
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import runs
from tests.support.memory_store import MemoryStore
from trainer.distributed import Gang
from trainer.requests import Agreement, Requests, Waiting, lead, verdict
from trainer.rundir.claims import Claim
from trainer.rundir.records import Request, RequestDone
from trainer.rundir.rundir import RunDirectory

ALONE = Gang(0, 1, None, 1.0)
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure


class Process:
    """One process of the model: a loop that goes from step to step, and a thread in one of three places."""

    def __init__(self) -> None:
        self.agreement = Agreement(0)
        self.commits: list[int] = []
        self.promised: list[int] = []  # one per agreement it took part in
        self.settled = 0

    def step(self) -> None:
        """The loop's next step, if it need not wait."""
        step = self.agreement.step + 1
        if not self.agreement.holds(step) and self.agreement.reached(step):
            self.commits.append(step)

    def hear(self, verdicts: list[int], calls: int) -> None:
        """The thread's next move: a promise for a call it has not heard of, or a verdict."""
        if len(self.promised) > self.settled:
            if len(verdicts) > self.settled:
                self.agreement.settle(verdicts[self.settled])
                self.settled += 1
        elif calls > len(self.promised):
            self.promised.append(self.agreement.promise())


@UNTIMED
@given(st.integers(1, 3), st.randoms(use_true_random=True))
def test_all_processes_commit_the_same_steps(count: int, random: Random) -> None:
    """Whatever the order in which loops step, threads hear and process 0 calls; nobody waits for ever."""
    processes = [Process() for _ in range(count)]
    calls, verdicts = 0, list[int]()

    def move(number: int, what: str) -> None:
        nonlocal calls
        process = processes[number % count]
        if what == "s":
            process.step()
        elif what == "h":
            process.hear(verdicts, calls)
        elif calls == len(verdicts) and all(p.settled == calls for p in processes):
            calls += 1
        if calls > len(verdicts) and all(len(p.promised) == calls for p in processes):
            verdicts.append(verdict(p.promised[-1] for p in processes))

    for _ in range(100):
        move(random.randrange(count), random.choice("sshhhc"))
    for _ in range(2):  # threads are always heard in the end
        for number in range(count):
            move(number, "h")
    last = max([*verdicts, *(p.agreement.step for p in processes)])
    for process in processes:
        while process.agreement.step < last:
            before = process.agreement.step
            process.step()
            assert process.agreement.step == before + 1, "held without a verdict on its way"
        assert process.commits == sorted(set(verdicts))


def test_the_loop_waits_for_the_verdict_and_no_longer() -> None:
    agreement, passed = Agreement(5), list[bool]()
    assert agreement.promise() == 5
    loop = threading.Thread(target=lambda: passed.append(agreement.reached(6)))
    loop.start()
    loop.join(0.2)
    assert loop.is_alive()
    agreement.settle(7)
    loop.join(5)
    assert passed == [False]
    assert agreement.reached(7)
    assert not agreement.reached(8)


def test_one_process_agrees_with_itself() -> None:
    agreement = Agreement(3)
    assert lead(ALONE, agreement, 1) == 4
    assert agreement.reached(4)


@UNTIMED
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 9))), st.integers(0, 12), st.integers(0, 12))
def test_a_request_is_answered_by_a_commit_of_all_steps_done_when_it_was_seen(
    seen: list[tuple[str, int]], begun: int, committed: int
) -> None:
    waiting, needs = Waiting(), dict[str, int]()
    for name, step in seen:
        waiting.see([name], step)
        needs.setdefault(name, max(1, step))
    assert waiting.answered_by(committed) == sorted(n for n, need in needs.items() if need <= committed)
    assert waiting.unmet(begun) == any(need > begun for need in needs.values())
    for name in waiting.answered_by(committed):
        waiting.done(name)
    assert not waiting.answered_by(committed)


@pytest.fixture
def rundir() -> RunDirectory:
    return runs.begun(MemoryStore(), patience_seconds=0)


def ask(rundir: RunDirectory, name: str, attempt: int = 1) -> None:
    rundir.request(name, Request(kind="commit", attempt=attempt, time=0.0))


def answered(rundir: RunDirectory, name: str) -> int | None:
    done = rundir.read_answer(name)
    return done.step if done else None


def test_what_is_committed_already_is_answered_at_once(rundir: RunDirectory) -> None:
    """As by a start that finds a request the start before saw and did not live to answer."""
    first = runs.claim(rundir)
    runs.commit(first, 4)
    ask(rundir, "a")
    ask(rundir, "for-another", attempt=2)
    claim = runs.claim(rundir)
    Requests(claim, rundir, ALONE, Agreement(4)).look()
    assert rundir.read_answer("a") == RequestDone(attempt=1, start=2, step=4, time=rundir.read_answer("a").time)  # type: ignore[union-attr]
    assert answered(rundir, "for-another") is None


def test_what_is_not_understood_holds_up_nobody(rundir: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    claim = runs.claim(rundir)
    runs.commit(claim, 4)
    rundir.create_bytes("requests/a.json", b'{"kind": "from the future", "attempt": 1, "time": 0}')
    ask(rundir, "b")
    requests = Requests(claim, rundir, ALONE, Agreement(4))
    for _ in range(2):
        requests.look()
    assert (answered(rundir, "a"), answered(rundir, "b")) == (None, 4)
    assert capsys.readouterr().err.count("not understood") == 1


def test_the_beginning_is_nobodys_commit(rundir: RunDirectory) -> None:
    requests = Requests(runs.claim(rundir), rundir, ALONE, Agreement(0))
    ask(rundir, "a")
    requests.look()
    assert answered(rundir, "a") is None
    assert requests._waiting.unmet(-1)


def test_a_step_without_a_commit_is_committed_first(rundir: RunDirectory) -> None:
    claim = runs.claim(rundir)
    runs.commit(claim, 4)
    agreement = Agreement(6)
    requests = Requests(claim, rundir, ALONE, agreement)
    ask(rundir, "a")
    requests.look()
    assert answered(rundir, "a") is None
    assert requests._waiting.unmet(agreement.begun)
    runs.commit(claim, 5)  # was on its way, and lacks a step
    requests.look()
    assert answered(rundir, "a") is None
    ask(rundir, "b")  # falls together with the first
    runs.commit(claim, 7)
    requests.look()
    assert (answered(rundir, "a"), answered(rundir, "b")) == (7, 7)


def test_a_fenced_start_answers_nothing(rundir: RunDirectory) -> None:
    old = runs.claim(rundir)
    runs.commit(old, 4)
    requests = Requests(old, rundir, ALONE, Agreement(4))
    runs.claim(rundir)
    ask(rundir, "a")
    requests.look()
    assert answered(rundir, "a") is None


class Loop(threading.Thread):
    """A loop without devices: steps, and commits when `Agreement.reached` says so."""

    def __init__(self, claim: Claim, agreement: Agreement, requests: Requests) -> None:
        super().__init__(daemon=True)
        self.claim, self.agreement, self.requests = claim, agreement, requests
        self.committed: list[int] = []
        self.ended = threading.Event()

    def run(self) -> None:
        step = self.agreement.step
        while not self.ended.wait(0.001):
            step += 1
            if self.agreement.reached(step):
                self.agreement.begun = step
                runs.commit(self.claim, step)
                self.committed.append(step)
                self.requests.committed()


def test_requests_that_fall_together_get_one_commit(rundir: RunDirectory) -> None:
    claim, agreement = runs.claim(rundir), Agreement(0)
    requests = Requests(claim, rundir, ALONE, agreement)
    for name in "abc":
        ask(rundir, name)
    loop = Loop(claim, agreement, requests)
    loop.start()
    departure: Any = SimpleNamespace(fail=lambda error: pytest.fail(str(error)))
    requests.start(0.05, departure)
    deadline = threading.Event()
    for _ in range(200):
        if all(answered(rundir, name) is not None for name in "abc"):
            break
        deadline.wait(0.02)
    ask(rundir, "d")
    for _ in range(200):
        if answered(rundir, "d") is not None:
            break
        deadline.wait(0.02)
    loop.ended.set()
    loop.join()
    assert [answered(rundir, name) for name in "abcd"] == [*loop.committed[:1] * 3, loop.committed[1]]
    assert len(loop.committed) == 2


def test_without_a_verdict_the_process_ends(rundir: RunDirectory) -> None:
    """The loop is held: nothing would go on."""

    class Client:
        def key_value_set(self, key: str, value: str) -> None:
            raise RuntimeError("the coordination service is gone")

    failed, ended = list[BaseException](), threading.Event()

    def fail(error: BaseException) -> None:
        failed.append(error)
        ended.set()
        threading.Event().wait()  # the real one does not return

    departure: Any = SimpleNamespace(fail=fail)
    ask(rundir, "a")
    gang = Gang(0, 2, Client(), 1.0)
    Requests(runs.claim(rundir), rundir, gang, Agreement(0)).start(0.05, departure)
    assert ended.wait(5)
    assert "coordination service" in str(failed[0])
