"""What a TrainingRun says about evaluation; orchestrator/api.py re-exports it."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from orchestrator.document import Document
from trainer.evaluation_settings import Evaluation as EvaluationSettings
from trainer.evaluation_settings import HeldOutSet as HeldOutSetSettings

TEXT_LIMIT = 1024
SETS_LIMIT, FILES_LIMIT, TASKS_LIMIT = 32, 64, 256

File = Annotated[str, Field(min_length=1, max_length=TEXT_LIMIT)]
TaskName = Annotated[str, Field(min_length=1, max_length=100)]


class HeldOutSet(Document):
    """A named held-out set; without files a known one, or a group of them such as v3_small_ppl_validation."""

    name: str = Field(min_length=1, max_length=100, description="what its results are called")
    files: tuple[File, ...] = Field(
        default=(), max_length=FILES_LIMIT, description="token files of documents, below data.root; none: a known set"
    )

    def settings(self) -> HeldOutSetSettings:
        """The same for the trainer."""
        return HeldOutSetSettings(name=self.name, files=self.files)


class Evaluation(Document):
    """Held-out losses and downstream tasks. All of it may be changed while the run goes on."""

    every_steps: int | None = Field(
        default=None, gt=0, description="steps between evaluations, a multiple of checkpoint.everySteps"
    )
    same_text: bool = Field(
        default=False,
        description="the held-out text was split off the training text at random: the memorisation alarm sees more",
    )
    sets: tuple[HeldOutSet, ...] = Field(
        default=(),
        max_length=SETS_LIMIT,
        description="held-out sets beside the recipe's own, evaluated every everySteps",
    )
    tasks: tuple[TaskName, ...] = Field(
        default=(), max_length=TASKS_LIMIT, description="downstream tasks and groups of them, by AI2's names, e.g. fast"
    )
    tasks_every_steps: int | None = Field(
        default=None, gt=0, description="steps between downstream evaluations; default: everySteps"
    )
    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        max_length=TEXT_LIMIT,
        description="of the tasks: dolma2, bytes or a tokenizer.json in the image; default: by the recipe's eos_id",
    )

    def settings(self) -> EvaluationSettings:
        """The same for the trainer."""
        return EvaluationSettings(
            sets=tuple(one.settings() for one in self.sets),
            tasks=self.tasks,
            tasks_every=self.tasks_every_steps,
            tokenizer=self.tokenizer,
        )

    @model_validator(mode="after")
    def _valid(self) -> Self:
        self.settings()
        if self.sets and not self.every_steps:
            raise ValueError("sets says what to evaluate, but everySteps is not set: after how many steps?")
        if self.tasks and not (self.tasks_every_steps or self.every_steps):
            raise ValueError(
                "tasks says what to evaluate, but neither tasksEverySteps nor everySteps is set: after how many steps?"
            )
        if self.tasks_every_steps and not self.tasks:
            raise ValueError("tasksEverySteps is set, but tasks is empty: name tasks, or leave it out")
        return self
