"""Commits: what happens between the end of a step and the moment the run can resume from it.

In this order, so that a kill between any two leaves either the old commit or the new one: step log up to N durable →
Orbax finished on all hosts → commit record → HEAD swap → garbage collection. One save is in flight at a time.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.checkpoint import Checkpoints
from trainer.departure import Departure
from trainer.log import log
from trainer.rundir.claims import Claim
from trainer.rundir.records import CommitRecord, CommitRef
from trainer.rundir.rundir import RunDirectory
from trainer.settings import Keep
from trainer.steplog import StepLog


@dataclass(frozen=True)
class Save:
    """A save that Orbax has begun."""

    ref: CommitRef
    parent: CommitRef | None
    path: str
    digest: dict[str, int]
    began: float  # monotonic
    phase_seconds: dict[str, float]
    gate: threading.Event | None = None  # HEAD is swapped only once this is set


class Committer:
    """Waits for saves on every process; on rank 0 it then commits. Any error ends the process, with the old commit."""

    def __init__(
        self,
        rundir: RunDirectory,
        claim: Claim | None,
        checkpoints: Checkpoints,
        departure: Departure,
        *,
        steplog: StepLog | None,
        fingerprint: str,
        versions: dict[str, str],
        keep: Keep,
        committed: CommitRef | None,
        save_seconds: float,
        on_commit: Callable[[CommitRef], None],
        beat: Callable[[str], None],
        phase_seconds: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self._rundir, self._claim, self._checkpoints, self._departure = rundir, claim, checkpoints, departure
        self._steplog, self._fingerprint, self._versions, self._keep = steplog, fingerprint, versions, keep
        self._on_commit, self._beat, self._phase_seconds = on_commit, beat, phase_seconds
        self.committed = committed  # on other ranks than 0: saved by all processes, not necessarily committed
        self.save_seconds = save_seconds
        self._thread: threading.Thread | None = None

    def begin(self, ref: CommitRef, state: Any, digest: dict[str, int], gate: threading.Event | None = None) -> None:
        """Save `state` as `ref`; returns once it is copied to the host. Waits for the commit before it, if any."""
        self.drain()
        path = self._rundir.path(ref.checkpoint)
        began = time.monotonic()
        if self._steplog is not None:
            self._steplog.cut(ref.step)
        self._checkpoints.begin_save(path, state)
        save = Save(ref, self.committed, path, digest, began, self._phase_seconds(), gate)
        self._thread = threading.Thread(target=self._finish, args=(save,), name="commit", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Wait until nothing is in flight."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _finish(self, save: Save) -> None:
        try:
            if self._steplog is not None:
                self._steplog.flush(save.ref.step)
            self._checkpoints.wait(save.path)
            self._beat(f"the commit of step {save.ref.step}")
            if self._claim is not None:
                self._commit(self._claim, save)
            self.save_seconds = time.monotonic() - save.began
            self.committed = save.ref
            self._beat("the next step")
            self._on_commit(save.ref)
        except BaseException as error:
            self._departure.fail(error)
        if self._claim is not None:
            self._collect(self._claim)

    def _commit(self, claim: Claim, save: Save) -> None:
        assert self._steplog is not None
        record = CommitRecord(
            ref=save.ref,
            parent=save.parent,
            checkpoint=save.ref.checkpoint,
            files=self._rundir.checkpoint_files(save.ref),
            digest=save.digest,
            step_log=self._steplog.files((save.parent.step if save.parent else 0) + 1, save.ref.step),
            fingerprint=self._fingerprint,
            versions=self._versions,
            save_seconds=round(time.monotonic() - save.began, 4),
            phase_seconds=save.phase_seconds,
            time=time.time(),
        )
        if save.gate is not None:
            save.gate.wait()
        claim.commit(record)

    def _collect(self, claim: Claim) -> None:
        """Garbage collection never ends a run: what it leaves, the next commit's collects."""
        from trainer.rundir.gc import collect

        try:
            collect(claim, self._keep)
        except Exception as error:
            log().warning("garbage collection failed; the next commit tries again", error=str(error))
