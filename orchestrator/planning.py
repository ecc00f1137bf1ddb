"""recipe × device type → plan, exactly; and the ladder of plans that a run accepts. Pure."""

from dataclasses import dataclass

from orchestrator.api import TrainingRun
from trainer.plan import Plan
from trainer.recipe import Recipe


@dataclass(frozen=True)
class Rung:
    """One rung of the ladder. `devices` of `family` are what it needs of the quota."""

    index: int
    plan: Plan
    family: str
    wait_in_queue: float  # seconds

    @property
    def devices(self) -> int:
        return self.plan.devices

    def __str__(self) -> str:
        return self.plan.device_type if self.plan.slices == 1 else f"{self.plan.slices} × {self.plan.device_type}"


def ladder(run: TrainingRun, recipe: Recipe) -> tuple[Rung, ...]:
    raise NotImplementedError  # completed in the next change
