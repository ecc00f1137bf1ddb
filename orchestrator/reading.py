"""How observations read a run directory: what is written once is fetched once, and a bucket is asked many things at a time.

A look reads some fifteen documents, and a bucket takes 20 to 50 ms for each. So the rest of what a look asks for is on
its way as soon as HEAD is there. Every look reads HEAD first, and all that can change after it: what is kept from look to
look are documents that are created once and never replaced, and only those that exist.
"""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary

from trainer.recipe import Data, Recipe
from trainer.rundir.alarms import Alarm
from trainer.rundir.records import (
    AttemptSpec,
    Ending,
    ExitRecord,
    Head,
    InitRecord,
    Progress,
    RecipeRecord,
    Request,
    RequestDone,
    StartRecord,
    Submitted,
)
from trainer.rundir.rundir import RunDirectory

Key = tuple[str, tuple[Any, ...]]  # which document: name of the method that reads it, and its arguments

THREADS = 32  # of all runs of a process together
_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="read")
_data: WeakValueDictionary[bytes, Data] = WeakValueDictionary()


def with_shared_data(recipe: Recipe) -> Recipe:
    """The same recipe, whose list of data files is one with that of all equal ones: a thousand files take 0.7 MB."""
    digest = hashlib.sha256(recipe.data.canonical()).digest()
    return recipe.model_copy(update={"data": _data.setdefault(digest, recipe.data)})


class RunReading:
    """The reading side of one run directory (orchestrator.observe.RunReader). For one thread at a time."""

    def __init__(self, rundir: RunDirectory) -> None:
        self._rundir = rundir
        self._far = "://" in rundir.uri and not rundir.uri.startswith("file://")
        self._kept: dict[Key, Any] = {}
        self._coming: dict[Key, Future[Any]] = {}  # asked for by this look
        self._attempt = 0
        self._closed: set[int] = set()  # attempts whose endings were read when HEAD was two attempts further

    def head(self, at_least: int = 0) -> tuple[Head, int] | None:
        """As RunDirectory.head; the rest of the look is read from now on."""
        for left in self._coming.values():
            left.cancel()
        self._coming = {}
        found = self._rundir.head(at_least)
        if found is None or found[0].attempt != self._attempt:
            keep = ("_recipe", "read_init") if found is not None else ()
            self._kept = {key: document for key, document in self._kept.items() if key[0] in keep}
        self._attempt = found[0].attempt if found is not None else 0
        if self._far:
            for read, *arguments in self._expected(found[0] if found else None):
                self._begin(read, *arguments)
        return found

    def read_recipe(self) -> RecipeRecord | None:
        return self._once(self._recipe)

    def read_init(self) -> InitRecord | None:
        return self._once(self._rundir.read_init)

    def read_spec(self, attempt: int) -> AttemptSpec | None:
        return self._once(self._rundir.read_spec, attempt)

    def read_submitted(self, attempt: int) -> Submitted | None:
        return self._once(self._rundir.read_submitted, attempt)

    def read_start(self, attempt: int, start: int) -> StartRecord | None:
        return self._once(self._rundir.read_start, attempt, start)

    def read_exit(self, attempt: int, start: int) -> ExitRecord | None:
        return self._once(self._rundir.read_exit, attempt, start)

    def read_pod_exit(self, attempt: int, pod_uid: str) -> ExitRecord | None:
        return self._once(self._rundir.read_pod_exit, attempt, pod_uid)

    def read_request(self, identifier: str) -> Request | None:
        return self._once(self._rundir.read_request, identifier)

    def read_answer(self, identifier: str) -> RequestDone | None:
        return self._once(self._rundir.read_answer, identifier)

    def read_alarm(self, name: str) -> Alarm | None:
        return self._once(self._rundir.read_alarm, name)

    def read_progress(self, attempt: int, start: int) -> Progress | None:
        return self._now(self._rundir.read_progress, attempt, start)

    def endings(self, attempt: int) -> tuple[Ending, ...]:
        """Of one attempt. Its ledger is closed two attempts later: others' late entries are met when we write our own."""
        if attempt in self._closed:
            return self._rundir.known_endings(attempt)
        found = self._now(self._rundir.endings, attempt)
        if attempt < self._attempt - 1:
            self._closed.add(attempt)
        return found

    # -- inside

    def _expected(self, head: Head | None) -> Iterator[tuple[Any, ...]]:
        """What a look goes on to read after this HEAD, as far as that is certain."""
        directory, attempt = self._rundir, head.attempt if head else 0
        yield (self._recipe,)
        yield (directory.read_init,)
        for number in (attempt, attempt + 1, attempt + 2):
            if number:
                yield directory.read_spec, number
        for number in (attempt, attempt + 1):
            if number:
                yield directory.read_submitted, number
        for number in range(1, attempt + 1):
            if number not in self._closed:
                yield directory.endings, number
        if head is not None and head.start:
            for read in (directory.read_start, directory.read_progress, directory.read_exit):
                yield read, attempt, head.start

    def _recipe(self) -> RecipeRecord | None:
        found = self._rundir.read_recipe()
        return found and found.model_copy(update={"recipe": with_shared_data(found.recipe)})

    def _begin(self, read: Callable[..., Any], *arguments: Any) -> None:
        key = _key(read, arguments)
        if key not in self._kept:
            self._coming[key] = _threads.submit(read, *arguments)

    def _now[T](self, read: Callable[..., T], *arguments: Any) -> T:
        """The answer that is on its way, or a new one."""
        coming = self._coming.pop(_key(read, arguments), None)
        found: T = coming.result() if coming is not None else read(*arguments)
        return found

    def _once[T](self, read: Callable[..., T | None], *arguments: Any) -> T | None:
        """A document that never changes once it is there."""
        key = _key(read, arguments)
        found: T | None = self._kept.get(key)
        if found is None:
            found = self._now(read, *arguments)
            if found is not None:
                self._kept[key] = found
        return found


def _key(read: Callable[..., Any], arguments: tuple[Any, ...]) -> Key:
    return read.__name__, arguments
