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


class RecipeRef(Document):
    """Which recipe, and what is changed in it."""

    name: str = Field(description="a recipe of trainer/recipes, or a path to a .py file with a function recipe()")
    overrides: dict[str, Any] = Field(default_factory=dict, description="dotted recipe fields, e.g. model.n_layers: 4")


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


class Backoff(Document):
    """Pause before the next attempt after a failure; doubled each time. Preemption has none."""

    initial: Duration = Field(default=5, description="after the first failure without a new commit")
    max: Duration = Field(default=300, description="never longer than this, jitter included")
    jitter: float = Field(
        default=0.2, ge=0, le=1, description="share of the pause that is random, so that runs do not return together"
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
    """Where step 0 comes from when not from the initialiser: exactly one of run and checkpoint."""

    run: str | None = Field(
        default=None, description="run directory of another run: URI, or URI@STEP for an older commit"
    )
    checkpoint: str | None = Field(default=None, description="a checkpoint folder written by this trainer")
    optimizer_state: bool = Field(default=True, description="carry the optimizer state over as well")
    step: bool = Field(default=False, description="carry the step counter over as well")

    def settings(self) -> InitFromSettings:
        """The same for the trainer."""
        return InitFromSettings(
            run=self.run, checkpoint=self.checkpoint, optimizer_state=self.optimizer_state, step=self.step
        )

    @model_validator(mode="after")
    def _valid(self) -> Self:
        if (self.run is None) == (self.checkpoint is None):
            raise ValueError("give exactly one of run and checkpoint")
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
    env: tuple[EnvVar, ...] = Field(default=(), description="environment of the trainer")
    suspend: bool = Field(default=False, description="stop at a commit and stay stopped until it is false again")

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


# Prefixes and shapes of credentials in common use, and names whose plain value is one for certain.
_TOKEN = re.compile(
    r"hf_[A-Za-z0-9]{8,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|xox[abprs]-[\w-]{8,}|AKIA[A-Z0-9]{12,}|ASIA[A-Z0-9]{12,}"
    r"|AIza[\w-]{20,}|ya29\.[\w-]{16,}|eyJ[\w-]{8,}\.[\w-]{8,}\.|-----BEGIN [A-Z ]*PRIVATE KEY|[Bb]earer\s+\S{8,}|[a-z]+://[^/\s:@]+:[^/\s@]+@"
)
_SECRET_NAME = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY)$", re.IGNORECASE
)
_PATH = re.compile(r"[/.~][\w./-]*")  # a path to a mounted secret is a reference, not a secret


def refuse_inline_secrets(data: Mapping[str, Any], source: str) -> None:
    """Raises ConfigurationError when a value anywhere looks like a credential. The value itself is never repeated."""
    spec = data.get("spec")
    env = spec.get("env") if isinstance(spec, Mapping) else None
    for index, variable in enumerate(env if isinstance(env, list) else ()):
        if not isinstance(variable, Mapping):
            continue
        name, value = str(variable.get("name", "")), variable.get("value")
        if isinstance(value, str) and value and _SECRET_NAME.search(name) and not _PATH.fullmatch(value):
            raise ConfigurationError(_secret_error(f"{source}: spec.env.{index}.value ({name})"))
    for field, value in _strings(data, ""):
        if _TOKEN.search(value):
            raise ConfigurationError(_secret_error(f"{source}: {field}"))


def _secret_error(where: str) -> str:
    return (
        f"{where}: looks like a secret, and a secret in a spec can be read by everybody who can read the run; "
        "put it into a Secret and refer to it: "
        "env: [{name: NAME, valueFrom: {secretKeyRef: {name: SECRET, key: KEY}}}]"
    )


def _strings(node: Any, path: str) -> list[tuple[str, str]]:
    """Every string below `node` with its dotted path."""
    if isinstance(node, str):
        return [(path, node)]
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    return [pair for key, value in items for pair in _strings(value, f"{path}.{key}" if path else str(key))]
