"""The status of a TrainingRun: conditions, not a phase, and the few numbers that lists show.

STATUS in lists is the reason of the condition Succeeded. Everything here is for people and tools: nothing is decided by
it, and the run directory keeps the whole history. conditions.py says what the conditions mean.
"""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainSerializer, ValidationError

from orchestrator.document import Document

ConditionType = Literal[
    "Ready", "Succeeded", "Finished", "Admitted", "Training", "Suspended", "Degraded", "Stalled", "Reconciling"
]
CONDITIONS: tuple[ConditionType, ...] = (
    "Ready",
    "Succeeded",
    "Finished",
    "Admitted",
    "Training",
    "Suspended",
    "Degraded",
    "Stalled",
    "Reconciling",
)
Truth = Literal["True", "False", "Unknown"]
ENDINGS_KEPT = 10
TEXT_LIMIT = 1024

Timestamp = PlainSerializer(lambda moment: moment.strftime("%Y-%m-%dT%H:%M:%SZ"), when_used="json")
Time = Annotated[datetime, Timestamp]
Text = Annotated[str, Field(max_length=TEXT_LIMIT)]


class Condition(Document):
    """One aspect of the state of the run."""

    type: ConditionType = Field(description="which aspect")
    status: Truth = Field(description="True, False or Unknown")
    observed_generation: int = Field(ge=0, description="metadata.generation of the spec that this is about")
    last_transition_time: Time = Field(description="when status changed last")
    reason: str = Field(
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        description="one word for programs; that of Succeeded is the STATUS of lists",
    )
    message: str = Field(max_length=4096, description="one sentence for people")


class EndingStatus(Document):
    """One entry of the ledger: how a start of the run ended."""

    attempt: int = Field(description="attempt that ended")
    start: int | None = Field(default=None, description="start within the attempt; absent: it ended before one")
    cause: str = Field(max_length=64, description="why it ended, e.g. preempted, host-failure, application-error")
    message: str = Field(max_length=TEXT_LIMIT, description="the evidence that decided the cause")
    time: Time | None = Field(default=None, description="when it ended")


class AcceptedSpec(Document):
    """The spec that counts, whole: an operator that comes later goes on with it when the newest one is refused."""

    generation: int = Field(ge=0, description="metadata.generation that it stood in")
    spec: str = Field(max_length=262144, description="the spec, as JSON")


class RunStatus(Document):
    """What untildone last saw of the run."""

    observed_generation: int = Field(ge=0, description="metadata.generation of the spec that this status is about")
    conditions: tuple[Condition, ...] = Field(
        max_length=32,
        description="Ready: the spec is accepted and the run looked after, true while it trains. Succeeded: the target "
        "is committed; its reason is the STATUS of lists. Finished: the run has ended either way. Admitted: the queue "
        "gave room. Training: steps advance. Suspended: stopped by spec.suspend. Degraded: an alarm about the data is "
        "open, or it runs on a lower rung of the ladder than the first. Stalled: no new commit although it may run. Reconciling: the spec is not applied yet",
    )
    step: int | None = Field(default=None, ge=0, description="last completed step")
    target_step: int | None = Field(default=None, ge=0, description="the step that makes the run done")
    committed_step: int | None = Field(default=None, ge=0, description="the step that a resumed run continues from")
    last_commit_time: Time | None = Field(default=None, description="when untildone saw the last commit")
    plan: str | None = Field(default=None, max_length=128, description="hardware of the current attempt")
    per_device_batch: int | None = Field(
        default=None, ge=0, description="instances per device and step: micro-batch × accumulation"
    )
    attempt: int | None = Field(default=None, ge=0, description="number of the current attempt")
    start: int | None = Field(default=None, ge=0, description="number of the current start within the attempt")
    queue: str | None = Field(default=None, max_length=253, description="Kueue LocalQueue")
    preemptions: int | None = Field(
        default=None, ge=0, description="endings because the machines were taken back, in the whole ledger"
    )
    message: str | None = Field(default=None, max_length=TEXT_LIMIT, description="what the run does or waits for")
    next_action: str | None = Field(default=None, max_length=TEXT_LIMIT, description="what untildone does next")
    next_action_time: Time | None = Field(default=None, description="when; absent: as soon as there is news")
    fingerprint: str | None = Field(default=None, max_length=128, description="fingerprint of the recipe")
    accepted: AcceptedSpec | None = Field(
        default=None, description="the spec that counts; that of an earlier generation while the newest one is refused"
    )
    endings: tuple[EndingStatus, ...] = Field(
        default=(),
        max_length=ENDINGS_KEPT,
        description="the last endings, oldest first; the run directory has all of them",
    )

    def condition(self, kind: ConditionType) -> Condition:
        """The condition of this type."""
        return next(condition for condition in self.conditions if condition.type == kind)

    def to_object(self) -> dict[str, Any]:
        """As it stands in the object's status: camelCase, times in RFC 3339, nothing that is not known."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @classmethod
    def of(cls, obj: dict[str, Any]) -> Self | None:
        """The status that `obj`, from the API server, has; None when there is none or not one of ours.

        Fields of other versions are left out: nothing depends on reading back what was written.
        """
        written = obj.get("status") or {}
        known = {str(field.alias) for field in cls.model_fields.values()}
        try:
            return cls.model_validate({key: value for key, value in written.items() if key in known})
        except ValidationError:
            return None


def moment(seconds: float | None) -> datetime | None:
    """UNIX seconds as a time in UTC, to the second: what is written is what is read back."""
    return None if seconds is None else datetime.fromtimestamp(int(seconds), UTC)
