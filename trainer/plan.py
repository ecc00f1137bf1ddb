"""How a recipe is laid out on devices. Made by the orchestrator's planner, recorded per attempt, read by the trainer.

Importable without JAX.
"""

import math
from typing import Literal

from pydantic import Field, model_validator

from trainer.errors import ConfigurationError
from trainer.frozen import Frozen
from trainer.recipe import Recipe

# What the backward pass computes again: nothing that holds a matrix product; gate and up, the widest of what is saved,
# two fifths of a layer's forward pass; or the whole layer, of which the input alone is saved (trainer.preflight.policies).
Remat = Literal["none", "mlp", "full"]


class Plan(Frozen):
    """recipe × device type × slices. `global_batch = data_parallel × micro_batch × accumulation`, exactly.

    `devices = data_parallel × sequence`: neighbouring devices share the sequences of the same instances.
    """

    device_type: str = Field(description="canonical name, e.g. cpu-8 or tpu7x-4x4x4")
    slices: int = Field(default=1, gt=0)
    processes: int = Field(gt=0, description="JAX processes over all slices")
    devices: int = Field(gt=0, description="JAX devices over all slices")
    global_batch: int = Field(gt=0)
    data_parallel: int = Field(gt=0)
    sequence: int = Field(default=1, gt=0, description="devices that share each instance's sequence")
    micro_batch: int = Field(gt=0, description="instances per forward pass of a device, or of those that share them")
    accumulation: int = Field(gt=0, description="forward passes per optimizer step")
    remat: Remat = "none"

    @model_validator(mode="after")
    def _exact(self) -> "Plan":
        made = self.data_parallel * self.micro_batch * self.accumulation
        if made != self.global_batch:
            raise ValueError(
                f"data_parallel {self.data_parallel} × micro_batch {self.micro_batch} × accumulation {self.accumulation} = {made}, not global_batch {self.global_batch}"
            )
        if self.devices % self.processes:
            raise ValueError(f"devices {self.devices} is not a multiple of processes {self.processes}")
        if self.data_parallel * self.sequence != self.devices:
            raise ValueError(
                f"data_parallel {self.data_parallel} × sequence {self.sequence} must equal devices {self.devices}"
            )
        if not is_whole(self.sequence, self.devices_per_process):
            raise ValueError(
                f"sequence {self.sequence} and the {self.devices_per_process} devices of a process do not divide one another"
            )
        return self

    @property
    def per_device_batch(self) -> int:
        """Instances per optimizer step and device, or devices that share a sequence."""
        return self.micro_batch * self.accumulation

    @property
    def devices_per_process(self) -> int:
        return self.devices // self.processes


def is_whole(sequence: int, devices_per_process: int) -> bool:
    """Whether a process holds whole sequences, or is one of several that hold one."""
    return devices_per_process % sequence == 0 or sequence % devices_per_process == 0


def sequence_factors(recipe: Recipe, devices: int, processes: int, multiple: int = 1) -> list[int]:
    """Over how many devices each sequence of the recipe can be divided so that the batch is exact, fewest first.

    Each device holds two chunks of it (trainer.sequence), each a multiple of `multiple` tokens. 1: it is not divided.
    """
    common = math.gcd(recipe.global_batch, devices)
    numbers = [devices // parts for parts in range(common, 0, -1) if common % parts == 0]
    return [
        n
        for n in numbers
        if n == 1
        or (
            recipe.sequence_length % (2 * n * multiple) == 0
            and is_whole(n, devices // processes)
            and recipe.reduction == "fast"
        )
    ]


def require_sequence(plan: Plan, recipe: Recipe) -> None:
    """Raises ConfigurationError for a recipe whose sequences `plan.sequence` devices cannot share."""
    if plan.sequence == 1:
        return
    if recipe.sequence_length % (2 * plan.sequence):
        raise ConfigurationError(
            f"plan.sequence {plan.sequence}: each device holds two chunks of a sequence, and sequence_length "
            f"{recipe.sequence_length} is no multiple of {2 * plan.sequence}; choose another device type"
        )
    if recipe.reduction == "invariant":
        raise ConfigurationError(
            f"plan.sequence {plan.sequence}: reduction invariant keeps each instance on one device; "
            f"use at most global_batch {plan.global_batch} devices, or reduction fast"
        )


def split_batch(global_batch: int, devices: int, max_micro_batch: int) -> tuple[int, int]:
    """(micro_batch, accumulation) with `devices · micro_batch · accumulation == global_batch`, exactly.

    Fewer devices mean more accumulation: the micro-batch is the largest divisor of the per-device batch that is at most
    `max_micro_batch`, so what one forward pass needs of memory never grows. Devices that share a sequence count as one. Raises ConfigurationError when the devices
    do not divide the batch.
    """
    if global_batch % devices:
        raise ConfigurationError(
            f"global_batch {global_batch} cannot be split exactly over {devices} devices; use a device count that divides it"
        )
    per_device = global_batch // devices
    micro_batch = next(m for m in range(min(per_device, max(max_micro_batch, 1)), 0, -1) if per_device % m == 0)
    return micro_batch, per_device // micro_batch
