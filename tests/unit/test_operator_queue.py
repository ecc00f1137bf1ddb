"""The work queue: each key once, one worker per key, nothing lost, later means later."""

import random
import threading
import time

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orchestrator.operating.queue import FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS, KeyedQueue

KEYS = st.sampled_from("abcd")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class QueueMachine(RuleBasedStateMachine):
    """Against a model: for each key since when it wants work, when it is due, and whether a worker has it."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.queue: KeyedQueue[str] = KeyedQueue(self.clock, random.Random(1))
        self.wants: dict[str, float] = {}
        self.due: dict[str, float] = {}
        self.working: set[str] = set()

    def settle(self) -> None:
        for key, due in list(self.due.items()):
            if due <= self.clock.now:
                del self.due[key]
                self.wants.setdefault(key, self.clock.now)

    @rule(key=KEYS)
    def add(self, key: str) -> None:
        self.settle()
        self.queue.add(key)
        self.wants.setdefault(key, self.clock.now)

    @rule(key=KEYS, seconds=st.integers(0, 20))
    def add_after(self, key: str, seconds: int) -> None:
        self.settle()
        self.queue.add_after(key, seconds)
        if seconds == 0:
            self.wants.setdefault(key, self.clock.now)
        else:
            self.due[key] = min(self.due.get(key, 1e9), self.clock.now + seconds)

    @rule(seconds=st.integers(1, 10))
    def time_passes(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule()
    def get(self) -> None:
        self.settle()
        may = set(self.wants) - self.working
        found = self.queue.get(timeout=0)
        if found is None:
            assert not may, "a key that wants work was not handed out"
            return
        key, _ = found
        assert key in may, "handed out although it wants no work, or a worker has it"
        del self.wants[key]
        self.due.pop(key, None)  # who works on it says anew when it is due
        self.working.add(key)

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.working)))
        self.settle()
        self.queue.done(key)
        self.working.discard(key)

    @invariant()
    def counts(self) -> None:
        self.settle()
        assert len(self.queue) == len(set(self.wants) - self.working)

    def teardown(self) -> None:
        """In the end everything that was ever wanted comes."""
        for key in list(self.working):
            self.queue.done(key)
        self.working.clear()
        self.clock.now += 100
        self.settle()
        rest = set(self.wants)
        found = {key for _ in range(len(KEYS.elements)) if (got := self.queue.get(timeout=0)) for key in got[:1]}  # type: ignore[attr-defined]
        assert found == rest


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_keys_come_in_the_order_in_which_they_were_added() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    for key in "cabca":
        queue.add(key)
    assert [queue.get(0)[0] for _ in range(3)] == ["c", "a", "b"]  # type: ignore[index]
    assert queue.get(0) is None


def test_retries_double_up_to_half_a_minute_with_jitter_and_begin_anew() -> None:
    clock = Clock()
    queue: KeyedQueue[str] = KeyedQueue(clock, random.Random(3))
    pauses = []
    for _ in range(14):
        pauses.append(queue.retry("a"))
        clock.now += LONGEST_RETRY_SECONDS
        assert queue.get(0) is not None
        queue.done("a")
    for number, pause in enumerate(pauses):
        longest = min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2**number)
        assert longest / 2 <= pause <= longest
    assert len({pause / min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2**n) for n, pause in enumerate(pauses)}) > 10
    assert pauses[-1] > 10
    queue.forget("a")
    assert queue.retry("a") <= FIRST_RETRY_SECONDS


def test_a_worker_that_waits_is_woken_by_a_date_and_by_the_end() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    got: list[object] = []

    def work() -> None:
        got.append(queue.get(5))
        got.append(queue.get(5))

    worker = threading.Thread(target=work)
    worker.start()
    began = time.monotonic()
    queue.add_after("a", 60)
    queue.add_after("a", 0.1)  # sooner: the worker must not sleep until the first date
    while not got and time.monotonic() - began < 2:
        time.sleep(0.01)
    queue.close()
    worker.join(2)
    assert not worker.is_alive()
    assert got[0][0] == "a" and got[1] is None  # type: ignore[index]
    assert time.monotonic() - began < 2.5
    queue.add("b")
    assert queue.get(0) is None


def test_many_workers_never_share_a_key_and_lose_nothing() -> None:
    queue: KeyedQueue[int] = KeyedQueue()
    busy: set[int] = set()
    lock = threading.Lock()
    visits: dict[int, int] = {}
    clashes: list[int] = []

    def work() -> None:
        while (found := queue.get()) is not None:
            key = found[0]
            with lock:
                if key in busy:
                    clashes.append(key)
                busy.add(key)
                visits[key] = visits.get(key, 0) + 1
            time.sleep(0.0005)
            with lock:
                busy.discard(key)
            queue.done(key)

    workers = [threading.Thread(target=work) for _ in range(6)]
    for worker in workers:
        worker.start()
    dice = random.Random(5)
    for _ in range(1500):
        queue.add(dice.randrange(8))
    for key in range(8):
        queue.add(key)
    deadline = time.monotonic() + 5
    while (len(queue) or busy) and time.monotonic() < deadline:
        time.sleep(0.01)
    queue.close()
    for worker in workers:
        worker.join(2)
    assert not clashes
    assert set(visits) == set(range(8))
