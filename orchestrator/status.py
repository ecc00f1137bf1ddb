"""From a look at a run to the status that its TrainingRun shows. Pure.

The words and sentences are those of explain.py, so that status, explain and the command line cannot disagree. What
could not be read keeps its last known value, and the conditions say that it was not read.
"""

from collections.abc import Mapping
from typing import Any

from orchestrator.api import TrainingRun
from orchestrator.conditions import Said, conditions_of, refused_conditions, seen
from orchestrator.decisions import Decision, Freeze, Refused, StatusWord, Wait
from orchestrator.explain import explanation, status_word
from orchestrator.observation import Observation
from orchestrator.status_model import (
    CONDITIONS,
    ENDINGS_KEPT,
    TEXT_LIMIT,
    Condition,
    ConditionType,
    EndingStatus,
    Time,
    moment,
)
from orchestrator.status_model import RunStatus as RunStatus
from trainer.rundir.records import Ending

CONDITION_TEXT_LIMIT = 4096
STEADY_SECONDS = 3  # a due time that moves by less is the same one, computed again
# What is written at once when it changes. The rest (steps, wording) may wait for the write of the minute.
MATERIAL = (
    "observed_generation",
    "target_step",
    "committed_step",
    "plan",
    "per_device_batch",
    "attempt",
    "start",
    "queue",
    "preemptions",
    "fingerprint",
    "accepted",
    "endings",
)


def status_of(
    run: TrainingRun, observation: Observation | None, decision: Decision, previous: RunStatus | None, now: float
) -> RunStatus:
    """The status after `decision` was taken on `observation`. `now` is UNIX seconds.

    `observation` is None where a Refused, Freeze or Wait was decided before the run could be looked at. `previous` is the
    status that the object has. A run that has ended stays so while its truth cannot be read: an end is for good, as
    long as the spec is the same.
    """
    generation = run.metadata.generation or 0
    if isinstance(decision, Freeze) and previous is not None and _has_ended(previous, generation):
        return previous
    if observation is None:
        assert isinstance(decision, (Refused, Freeze, Wait)), "nothing else is decided blindly"
        word: StatusWord = "Refused" if isinstance(decision, Refused) else "TruthUnknown"
        if isinstance(decision, Wait):
            word = decision.word
        what, next_action = decision.message, _next_blind(decision)
        next_at = decision.until if isinstance(decision, Freeze) else None
        facts = _last_known(previous)
    else:
        word = status_word(run, observation, decision)
        explained = explanation(run, observation, decision, now)
        what, next_action, next_at = explained.what, explained.next_action, explained.next_at
        facts = _facts(run, observation, previous, now) if seen(observation) else _last_known(previous)
    said = conditions_of(run, observation, decision, word, what)
    return RunStatus.model_validate(
        facts
        | {
            "observedGeneration": generation,
            "conditions": _conditions(said, generation, previous, now),
            "targetStep": run.spec.target_step,
            "queue": run.spec.queue,
            "message": _cut(what, TEXT_LIMIT),
            "nextAction": _cut(next_action, TEXT_LIMIT),
            "nextActionTime": _steady(next_at, previous),
        }
    )


def refused_status(message: str, generation: int, previous: RunStatus | None, now: float) -> RunStatus:
    """The status of a run whose spec cannot be read. `message` names field and fix."""
    return RunStatus.model_validate(
        _last_known(previous)
        | {
            "observedGeneration": generation,
            "conditions": _conditions(refused_conditions(message), generation, previous, now),
            "message": _cut(message, TEXT_LIMIT),
            "nextAction": _next_blind(Refused(message)),
        }
    )


def differs_materially(old: RunStatus | None, new: RunStatus) -> bool:
    """Whether `new` is to be written at once; otherwise it may wait, and if nothing differs at all, for ever."""
    if old is None or any(getattr(old, name) != getattr(new, name) for name in MATERIAL):
        return True
    return _states(old) != _states(new)


# -- inside


def _states(status: RunStatus) -> set[tuple[str, str, str, int]]:
    return {(c.type, c.status, c.reason, c.observed_generation) for c in status.conditions}


def _has_ended(status: RunStatus, generation: int) -> bool:
    return status.observed_generation == generation and any(
        condition.type == "Finished" and condition.status == "True" for condition in status.conditions
    )


def _next_blind(decision: Refused | Freeze | Wait) -> str:
    if isinstance(decision, Wait):
        return "look at the run directory and the cluster"
    if isinstance(decision, Refused):
        return "nothing, until the request is corrected"
    return f"ask {' and '.join(decision.sources)} again; nothing is changed meanwhile"


def _facts(run: TrainingRun, o: Observation, previous: RunStatus | None, now: float) -> dict[str, Any]:
    """What the run directory says, in the names of the status."""
    start = o.current_start
    progress = start.progress if start else None
    plan = o.spec.plan if o.spec else None
    return {
        "step": max(progress.step or 0 if progress else 0, o.committed_step),
        "committedStep": o.committed_step,
        "lastCommitTime": _last_commit(o.committed_step, previous, now),
        "plan": _plan(plan.device_type, plan.slices) if plan else None,
        "perDeviceBatch": plan.per_device_batch if plan else None,
        "attempt": o.attempt,
        "start": o.head.start if o.head else 0,
        "preemptions": sum(ending.cause == "preempted" for ending in o.endings),
        "fingerprint": o.recorded.fingerprint if o.recorded else o.recipe.fingerprint(),
        "endings": tuple(_ending(ending) for ending in o.endings[-ENDINGS_KEPT:]),
    }


def _last_known(previous: RunStatus | None) -> dict[str, Any]:
    """The same from the last status, where nothing could be read."""
    if previous is None:
        return {}
    fields = RunStatus.model_fields
    names = set(fields) - {"observed_generation", "conditions", "message", "next_action", "next_action_time"}
    return {str(fields[name].alias): getattr(previous, name) for name in names}


def _last_commit(committed: int, previous: RunStatus | None, now: float) -> Time | None:
    """When the commit was seen first; not known of one that was there before us."""
    if committed == 0 or previous is None or previous.committed_step is None:
        return None
    return previous.last_commit_time if previous.committed_step == committed else moment(now)


def _plan(device_type: str, slices: int) -> str:
    """Without spaces, for a column."""
    return device_type if slices == 1 else f"{slices}×{device_type}"


def _ending(ending: Ending) -> EndingStatus:
    said = next((fact.value for fact in ending.evidence if fact.field == "reason"), None)
    if said is None and ending.evidence:
        fact = ending.evidence[0]
        said = f"{fact.source}: {fact.field} = {fact.value}"
    return EndingStatus.model_validate(
        {
            "attempt": ending.attempt,
            "start": ending.start,
            "cause": ending.cause,
            "message": _cut(said or "no evidence was left", 256),
            "time": moment(ending.ended),
        }
    )


def _conditions(
    said: Mapping[ConditionType, Said], generation: int, previous: RunStatus | None, now: float
) -> tuple[Condition, ...]:
    """The time of a transition moves with the status of its condition, and with nothing else."""
    before = {condition.type: condition for condition in previous.conditions} if previous else {}

    def since(kind: ConditionType) -> Any:
        old = before.get(kind)
        return old.last_transition_time if old is not None and old.status == said[kind].status else moment(now)

    return tuple(
        Condition.model_validate(
            {
                "type": kind,
                "status": said[kind].status,
                "observedGeneration": generation,
                "lastTransitionTime": since(kind),
                "reason": said[kind].reason,
                "message": _cut(said[kind].message, CONDITION_TEXT_LIMIT),
            }
        )
        for kind in CONDITIONS
    )


def _steady(due: float | None, previous: RunStatus | None) -> Time | None:
    """A due time is computed again at each look; unless it really moved, it stays as it was written."""
    new, old = moment(due), previous.next_action_time if previous else None
    return old if new and old and abs((new - old).total_seconds()) < STEADY_SECONDS else new


def _cut(text: str, limit: int) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
