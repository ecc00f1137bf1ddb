"""decide(run, observation, now): what to do next about one run. Pure: it reads nothing and touches nothing.

It is asked again after everything that was done, so each answer is one step only. The steps are ordered by what must be
certain before what: what contradicts itself is refused, what is not known freezes everything, what ended is written
down before anything new is decided, and only then is the current attempt looked after or followed by the next.
"""

from dataclasses import replace

from orchestrator.api import TrainingRun
from orchestrator.backfill import SIGHTINGS, confirmed_gone, is_over, live_ending, missing_ending, written_down
from orchestrator.budgets import NO_NEW_COMMIT, account, camel, pause, spent
from orchestrator.causes import Verdict, classify
from orchestrator.clusters.base import Admission, Gang
from orchestrator.decisions import (
    AppendEnding,
    Decision,
    DeleteGang,
    Done,
    GiveUp,
    RecordSubmitted,
    StatusWord,
    SubmitGang,
    SwapHead,
    Wait,
    WriteRecipe,
    WriteSpec,
)
from orchestrator.marks import beat_marks, cannot_start_mark, missing, over_mark, phase_mark, stuck_mark
from orchestrator.observation import Observation, ending_key
from orchestrator.planning import Rung, settings
from orchestrator.preconditions import done_message, freeze, reached, refusal
from orchestrator.programs import failed_at_once, is_new, next_programs, on_trial
from orchestrator.progressing import WORDS, live_progress, training
from orchestrator.switching import CONFIRM_SECONDS, NEVER, commit_first, give_up_ahead, switch
from trainer.rundir.records import AttemptSpec, Ending, Evidence

STUCK_SECONDS = 30.0  # pods that do not end, on hosts that do not answer: the cluster had its time to solve it
CANNOT_START_SECONDS = 120.0  # a pull that fails is tried again by the cluster; then it is the image


def decide(run: TrainingRun, observation: Observation, now: float) -> Decision:
    """The next act, end or pause. `now` is UNIX seconds: for the dates that are shown, and for `goUp.every`."""
    o = observation
    return (
        refusal(run, o)
        or freeze(run, o, now)
        or _first_attempt(run, o)
        or _write_down(run, o)
        or _remove_stale(run, o)
        or _finish(run, o, now)
        or _submit(run, o, now)
        or _meanwhile(run, o, now)
        or switch(run, o, now)
        or (_next_attempt(run, o, now) if is_over(run, o) else _look_after(run, o, now))
    )


# -- the beginning, the ledger, the end


def _first_attempt(run: TrainingRun, o: Observation) -> Decision | None:
    if o.recorded is None:
        return WriteRecipe(o.recipe)
    if o.head is not None:
        return None
    if o.next_spec is not None:
        return SwapHead(1, o.generation)
    if run.spec.suspend:
        return _suspended()
    return WriteSpec(_spec(run, o, 1, o.rungs[0]), "the first attempt")


def _write_down(run: TrainingRun, o: Observation) -> AppendEnding | None:
    """Before anything new is decided, everything that ended is in the ledger."""
    ending = missing_ending(run, o)
    return AppendEnding(ending) if ending is not None else None


def _remove_stale(run: TrainingRun, o: Observation) -> DeleteGang | None:
    """Gangs of attempts that are over. They can commit nothing, but they hold machines."""
    for gang in o.stale:
        if gang.phase != "Deleting" and o.marks.get(f"stale/{gang.uid}", NEVER).count >= SIGHTINGS:
            return _delete(run, gang, f"attempt {gang.attempt} is over: HEAD names attempt {o.attempt}")
    return None


def _finish(run: TrainingRun, o: Observation, now: float) -> Decision | None:
    """The target is committed: let what still runs end, then say so."""
    if not reached(run, o):
        return None
    ahead = give_up_ahead(run, o, f"step {o.committed_step} is committed; nothing is left to train")
    if ahead is not None:
        return ahead
    gang = o.gang
    if gang is not None and gang.phase == "Queued":
        return _delete(run, gang, f"step {o.committed_step} is committed; nothing is left to train")
    if gang is not None and gang.phase == "Running":
        hang = _hang(run, o)
        if _target_was_lowered(run, o):
            return _delete(run, gang, f"step {o.committed_step} is committed, and the target is lower now")
        if hang is not None:
            return _delete(
                run, gang, f"step {o.committed_step} is committed, but the trainers do not end: {hang.value}"
            )
    running = gang is not None and not is_over(run, o)
    if running or o.stale or (missing(o) and not confirmed_gone(run, o)):
        what = f"step {o.committed_step} of {run.spec.target_step} is committed; waiting for the last processes to end"
        return Wait("Saving", what, now + CONFIRM_SECONDS)
    return Done(o.committed_step, done_message(run, o))


# -- the current attempt


def _submit(run: TrainingRun, o: Observation, now: float) -> Decision | None:
    """Steps 3 and 4 of a submission, or finding out that the gang is gone."""
    assert o.spec is not None
    gang = o.gang or o.deleted_gang
    if gang is not None and o.submitted is None:
        return RecordSubmitted(o.attempt, gang.uid)
    if missing(o) and not confirmed_gone(run, o):
        what = (
            f"attempt {o.attempt} was submitted, but the cluster does not show it; it counts as gone if that stays so"
        )
        return Wait("Starting", what, now + CONFIRM_SECONDS)
    if gang is None and not missing(o) and o.next_spec is None:
        if run.spec.suspend:
            return _suspended()
        if o.rung is None or is_new(o):  # perhaps because the cluster would not have it
            rung = o.rung or o.rungs[0]
            return WriteSpec(_spec(run, o, o.attempt + 1, rung), "the spec has changed before it was submitted")
        return SubmitGang(o.spec)
    return None


def _look_after(run: TrainingRun, o: Observation, now: float) -> Decision:
    """HEAD's gang exists and is not over: queued, running, or on its way out."""
    gang = o.gang
    assert gang is not None
    if gang.phase == "Deleting":
        word: StatusWord = "Suspended" if run.spec.suspend else "Switching"
        return Wait(
            word, f"attempt {o.attempt} is being deleted; waiting until its processes are gone", now + CONFIRM_SECONDS
        )
    if run.spec.suspend:
        return _suspend(run, o, gang, now)
    hopeless = _hopeless(run, o, gang)
    if hopeless is not None:
        return hopeless
    failed = failed_at_once(o)
    if o.rung is None or _target_was_lowered(run, o) or is_new(o) or failed is not None:
        rung = _rung_now(o, gang)
        why = "the spec has changed" if failed is None else f"what is new failed at once: {failed.cause}{_said(failed)}"
        return WriteSpec(_spec(run, o, o.attempt + 1, rung), why)
    return _queued(run, o, gang, o.rung, now) if gang.phase == "Queued" else _running(run, o, gang, o.rung, now)


def _meanwhile(run: TrainingRun, o: Observation, now: float) -> Decision | None:
    """The next attempt is written down and may wait for its turn for weeks: the present one is watched all the same."""
    gang = o.gang
    if o.next_spec is None or gang is None or gang.phase == "Deleting" or is_over(run, o):
        return None
    if run.spec.suspend:
        return _suspend(run, o, gang, now)
    return _hopeless(run, o, gang) or (_unwell(run, o, gang) if gang.phase == "Running" else None)


def _suspend(run: TrainingRun, o: Observation, gang: Gang, now: float) -> Decision:
    why = "spec.suspend is true"
    return give_up_ahead(run, o, why) or commit_first(run, o, gang, why, now, "Saving") or _delete(run, gang, why)


def _hopeless(run: TrainingRun, o: Observation, gang: Gang) -> Decision | None:
    """A budget is spent, or the gang cannot come up again."""
    out = spent(o.endings, o.committed_step, run.spec.budgets)
    if out is not None:
        return _delete(run, gang, f"the budget for {out.cause} is spent: {out.count} endings since the last commit")
    return _stuck(run, o, gang)


def _rung_now(o: Observation, gang: Gang) -> Rung:
    """Where an attempt would run that is planned for another reason than hardware: where it is, if it runs there."""
    rung = o.rung
    if rung is None:
        return next((rung for rung in o.rungs if o.fits(rung)), o.rungs[0])
    waited = o.marks.get(phase_mark(gang), NEVER).seconds if gang.phase == "Queued" else 0.0
    others = _others(o, rung)
    return others[0] if waited >= rung.wait_in_queue and others else rung


def _others(o: Observation, rung: Rung) -> list[Rung]:
    """Rungs that may have room where `rung` has none: those that the quota allows, or, unknown, the lower ones."""
    known = o.view is not None and o.view.quota_devices is not None
    return [other for other in o.rungs if other != rung and (o.fits(other) if known else other.index > rung.index)]


def _queued(run: TrainingRun, o: Observation, gang: Gang, rung: Rung, now: float) -> Decision:
    """The queue place is kept; only a wait longer than the rung allows moves the run, to where there is room."""
    waited = o.marks.get(phase_mark(gang), NEVER).seconds
    last = o.endings[-1] if o.endings and o.endings[-1].attempt == o.attempt else None
    word: StatusWord = "Preempted" if last is not None and last.cause == "preempted" else "Queued"
    others = _others(o, rung)
    what = f"attempt {o.attempt} waits in the queue for {rung.devices} {rung.family} devices ({rung})"
    if gang.message:
        what += f": {gang.message}"
    if waited >= rung.wait_in_queue and others:
        why = f"{rung} was queued longer than spec.ladder[{rung.index}].waitInQueue ({rung.wait_in_queue:g} s)"
        return WriteSpec(_spec(run, o, o.attempt + 1, others[0]), why)
    if len(o.rungs) == 1:
        return Wait(word, f"{what}; the ladder has no other rung")
    if waited >= rung.wait_in_queue:
        return Wait(word, f"{what}; no other rung has capacity now")
    return Wait(
        word, f"{what}; after {rung.wait_in_queue:g} s another rung is tried", now + rung.wait_in_queue - waited
    )


def _running(run: TrainingRun, o: Observation, gang: Gang, rung: Rung, now: float) -> Decision:
    unwell = _unwell(run, o, gang)
    if unwell is not None:
        return unwell
    progress = live_progress(o)
    word = WORDS[progress.phase] if progress else "Starting"
    upper = _upper(run, o, rung, now)
    if upper is not None and progress is not None and progress.phase == "Training" and progress.step is not None:
        why = f"{upper} is preferred, and spec.goUp.after ({run.spec.go_up.after:g} s) has passed"
        return WriteSpec(_spec(run, o, o.attempt + 1, upper), why)
    return Wait(word, training(o, progress))


def _unwell(run: TrainingRun, o: Observation, gang: Gang) -> Decision | None:
    """A start that does not go on, or whose end was written down. One that was to make way, and need not yet, is well."""
    admission, hang = o.live_admission, _hang(run, o)
    if written_down(o):
        key = ending_key(gang, admission) if admission is not None else ""
        moving = o.next_spec is not None and any(e.key == key and e.cause == "plan-change" for e in o.endings)
        return None if moving and hang is None else _delete(run, gang, "its present start is in the ledger as ended")
    if hang is not None and admission is not None:
        return AppendEnding(live_ending(o, _why_silent(admission, hang)))
    blocked = o.marks.get(cannot_start_mark(gang), NEVER).seconds >= CANNOT_START_SECONDS
    if blocked and gang.cannot_start and admission is not None and on_trial(o):
        return AppendEnding(live_ending(o, Verdict("bad-configuration", gang.cannot_start)))
    return None


def _hang(run: TrainingRun, o: Observation) -> Evidence | None:
    """No heartbeat, or no step, for twice what the trainer's own watchdog allows; measured on our clock."""
    gang, progress = o.gang, live_progress(o)
    if gang is None:
        return None
    limits, phase = run.spec.hang, progress.phase if progress else "Starting"
    stepping = 2 * (limits.step if phase == "Training" else limits.start)
    beating = 2 * (limits.start if phase in ("Starting", "Restoring", "Compiling") else limits.step)
    beats, step = (o.marks.get(name, NEVER).seconds for name in beat_marks(o, gang))
    start = o.current_start
    source = f"attempts/{o.attempt}/{start.start}/progress.json" if progress and start else f"gang {gang.name}"
    if beats > beating:
        return Evidence(source=source, field="beats", value=f"no heartbeat for {beats:.0f} s in phase {phase}")
    if step > stepping:
        return Evidence(source=source, field="step", value=f"no new step for {step:.0f} s in phase {phase}")
    return None


def _why_silent(admission: Admission, hang: Evidence) -> Verdict:
    """The cause of a silence: what the queue, a node or a pod said, where one did; else a hang."""
    said = classify(replace(admission, containers=()), {})
    if said.certain and said.cause in ("host-failure", "maintenance", "preempted", "deactivated"):
        return Verdict(said.cause, (hang, *said.evidence), said.charged)
    return Verdict("hang", (hang,))


def _stuck(run: TrainingRun, o: Observation, gang: Gang) -> Decision | None:
    """Pods on hosts that do not answer keep the cluster from bringing the gang up again: another attempt does.

    Not while the start still reports: cut off from the API server alone, it trains on, and that is what is wanted.
    """
    if not gang.stuck or o.marks.get(stuck_mark(gang), NEVER).seconds < STUCK_SECONDS:
        return None
    if live_progress(o) is not None:
        silent = o.marks.get(beat_marks(o, gang)[0], NEVER).seconds
        if silent < max(STUCK_SECONDS, 3 * run.spec.progress_every):
            return None
    if o.live_admission is not None and not written_down(o):
        return AppendEnding(live_ending(o, Verdict("host-failure", gang.stuck)))
    return _delete(run, gang, f"{gang.stuck[0].source} does not end: {gang.stuck[0].value}")


def _upper(run: TrainingRun, o: Observation, rung: Rung, now: float) -> Rung | None:
    """The best higher rung whose capacity has been there long enough, if the last move is long enough ago."""
    moves = [e.ended for e in o.endings if e.cause == "plan-change" and e.start is not None and e.ended is not None]
    if moves and now - max(moves) < run.spec.go_up.every:
        return None
    for other in o.rungs[: rung.index]:
        # Hardware of another family draws on another quota: the queue itself says when there is room, and costs nothing.
        trained = o.marks.get(phase_mark(o.gang), NEVER).seconds if o.gang else 0.0
        if other.family != rung.family and trained >= run.spec.go_up.after:
            return other
        mark = o.marks.get(f"fits/{other.index}", NEVER)
        if mark.count >= SIGHTINGS and mark.seconds >= run.spec.go_up.after:
            return other
    return None


# -- the next attempt


def _next_attempt(run: TrainingRun, o: Observation, now: float) -> Decision:
    """HEAD's attempt is over and short of the target: give up, pause, or plan the next."""
    failed = failed_at_once(o)
    if failed is not None and not run.spec.suspend:
        why = f"what was new failed at once ({failed.cause}{_said(failed)}): back to what ran before"
        return WriteSpec(_spec(run, o, o.attempt + 1, o.rung or o.rungs[0]), why)
    out = spent(o.endings, o.committed_step, run.spec.budgets)
    if out is not None:
        field = "noNewCommit" if out.cause == NO_NEW_COMMIT else camel(out.cause)
        last = out.endings[-1]
        what = (
            f"{out.count} endings without a new commit"
            if out.cause == NO_NEW_COMMIT
            else f"{out.cause} {out.count} time(s)"
        )
        message = (
            f"{what} since step {o.committed_step} was committed; spec.budgets.{field} is {out.limit}. Last: attempt "
            f"{last.attempt}, {last.cause}{_said(last)}. Remove the cause, then raise spec.budgets.{field} to go on from "
            "there"
        )
        return GiveUp(message, out.cause, last.evidence)
    if run.spec.suspend:
        return _suspended()
    books = account(o.endings, o.committed_step)
    rest = 0.0
    if books.needs_pause and books.last is not None:
        full = pause(run.spec.backoff.of(books.last.cause), books.failures, run.name, o.attempt)
        rest = full - o.marks.get(over_mark(o), NEVER).seconds
    if rest > 0 and books.last is not None:
        what = f"attempt {o.attempt} ended ({books.last.cause}{_said(books.last)})"
        what += f", failure {books.failures} since the last commit"
        return Wait("BackingOff", f"{what}; attempt {o.attempt + 1} follows after a pause", now + rest)
    return WriteSpec(_spec(run, o, o.attempt + 1, o.rung or o.rungs[0]), f"attempt {o.attempt} is over")


# -- small things


def _spec(run: TrainingRun, o: Observation, attempt: int, rung: Rung) -> AttemptSpec:
    programs = next_programs(o)
    return AttemptSpec(
        attempt=attempt,
        nonce=o.nonce,
        gang=run.gang(attempt),
        plan=rung.plan,
        settings=settings(run),
        image=programs.program.image if programs.program else o.image,
        program=programs.program,
        fallback=programs.fallback,
        rejected=programs.rejected,
    )


def _delete(run: TrainingRun, gang: Gang, why: str) -> DeleteGang:
    return DeleteGang(gang.name, gang.uid, run.spec.grace_period, why)


def _said(ending: Ending) -> str:
    """ ": " and what the program said as it ended, where it said something: the field to change, often."""
    reason = next((fact.value for fact in ending.evidence if fact.field == "reason"), "")
    return f": {' '.join(reason.split()).rstrip('.')}" if reason else ""


def _suspended() -> Wait:
    return Wait("Suspended", "spec.suspend is true; set it to false to go on")


def _target_was_lowered(run: TrainingRun, o: Observation) -> bool:
    """The gang would train beyond what is asked for now. A raised target needs nothing until the old one is reached."""
    return o.spec is not None and o.spec.settings.target_step > run.spec.target_step
