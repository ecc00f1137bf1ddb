"""TrainingRun: what a user asks for. One source for the YAML of the command line and for the Kubernetes resource.

Strict: an unknown field is an error with the nearest known name. Field names are camelCase in documents and snake_case
in code. Durations are "300s", "5m", "1h30m" or a number of seconds; in code they are seconds. Secrets never stand in a
run: environment values that look like one are refused, and only references are accepted.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, field_validator, model_validator

from orchestrator.document import Document as Document
from orchestrator.durations import Duration as Duration
from orchestrator.durations import parse_duration as parse_duration
from orchestrator.evaluation_fields import Evaluation as Evaluation
from orchestrator.inline_secrets import refuse_inline_secrets as refuse_inline_secrets
from orchestrator.tolerance import Backoff as Backoff
from orchestrator.tolerance import Budgets as Budgets
from orchestrator.tolerance import Hang as Hang
from orchestrator.tolerance import Pause as Pause
from orchestrator.trainer_fields import ENV_LIMIT, RESERVED_ENV, Argument, EnvVar, Trainer
from orchestrator.trainer_fields import TRAINER_COMMAND as TRAINER_COMMAND
from trainer.errors import ConfigurationError
from trainer.settings import InitFrom as InitFromSettings
from trainer.settings import Keep as KeepSettings

API_VERSION = "untildone.dev/v1alpha1"
STEP_LIMIT = 2**31  # the trainer counts steps in 32 bits
NAME_LIMIT = 40  # <run>-a<attempt>-<job>-<index>-<index>-<hash> has to stay below the 63 characters of a DNS label

# Sizes that no sensible run reaches: the API server bounds what checking a document may cost.
LADDER_LIMIT = 16
TEXT_LIMIT = 1024

DNS_LABEL = "[a-z]([-a-z0-9]*[a-z0-9])?"
OBJECT_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"  # a DNS subdomain


class ConfigMapKeyRef(Document):
    """One key of a ConfigMap in the namespace of the run."""

    # A path to something else, in another namespace even, must not be readable with the operator's rights.
    name: str = Field(pattern=f"^{OBJECT_NAME}$", min_length=1, max_length=253, description="name of the ConfigMap")
    key: str = Field(default="recipe.yaml", min_length=1, max_length=253, description="key within it")


class RecipeRef(Document):
    """Which recipe, and what is changed in it: exactly one of name and configMap."""

    name: str | None = Field(
        default=None,
        min_length=1,
        max_length=TEXT_LIMIT,
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

    root: str = Field(
        min_length=1,
        max_length=TEXT_LIMIT,
        description="folder or gs:// prefix that the file paths of the recipe are relative to",
    )


class LadderRung(Document):
    """One rung of the ladder: hardware the run accepts."""

    device_type: str = Field(
        min_length=1, max_length=63, description="a slice: generation and topology, e.g. tpu7x-4x4x4, v5p-4x4x8, cpu-8"
    )
    slices: int = Field(default=1, gt=0, le=1024, description="slices of this type")
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


class InitFrom(Document):
    """Where step 0 comes from when not from the initialiser: exactly one of run, checkpoint and hf."""

    run: str | None = Field(
        default=None,
        min_length=1,
        max_length=TEXT_LIMIT,
        description="run directory of another run: URI, or URI@STEP for an older commit",
    )
    checkpoint: str | None = Field(
        default=None, min_length=1, max_length=TEXT_LIMIT, description="a checkpoint folder written by this trainer"
    )
    hf: str | None = Field(
        default=None,
        min_length=1,
        max_length=TEXT_LIMIT,
        description="folder of a Hugging Face model (Olmo3ForCausalLM, safetensors): weights alone",
    )
    optimizer_state: bool = Field(
        default=True, description="carry the optimizer state over as well; of no effect with hf, which has none"
    )
    step: bool = Field(default=False, description="carry the step counter over as well")

    def settings(self) -> InitFromSettings:
        """The same for the trainer."""
        return InitFromSettings(
            run=self.run,
            checkpoint=self.checkpoint,
            hf=self.hf,
            optimizer_state=self.optimizer_state and self.hf is None,
            step=self.step,
        )

    @model_validator(mode="after")
    def _valid(self) -> Self:
        if sum(source is not None for source in (self.run, self.checkpoint, self.hf)) != 1:
            raise ValueError("give exactly one of run, checkpoint and hf")
        if self.hf is not None and self.step:
            raise ValueError("step: true carries a step counter over, and hf has none; give run, or leave step out")
        if self.step and not self.optimizer_state:
            raise ValueError("step: true needs optimizerState: true")
        return self


class Spec(Document):
    """What is wanted."""

    recipe: RecipeRef = Field(
        description="which recipe, and what is changed in it: exactly one of name and configMap; fixed for the life of the run"
    )
    data: DataRef = Field(description="where the token files are")
    target_step: int = Field(gt=0, lt=STEP_LIMIT, description="the run is done when a commit at this step exists")
    run_directory: str = Field(
        min_length=1,
        max_length=TEXT_LIMIT,
        description="folder or gs:// prefix that belongs to this run alone; fixed for the life of the run",
    )
    ladder: tuple[LadderRung, ...] = Field(
        min_length=1,
        max_length=LADDER_LIMIT,
        description="hardware the run accepts, best first. It begins on the first rung; queued longer than a rung's "
        "waitInQueue it tries another one, and goUp says when it returns to a better one. The global batch is the same on all",
    )
    go_up: GoUp = Field(default=GoUp(), description="when a run on a lower rung of the ladder moves up again")
    checkpoint: Checkpoint = Field(
        default=Checkpoint(), description="how often progress is made durable, and what is kept of it"
    )
    evaluation: Evaluation = Field(default=Evaluation(), description="held-out losses and downstream tasks")
    budgets: Budgets = Field(
        default=Budgets(),
        description="endings tolerated per cause since the last new commit: a number or unlimited. One more and the run gives up",
    )
    backoff: Backoff = Field(
        default=Backoff(),
        description="pause before the next attempt after a failure, doubled each time; after a preemption there is none",
    )
    hang: Hang = Field(
        default=Hang(),
        description="when no progress is a hang: the trainer's watchdog acts on these, untildone itself on twice as much",
    )
    grace_period: Duration = Field(default=30, gt=0, description="time between SIGTERM and SIGKILL")
    progress_every: Duration = Field(default=10, gt=0, description="how often the trainer reports")
    log_every: Duration = Field(default=60, gt=0, description="the step log is made durable at least this often")
    compile_cache: str | None = Field(
        default=None,
        min_length=1,
        max_length=TEXT_LIMIT,
        description="folder of compiled programs; default: cache/compile in the run directory",
    )
    init_from: InitFrom | None = Field(
        default=None, description="start from another run or a checkpoint; fixed for the life of the run"
    )
    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=TEXT_LIMIT,
        description="container image of the trainer, best with its digest; not used by the local cluster",
    )
    command: tuple[Argument, ...] = Field(
        default=TRAINER_COMMAND, min_length=1, max_length=ENV_LIMIT, description="command of the trainer's containers"
    )
    env: tuple[EnvVar, ...] = Field(
        default=(), max_length=ENV_LIMIT, description="environment of the trainer; secrets by reference only"
    )
    queue: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="Kueue LocalQueue in the namespace of the run; not used by the local cluster",
    )
    priority_class: str | None = Field(
        default=None, min_length=1, max_length=253, description="Kueue WorkloadPriorityClass"
    )
    service_account: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="service account of the trainer's pods, for access to the buckets",
    )
    pod_template: dict[str, Any] = Field(
        default_factory=dict,
        description="merged into the trainer's pod template (metadata and spec; containers by name, the trainer's is "
        "called trainer); refused where it would break what untildone relies on",
    )
    trainer: Trainer = Field(
        default=Trainer(), description="the contract between untildone and the program in the image"
    )
    suspend: bool = Field(default=False, description="stop at a commit and stay stopped until it is false again")
    suspend_reason: str | None = Field(
        default=None, max_length=TEXT_LIMIT, description="shown while suspended: who, and why; goes with suspend: true"
    )

    @field_validator("pod_template")
    @classmethod
    def _is_a_template(cls, template: dict[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(template) - {"metadata", "spec"})
        if unknown:
            raise ValueError(f"{unknown[0]}: no part of a pod template, which has metadata and spec")
        for part, value in template.items():
            if not isinstance(value, dict):
                raise ValueError(f"{part} is a mapping")
        unknown = sorted(set(template.get("metadata", {})) - {"labels", "annotations"})
        if unknown:
            raise ValueError(f"metadata.{unknown[0]}: only labels and annotations can be set here")
        return template

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        evaluation = self.evaluation
        for name, every in (("everySteps", evaluation.every_steps), ("tasksEverySteps", evaluation.tasks_every_steps)):
            if every and every % self.checkpoint.every_steps:
                raise ValueError(
                    f"evaluation.{name} {every} must be a multiple of checkpoint.everySteps "
                    f"{self.checkpoint.every_steps}: evaluations belong to commits"
                )
        names = [variable.name for variable in self.env]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"env names {', '.join(twice)} twice")
        reserved = sorted(name for name in names if name.startswith(RESERVED_ENV))
        if reserved:
            raise ValueError(
                f"env {', '.join(reserved)}: names that begin with {RESERVED_ENV} are set by untildone; choose another"
            )
        rungs = [(rung.device_type, rung.slices) for rung in self.ladder]
        if len(set(rungs)) != len(rungs):
            raise ValueError("ladder names the same deviceType and slices twice; keep one of them")
        if self.suspend_reason is not None and not self.suspend:
            raise ValueError("suspendReason goes with suspend: true; set it, or remove the reason")
        return self

    def keep(self) -> KeepSettings:
        """Retention for the trainer."""
        keep = self.checkpoint.keep
        return KeepSettings(last=keep.last, every=keep.every, min_age_seconds=keep.min_age)


class Metadata(Document):
    """Name of the run."""

    name: str = Field(description=f"DNS label of at most {NAME_LIMIT} characters; gangs are called <name>-a<attempt>")
    namespace: str | None = Field(default=None, description="namespace in Kubernetes")
    uid: str | None = Field(default=None, description="set by Kubernetes")
    generation: int | None = Field(default=None, description="set by Kubernetes")
    labels: dict[str, str] = Field(default_factory=dict, description="for people and selectors")
    annotations: dict[str, str] = Field(default_factory=dict, description="for people and tools")

    @model_validator(mode="after")
    def _label(self) -> Self:
        if not re.fullmatch(DNS_LABEL, self.name) or len(self.name) > NAME_LIMIT:
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


def from_object(obj: Mapping[str, Any]) -> TrainingRun:
    """The TrainingRun in an object that the API server gave. Raises ConfigurationError naming object, field and fix.

    Of its metadata the name, namespace, uid, generation, labels and annotations are kept; its status is not read.
    """
    metadata, spec = obj.get("metadata") or {}, obj.get("spec") or {}
    source = f"TrainingRun {metadata.get('namespace')}/{metadata.get('name')}"
    refuse_inline_secrets({"spec": spec}, source)
    known = {str(field.alias) for field in Metadata.model_fields.values()}
    kept = {key: value for key, value in metadata.items() if key in known}
    document = {"apiVersion": obj.get("apiVersion"), "kind": obj.get("kind"), "metadata": kept, "spec": spec}
    return TrainingRun.parse(document, source)


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
