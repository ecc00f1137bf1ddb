"""Small, valid documents for tests of the run directory."""

from typing import Any

from trainer.plan import Plan
from trainer.rundir.claims import Claim
from trainer.rundir.records import AttemptSpec, CommitRecord, CommitRef, Ending, StepLine
from trainer.rundir.rundir import RunDirectory
from trainer.rundir.store import Store
from trainer.settings import Settings


def spec(attempt: int = 1, nonce: str = "nonce", gang: str = "") -> AttemptSpec:
    """An attempt on one CPU device."""
    return AttemptSpec(
        attempt=attempt,
        nonce=nonce,
        gang=gang or f"run-a{attempt}",
        plan=Plan(
            device_type="cpu-1", processes=1, devices=1, global_batch=4, data_parallel=1, micro_batch=4, accumulation=1
        ),
        settings=Settings(target_step=100, data_root="data"),
        image="test",
    )


def lines(first: int, last: int, loss: float = 1.0) -> list[StepLine]:
    """Step log lines first..last."""
    return [
        StepLine(step=n, loss=loss + n, grad_norm=1.0, lr=0.1, skipped=False, ids="0", data="0", seconds=0.1)
        for n in range(first, last + 1)
    ]


def commit(claim: Claim, step: int, time: float = 0.0) -> CommitRecord:
    """Everything a start does to commit `step`: checkpoint, step log, record, HEAD."""
    record = prepare(claim, step, time)
    claim.commit(record)
    return record


def prepare(claim: Claim, step: int, time: float = 0.0) -> CommitRecord:
    """Write checkpoint and step log of `step` and return the record to commit."""
    ref = claim.ref(step)
    store = claim.documents.store
    if not store.list(ref.checkpoint):
        claim.documents.create_bytes(f"{ref.checkpoint}/state", f"{ref}".encode())
    parent = claim.commit_ref
    log = claim.append_step_log(lines((parent.step if parent else 0) + 1, step))
    return CommitRecord(
        ref=ref,
        parent=parent,
        checkpoint=ref.checkpoint,
        files=(),
        digest={"params/w": step},
        step_log=(log,),
        fingerprint="f",
        versions={},
        save_seconds=0.0,
        time=time,
    )


def begun(store: Store, attempt: int = 1, **options: Any) -> RunDirectory:
    """A run directory whose HEAD names `attempt`, unclaimed."""
    directory = RunDirectory(store, **options)
    submit(directory, attempt)
    return directory


def submit(directory: RunDirectory, attempt: int) -> None:
    """Steps 1 and 2 of a submission."""
    directory.adopt_spec(spec(attempt))
    directory.swap_to_attempt(attempt)


def claim(directory: RunDirectory, attempt: int = 1, pod: str = "pod", restart: int = 0) -> Claim:
    """Claim the next start at once, or fail."""
    return directory.claim(attempt, "nonce", pod, restart, deadline_seconds=0)


def ending(attempt: int = 1, key: str = "key", **fields: Any) -> Ending:
    """An entry for the ledger; its index is chosen when it is appended."""
    return Ending.model_validate(
        {
            "attempt": attempt,
            "start": 1,
            "index": 1,
            "key": key,
            "cause": "preempted",
            "evidence": (),
            "charged": False,
        }
        | fields
    )


def committed(directory: RunDirectory) -> list[CommitRef]:
    """The lineage of HEAD, oldest first."""
    found = directory.head()
    return [record.ref for record in directory.lineage(found[0].commit if found else None)][::-1]
