"""Garbage collection of checkpoints: from commit records along the lineage, by the start that just swapped HEAD.

Commit records and step logs are never deleted: they are the run's history, and small. What goes is the folder of a
committed checkpoint that the policy gives up, and *debris*: folders of ended starts that HEAD does not reach, a day
after their last write.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from trainer.rundir.claims import Ancestor, Claim
from trainer.rundir.documents import Documents
from trainer.rundir.records import CommitRef, Pin
from trainer.settings import Keep

ANCESTORS = 2  # of HEAD that always stay: where to go when HEAD's checkpoint is damaged, twice
DEBRIS_SECONDS = 24 * 3600.0
SWEEP_SECONDS = 6 * 3600.0  # between two looks for debris by the same start


@dataclass(frozen=True)
class Collected:
    """Keys of the checkpoint folders that were removed."""

    expired: tuple[str, ...] = ()
    debris: tuple[str, ...] = ()


def to_collect(ancestors: Sequence[Ancestor], keep: Keep, pinned: Iterable[CommitRef], now: float) -> list[CommitRef]:
    """Which commits of the lineage (newest first) the policy gives up; oldest first. Pure.

    `now` is UNIX seconds. A commit whose time lies in the future, by another machine's clock, counts as young.
    """
    spared = set(pinned)
    always = max(1 + ANCESTORS, keep.last)
    return [
        old.ref
        for old in reversed(ancestors[always:])
        if old.ref not in spared
        and not (keep.every and old.ref.step % keep.every == 0)
        and now - old.time >= keep.min_age_seconds
    ]


def collect(claim: Claim, keep: Keep) -> Collected:
    """Remove what `keep` gives up. Before each folder HEAD must still be as this claim's last swap left it.

    A start's first call reads the whole lineage, later ones read none of it: call it off the training thread.
    Raises StorageUnavailable; ConfigurationError for an unreadable pin, since nobody knows which commit it meant.
    """
    documents = claim.documents
    if claim.commit_ref is None or not claim.still_current():
        return Collected()
    pinned = read_pins(documents)
    expired = _still_there(claim, to_collect(claim.ancestors(), keep, pinned, documents.clock()))
    removed = _remove(claim, [ref.checkpoint for ref in expired])
    claim.gone.update(ref for ref in expired if ref.checkpoint in removed)
    debris: list[str] = []
    if claim.swept is None or documents.monotonic() - claim.swept >= SWEEP_SECONDS:
        debris = _remove(claim, find_debris(claim, pinned))
        claim.swept = documents.monotonic()
    return Collected(tuple(removed), tuple(debris))


def read_pins(documents: Documents) -> set[CommitRef]:
    """The commits that readers have pinned and not let expire."""
    keys = documents.patient(lambda: documents.store.list("pins"))
    pins = [documents.read(key, Pin) for key in keys]
    return {pin.commit for pin in pins if pin is not None and pin.expires > documents.clock()}


def find_debris(claim: Claim, pinned: Iterable[CommitRef]) -> list[str]:
    """Checkpoint folders of earlier starts that are in no commit HEAD reaches, unchanged for a day.

    Those starts are fenced, so nothing in these folders can be committed any more.
    """
    documents, store, patient = claim.documents, claim.documents.store, claim.documents.patient
    kept = {old.ref.checkpoint for old in claim.ancestors()} | {ref.checkpoint for ref in pinned}
    found = []
    for name in patient(lambda: store.folders("checkpoints")):
        numbers = re.fullmatch(r"(\d+)\.(\d+)", name)
        if numbers is None or (int(numbers[1]), int(numbers[2])) >= (claim.attempt, claim.start):
            continue
        for folder in _folders(documents, f"checkpoints/{name}"):
            if folder in kept:
                continue
            modified = patient(partial(store.modified, folder))
            if modified is not None and documents.clock() - modified >= DEBRIS_SECONDS:
                found.append(folder)
    return found


def _folders(documents: Documents, prefix: str) -> list[str]:
    return [f"{prefix}/{name}" for name in documents.patient(lambda: documents.store.folders(prefix))]


def _still_there(claim: Claim, refs: Sequence[CommitRef]) -> list[CommitRef]:
    """`refs` without those whose folder is gone. A start's first call lists folders, only so as not to delete again."""
    unknown = [ref for ref in refs if ref not in claim.gone]
    starts = {ref.checkpoint.rpartition("/")[0] for ref in unknown}
    if len(unknown) <= len(starts):
        return unknown
    there = {folder for prefix in starts for folder in _folders(claim.documents, prefix)}
    claim.gone.update(ref for ref in unknown if ref.checkpoint not in there)
    return [ref for ref in unknown if ref.checkpoint in there]


def _remove(claim: Claim, folders: Sequence[str]) -> list[str]:
    removed: list[str] = []
    for folder in folders:
        if not claim.still_current():
            break
        claim.documents.patient(partial(claim.documents.store.delete_tree, folder))
        removed.append(folder)
    return removed
