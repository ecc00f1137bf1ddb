"""The run directory as trainer and orchestrator use it: PROTOCOL of one run, on disk or in a bucket.

One method per thing that may happen; each is one step that can be repeated after a crash. docs/run-directory.md tells
the story.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from trainer.errors import ConfigurationError
from trainer.frozen import Frozen
from trainer.recipe import Recipe
from trainer.rundir import alarms, claims, lineage, steplog, submission
from trainer.rundir.alarms import Alarm
from trainer.rundir.claims import Claim, ClaimStopped
from trainer.rundir.documents import Documents
from trainer.rundir.ledger import Ledger
from trainer.rundir.opening import open_store
from trainer.rundir.records import (
    AttemptSpec,
    CommitRecord,
    CommitRef,
    Ending,
    ExitRecord,
    FileEntry,
    Head,
    InitRecord,
    Owner,
    Pin,
    Progress,
    RecipeRecord,
    Request,
    RequestBegun,
    RequestDone,
    SetAside,
    StartRecord,
    StepLine,
    StepLogFile,
    Submitted,
)
from trainer.rundir.store import NotFound, Store
from trainer.rundir.swap import certain_swap

RECIPE, INIT, OWNER = "recipe.json", "init.json", "owner.json"
SHOWN_DIFFERENCES = 8
__all__ = ["Claim", "ClaimStopped", "RunDirectory"]


class RunDirectory(Documents):
    """One run's directory. Safe to use from several processes and, for reading, several threads."""

    def __init__(self, store: Store, **options: Any) -> None:
        super().__init__(store, **options)
        self._ledger = Ledger(self)

    @classmethod
    def open(cls, uri: str, create: bool = False, **options: Any) -> Self:
        """The run directory at `uri` (a folder, or gs://bucket/prefix); `create` makes a missing folder.

        Reading needs no write permission; the store is probed at the first write. Raises ConfigurationError when it is
        missing.
        """
        waiting = {name: options[name] for name in ("patience_seconds", "sleep") if name in options}
        return cls(open_store(uri, create, **waiting), **options)

    # -- what the run is

    def create_recipe(self, recipe: Recipe) -> RecipeRecord:
        """Fix the run's recipe, or check that it is the one the run began with; returns the stored one.

        Raises ConfigurationError listing the fields that differ.
        """
        unmeasured = [file.path for file in (*recipe.data.files, *recipe.data.held_out) if file.bytes is None]
        if unmeasured:
            raise ConfigurationError(
                f"recipe {recipe.name!r}: data file {unmeasured[0]} has no measured size; freeze the recipe first"
            )
        stored = self.adopt(RECIPE, RecipeRecord(fingerprint=recipe.fingerprint(), recipe=recipe))
        self._same("recipe", stored.recipe, recipe, ignored="name")
        return stored

    def read_recipe(self) -> RecipeRecord | None:
        return self.read(RECIPE, RecipeRecord)

    def create_init(self, init: InitRecord) -> InitRecord:
        """Fix where the weights come from, or check that it is unchanged; errors as in `create_recipe`."""
        stored = self.adopt(INIT, init)
        self._same("initFrom", stored, init, ignored="digest")
        return stored

    def read_init(self) -> InitRecord | None:
        return self.read(INIT, InitRecord)

    def _same(self, what: str, stored: Frozen, given: Frozen, ignored: str | None = None) -> None:
        exclude = {ignored} if ignored else None
        found = differences(
            stored.model_dump(mode="json", exclude=exclude), given.model_dump(mode="json", exclude=exclude)
        )
        if found:
            more = f"; and {len(found) - SHOWN_DIFFERENCES} more" if len(found) > SHOWN_DIFFERENCES else ""
            raise ConfigurationError(
                f"{what} differs from the one this run began with ({self.uri}): "
                f"{'; '.join(found[:SHOWN_DIFFERENCES])}{more}. "
                "Restore these values to continue the run, or give runDirectory another folder to begin a new one"
            )

    # -- asking the running start for something, and who may ask

    def request(self, identifier: str, request: Request) -> None:
        """Ask; an older request of the same name counts."""
        self.create(f"requests/{identifier}.json", request)

    def read_request(self, identifier: str) -> Request | None:
        return self.read(f"requests/{identifier}.json", Request)

    def unanswered(self) -> list[str]:
        """Requests that have no answer yet, unread."""
        keys = self._requests()
        return sorted(key for key in keys if not key.endswith((".begun", ".done")) and f"{key}.done" not in keys)

    def asked(self, prefix: str) -> list[str]:
        """All requests whose identifiers begin with `prefix`, answered or not, unread."""
        return sorted(
            key for key in self._requests() if key.startswith(prefix) and not key.endswith((".begun", ".done"))
        )

    def requests(self) -> dict[str, Request]:
        """Requests that have no answer yet, by identifier."""
        found = {key: self.read_request(key) for key in self.unanswered()}
        return {key: request for key, request in found.items() if request is not None}

    def begin(self, identifier: str, begun: RequestBegun) -> bool:
        """Say, before it is done, that it is: what must not be tried twice. False: another start said so."""
        return self.create(f"requests/{identifier}.begun.json", begun)

    def read_begun(self, identifier: str) -> RequestBegun | None:
        return self.read(f"requests/{identifier}.begun.json", RequestBegun)

    def answer(self, identifier: str, done: RequestDone) -> None:
        """Say that it was done; the first answer counts."""
        self.create(f"requests/{identifier}.done.json", done)

    def read_answer(self, identifier: str) -> RequestDone | None:
        return self.read(f"requests/{identifier}.done.json", RequestDone)

    # -- reading what another run may collect

    def pin(self, reader: str, commit: CommitRef, seconds: float) -> None:
        """Have garbage collection leave `commit` for `reader` for so long; again extends it, 0 lets it go.

        A reader has one pin. What its collection is about to remove when the pin is made may still go.
        """
        name = hashlib.sha256(reader.encode()).hexdigest()[:16]
        pin = Pin(commit=commit, expires=self.clock() + seconds, reader=reader)
        self.patient(lambda: self.put(f"pins/{name}.json", pin))

    def owner(self) -> tuple[Owner, int] | None:
        """owner.json and its generation."""
        try:
            blob = self.patient(lambda: self.store.get(OWNER))
        except NotFound:
            return None
        return Owner.read(blob.data, self.path(OWNER)), blob.generation

    def swap_owner(self, owner: Owner, generation: int) -> int | None:
        """Replace owner.json at `generation` (0: none yet). The new one, or None when somebody else was faster."""
        return certain_swap(self.store, self.patient, OWNER, owner.canonical(), generation)

    def _requests(self) -> set[str]:
        keys = self.patient(lambda: self.store.list("requests"))
        return {key.removeprefix("requests/").removesuffix(".json") for key in keys}

    # -- attempts: submission.py says why in this order

    def adopt_spec(self, spec: AttemptSpec) -> AttemptSpec:
        return submission.adopt_spec(self, spec)

    def swap_to_attempt(self, attempt: int, seen: int | None = None) -> tuple[Head, int]:
        return submission.swap_to_attempt(self, attempt, seen)

    def record_submitted(self, attempt: int, submitted: Submitted) -> Submitted:
        return submission.record_submitted(self, attempt, submitted)

    def read_spec(self, attempt: int) -> AttemptSpec | None:
        return self.read(submission.spec_key(attempt), AttemptSpec)

    def read_submitted(self, attempt: int) -> Submitted | None:
        return self.read(submission.submitted_key(attempt), Submitted)

    # -- starts

    def claim(
        self,
        attempt: int,
        nonce: str,
        pod_uid: str,
        restart_attempt: int,
        *,
        stop: Callable[[], bool] = lambda: False,
        deadline_seconds: float | None = None,
        poll_seconds: float = 1.0,
    ) -> Claim:
        """See claims.claim."""
        return claims.claim(
            self,
            attempt,
            nonce,
            pod_uid,
            restart_attempt,
            stop=stop,
            deadline_seconds=deadline_seconds,
            poll_seconds=poll_seconds,
        )

    def last_start(self, attempt: int) -> int:
        """The highest start of `attempt` that left a trace; 0 when none claimed. Starts below it all claimed."""
        names = self.patient(lambda: self.store.folders(f"attempts/{attempt}"))
        found = self.head()
        current = found[0].start if found and found[0].attempt == attempt else 0
        return max([current, *(int(name) for name in names if name.isdigit())])

    def create_start(self, record: StartRecord) -> None:
        if not self.create(f"attempts/{record.attempt}/{record.start}/start.json", record):
            raise ConfigurationError(f"start {record.attempt}.{record.start} is recorded already by another process")

    def read_start(self, attempt: int, start: int) -> StartRecord | None:
        return self.read(f"attempts/{attempt}/{start}/start.json", StartRecord)

    def put_progress(self, attempt: int, start: int, progress: Progress) -> None:
        self.put(f"attempts/{attempt}/{start}/progress.json", progress)

    def read_progress(self, attempt: int, start: int) -> Progress | None:
        return self.read(f"attempts/{attempt}/{start}/progress.json", Progress)

    def put_exit(self, attempt: int, start: int, record: ExitRecord) -> bool:
        """Why a process of this start ended. The first one counts, its peers die of it: False when one is there."""
        return self.create(f"attempts/{attempt}/{start}/exit.json", record)

    def read_exit(self, attempt: int, start: int) -> ExitRecord | None:
        return self.read(f"attempts/{attempt}/{start}/exit.json", ExitRecord)

    def put_pod_progress(self, attempt: int, pod_uid: str, progress: Progress) -> None:
        """Progress of a pod that has not claimed (yet)."""
        self.put(f"attempts/{attempt}/pods/{pod_uid}/progress.json", progress)

    def read_pod_progress(self, attempt: int, pod_uid: str) -> Progress | None:
        return self.read(f"attempts/{attempt}/pods/{pod_uid}/progress.json", Progress)

    def put_pod_exit(self, attempt: int, pod_uid: str, record: ExitRecord) -> bool:
        return self.create(f"attempts/{attempt}/pods/{pod_uid}/exit.json", record)

    def read_pod_exit(self, attempt: int, pod_uid: str) -> ExitRecord | None:
        return self.read(f"attempts/{attempt}/pods/{pod_uid}/exit.json", ExitRecord)

    def set_asides(self, attempt: int, start: int) -> list[SetAside]:
        """Commits this start refused as damaged, by step."""
        prefix = f"attempts/{attempt}/{start}"
        keys = self.patient(lambda: self.store.list(prefix))
        found = [self.read(key, SetAside) for key in keys if re.fullmatch(rf"{prefix}/set-aside-\d+\.json", key)]
        return sorted((note for note in found if note), key=lambda note: note.commit.step)

    # -- commits and steps

    def read_commit(self, ref: CommitRef) -> CommitRecord:
        return lineage.read_commit(self, ref)

    def lineage(self, ref: CommitRef | None) -> Iterator[CommitRecord]:
        """Records from `ref` back to the first commit, newest first."""
        return lineage.lineage(self, ref)

    def checkpoint_files(self, ref: CommitRef) -> tuple[FileEntry, ...]:
        """The files of a checkpoint as they are now, with paths relative to its folder, for a commit record."""
        stats = self.patient(lambda: self.store.stat_tree(ref.checkpoint))
        return tuple(
            FileEntry(path=s.key.removeprefix(f"{ref.checkpoint}/"), bytes=s.bytes, crc32c=s.crc32c) for s in stats
        )

    def damaged_files(self, record: CommitRecord) -> list[str]:
        """What differs between a checkpoint's files now and at its commit, one sentence per file. Reads all of them."""
        now = {entry.path: entry for entry in self.checkpoint_files(record.ref)}
        found = []
        for entry in record.files:
            actual = now.get(entry.path)
            if actual is None:
                found.append(f"{entry.path} is missing")
            elif actual.bytes != entry.bytes:
                found.append(f"{entry.path} has {actual.bytes} bytes, {entry.bytes} were written")
            elif actual.crc32c != entry.crc32c:
                found.append(f"{entry.path} has crc32c {actual.crc32c:08x}, {entry.crc32c:08x} was written")
        return found

    def append_step_log(self, attempt: int, start: int, lines: Sequence[StepLine]) -> StepLogFile:
        return steplog.append(self, attempt, start, lines)

    def read_step_log(self, file: StepLogFile) -> list[StepLine]:
        return steplog.read(self, file)

    def logged_steps(self, attempt: int, start: int) -> list[StepLine]:
        """Every line that start logged, also of steps it never committed."""
        return steplog.read_all(self, attempt, start)

    # -- alarms

    def open_alarms(self) -> tuple[str, ...]:
        """Names of the alarms that nobody has acknowledged."""
        return alarms.open_alarms(self)

    def read_alarm(self, name: str) -> Alarm | None:
        return self.read(alarms.key(name), Alarm)

    # -- the ledger

    def endings(self, attempt: int | None = None) -> tuple[Ending, ...]:
        """The endings of one attempt, or of all attempts up to HEAD's, in order."""
        if attempt is not None:
            return self._ledger.endings(attempt)
        found = self.head()
        last = found[0].attempt if found else 0
        return tuple(entry for number in range(1, last + 1) for entry in self._ledger.endings(number))

    def known_endings(self, attempt: int) -> tuple[Ending, ...]:
        """The endings of one attempt that this object has read or written; the store is not asked."""
        return self._ledger.known(attempt)

    def append_ending(self, ending: Ending) -> Ending:
        """Record an ending once per key; returns the entry that counts, perhaps another writer's."""
        return self._ledger.append(ending)


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Where two JSON values differ: dotted field, old → new."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = [*old, *(name for name in new if name not in old)]
        return [
            line
            for name in names
            for line in differences(old.get(name), new.get(name), f"{path}.{name}" if path else str(name))
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            line
            for index, (a, b) in enumerate(zip(old, new, strict=True))
            for line in differences(a, b, f"{path}.{index}")
        ]
    if old == new:
        return []
    return [f"{path}: {_short(old)} → {_short(new)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
