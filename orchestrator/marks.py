"""The facts about a run whose age decides something: their names, and which of them hold in an observation. Pure.

How long each has held is kept by memory.py, on our own clock; a name holds the value that must not have changed.
"""

from orchestrator.clusters.base import Admission, Gang
from orchestrator.observation import Observation, StartFacts, request_name


def marks_of(o: Observation) -> set[str]:
    """The facts of `o` whose age decides something. Each name holds the value that must not have changed.

    fits/<rung>            the quota allows the rung
    stale/<gang uid>       the gang is to be deleted
    gone/<attempt>…        it was submitted and the cluster does not show it; and its start has not reported since
    over/<attempt>/<n>     the attempt is over for good, with n entries in the ledger: the pause is counted from here
    phase/<gang uid>/<phase>/<admission>   the gang, or the one that queues ahead, is in this phase; its last admission
    stuck/<gang uid>       it has pods that do not end, on hosts that do not answer
    cannot-start/<gang uid>/<admission>   its pods cannot start as they are
    asked/stop-<attempt>.<start>…   the start was asked for a commit, by this request
    beats/…, step/…        the start's heartbeat, and its step, are still the same
    """
    if o.view is None or o.unknown:
        return set()
    facts = {f"fits/{rung.index}" for rung in o.rungs if o.fits(rung)}
    facts |= {f"stale/{gang.uid}" for gang in o.stale}
    gang = o.gang
    if missing(o):
        facts |= set(gone_marks(o))
    if missing(o) or (gang is not None and gang.phase in (*OVER, "Deleting")):
        facts.add(over_mark(o))
    if gang is not None:
        facts.add(phase_mark(gang))
        facts |= set(beat_marks(o, gang))
        if gang.stuck:
            facts.add(stuck_mark(gang))
        if gang.cannot_start:
            facts.add(cannot_start_mark(gang))
    if o.ahead is not None:
        facts.add(phase_mark(o.ahead))
    if o.asked:
        facts.add(asked_mark(o))
    return facts


def missing(o: Observation) -> bool:
    """HEAD's attempt was accepted by a cluster (it is recorded, or a start of it claimed), and shows no gang now."""
    return o.head is not None and o.gang is None and (o.submitted is not None or o.head.start > 0)


OVER = ("Succeeded", "Failed", "Deactivated", "Deleted")


def gone_marks(o: Observation) -> tuple[str, str]:
    """Names of "the cluster does not show it", and of the same while its start did not report either."""
    progress = o.current_start.progress if o.current_start else None
    return f"gone/{o.attempt}", f"gone/{o.attempt}/{o.head.start if o.head else 0}/{progress.beats if progress else 0}"


def over_mark(o: Observation) -> str:
    return f"over/{o.attempt}/{len(o.endings)}"


def phase_mark(gang: Gang) -> str:
    return f"phase/{gang.uid}/{gang.phase}/{_last_key(gang)}"


def stuck_mark(gang: Gang) -> str:
    return f"stuck/{gang.uid}"


def cannot_start_mark(gang: Gang) -> str:
    return f"cannot-start/{gang.uid}/{_last_key(gang)}"


def asked_mark(o: Observation) -> str:
    return f"asked/{request_name(o.head, o.request)}" if o.head else "asked/"


def _last_key(gang: Gang) -> str:
    return gang.admissions[-1].key if gang.admissions else ""


def beat_marks(o: Observation, gang: Gang) -> tuple[str, str]:
    """Names of "no new heartbeat" and "no new step" for the admission that is live now."""
    start, admission = o.current_start, o.live_admission
    live = f"{gang.uid}/{admission.key if admission else _last_key(gang)}"
    if start is None or start.progress is None or not claimed_by(start, admission):
        return f"beats/{live}", f"step/{live}"
    progress = start.progress
    at = f"{live}/{start.start}"
    return f"beats/{at}/{progress.beats}", f"step/{at}/{progress.phase}/{progress.step}/{progress.committed_step}"


def claimed_by(start: StartFacts, admission: Admission | None) -> bool:
    """Whether `start` was claimed by a process of `admission`."""
    if admission is None:
        return False
    if admission.pod_uids or admission.ended is None:  # one that is live and has no pods yet has claimed nothing
        return start.pod_uid in admission.pod_uids
    return start.restart_attempt == admission.restart_attempt
