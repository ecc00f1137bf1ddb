"""A start's right to commit: claimed by a swap of HEAD, checked again by every swap that uses it.

A claim is no lock. Whoever claims later takes it away, and the earlier holder learns so when its next swap
meets another attempt or start; until then it may waste work, but it cannot change what the next start restores.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from trainer.errors import Fenced, TrainerError
from trainer.rundir import steplog
from trainer.rundir.documents import Documents
from trainer.rundir.lineage import lineage, read_commit
from trainer.rundir.records import AttemptSpec, CommitRecord, CommitRef, Head, SetAside, StepLine, StepLogFile
from trainer.rundir.submission import spec_key
from trainer.rundir.swap import new_op_id


class ClaimStopped(TrainerError):
    """The caller's `stop` said yes, or the deadline passed, before the claim was made. Nothing was changed."""


@dataclass(frozen=True)
class Ancestor:
    """What garbage collection needs to know of a commit in the lineage. `time` is the record's, UNIX seconds."""

    ref: CommitRef
    time: float


class Claim:
    """What one start may do to HEAD. `restore` is the commit to restore: the one in the body of the claim itself."""

    def __init__(self, documents: Documents, head: Head, generation: int) -> None:
        self.documents = documents
        self.head = head
        self.generation = generation
        self.restore = head.commit
        self.gone: set[CommitRef] = set()  # checkpoints that garbage collection need not look at again
        self.swept: float | None = None  # when debris was last looked for, monotonic
        self._ancestors: list[Ancestor] | None = None

    @property
    def attempt(self) -> int:
        return self.head.attempt

    @property
    def start(self) -> int:
        return self.head.start

    @property
    def commit_ref(self) -> CommitRef | None:
        """The current commit, as far as this claim has moved it."""
        return self.head.commit

    def ref(self, step: int) -> CommitRef:
        """The name of this start's commit at `step`."""
        return CommitRef(attempt=self.attempt, start=self.start, step=step)

    def append_step_log(self, lines: Sequence[StepLine]) -> StepLogFile:
        """Make `lines` durable as one more file of this start's step log."""
        return steplog.append(self.documents, self.attempt, self.start, lines)

    def commit(self, record: CommitRecord) -> None:
        """Make `record` current: create its document, then swap HEAD. Step log and checkpoint must be written.

        Safe to repeat with the same record after StorageUnavailable. Raises Fenced when HEAD names another attempt or
        start, or its commit was changed by another; ValueError when the record does not follow the current commit.
        """
        if self.commit_ref == record.ref:
            self._check_same(record)
            return
        self._check(record)
        self.documents.patient(partial(self.documents.store.sync_tree, record.checkpoint))
        if not self.documents.create(record.ref.key, record):
            self._check_same(record)
        self._move(record.ref)
        if self._ancestors is not None:
            self._ancestors.insert(0, Ancestor(record.ref, record.time))

    def set_aside(self, reason: str) -> CommitRef | None:
        """Turn HEAD back from a commit that cannot be restored to its parent; returns the parent (None: the beginning).

        Leaves attempts/<n>/<k>/set-aside-<step>.json as evidence. Raises Fenced like `commit`.
        """
        ref = self.commit_ref
        if ref is None:
            raise ValueError("set_aside: HEAD names no commit")
        parent = read_commit(self.documents, ref).parent
        note = SetAside(commit=ref, parent=parent, reason=reason, time=self.documents.clock())
        self.documents.create(f"attempts/{self.attempt}/{self.start}/set-aside-{ref.step}.json", note)
        self._move(parent)
        self._ancestors = None
        return parent

    def ancestors(self) -> Sequence[Ancestor]:
        """The lineage of the current commit, newest first. Read once; what this claim commits is added to it."""
        if self._ancestors is None:
            self._ancestors = [Ancestor(r.ref, r.time) for r in lineage(self.documents, self.commit_ref)]
        return self._ancestors

    def still_current(self) -> bool:
        """Whether HEAD is exactly as this claim's last swap left it."""
        found = self.documents.head()
        return found is not None and found[0].op_id == self.head.op_id

    # -- inside

    def _check(self, record: CommitRecord) -> None:
        ref, parent, logs = record.ref, self.commit_ref, record.step_log
        if (ref.attempt, ref.start) != (self.attempt, self.start):
            raise ValueError(f"commit of {ref} by start {self.attempt}.{self.start}")
        if record.parent != parent:
            raise ValueError(f"commit of {ref}: parent is {record.parent}, but the current commit is {parent}")
        if ref.step <= (parent.step if parent else 0):
            raise ValueError(f"commit of {ref}: not after the current commit ({parent})")
        if not logs or logs[-1].last != ref.step or (parent and logs[0].first != parent.step + 1):
            raise ValueError(
                f"commit of {ref}: the step log must cover steps {parent.step + 1 if parent else 1}..{ref.step}"
            )
        if any(after.first != before.last + 1 for before, after in pairwise(logs)):
            raise ValueError(f"commit of {ref}: the step log has a gap: {', '.join(log.key for log in logs)}")

    def _check_same(self, record: CommitRecord) -> None:
        """A record of this step exists: fine if it is an earlier try of ours, about the same files."""
        found = read_commit(self.documents, record.ref)
        timing = {"time": record.time, "save_seconds": record.save_seconds}
        if found.model_copy(update=timing) != record:
            raise TrainerError(
                f"commit of {record.ref}: {record.ref.key} exists with other content; "
                "a start commits each step once, the next start may do it again"
            )

    def _move(self, target: CommitRef | None) -> None:
        """Swap HEAD's commit from the current one to `target`, if HEAD still is this start's."""
        while True:
            new = self.head.model_copy(update={"commit": target, "op_id": new_op_id()})
            generation = self.documents.swap_head(new, self.generation)
            if generation is not None:
                self.head, self.generation = new, generation
                return
            found = self.documents.head()
            if found is None:
                raise self.documents.unknown("HEAD vanished")
            head, generation = found
            mine = (self.attempt, self.start, self.head.pod_uid)
            if (head.attempt, head.start, head.pod_uid) != mine:
                raise Fenced(
                    f"start {self.attempt}.{self.start} is fenced: HEAD names start {head.attempt}.{head.start}; "
                    "nothing was changed"
                )
            if head.commit == target:
                self.head, self.generation = head, generation
                return
            if head.commit != self.commit_ref:
                raise Fenced(
                    f"start {self.attempt}.{self.start} is fenced: HEAD's commit became {head.commit} by another hand; "
                    "nothing was changed"
                )
            self.generation = generation  # only now: a fenced claim must never learn the generation to swap


def claim(
    documents: Documents,
    attempt: int,
    nonce: str,
    pod_uid: str,
    restart_attempt: int,
    *,
    stop: Callable[[], bool] = lambda: False,
    deadline_seconds: float | None = None,
    poll_seconds: float = 1.0,
) -> Claim:
    """Swap HEAD to the next start of `attempt`.

    While HEAD names a lower attempt, or none yet, it looks again every `poll_seconds`. `restart_attempt` counts the
    gang's restarts; equal to the stored one is a new claim all the same, since Kueue re-admits a gang without counting,
    and of two such claims the later one holds. Raises Fenced for a lower attempt, a lower restart_attempt or a nonce
    that is not the attempt's; ClaimStopped when `stop()` is true (after SIGTERM nothing is claimed) or after
    `deadline_seconds`.
    """
    began = documents.monotonic()
    while True:
        if stop():
            raise ClaimStopped(f"start of attempt {attempt}: stopped before it claimed")
        found = documents.head()
        if found is not None and found[0].attempt > attempt:
            raise Fenced(f"attempt {attempt} is fenced: HEAD names attempt {found[0].attempt}; nothing was changed")
        if found is not None and found[0].attempt == attempt:
            claimed = _try_claim(
                documents, *found, nonce=nonce, pod_uid=pod_uid, restart_attempt=restart_attempt, stop=stop
            )
            if claimed is not None:
                return claimed
            continue
        if deadline_seconds is not None and documents.monotonic() - began >= deadline_seconds:
            at = f"attempt {found[0].attempt}" if found else "no attempt yet"
            raise ClaimStopped(f"start of attempt {attempt}: HEAD still names {at} after {deadline_seconds:g} s")
        documents.sleep(poll_seconds)


def _try_claim(
    documents: Documents,
    head: Head,
    generation: int,
    *,
    nonce: str,
    pod_uid: str,
    restart_attempt: int,
    stop: Callable[[], bool],
) -> Claim | None:
    """One try on the HEAD that was just read; None when it moved meanwhile."""
    spec = documents.read(spec_key(head.attempt), AttemptSpec)
    if spec is None:
        raise documents.unknown(f"HEAD names attempt {head.attempt}, but {spec_key(head.attempt)} is missing")
    if spec.nonce != nonce:
        raise Fenced(
            f"attempt {head.attempt} was submitted with another nonce: this gang is not the one that HEAD means"
        )
    if restart_attempt < head.restart_attempt:
        raise Fenced(
            f"gang restart {restart_attempt} of attempt {head.attempt} is fenced: restart {head.restart_attempt} "
            "has claimed; nothing was changed"
        )
    new = head.model_copy(
        update={"start": head.start + 1, "pod_uid": pod_uid, "restart_attempt": restart_attempt, "op_id": new_op_id()}
    )
    if stop():
        raise ClaimStopped(f"start of attempt {head.attempt}: stopped before it claimed")
    won = documents.swap_head(new, generation)
    return None if won is None else Claim(documents, new, won)
