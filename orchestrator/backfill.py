"""The ledger's next missing entry: what ended and was not written down yet. Pure.

Each end of an admission has one key that every orchestrator derives alike. Starts that claimed, and whose admission the
cluster no longer shows, get their entry from their exit record; where nothing is left to read, the entry says so.
"""

from collections.abc import Iterator

from orchestrator.api import TrainingRun
from orchestrator.causes import Verdict, classify, stopped
from orchestrator.clusters.base import Admission, Gang
from orchestrator.marks import OVER, claimed_by, gone_marks, missing, phase_mark
from orchestrator.memory import Mark
from orchestrator.observation import Observation, StartFacts, ending_key
from orchestrator.planning import shown
from orchestrator.programs import FAULTS, on_trial
from trainer.rundir.records import Ending, Evidence

SIGHTINGS = 2  # a gang is taken for gone, or deleted as stale, only when it was seen so this often in a row
QUIET_BEATS = 1.5  # heartbeats missed before silence means anything
STILL_REPORTING_SECONDS = 300.0  # gone from the cluster, but reporting: cut off, and taken over in the end
TERMINATING_SECONDS = 120.0  # beyond the grace: a gang that is still Deleting then is on a dead node


def confirmed_gone(run: TrainingRun, o: Observation) -> bool:
    """HEAD's gang is gone: the cluster proves it, or showed none in several looks without a break.

    While the start still reports, an old answer of the cluster is the likelier explanation: then it takes much longer.
    """
    if not missing(o):
        return False
    if o.deleted_gang is not None:
        return True
    gone, silent = (o.marks.get(name, Mark(0, 0)) for name in gone_marks(o))
    reporting = o.current_start is not None and o.current_start.progress is not None
    quiet = QUIET_BEATS * run.spec.progress_every if reporting else 0.0
    return (silent.count >= SIGHTINGS and silent.seconds >= quiet) or gone.seconds >= STILL_REPORTING_SECONDS


def stuck_deleting(run: TrainingRun, o: Observation) -> bool:
    """HEAD's gang should have ended long ago and cannot be waited for: the fence keeps it from doing harm."""
    gang = o.gang
    if gang is None or gang.phase != "Deleting":
        return False
    if gang.stuck:  # known to be on hosts that do not answer
        return True
    return o.marks.get(phase_mark(gang), Mark(0, 0)).seconds >= 2 * run.spec.grace_period + TERMINATING_SECONDS


def is_over(run: TrainingRun, o: Observation) -> bool:
    """HEAD's attempt can have no further start. Never said of an attempt that nobody submitted."""
    gang = o.gang
    if gang is not None:
        return gang.phase in OVER or stuck_deleting(run, o)
    return confirmed_gone(run, o)


def missing_ending(run: TrainingRun, o: Observation) -> Ending | None:
    """The oldest ending that the ledger lacks, or None."""
    return next(_missing_endings(run, o), None)


def written_down(o: Observation) -> bool:
    """The admission that is live now is in the ledger as ended: that was written before we end it."""
    gang, admission = o.gang, o.live_admission
    return gang is not None and admission is not None and any(e.key == ending_key(gang, admission) for e in o.endings)


def live_ending(o: Observation, verdict: Verdict) -> Ending:
    """The entry for the admission that is live now: written before we end it, so that the cause survives us."""
    gang, admission = o.gang, o.live_admission
    assert gang is not None
    assert admission is not None
    start = o.current_start
    claimed = start if start is not None and claimed_by(start, admission) else None
    if claimed is not None and any(e.attempt == gang.attempt and e.start == claimed.start for e in o.endings):
        claimed = None  # taken for gone once, by an old answer of the cluster: no start ends twice
    return _entry(o, gang.attempt, claimed, ending_key(gang, admission), verdict, admission)


def _missing_endings(run: TrainingRun, o: Observation) -> Iterator[Ending]:
    if o.head is None or o.view is None:
        return
    keys = {ending.key for ending in o.endings}
    for gang in (*o.view.deleted, *o.stale):
        if gang.attempt < o.attempt:
            for admission in gang.admissions:
                if admission.ended is not None and not _entered(gang, admission, keys):
                    yield _entry(
                        o, gang.attempt, None, ending_key(gang, admission), _stale_verdict(o, admission), admission
                    )
    yield from _own_endings(run, o, keys)


def _own_endings(run: TrainingRun, o: Observation, keys: set[str]) -> Iterator[Ending]:
    """Of HEAD's attempt: its gang's ended admissions, then claimed starts that no admission explains."""
    gang = o.gang or o.deleted_gang
    entered = {ending.start for ending in o.endings if ending.attempt == o.attempt and ending.start is not None}
    open_starts = [start for start in o.starts if start.start not in entered]
    for admission in gang.admissions if gang else ():
        assert gang is not None
        last = admission is gang.admissions[-1]
        if admission.ended is None and not (last and is_over(run, o)):
            continue
        start = next((s for s in open_starts if claimed_by(s, admission)), None)
        if start is not None:
            open_starts.remove(start)
        if _entered(gang, admission, keys) or _entered_by_pod(o, admission, entered):
            continue
        verdict = _verdict(run, o, start, admission, last)
        yield _entry(o, gang.attempt, start, ending_key(gang, admission), verdict, admission)
    for start in open_starts:
        if _start_is_over(run, o, start):
            last = o.head is not None and start.start == o.head.start
            key = f"pod/{start.pod_uid}" if start.pod_uid else f"start/{o.attempt}.{start.start}"
            yield _entry(o, o.attempt, start, key, _verdict(run, o, start, None, last), None)
    if is_over(run, o) and not any(ending.attempt == o.attempt for ending in o.endings):
        yield _entry(o, o.attempt, None, f"never-started/{o.attempt}", _never_started(run, o, gang), None)


def _entered(gang: Gang, admission: Admission, keys: set[str]) -> bool:
    """The end of this admission is in the ledger, under its own key or under that of the pod that claimed."""
    return ending_key(gang, admission) in keys or any(f"pod/{pod}" in keys for pod in admission.pod_uids)


def _entered_by_pod(o: Observation, admission: Admission, entered: set[int]) -> bool:
    """The start that this admission's pods claimed has an entry already, under another key."""
    return any(s.start in entered and s.pod_uid in admission.pod_uids for s in o.starts if s.pod_uid is not None)


def _start_is_over(run: TrainingRun, o: Observation, start: StartFacts) -> bool:
    """Whether a claimed start has ended for certain."""
    assert o.head is not None
    if start.start < o.head.start or is_over(run, o):
        return True
    gang, live = o.gang, o.live_admission
    if gang is None:
        return False
    # Queued: suspended, and its pods with it. Otherwise another coming-up has taken its place.
    return gang.phase == "Queued" or (live is not None and bool(live.pod_uids) and start.pod_uid not in live.pod_uids)


def _verdict(
    run: TrainingRun, o: Observation, start: StartFacts | None, admission: Admission | None, last: bool
) -> Verdict:
    exits = {uid: o.pod_exits[uid] for uid in (admission.pod_uids if admission else ()) if uid in o.pod_exits}
    verdict = classify(admission, exits, start.exit if start else None)
    if last:
        verdict = _with_stop(run, o, verdict)
    target = o.spec.settings.target_step if o.spec else 0
    if verdict.cause == "completed" and o.committed_step < target:
        # The exit code says done; the commit does not. The commit is the truth, and why is not known.
        found = Evidence(source="HEAD", field="commit", value=f"step {o.committed_step}, target {target}")
        return Verdict("unknown", (*verdict.evidence, found))
    return verdict


def _with_stop(run: TrainingRun, o: Observation, verdict: Verdict) -> Verdict:
    """`verdict`, given what is known to have asked for the end of HEAD's attempt."""
    gang = o.gang or o.deleted_gang
    ended = gang is None or gang.phase in ("Deleting", "Deleted")
    if o.next_spec is not None and ended:  # planned alone is no reason: it may queue for weeks
        evidence = Evidence(
            source=f"attempts/{o.next_spec.attempt}/spec.json", field="plan", value=shown(o.next_spec.plan)
        )
        return stopped(verdict, "plan-change", evidence)
    if ended:
        if run.spec.suspend:
            asked = stopped(verdict, "deactivated", Evidence(source="TrainingRun", field="spec.suspend", value="true"))
            return Verdict(asked.cause, asked.evidence, charged=asked.charged and verdict.certain)
        if gang is not None or verdict.cause != "unknown-while-absent":
            value = f"{gang.phase}: {gang.message}" if gang else "gone"
            name = gang.name if gang else o.spec.gang if o.spec else "?"
            return stopped(verdict, "gone", Evidence(source=f"gang {name}", field="phase", value=value))
    return verdict


def _stale_verdict(o: Observation, admission: Admission) -> Verdict:
    """An older attempt came up once more, or was still up, when HEAD had moved on. Nobody is charged for that."""
    exits = {uid: o.pod_exits[uid] for uid in admission.pod_uids if uid in o.pod_exits}
    evidence = Evidence(source="HEAD", field="attempt", value=str(o.attempt))
    verdict = stopped(classify(admission, exits), "fenced", evidence)
    return Verdict(verdict.cause, verdict.evidence, charged=False)


def _never_started(run: TrainingRun, o: Observation, gang: Gang | None) -> Verdict:
    """The end of an attempt that never came up."""
    if o.next_spec is not None or gang is None or gang.phase in ("Deleting", "Deleted"):
        nothing = Verdict("unknown", (), certain=False)
        verdict = _with_stop(run, o, nothing)
        if verdict.cause != "unknown":
            return verdict
    evidence = Evidence(
        source=f"gang {gang.name}" if gang else "cluster",
        field=gang.phase if gang else "gang",
        value=gang.message if gang else "gone",
    )
    if gang is not None and gang.phase == "Deactivated":
        return Verdict("deactivated", (evidence,))
    return Verdict("unknown", (evidence,))


def _entry(
    o: Observation, attempt: int, start: StartFacts | None, key: str, verdict: Verdict, admission: Admission | None
) -> Ending:
    claimed = start.record if start else None
    progress = start.progress if start else None
    exit_ = start.exit if start else None
    steps = [record.step for record in (progress, exit_) if record is not None and record.step is not None]
    committed = _committed_at_end(o, start)
    restored = claimed.restored.step if claimed and claimed.restored else 0 if claimed else None
    seconds = dict(progress.phase_seconds) if progress else {}
    if admission and admission.queued_at is not None and admission.began is not None:
        seconds["queue"] = max(0.0, admission.began - admission.queued_at)
    return Ending(
        attempt=attempt,
        start=start.start if start else None,
        index=1 + sum(1 for ending in o.endings if ending.attempt == attempt),
        key=key,
        cause=verdict.cause,
        evidence=verdict.evidence,
        # What is new and fails at once is taken back, once: nobody's budget pays for the try.
        charged=verdict.charged and not (attempt == o.attempt and on_trial(o) and verdict.cause in FAULTS),
        first_step=restored,
        last_step=max(steps, default=None),
        last_committed_step=committed,
        seconds=seconds,
        began=admission.began if admission else claimed.time if claimed else None,
        ended=admission.ended if admission else exit_.time if exit_ else progress.time if progress else None,
    )


def _committed_at_end(o: Observation, start: StartFacts | None) -> int:
    """The committed step when `start` ended: what the next start restored, or HEAD's when there was no next one."""
    if start is not None:
        following = next((s.record for s in o.starts if s.start == start.start + 1 and s.record is not None), None)
        if following is not None:
            return following.restored.step if following.restored else 0
    return o.committed_step
