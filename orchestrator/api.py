"""TrainingRun: what a user asks for. One source for the YAML of the command line and for the Kubernetes resource.

Strict: an unknown field is an error with the nearest known name. Field names are camelCase in documents and snake_case
in code. Durations are "300s", "5m", "1h30m" or a number of seconds; in code they are seconds. Secrets never stand in a
run: environment values that look like one are refused, and only references are accepted.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.alias_generators import to_camel

from orchestrator.inline_secrets import refuse_inline_secrets as refuse_inline_secrets
from trainer.errors import ConfigurationError
from trainer.frozen import Frozen
from trainer.rundir.records import Category
from trainer.settings import InitFrom as InitFromSettings
from trainer.settings import Keep as KeepSettings

API_VERSION = "untildone.dev/v1alpha1"
LONGEST_SECONDS = 10 * 365 * 86400.0  # what is longer is a slip of the pen, and no timer takes it
STEP_LIMIT = 2**31  # the trainer counts steps in 32 bits
NAME_LIMIT = 40  # <run>-a<attempt>-<job>-<index>-<index>-<hash> has to stay below the 63 characters of a DNS label

_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def parse_duration(value: object) -> float:
    """Seconds of "300s", "5m", "1h30m", "2d", or of a number. Raises ValueError with the accepted forms."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    else:
        match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) and value.strip() else None
        if match is None:
            raise ValueError('not a duration; write it as "300s", "5m", "1h30m", or a number of seconds')
        seconds = sum(float(part or 0) * unit for part, unit in zip(match.groups(), (86400, 3600, 60, 1), strict=True))
    if not 0 <= seconds <= LONGEST_SECONDS:
        raise ValueError("a duration is between 0 and ten years")
    return seconds


Duration = Annotated[float, BeforeValidator(parse_duration, json_schema_input_type=str | float)]


class Document(Frozen):
    """Part of a TrainingRun: camelCase only."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=False, validate_by_alias=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """YAML's true, yes and on would otherwise count as 1."""
        wanted = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and wanted is not bool:
            raise ValueError("true and false (also yes, no, on, off) are no value for this field")
        return value


class ConfigMapKeyRef(Document):
    """One key of a ConfigMap in the namespace of the run."""

    name: str = Field(description="name of the ConfigMap")
    key: str = Field(default="recipe.yaml", description="key within it")


class RecipeRef(Document):
    """Which recipe, and what is changed in it: exactly one of name and configMap."""

    name: str | None = Field(
        default=None,
        description="a recipe that comes with untildone; outside Kubernetes also a path to a .py file with recipe()",
    )
    config_map: ConfigMapKeyRef | None = Field(
        default=None, description="a recipe written out as a YAML or JSON document (data, not code)"
    )
    overrides: dict[str, Any] = Field(default_factory=dict, description="dotted recipe fields, e.g. model.n_layers: 4")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.name is None) == (self.config_map is None):
            raise ValueError("give exactly one of name and configMap")
        return self


class DataRef(Document):
    """Where the token files are."""

    root: str = Field(description="folder or gs:// prefix that the file paths of the recipe are relative to")


class LadderRung(Document):
    """One rung of the ladder: hardware the run accepts."""

    device_type: str = Field(description="for example tpu7x-4x4x4, v5p-4x4x8, cpu-8")
    slices: int = Field(default=1, gt=0, description="slices of this type")
    wait_in_queue: Duration = Field(default=300, description="queued longer than this: the next rung is tried")


class GoUp(Document):
    """When a run on a lower rung moves up again."""

    after: Duration = Field(
        default=600, description="capacity for the upper rung must have been there this long without a break"
    )
    every: Duration = Field(default=21600, description="at most one move up within this time")


class Keep(Document):
    """Which commits garbage collection leaves. HEAD and its two ancestors always stay."""

    last: int = Field(default=3, ge=1, description="newest commits to keep")
    every: int | None = Field(
        default=None, gt=0, description="keep each commit whose step is a multiple of this, for ever"
    )
    min_age: Duration = Field(default=3600, description="younger commits are never collected")


class Checkpoint(Document):
    """How often progress is made durable."""

    every_steps: int = Field(default=2000, gt=0, description="steps between commits")
    keep: Keep = Keep()


class Evaluation(Document):
    """Held-out evaluation."""

    every_steps: int | None = Field(
        default=None, gt=0, description="steps between evaluations, a multiple of checkpoint.everySteps"
    )


class Budgets(Document):
    """Endings tolerated per cause since the last new commit; null is unlimited. One more and the run gives up."""

    preempted: int | None = Field(
        default=None, ge=0, description="the queue, or whoever owns the machines, took them back"
    )
    maintenance: int | None = Field(default=None, ge=0, description="announced work on a host")
    plan_change: int | None = Field(default=None, ge=0, description="stopped by untildone to move to another rung")
    host_failure: int | None = Field(default=50, ge=0, description="a host or its devices died")
    hang: int | None = Field(default=10, ge=0, description="alive, but no step any more")
    storage: int | None = Field(default=20, ge=0, description="the store was full or did not answer")
    application_error: int | None = Field(default=3, ge=0, description="the training program failed by itself")
    bad_configuration: int | None = Field(default=0, ge=0, description="trying again cannot help")
    non_finite: int | None = Field(default=2, ge=0, description="the loss was NaN or infinite")
    mixed_gang: int | None = Field(default=5, ge=0, description="processes of different attempts met")
    fenced: int | None = Field(default=None, ge=0, description="an older start found that it had been replaced")
    deactivated: int | None = Field(default=5, ge=0, description="the queue or a person switched the gang off for good")
    gone: int | None = Field(default=10, ge=0, description="somebody deleted the gang")
    unknown: int | None = Field(default=10, ge=0, description="the evidence does not say")
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
        default_factory=dict, description="by cause, named as in budgets, e.g. storage: {initial: 30s}"
    )


class Hang(Document):
    """When no progress is a hang. The trainer's watchdog acts on these; untildone itself on twice as much."""

    step: Duration = Field(default=600, gt=0, description="no step for this long")
    start: Duration = Field(
        default=1800, gt=0, description="no first step for this long: joining, restoring, compiling"
    )
    heartbeat: Duration = Field(
        default=30, ge=1, description="a process that its peers have not heard for this long is dead to them"
    )


class InitFrom(Document):
    """Where step 0 comes from when not from the initialiser: exactly one of run, checkpoint and hf."""

    run: str | None = Field(
        default=None, description="run directory of another run: URI, or URI@STEP for an older commit"
    )
    checkpoint: str | None = Field(default=None, description="a checkpoint folder written by this trainer")
    hf: str | None = Field(default=None, description="a folder in Hugging Face's format; not built yet, and refused")
    optimizer_state: bool = Field(default=True, description="carry the optimizer state over as well")
    step: bool = Field(default=False, description="carry the step counter over as well")

    def settings(self) -> InitFromSettings:
        """The same for the trainer."""
        return InitFromSettings(
            run=self.run, checkpoint=self.checkpoint, optimizer_state=self.optimizer_state, step=self.step
        )

    @model_validator(mode="after")
    def _valid(self) -> Self:
        if sum(source is not None for source in (self.run, self.checkpoint, self.hf)) != 1:
            raise ValueError("give exactly one of run, checkpoint and hf")
        if self.hf is not None:
            raise ValueError("hf: reading Hugging Face folders is not built yet; give run or checkpoint")
        if self.step and not self.optimizer_state:
            raise ValueError("step: true needs optimizerState: true")
        return self


class SecretKeyRef(Document):
    """One key of a Kubernetes Secret in the namespace of the run."""

    name: str = Field(description="name of the Secret")
    key: str = Field(description="key within it")


class ValueFrom(Document):
    """Where an environment value comes from."""

    secret_key_ref: SecretKeyRef


class EnvVar(Document):
    """One environment variable of the trainer: exactly one of value and valueFrom."""

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    value: str | None = Field(default=None, description="plain text; never a secret")
    value_from: ValueFrom | None = Field(default=None, description="a reference to a secret")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.value is None) == (self.value_from is None):
            raise ValueError("give exactly one of value and valueFrom")
        return self


class Trainer(Document):
    """The contract between untildone and the program in the image."""

    contract: Literal["untildone", "orbax"] = Field(
        default="untildone", description="orbax, for any program that writes Orbax checkpoints, is not built yet"
    )

    @model_validator(mode="after")
    def _built(self) -> Self:
        if self.contract != "untildone":
            raise ValueError("contract orbax is not built yet; use untildone, with this project's trainer in the image")
        return self


TRAINER_COMMAND = ("python", "-m", "trainer", "train")


class Spec(Document):
    """What is wanted."""

    recipe: RecipeRef
    data: DataRef
    target_step: int = Field(gt=0, lt=STEP_LIMIT, description="the run is done when a commit at this step exists")
    run_directory: str = Field(description="folder or gs:// prefix that belongs to this run alone")
    ladder: tuple[LadderRung, ...] = Field(min_length=1, description="accepted hardware, best first")
    go_up: GoUp = GoUp()
    checkpoint: Checkpoint = Checkpoint()
    evaluation: Evaluation = Evaluation()
    budgets: Budgets = Budgets()
    backoff: Backoff = Backoff()
    hang: Hang = Hang()
    grace_period: Duration = Field(default=30, gt=0, description="time between SIGTERM and SIGKILL")
    progress_every: Duration = Field(default=10, gt=0, description="how often the trainer reports")
    log_every: Duration = Field(default=60, gt=0, description="the step log is made durable at least this often")
    compile_cache: str | None = Field(
        default=None, description="folder of compiled programs; default: cache/compile in the run directory"
    )
    init_from: InitFrom | None = Field(default=None, description="start from another run or a checkpoint")
    image: str | None = Field(
        default=None, description="container image with its digest; not used by the local cluster"
    )
    command: tuple[str, ...] = Field(
        default=TRAINER_COMMAND, min_length=1, description="command of the trainer's containers"
    )
    env: tuple[EnvVar, ...] = Field(default=(), description="environment of the trainer")
    queue: str | None = Field(
        default=None, description="Kueue LocalQueue in the namespace of the run; not used by the local cluster"
    )
    priority_class: str | None = Field(default=None, description="Kueue WorkloadPriorityClass")
    service_account: str | None = Field(
        default=None, description="service account of the trainer's pods, for access to the buckets"
    )
    pod_template: dict[str, Any] = Field(
        default_factory=dict,
        description="merged into the trainer's pod template (metadata and spec; containers by name, the trainer's is "
        "called trainer); refused where it would break what untildone relies on",
    )
    trainer: Trainer = Trainer()
    suspend: bool = Field(default=False, description="stop at a commit and stay stopped until it is false again")
    suspend_reason: str | None = Field(default=None, description="shown while suspended: who, and why")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        every = self.evaluation.every_steps
        if every and every % self.checkpoint.every_steps:
            raise ValueError(
                f"evaluation.everySteps {every} must be a multiple of checkpoint.everySteps "
                f"{self.checkpoint.every_steps}: evaluations belong to commits"
            )
        names = [variable.name for variable in self.env]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"env names {', '.join(twice)} twice")
        reserved = sorted(name for name in names if name.startswith("UNTILDONE_"))
        if reserved:
            raise ValueError(
                f"env {', '.join(reserved)}: names that begin with UNTILDONE_ are set by untildone; choose another"
            )
        rungs = [(rung.device_type, rung.slices) for rung in self.ladder]
        if len(set(rungs)) != len(rungs):
            raise ValueError("ladder names the same deviceType and slices twice; keep one of them")
        return self

    def keep(self) -> KeepSettings:
        """Retention for the trainer."""
        keep = self.checkpoint.keep
        return KeepSettings(last=keep.last, every=keep.every, min_age_seconds=keep.min_age)


class Metadata(Document):
    """Name of the run."""

    name: str = Field(description=f"DNS label of at most {NAME_LIMIT} characters; gangs are called <name>-a<attempt>")
    namespace: str | None = None
    uid: str | None = Field(default=None, description="set by Kubernetes")
    generation: int | None = Field(default=None, description="set by Kubernetes")
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _label(self) -> Self:
        if not _DNS_LABEL.fullmatch(self.name) or len(self.name) > NAME_LIMIT:
            raise ValueError(
                f"name {self.name!r} must be a DNS label: lower-case letters, digits and '-', "
                f"beginning with a letter, at most {NAME_LIMIT} characters"
            )
        return self


class TrainingRun(Document):
    """One training run to a target step."""

    api_version: Literal["untildone.dev/v1alpha1"]
    kind: Literal["TrainingRun"]
    metadata: Metadata
    spec: Spec

    @property
    def name(self) -> str:
        return self.metadata.name

    def gang(self, attempt: int) -> str:
        """Name of the gang of `attempt`: derived, so that a second submission collides instead of doubling."""
        return f"{self.name}-a{attempt}"


def parse_run(data: Any, source: str) -> TrainingRun:
    """A TrainingRun from a parsed document. Raises ConfigurationError naming `source`, the field and the fix."""
    if not isinstance(data, Mapping):
        raise ConfigurationError(
            f"{source}: a TrainingRun is a mapping with apiVersion, kind, metadata and spec, not {type(data).__name__}"
        )
    refuse_inline_secrets(data, source)
    return TrainingRun.parse(data, source)


def load_run(path: str | Path) -> TrainingRun:
    """The TrainingRun in the YAML file `path`. Raises ConfigurationError naming file, field and fix."""
    source = str(path)
    try:
        documents = [d for d in yaml.safe_load_all(Path(path).read_text(encoding="utf-8")) if d is not None]
    except FileNotFoundError:
        raise ConfigurationError(f"{source}: no such file; give the YAML file of a TrainingRun") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{source}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}" if where is not None else ""
        raise ConfigurationError(f"{source}:{line} not YAML: {getattr(error, 'problem', None) or error}") from None
    if len(documents) != 1:
        raise ConfigurationError(f"{source}: holds {len(documents)} documents; one TrainingRun per file")
    return parse_run(documents[0], source)
