"""The nine conditions of a run: what each says at one moment. Pure.

All are there from the first visit on, and each is Unknown where nobody can tell. Those that tools wait for:

    Ready        the spec is accepted and the run looked after; it stays True while the run trains, for weeks
    Reconciling  the spec is not applied yet     Stalled   no new commit although it may run (kstatus reads these three)
    Succeeded    the target is committed; Unknown until the end, and its reason is the STATUS of lists
    Finished     the run has ended, either way
"""

from collections.abc import Mapping
from typing import NamedTuple

from orchestrator.api import TrainingRun
from orchestrator.budgets import account
from orchestrator.decisions import Decision, Done, Freeze, GiveUp, OwnedByOther, Refused, StatusWord
from orchestrator.observation import RUN_DIRECTORY, Observation
from orchestrator.planning import settings
from orchestrator.programs import is_new
from orchestrator.progressing import live_progress, training
from orchestrator.status_model import CONDITIONS, ConditionType, Truth
from trainer.plan import filling
from trainer.rundir.alarms import AlarmKind

ALARM_REASONS: dict[AlarmKind, str] = {"coverage": "WrongInstances", "memorisation": "Memorising"}
STALLED_AFTER = 3  # endings in a row without a new commit


class Said(NamedTuple):
    """What one condition says: status, reason, message."""

    status: Truth
    reason: str
    message: str


def conditions_of(
    run: TrainingRun, o: Observation | None, decision: Decision, word: StatusWord, what: str
) -> Mapping[ConditionType, Said]:
    """All conditions. `word` and `what` are those of explain.py; `o` is None where the run was not looked at."""
    said: dict[ConditionType, Said] = {
        "Ready": _ready(o, decision, word, what),
        "Succeeded": Said(_outcome(decision), word, what),
        "Finished": _finished(decision, word, what),
        "Suspended": _suspended(run, decision, word, what),
        "Stalled": _stalled(run, o, decision, word, what),
        "Reconciling": _reconciling(run, o, decision, word, what),
    }
    if o is None or not seen(o) or o.view is None:
        # An end is only said when nothing of the run is left, whether or not the cluster answers now.
        unseen = Said("False" if isinstance(decision, (Done, GiveUp)) else "Unknown", word, what)
        said |= {"Admitted": unseen, "Training": unseen, "Degraded": unseen}
    else:
        said["Admitted"] = _admitted(o, word, what)
        said["Training"] = _training(o, word, what)
        said["Degraded"] = _degraded(o, decision, word, what)
    return {kind: said[kind] for kind in CONDITIONS}


def refused_conditions(message: str) -> Mapping[ConditionType, Said]:
    """The conditions of a run whose spec cannot even be read."""
    unseen = Said("Unknown", "Refused", "not looked at, since the spec is refused")
    said: dict[ConditionType, Said] = dict.fromkeys(CONDITIONS, unseen)
    return said | {
        "Ready": Said("False", "Refused", message),
        "Succeeded": Said("Unknown", "Refused", message),
        "Finished": Said("False", "Refused", message),
        "Stalled": Said("True", "Refused", message),
        "Reconciling": Said("False", "Refused", message),
    }


def seen(o: Observation) -> bool:
    """Whether the run directory was read: HEAD, the ledger, and what follows from them."""
    return RUN_DIRECTORY not in o.unknown and not o.refusals


# -- inside


def _ready(o: Observation | None, decision: Decision, word: StatusWord, what: str) -> Said:
    match decision:
        case Refused() | GiveUp():
            return Said("False", word, what)
        case OwnedByOther():
            return Said("False", "OwnedByOther", what)
        case Freeze():
            return Said("Unknown", word, what)
        case Done():
            return Said("True", word, what)
        case _ if o is None:
            return Said("Unknown", "Preparing", what)
        case _:
            return Said("True", "UnderControl", "the spec is accepted, and the run is looked after")


def _outcome(decision: Decision) -> Truth:
    match decision:
        case Done():
            return "True"
        case GiveUp():
            return "False"
        case _:
            return "Unknown"


def _finished(decision: Decision, word: StatusWord, what: str) -> Said:
    match decision:
        case Done() | GiveUp():
            return Said("True", word, what)
        case Freeze():
            return Said("Unknown", word, what)
        case _:
            return Said("False", word, what)


def _suspended(run: TrainingRun, decision: Decision, word: StatusWord, what: str) -> Said:
    if word == "Suspended":
        reason = run.spec.suspend_reason
        return Said("True", "Suspended", f"{reason} ({what})" if reason else what)
    if isinstance(decision, (Done, GiveUp)) or not run.spec.suspend:
        return Said("False", "NotSuspended", "spec.suspend is false" if not run.spec.suspend else what)
    if isinstance(decision, (Freeze, Refused, OwnedByOther)):
        return Said("Unknown", word, what)
    return Said("False", "Stopping", f"spec.suspend is true; it takes effect after what is being done now: {what}")


def _stalled(run: TrainingRun, o: Observation | None, decision: Decision, word: StatusWord, what: str) -> Said:
    match decision:
        case Refused() | GiveUp():
            return Said("True", word, what)
        case OwnedByOther():
            return Said("True", "OwnedByOther", what)
        case Freeze():
            return Said("Unknown", word, what)
        case Done():
            return Said("False", word, what)
    if o is None or word == "Suspended":
        return Said("False", word, what)
    if o.gang is not None and o.gang.cannot_start and live_progress(o) is None:
        return Said("True", "CannotStart", what)
    count = account(o.endings, o.committed_step).without_commit
    limit = run.spec.budgets.no_new_commit
    if count >= min(STALLED_AFTER, limit):
        message = (
            f"{count} endings in a row without a new commit; at {limit} the run gives up (spec.budgets.noNewCommit)"
        )
        return Said("True", "NoNewCommit", message)
    return Said("False", "NotStalled", "new commits are made, or waited for as they should be")


def _reconciling(run: TrainingRun, o: Observation | None, decision: Decision, word: StatusWord, what: str) -> Said:
    """Whether what trains is what the spec asks for. A run that waits in the queue is as the spec wants it."""
    match decision:
        case Freeze():
            return Said("Unknown", word, what)
        case Refused() | OwnedByOther() | GiveUp() | Done():
            return Said("False", word, what)
    if o is None:
        return Said("True", word, what)
    if word == "Switching":
        return Said("True", word, what)
    if word == "Suspended":
        return Said("False", "Applied", "the spec is applied: the run is stopped")
    if run.spec.suspend:
        return Said("True", "Stopping", what)
    if o.head is None or (o.attempt == 1 and o.gang is None and o.submitted is None):
        return Said("True", "Starting", what)
    assert o.spec is not None
    if o.rung is None or is_new(o) or o.spec.settings.target_step > run.spec.target_step:
        return Said("True", "NotApplied", "the spec has changed; another attempt takes over at a commit")
    later = _with_the_next_attempt(run, o)
    return Said("False", "Applied", f"the spec is applied{later}")


def _with_the_next_attempt(run: TrainingRun, o: Observation) -> str:
    """Clause about limits and intervals that the present attempt was given before they were changed."""
    assert o.spec is not None
    now, wanted = o.spec.settings, settings(run)
    changed = [name for name in type(now).model_fields if getattr(now, name) != getattr(wanted, name)]
    return f"; with the next attempt: {', '.join(changed)}" if changed else ""


def _admitted(o: Observation, word: StatusWord, what: str) -> Said:
    gang = o.gang
    if gang is None or gang.phase not in ("Queued", "Running", "Deleting"):
        return Said("False", word, what)
    if gang.phase == "Queued":
        return Said("False", "Preempted" if word == "Preempted" else "Queued", gang.message or what)
    if gang.phase == "Deleting" and o.live_admission is None:
        return Said("False", word, what)
    plan = o.spec.plan if o.spec else None
    held = f"{plan.devices} devices ({plan.device_type})" if plan else "its devices"
    return Said("True", "Admitted", f"{gang.name} holds {held}")


def _training(o: Observation, word: StatusWord, what: str) -> Said:
    progress = live_progress(o)
    steps = progress is not None and progress.phase in ("Training", "Evaluating", "Saving")
    if steps and word not in ("Suspended", "Completed", "BudgetExhausted"):
        return Said("True", "StepsAdvance", training(o, progress))
    return Said("False", word, what)


def _degraded(o: Observation, decision: Decision, word: StatusWord, what: str) -> Said:
    if isinstance(decision, (Done, GiveUp)):
        return Said("False", word, what)
    if o.spec is None:
        return Said("False", "NotStarted", "no attempt has been planned yet")
    if o.alarms:  # before the rung: what is trained is worth less than how fast
        kinds = {alarm.kind for alarm in o.alarms}
        reason = ALARM_REASONS["coverage" if "coverage" in kinds else "memorisation"]
        return Said("True", reason, "; ".join(alarm.message for alarm in o.alarms))
    if o.rung is None:
        return Said("Unknown", "NotInLadder", f"spec.ladder no longer has {o.spec.plan.device_type}")
    loss = filling(o.spec.plan)
    lost = "" if loss is None else f"; {loss}"
    if o.rung.index == 0:
        return Said("False", "FirstRung", f"on {o.rung}, the first rung of spec.ladder{lost}")
    return Said("True", "LowerRung", f"on {o.rung}, spec.ladder[{o.rung.index}]; the first rung is {o.rungs[0]}{lost}")
