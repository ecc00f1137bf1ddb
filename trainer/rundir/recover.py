"""When HEAD is lost, unreadable or rolled back: the HEAD that the other documents speak for.

Nobody calls this but a person who knows that no trainer of the run is alive: a claim that HEAD has forgotten cannot be
fenced. What a start committed after the newest record that is left is lost with that record.
"""

import re

from trainer.errors import TruthUnknown
from trainer.rundir.documents import HEAD, Documents
from trainer.rundir.lineage import lineage
from trainer.rundir.records import CommitRef, Head, SetAside
from trainer.rundir.store import NotFound
from trainer.rundir.swap import new_op_id


def propose(documents: Documents, at_least: int = 0) -> Head:
    """The HEAD to write: the highest attempt with a trace (or `at_least`), its last start, the newest whole commit.

    A commit is whole when its line of records reaches back to the first one, none of them was set aside, and its
    checkpoint is there. Raises TruthUnknown when no attempt left a trace.
    """
    keys = documents.patient(lambda: documents.store.list("attempts"))
    starts = [(int(m[1]), int(m[2] or 0)) for key in keys if (m := re.match(r"attempts/(\d+)/(?:(\d+)/)?", key))]
    commits = _commits(documents)
    starts += [(ref.attempt, ref.start) for ref in commits]
    if at_least:
        starts.append((at_least, 0))
    if not starts:
        raise TruthUnknown(f"run directory {documents.uri}: there is no attempt and no commit to recover HEAD from")
    attempt, start = max(starts)
    aside = _set_aside(documents, keys)
    newest = next((ref for ref in sorted(commits, key=_age, reverse=True) if _whole(documents, ref, aside)), None)
    return Head(attempt=attempt, start=start, commit=newest, op_id=new_op_id())


def write(documents: Documents, head: Head) -> int:
    """Put `head` in the place of whatever HEAD there is; returns its generation.

    Raises TruthUnknown when HEAD changes meanwhile: then somebody is alive.
    """

    def generation() -> int:
        try:
            return documents.store.get(HEAD).generation
        except NotFound:
            return 0

    written = documents.swap_head(head, documents.patient(generation))
    if written is None:
        raise TruthUnknown(f"run directory {documents.uri}: HEAD changed meanwhile; somebody is alive, look again")
    return written


def _age(ref: CommitRef) -> tuple[int, int, int]:
    return ref.attempt, ref.start, ref.step


def _commits(documents: Documents) -> list[CommitRef]:
    keys = documents.patient(lambda: documents.store.list("commits"))
    found = (re.fullmatch(r"commits/(\d+)\.(\d+)/(\d+)\.json", key) for key in keys)
    return [CommitRef(attempt=int(m[1]), start=int(m[2]), step=int(m[3])) for m in found if m]


def _set_aside(documents: Documents, keys: list[str]) -> set[CommitRef]:
    notes = (documents.read(key, SetAside) for key in keys if re.search(r"/set-aside-\d+\.json$", key))
    return {note.commit for note in notes if note is not None}


def _whole(documents: Documents, ref: CommitRef, aside: set[CommitRef]) -> bool:
    try:
        line = [record.ref for record in lineage(documents, ref)]
    except TruthUnknown:
        return False
    if aside.intersection(line):
        return False
    return bool(documents.patient(lambda: documents.store.list(ref.checkpoint)))
