"""The step log of one start: lines gather in memory and become immutable files, cut exactly at commits.

A commit record names the files that hold the steps since its parent; so no file may span a commit. Only rank 0 has one.
"""

import threading
import time
from collections.abc import Callable, Sequence

from trainer.rundir.records import StepLine, StepLogFile


class StepLog:
    """`append(lines)` makes lines durable in one file and returns it; it may raise StorageUnavailable."""

    def __init__(self, append: Callable[[Sequence[StepLine]], StepLogFile]) -> None:
        self._append = append
        self._lines: list[StepLine] = []
        self._files: list[StepLogFile] = []
        self._cuts: list[int] = []
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._flushed_at = time.monotonic()

    def add(self, line: StepLine) -> None:
        with self._lock:
            self._lines.append(line)

    def cut(self, step: int) -> None:
        """A commit at `step` is coming: no file will hold steps on both sides of it."""
        with self._lock:
            self._cuts.append(step)

    def flush(self, until: int | None = None) -> None:
        """Make the lines of steps ≤ `until` (None: all) durable. On an error they stay for the next flush."""
        with self._writing:
            while True:
                with self._lock:
                    part = self._next_part(until)
                if not part:
                    break
                file = self._append(part)
                with self._lock:
                    del self._lines[: len(part)]
                    self._files.append(file)
            self._flushed_at = time.monotonic()

    def _next_part(self, until: int | None) -> list[StepLine]:
        """The first lines up to the next cut and up to `until`."""
        if not self._lines:
            return []
        first = self._lines[0].step
        limits = [cut for cut in self._cuts if cut >= first]
        end = min(limits, default=None)
        if until is not None:
            end = until if end is None else min(end, until)
        return [line for line in self._lines if end is None or line.step <= end]

    def files(self, first: int, last: int) -> tuple[StepLogFile, ...]:
        """The durable files of steps first..last, which are cut at both ends."""
        with self._lock:
            return tuple(file for file in self._files if first <= file.first and file.last <= last)

    @property
    def seconds_since_flush(self) -> float:
        return time.monotonic() - self._flushed_at
