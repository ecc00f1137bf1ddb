"""What a run puts up with: endings per cause, pauses between attempts, and how long nothing may happen."""

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, field_validator

from orchestrator.document import Document
from orchestrator.durations import Duration
from trainer.rundir.records import Category

UNLIMITED = "unlimited"


def parse_budget(value: object) -> object:
    """None for "unlimited"; anything else as it is. Not null: Kubernetes takes that for a field that was left out."""
    if value == UNLIMITED:
        return None
    if not isinstance(value, int):
        raise ValueError(f"a budget is a number of endings, or {UNLIMITED}")
    if value < 0:
        raise ValueError(f"a budget is 0 or more endings, or {UNLIMITED}")
    return value


Budget = Annotated[int | None, BeforeValidator(parse_budget, json_schema_input_type=str | int)]


class Budgets(Document):
    """Endings tolerated per cause since the last new commit; a number or unlimited. One more and the run gives up."""

    preempted: Budget = Field(default=None, description="the queue, or whoever owns the machines, took them back")
    maintenance: Budget = Field(default=None, description="announced work on a host")
    plan_change: Budget = Field(default=None, description="stopped by untildone to move to another rung")
    host_failure: Budget = Field(default=None, description="a host or its devices died; noNewCommit bounds these too")
    hang: Budget = Field(default=10, description="alive, but no step any more")
    storage: Budget = Field(default=20, description="the store was full or did not answer")
    application_error: Budget = Field(default=3, description="the training program failed by itself")
    bad_configuration: Budget = Field(default=0, description="trying again cannot help")
    non_finite: Budget = Field(default=2, description="the loss was NaN or infinite")
    mixed_gang: Budget = Field(default=5, description="processes of different attempts met")
    fenced: Budget = Field(default=None, description="an older start found that it had been replaced")
    deactivated: Budget = Field(default=5, description="the queue or a person switched the gang off for good")
    gone: Budget = Field(default=10, description="somebody deleted the gang")
    unknown: Budget = Field(default=10, description="the evidence does not say")
    no_new_commit: int = Field(
        default=10,
        gt=0,
        description="give up after this many endings in a row without a new commit, whatever their causes; "
        "preemption, maintenance and storage outages are not counted",
    )

    def of(self, cause: Category) -> int | None:
        """Endings of `cause` that are tolerated; None is unlimited."""
        value = getattr(self, cause.replace("-", "_"), None)
        return value if isinstance(value, int) else None


CAUSES = tuple(
    str(field.alias) for name, field in Budgets.model_fields.items() if name != "no_new_commit"
)  # as written in documents


class Pause(Document):
    """Another pause for one cause; what is not given is as in the rest of backoff."""

    initial: Duration | None = Field(default=None, description="after the first such failure without a new commit")
    max: Duration | None = Field(default=None, description="never longer than this, jitter included")
    jitter: float | None = Field(default=None, ge=0, le=1, description="share of the pause that is random")


class Backoff(Document):
    """Pause before the next attempt after a failure; doubled each time. Preemption has none."""

    initial: Duration = Field(default=5, description="after the first failure without a new commit")
    max: Duration = Field(default=300, description="never longer than this, jitter included")
    jitter: float = Field(
        default=0.2, ge=0, le=1, description="share of the pause that is random, so that runs do not return together"
    )
    causes: dict[str, Pause] = Field(
        default_factory=dict,
        max_length=len(CAUSES),
        description="another pause by cause, named as in budgets, e.g. storage: {initial: 30s}",
    )

    @field_validator("causes")
    @classmethod
    def _known(cls, causes: dict[str, Pause]) -> dict[str, Pause]:
        unknown = sorted(set(causes) - set(CAUSES))
        if unknown:
            raise ValueError(f"no such cause: {', '.join(unknown)}; causes: {', '.join(CAUSES)}")
        return causes

    def of(self, cause: Category) -> Self:
        """The pause after an ending by `cause`."""
        first, *rest = cause.split("-")
        own = self.causes.get(first + "".join(part.capitalize() for part in rest))
        if own is None:
            return self
        given = {name: value for name, value in own if value is not None}
        return self.model_copy(update=given)


class Hang(Document):
    """When no progress is a hang. The trainer's watchdog acts on these; untildone itself on twice as much."""

    step: Duration = Field(default=600, gt=0, description="no step for this long")
    start: Duration = Field(
        default=1800, gt=0, description="no first step for this long: joining, restoring, compiling"
    )
    heartbeat: Duration = Field(
        default=30, ge=1, description="a process that its peers have not heard for this long is dead to them"
    )
