"""A store that fails as real ones do, by plan or by dice.

Wraps any store. What is lost on the way back did happen; what arrives late happens later; a crash is the process dying
between two calls. The plan is a function of the call, so every call boundary can be tried.
"""

import builtins
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from trainer.errors import StorageUnavailable
from trainer.rundir.store import AlreadyExists, Blob, Conflict, NotFound, Stat, StorageFull, Store, StoreRefused

T = TypeVar("T")
WRITES = frozenset({"create", "create_from_file", "put", "swap", "delete_tree"})


class Fault(Enum):
    """What happens to one call."""

    BEFORE = "the call fails and has no effect"
    AFTER = "the call has its effect, its answer is lost"
    LATE = "the call fails now; its effect comes later, before the next call of the store that is `due` calls away"
    DELAY = "the call takes a while"
    FULL = "no space left"
    READ_ONLY = "the store may not be written"
    CRASH_BEFORE = "the process dies before the call"
    CRASH_AFTER = "the process dies after the call, before it sees the answer"


class Crash(BaseException):
    """The process is dead. Not an Exception: nothing may handle it."""


@dataclass(frozen=True)
class Call:
    """One call of a store: its place among all calls (from 0), its place among the writes (None: no write)."""

    number: int
    write: int | None
    method: str
    key: str


Plan = Callable[[Call], Fault | None]


def never(call: Call) -> Fault | None:
    """No fault at all."""
    return None


def at_write(number: int, fault: Fault) -> Plan:
    """`fault` at the write with this number."""
    return lambda call: fault if call.write == number else None


def at_call(number: int, fault: Fault) -> Plan:
    """`fault` at the call with this number."""
    return lambda call: fault if call.number == number else None


def always(fault: Fault, methods: frozenset[str] = WRITES) -> Plan:
    """`fault` at each call of these methods."""
    return lambda call: fault if call.method in methods else None


def dice(seed: int, rate: float, faults: Sequence[Fault] = (Fault.BEFORE, Fault.AFTER)) -> Plan:
    """One of `faults` with probability `rate`, reproducibly."""
    source = random.Random(seed)
    return lambda call: source.choice(faults) if source.random() < rate else None


class FaultyStore:
    """See the module. `calls` is what was asked; `sleep` serves DELAY; LATE effects land `due` calls later."""

    def __init__(
        self, store: Store, plan: Plan = never, *, due: int = 2, sleep: Callable[[float], None] = lambda seconds: None
    ) -> None:
        self.inner = store
        self.plan = plan
        self.due = due
        self.sleep = sleep
        self.calls: list[Call] = []
        self._writes = 0
        self._late: list[tuple[int, Callable[[], Any]]] = []

    @property
    def uri(self) -> str:
        return self.inner.uri

    def get(self, key: str) -> Blob:
        return self._call("get", key, lambda: self.inner.get(key))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self._call("get_range", key, lambda: self.inner.get_range(key, offset, length))

    def create(self, key: str, data: bytes) -> None:
        self._call("create", key, lambda: self.inner.create(key, data))

    def create_from_file(self, key: str, path: str | os.PathLike[str]) -> None:
        self._call("create_from_file", key, lambda: self.inner.create_from_file(key, path))

    def put(self, key: str, data: bytes) -> None:
        self._call("put", key, lambda: self.inner.put(key, data))

    def swap(self, key: str, data: bytes, expected: int) -> int:
        return self._call("swap", key, lambda: self.inner.swap(key, data, expected))

    def list(self, prefix: str) -> builtins.list[str]:
        return self._call("list", prefix, lambda: self.inner.list(prefix))

    def folders(self, prefix: str) -> builtins.list[str]:
        return self._call("folders", prefix, lambda: self.inner.folders(prefix))

    def modified(self, prefix: str) -> float | None:
        return self._call("modified", prefix, lambda: self.inner.modified(prefix))

    def stat(self, key: str) -> Stat:
        return self._call("stat", key, lambda: self.inner.stat(key))

    def stat_tree(self, prefix: str) -> builtins.list[Stat]:
        return self._call("stat_tree", prefix, lambda: self.inner.stat_tree(prefix))

    def sync_tree(self, prefix: str) -> None:
        self._call("sync_tree", prefix, lambda: self.inner.sync_tree(prefix))

    def delete_tree(self, prefix: str) -> None:
        self._call("delete_tree", prefix, lambda: self.inner.delete_tree(prefix))

    def probe(self) -> None:
        self.inner.probe()

    def land(self) -> None:
        """Let every late effect arrive now."""
        late, self._late = self._late, []
        for _, effect in late:
            _ignoring_answers(effect)

    def _call(self, method: str, key: str, effect: Callable[[], T]) -> T:
        number = len(self.calls)
        write = self._writes if method in WRITES else None
        self._writes += method in WRITES
        call = Call(number, write, method, key)
        self.calls.append(call)
        self._land_due(number)
        fault = self.plan(call)
        where = f"{method} {key} (call {number})"
        if fault is Fault.CRASH_BEFORE:
            raise Crash(where)
        if fault is Fault.BEFORE:
            raise StorageUnavailable(f"no answer: {where}")
        if fault is Fault.LATE:
            self._late.append((number + self.due, effect))
            raise StorageUnavailable(f"no answer yet: {where}")
        if fault is Fault.FULL:
            raise StorageFull(f"disk full: {where}")
        if fault is Fault.READ_ONLY:
            raise StoreRefused(f"read-only: {where}")
        if fault is Fault.DELAY:
            self.sleep(0.05)
        try:
            return effect()
        finally:  # whatever the answer was, also if it was an error
            if fault is Fault.AFTER:
                raise StorageUnavailable(f"answer lost: {where}")
            if fault is Fault.CRASH_AFTER:
                raise Crash(where)

    def _land_due(self, number: int) -> None:
        ready = [effect for due, effect in self._late if due <= number]
        self._late = [(due, effect) for due, effect in self._late if due > number]
        for effect in ready:
            _ignoring_answers(effect)


def _ignoring_answers(effect: Callable[[], Any]) -> None:
    try:
        effect()
    except (AlreadyExists, Conflict, NotFound, StorageUnavailable):
        pass
