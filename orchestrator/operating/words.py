"""What the operator adds to the words of conditions: a spec that is refused while the last one goes on, missing rights."""

from dataclasses import replace
from datetime import datetime
from typing import Any

from orchestrator.api import TrainingRun
from orchestrator.daemon import Look
from orchestrator.decisions import Freeze, Refused
from orchestrator.status import RunStatus
from orchestrator.status_model import Condition, ConditionType, moment

NOT_ALLOWED = "not allowed: needed"
RIGHTS = (
    "; the Helm values rbac.create, rbac.clusterWide and watchNamespaces decide what the operator may do, and "
    "`untildone doctor` lists what is missing"
)


def with_rights(message: str) -> str:
    """`message`, and where a missing right comes from."""
    return message + RIGHTS if NOT_ALLOWED in message and RIGHTS not in message else message


def explained(look: Look, take_over: str) -> Look:
    """`look` with the fix for a right that is missing, and with what here stands for --take-over."""
    decision = look.decision
    if isinstance(decision, (Freeze, Refused)):
        message = with_rights(decision.message).replace("with --take-over", f"with: {take_over}")
        return replace(look, decision=replace(decision, message=message))
    return look


def of_generation(run: TrainingRun, generation: int) -> TrainingRun:
    """`run` as if it stood in that generation of the object: for the observedGeneration of a status."""
    return run.model_copy(update={"metadata": run.metadata.model_copy(update={"generation": generation})})


def refused_message(message: str, accepted: int) -> str:
    """Of a spec that is refused while an earlier generation goes on to count."""
    return f"{message}. Nothing was changed: the run goes on as generation {accepted} of its spec wants it"


def with_refusal(status: RunStatus, message: str, previous: RunStatus | None, now: float) -> RunStatus:
    """`status`, of a run that is looked after, when the spec that stands in the object is refused."""
    wanted: dict[ConditionType, str] = {"Ready": "False", "Stalled": "True", "Reconciling": "False"}
    return status.model_copy(
        update={
            "conditions": tuple(
                _said(condition, wanted[condition.type], message, previous, now)
                if condition.type in wanted
                else condition
                for condition in status.conditions
            )
        }
    )


def _said(condition: Condition, truth: str, message: str, previous: RunStatus | None, now: float) -> Condition:
    old = previous.condition(condition.type) if previous is not None else None
    since: datetime | None = old.last_transition_time if old is not None and old.status == truth else moment(now)
    changes: dict[str, Any] = {"status": truth, "reason": "Refused", "message": message, "last_transition_time": since}
    return condition.model_copy(update=changes)
