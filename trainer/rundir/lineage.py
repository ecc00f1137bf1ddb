"""Commit records, and the line of parents that leads from one to the beginning of the run."""

from collections.abc import Iterator

from trainer.rundir.documents import Documents
from trainer.rundir.records import CommitRecord, CommitRef


def read_commit(documents: Documents, ref: CommitRef) -> CommitRecord:
    """The record of a commit. Raises TruthUnknown when it is missing or names another commit."""
    record = documents.read(ref.key, CommitRecord)
    if record is None:
        raise documents.unknown(f"commit record {ref.key} is missing")
    if record.ref != ref:
        raise documents.unknown(f"commit record {ref.key} describes {record.ref}")
    return record


def lineage(documents: Documents, ref: CommitRef | None) -> Iterator[CommitRecord]:
    """Records from `ref` back to the first commit, newest first.

    Raises TruthUnknown when a record is missing, or a parent does not come before its child (which a loop cannot).
    """
    while ref is not None:
        record = read_commit(documents, ref)
        yield record
        parent = record.parent
        if parent is not None and (
            parent.step >= ref.step or (parent.attempt, parent.start) > (ref.attempt, ref.start)
        ):
            raise documents.unknown(
                f"commit record {ref.key} names {parent} as its parent, which does not come before it"
            )
        ref = parent
