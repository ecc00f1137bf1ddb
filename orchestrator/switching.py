"""From one attempt to the next while the first still lives: other hardware, another program, a stop that was asked for. Pure.

Healthy training is stopped only after it was asked for a commit and had time to make one. Where the next attempt runs
on hardware of another family, which draws on another quota, it queues ahead: the present one trains until that has been
admitted, and a trainer whose attempt HEAD does not name yet waits before its claim.
"""

from orchestrator.api import TrainingRun
from orchestrator.backfill import is_over, live_ending, written_down
from orchestrator.causes import Verdict
from orchestrator.clusters.base import Gang
from orchestrator.decisions import (
    AppendEnding,
    Decision,
    DeleteGang,
    RequestCommit,
    StatusWord,
    StopForPlanChange,
    SubmitGang,
    SwapHead,
    Wait,
)
from orchestrator.marks import OVER, asked_mark, phase_mark
from orchestrator.memory import Mark
from orchestrator.observation import Observation, request_name
from orchestrator.planning import shown
from orchestrator.progressing import WORDS, live_progress, training
from trainer.hardware import device_type
from trainer.rundir.records import AttemptSpec, Evidence

CONFIRM_SECONDS = 1.0
ASKED_BEATS = 6.0  # of progressEvery: a start looks for requests at least that often, and a step may take a while
NEVER = Mark(0, 0.0)


def switch(run: TrainingRun, o: Observation, now: float) -> Decision | None:
    """The next attempt is written down: HEAD follows as soon as the current one has ended, or the next is admitted."""
    new, old, gang = o.next_spec, o.spec, o.gang
    if new is None or old is None:
        return None
    if gang is None or is_over(run, o):
        return SwapHead(new.attempt, o.generation)
    if gang.phase == "Deleting":
        what = f"{_change(old, new)}: waiting for attempt {o.attempt} to commit and end"
        return Wait("Switching", what, now + CONFIRM_SECONDS)
    if _may_queue_ahead(run, o, gang, old, new):
        return _queue_ahead(run, o, gang, new, now)
    target = o.rung_of(new)
    moved = target is not None and o.rung is not None and target.index < o.rung.index
    if gang.phase == "Running" and moved and target and o.fits(target) is False and _is_wanted(run, o, new):
        what = f"the move to {target} waits: its capacity went away again"
        return _go_on(o, gang, what)
    return commit_first(run, o, gang, _change(old, new), now) or StopForPlanChange(
        name=gang.name,
        uid=gang.uid,
        grace_seconds=run.spec.grace_period,
        why=f"attempt {new.attempt} takes over: {_change(old, new)}",
        old=old.plan,
        new=new.plan,
    )


def commit_first(
    run: TrainingRun, o: Observation, gang: Gang, why: str, now: float, word: StatusWord = "Switching"
) -> RequestCommit | Wait | None:
    """Before `gang` is stopped: ask for a commit, and wait for it. None when there is nothing (more) to wait for.

    A start that does not answer is stopped all the same: it commits at SIGTERM if its grace allows.
    """
    progress = live_progress(o)
    if gang.phase != "Running" or progress is None or progress.phase not in ("Training", "Evaluating", "Saving"):
        return None
    if o.head is None:
        return None
    if o.answered:
        # Long ago, before a stop that did not come to pass? A save takes less than this, or its watchdog ends it.
        undone = (progress.step or 0) - o.committed_step
        old = undone * (progress.step_seconds or 0.0) > run.spec.hang.step
        return RequestCommit(o.attempt, request_name(o.head, o.request + 1), why) if old else None
    if not o.asked:
        return RequestCommit(o.attempt, request_name(o.head), why)
    waited = o.marks.get(asked_mark(o), NEVER).seconds
    limit = ASKED_BEATS * run.spec.progress_every + 4 * (progress.step_seconds or 0.0)
    saving = progress.phase == "Saving" and waited < run.spec.hang.step
    if waited >= limit and not saving:
        return None
    what = f"{why}: attempt {o.attempt} was asked for a commit and is stopped when it has made it"
    return Wait(word, what, now + 2 * CONFIRM_SECONDS)


def give_up_ahead(run: TrainingRun, o: Observation, why: str) -> DeleteGang | None:
    """Nothing queues ahead of a run that is to stand still."""
    ahead = o.ahead
    if ahead is None or ahead.phase == "Deleting":
        return None
    return DeleteGang(ahead.name, ahead.uid, run.spec.grace_period, why)


def _may_queue_ahead(run: TrainingRun, o: Observation, gang: Gang, old: AttemptSpec, new: AttemptSpec) -> bool:
    """Whether the next attempt can wait for its hardware while HEAD's goes on: up the ladder, or off it.

    Not when what was written down is not wanted any more, and not when HEAD's own wait in the queue has become too long
    for its rung: then the next attempt takes over, and finds the rung that has room.
    """
    target, rung = o.rung_of(new), o.rung
    if target is None or not _is_wanted(run, o, new):
        return False
    if rung is not None and (target.family == rung.family or target.index > rung.index):
        return False
    if rung is None and device_type(old.plan.device_type).family == target.family:
        return False
    if gang.phase == "Queued":
        return rung is not None and o.marks.get(phase_mark(gang), NEVER).seconds < rung.wait_in_queue
    return gang.phase == "Running"


def _is_wanted(run: TrainingRun, o: Observation, new: AttemptSpec) -> bool:
    """Nothing but hardware is asked for that differs from what the next attempt was planned with."""
    return not run.spec.suspend and not _other_program(o, new) and new.settings.target_step <= run.spec.target_step


def _other_program(o: Observation, new: AttemptSpec) -> bool:
    """What is asked for now is not what the next attempt was planned with."""
    if o.program is None or new.program is None:
        return False
    return o.program.digest not in (new.program.digest, new.rejected)


def _queue_ahead(run: TrainingRun, o: Observation, gang: Gang, new: AttemptSpec, now: float) -> Decision:
    assert o.spec is not None
    ahead = o.ahead
    if ahead is None:
        return SubmitGang(new)
    where = shown(new.plan)
    if ahead.phase in OVER:
        left = run.spec.go_up.after - o.marks.get(phase_mark(ahead), NEVER).seconds
        what = f"attempt {new.attempt} on {where} did not come up ({ahead.phase}: {ahead.message})"
        if left > 0:
            return _go_on(o, gang, f"{what}; it is queued again after spec.goUp.after", now + left)
        # Under the same name and nonce: HEAD does not name it, so nothing of it can have claimed anything.
        return DeleteGang(ahead.name, ahead.uid, run.spec.grace_period, f"{what}; it is queued again")
    if ahead.phase == "Deleting":
        return _go_on(o, gang, f"attempt {new.attempt} is to be queued again for {where}", now + CONFIRM_SECONDS)
    if ahead.phase != "Running":
        said = f": {ahead.message}" if ahead.message else ""
        return _go_on(o, gang, f"attempt {new.attempt} waits in the queue for {where}{said}")
    first = commit_first(run, o, gang, _change(o.spec, new), now)
    if first is not None:
        return first
    if o.live_admission is not None and not written_down(o):
        evidence = Evidence(source=f"attempts/{new.attempt}/spec.json", field="plan", value=where)
        return AppendEnding(live_ending(o, Verdict("plan-change", (evidence,), charged=False)))
    return SwapHead(new.attempt, o.generation)


def _go_on(o: Observation, gang: Gang, what: str, until: float | None = None) -> Wait:
    """HEAD's gang goes on meanwhile."""
    if gang.phase == "Queued":
        said = f" ({gang.message})" if gang.message else ""
        return Wait("Queued", f"attempt {o.attempt} waits in the queue{said}; {what}", until)
    progress = live_progress(o)
    word: StatusWord = WORDS[progress.phase] if progress else "Starting"
    return Wait(word, f"{training(o, progress)}; {what}", until)


def _change(old: AttemptSpec, new: AttemptSpec) -> str:
    """What changes, in a few words."""
    if (old.plan.device_type, old.plan.slices) != (new.plan.device_type, new.plan.slices):
        return f"{shown(old.plan)} → {shown(new.plan)}"
    if old.program and new.program and old.program.digest != new.program.digest:
        if old.program.image != new.program.image:
            return f"image {old.program.image} → {new.program.image}"
        return "another command, environment or pod template"
    return "other settings"
