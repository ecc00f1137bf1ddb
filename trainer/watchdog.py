"""Ends a process that makes no progress, even when its main thread sits inside a collective.

A dead peer is noticed by the coordination service; one that is alive but stuck is not, and everybody waits for it. Time
is counted in the watchdog's own ticks, so that a process that was itself stopped and continued does not take the pause
for a hang.
"""

import faulthandler
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Watchdog:
    """Calls `expired(message, stacks)` after `start_seconds` without a `beat`, or `step_seconds` once it trains."""

    start_seconds: float
    step_seconds: float
    expired: Callable[[str, bytes], None]
    _idle: float = 0.0
    _training: bool = False
    _what: str = "start"
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self, what: str, training: bool | None = None) -> None:
        """Progress was made: `what` is what comes next. `training=True` once the first step is done."""
        with self._lock:
            self._idle = 0.0
            self._what = what
            if training is not None:
                self._training = training

    @contextmanager
    def patient(self, what: str) -> Iterator[None]:
        """Something that compiles: `start_seconds` holds for it, also while training."""
        with self._lock:
            before, self._training = self._training, False
            self._idle, self._what = 0.0, what
        yield
        self.beat(what, training=before)

    @property
    def limit(self) -> float:
        return self.step_seconds if self._training else self.start_seconds

    def _watch(self) -> None:
        before = time.monotonic()
        while True:
            tick = min(1.0, self.limit / 10)
            time.sleep(tick)
            now = time.monotonic()
            with self._lock:
                self._idle += min(now - before, 2 * tick)
                idle, what = self._idle, self._what
            before = now
            if idle > self.limit:
                setting = "hang_step_seconds" if self._training else "hang_start_seconds"
                self.expired(f"no progress for {idle:.0f} s during {what} ({setting} is {self.limit:g})", stacks())
                return


def stacks() -> bytes:
    """The Python stacks of all threads."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return file.read()
