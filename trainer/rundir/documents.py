"""What all parts of the run directory share: documents by key, with patience, and HEAD.

HEAD decides who may commit and what is committed; everything else in the directory is reached from it.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from trainer.errors import ConfigurationError, TruthUnknown
from trainer.rundir.records import Head, Record, newer_version
from trainer.rundir.store import AlreadyExists, NotFound, Store
from trainer.rundir.swap import PATIENCE_SECONDS, Patient, certain_create, certain_swap

R = TypeVar("R", bound=Record)
HEAD = "HEAD"
FIRST_SPEC = "attempts/1/spec.json"


class Documents:
    """Typed documents over a store. Each call is repeated while unanswered, for at most `patience_seconds`.

    `clock` gives UNIX seconds, `monotonic` and `sleep` the waiting; tests replace them.
    """

    def __init__(
        self,
        store: Store,
        patience_seconds: float = PATIENCE_SECONDS,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store = store
        self.patient = Patient(patience_seconds, sleep)
        self.clock = clock
        self.monotonic = monotonic
        self.sleep = sleep

    @property
    def uri(self) -> str:
        return self.store.uri

    def path(self, key: str) -> str:
        """Path or gs:// URI of an object or folder, for libraries that write there themselves."""
        return f"{self.store.uri.rstrip('/')}/{key}"

    # -- bytes

    def get(self, key: str) -> bytes | None:
        """Bytes of `key`, or None when there is no such object."""

        def attempt() -> bytes | None:
            try:
                return self.store.get(key).data
            except NotFound:
                return None

        return self.patient(attempt)

    def create_bytes(self, key: str, data: bytes) -> None:
        """Create `key` once; the same bytes again are fine. Raises AlreadyExists when it holds others."""
        certain_create(self.store, self.patient, key, data)

    # -- documents

    def read(self, key: str, kind: type[R]) -> R | None:
        """The document at `key`, or None. Raises ConfigurationError when it is unreadable or newer than this code."""
        data = self.get(key)
        return None if data is None else kind.read(data, self.path(key))

    def create(self, key: str, record: Record) -> bool:
        """Create the document at `key`. False: another one is there, and is left alone. The same again is True."""
        try:
            self.create_bytes(key, record.canonical())
        except AlreadyExists:
            return False
        return True

    def adopt(self, key: str, record: R) -> R:
        """Create the document at `key`, or return the one that is there: whoever came first decides."""
        if self.create(key, record):
            return record
        found = self.read(key, type(record))
        if found is None:
            raise TruthUnknown(f"{self.path(key)}: it existed a moment ago and is gone; this document is never deleted")
        return found

    def put(self, key: str, record: Record) -> None:
        """Overwrite a heartbeat. Sent once: the next beat comes anyway."""
        self.store.put(key, record.canonical())

    # -- HEAD

    def head(self, at_least: int = 0) -> tuple[Head, int] | None:
        """HEAD and its generation; None when no attempt was ever submitted.

        `at_least` is the highest attempt the caller has ever seen. Raises TruthUnknown when HEAD is lower than that,
        unreadable, or missing although attempts or commits exist; ConfigurationError when a newer untildone wrote it.
        Changes nothing.
        """
        blob = self.patient(self._get_head)
        if blob is None:
            self._check_unsubmitted(at_least)
            return None
        data, generation = blob
        if newer_version(data) is None:
            try:
                head = Head.read(data, self.path(HEAD))
            except ConfigurationError as error:
                raise self.unknown(f"HEAD is unreadable ({error})") from None
        else:
            head = Head.read(data, self.path(HEAD))  # raises: upgrade
        if head.attempt < at_least:
            raise self.unknown(
                f"HEAD names attempt {head.attempt}, but attempt {at_least} was seen before: it was rolled back"
            )
        return head, generation

    def swap_head(self, head: Head, generation: int) -> int | None:
        """Replace HEAD at `generation` (0: no HEAD yet). The new generation, or None when another write took it."""
        return certain_swap(self.store, self.patient, HEAD, head.canonical(), generation)

    def unknown(self, what: str) -> TruthUnknown:
        """The error for a HEAD that cannot be trusted, with the way out."""
        return TruthUnknown(
            f"run directory {self.uri}: {what}. Nothing was changed. "
            "When you know that no trainer of this run is alive: "
            f"untildone recover {self.uri} (shows the HEAD it would write, --yes writes it)"
        )

    def _get_head(self) -> tuple[bytes, int] | None:
        try:
            blob = self.store.get(HEAD)
        except NotFound:
            return None
        return blob.data, blob.generation

    def _check_unsubmitted(self, at_least: int) -> None:
        """No HEAD: true before the first submission has swapped it in, when at most the first spec exists."""
        if at_least:
            raise self.unknown(f"HEAD is missing, but attempt {at_least} was seen before")
        found = self.patient(lambda: self.store.list("attempts") + self.store.folders("commits"))
        if any(key != FIRST_SPEC for key in found) and self.patient(self._get_head) is None:
            raise self.unknown(f"HEAD is missing, but {found[-1]} exists")
