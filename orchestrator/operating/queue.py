"""The keys that want work: each once, one worker per key at a time, some of them later.

The semantics of client-go's work queues: a key added while a worker has it comes again when that worker is done; a key
that fails comes back after a growing, jittered pause. And one of our own: whoever works on a key says anew when it is
due, so a date set earlier is dropped when the key is handed out.
"""

import heapq
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

FIRST_RETRY_SECONDS = 0.1
LONGEST_RETRY_SECONDS = 30.0


class KeyedQueue[K: Hashable]:
    """Safe for any number of threads."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, dice: random.Random | None = None, first: float | None = None
    ) -> None:
        self._clock = clock
        self._dice = dice or random.Random()
        self._first = FIRST_RETRY_SECONDS if first is None else first
        self._changed = threading.Condition()
        self._ready: OrderedDict[K, float] = OrderedDict()  # in the order they came, with the time since when
        self._working: set[K] = set()
        self._again: set[K] = set()  # added while a worker has them
        self._due: dict[K, float] = {}
        self._dates: list[tuple[float, int, K]] = []  # heap of `_due`; entries that `_due` does not have are void
        self._count = 0
        self._failures: dict[K, int] = {}
        self._closed = False

    def add(self, key: K) -> None:
        """`key` wants work now."""
        with self._changed:
            self._add(key)

    def add_after(self, key: K, seconds: float) -> None:
        """`key` wants work in `seconds`, or when it was due before, whichever is sooner."""
        with self._changed:
            if self._closed:
                return
            if seconds <= 0:
                self._add(key)
                return
            due = self._clock() + seconds
            if key not in self._due or due < self._due[key]:
                self._due[key] = due
                self._count += 1
                heapq.heappush(self._dates, (due, self._count, key))
                self._changed.notify()

    def retry(self, key: K) -> float:
        """`key` failed: it comes back after a pause that doubles, jittered, up to 30 s. Returns the pause."""
        with self._changed:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            longest = min(LONGEST_RETRY_SECONDS, self._first * 2.0 ** min(failures - 1, 32))
            pause = longest * self._dice.uniform(0.5, 1.0)
        self.add_after(key, pause)
        return pause

    def forget(self, key: K) -> None:
        """`key` is fine again: its next failure is a first one."""
        with self._changed:
            self._failures.pop(key, None)

    def get(self, timeout: float | None = None) -> tuple[K, float] | None:
        """The next key and since when it was ready (on the clock), once there is one.

        None after `timeout` seconds, or when the queue is closed. The caller says `done(key)` afterwards.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._closed:
                self._move_due()
                if self._ready:
                    key, since = self._ready.popitem(last=False)
                    self._working.add(key)
                    self._due.pop(key, None)
                    return key, since
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(self._until_due(left))
            return None

    def done(self, key: K) -> None:
        """The worker that got `key` has finished with it."""
        with self._changed:
            self._working.discard(key)
            if key in self._again:
                self._again.discard(key)
                self._add(key)

    def close(self) -> None:
        """No more keys: every `get` returns None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def __len__(self) -> int:
        """Keys that wait for a worker now."""
        with self._changed:
            self._move_due()
            return len(self._ready)

    def _add(self, key: K) -> None:
        if self._closed or key in self._ready:
            return
        if key in self._working:
            self._again.add(key)
            return
        self._ready[key] = self._clock()
        self._changed.notify()

    def _move_due(self) -> None:
        now = self._clock()
        while self._dates and self._dates[0][0] <= now:
            due, _, key = heapq.heappop(self._dates)
            if self._due.get(key) == due:
                del self._due[key]
                self._add(key)

    def _until_due(self, left: float | None) -> float | None:
        """How long to wait for the next date, at most `left`."""
        dates = self._dates
        while dates and self._due.get(dates[0][2]) != dates[0][0]:
            heapq.heappop(dates)
        if not dates:
            return left
        wait = max(0.0, dates[0][0] - self._clock())
        return wait if left is None else min(left, wait)
