"""What an attempt is told besides recipe and plan: target, intervals, limits. Not part of the fingerprint.

Recorded in attempts/<n>/spec.json. Importable without JAX.
"""

from typing import Any

from pydantic import Field, model_validator

from trainer.evaluation_settings import Evaluation
from trainer.frozen import Frozen


class Keep(Frozen):
    """Which commits garbage collection leaves. HEAD, its two ancestors and pinned ones always stay."""

    last: int = Field(default=3, ge=1)
    every: int | None = Field(
        default=None, gt=0, description="keep each commit whose step is a multiple of this, for ever"
    )
    min_age_seconds: float = Field(default=3600, ge=0)


class InitFrom(Frozen):
    """Where step 0 comes from when not from the initialiser: exactly one of `run`, `checkpoint` and `hf`."""

    run: str | None = Field(
        default=None, description="run directory of another run: URI, or URI@STEP for an older commit"
    )
    checkpoint: str | None = Field(default=None, description="a checkpoint folder written by this trainer")
    hf: str | None = Field(default=None, description="folder of an Olmo3ForCausalLM in safetensors: weights alone")
    optimizer_state: bool = Field(default=True, description="false with hf, which has none")
    step: bool = Field(default=False, description="carry step counter and skip window over as well")

    @model_validator(mode="before")
    @classmethod
    def _weights_alone(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("hf") is not None:
            return {"optimizer_state": False, **given}
        return given

    @model_validator(mode="after")
    def _one(self) -> "InitFrom":
        if sum(source is not None for source in (self.run, self.checkpoint, self.hf)) != 1:
            raise ValueError("give exactly one of run, checkpoint and hf")
        if self.hf is not None and self.optimizer_state:
            raise ValueError("hf has no optimizer state; leave optimizer_state out")
        if self.step and not self.optimizer_state:
            raise ValueError("step: true needs optimizer_state: true; a step counter without its moments is no resume")
        return self


class Settings(Frozen):
    """Limits and intervals of one attempt."""

    target_step: int = Field(gt=0)
    data_root: str = Field(description="folder or gs:// prefix that the recipe's file paths are relative to")
    commit_every: int = Field(default=2000, gt=0, description="steps between commits")
    keep: Keep = Keep()
    evaluate_every: int | None = Field(
        default=None, gt=0, description="steps between held-out evaluations; a multiple of commit_every"
    )
    evaluation: Evaluation = Evaluation()
    held_out_same_text: bool = Field(
        default=False,
        description="the held-out text was split off the training text at random: the memorisation alarm sees more",
    )
    grace_seconds: float = Field(default=30, gt=0, description="time between SIGTERM and SIGKILL")
    hang_step_seconds: float = Field(
        default=600, gt=0, description="no step for this long: the watchdog ends the process"
    )
    hang_start_seconds: float = Field(
        default=1800, gt=0, description="the same until the first step: rendezvous, restore, compile"
    )
    heartbeat_timeout_seconds: int = Field(
        default=30, gt=0, description="coordination service: a silent peer is dead after this"
    )
    progress_seconds: float = Field(default=10, gt=0)
    log_seconds: float = Field(
        default=60, gt=0, description="the step log is made durable at least this often, and at every commit"
    )
    compile_cache: str | None = Field(default=None, description="folder or gs:// prefix of compiled programs")
    init_from: InitFrom | None = None

    @property
    def tasks_every(self) -> int | None:
        """Steps between downstream evaluations; None: there are none."""
        return (self.evaluation.tasks_every or self.evaluate_every) if self.evaluation.tasks else None

    @model_validator(mode="after")
    def _aligned(self) -> "Settings":
        for name, every in (
            ("evaluate_every", self.evaluate_every),
            ("evaluation.tasks_every", self.evaluation.tasks_every),
        ):
            if every and every % self.commit_every:
                raise ValueError(
                    f"{name} {every} must be a multiple of commit_every {self.commit_every}: evaluations belong to commits"
                )
        if self.evaluation.sets and not self.evaluate_every:
            raise ValueError(
                "evaluation.sets says what to evaluate, but evaluate_every is not set: after how many steps?"
            )
        if self.evaluation.tasks and not self.tasks_every:
            raise ValueError(
                "evaluation.tasks says what to evaluate, but neither tasks_every nor evaluate_every is set: after how many steps?"
            )
        if self.evaluation.tasks_every and not self.evaluation.tasks:
            raise ValueError(
                "evaluation.tasks_every is set, but evaluation.tasks is empty: name tasks, or leave it out"
            )
        return self


def compile_cache_of(run_directory: str) -> str:
    """Where the compiled programs of a run lie unless its settings say otherwise: beside all else that is its own."""
    return f"{run_directory.rstrip('/')}/cache/compile"
