"""How a recipe is laid out on devices. Made by the orchestrator's planner, recorded per attempt, read by the trainer.

Importable without JAX.
"""

from typing import Literal

from pydantic import Field, model_validator

from trainer.errors import ConfigurationError
from trainer.frozen import Frozen


class Plan(Frozen):
    """recipe × device type × slices. `global_batch = data_parallel × micro_batch × accumulation`, exactly."""

    device_type: str = Field(description="canonical name, e.g. cpu-8 or tpu7x-4x4x4")
    slices: int = Field(default=1, gt=0)
    processes: int = Field(gt=0, description="JAX processes over all slices")
    devices: int = Field(gt=0, description="JAX devices over all slices")
    global_batch: int = Field(gt=0)
    data_parallel: int = Field(gt=0)
    micro_batch: int = Field(gt=0, description="instances per device and forward pass")
    accumulation: int = Field(gt=0, description="forward passes per optimizer step")
    remat: Literal["none", "full"] = "none"

    @model_validator(mode="after")
    def _exact(self) -> "Plan":
        made = self.data_parallel * self.micro_batch * self.accumulation
        if made != self.global_batch:
            raise ValueError(
                f"data_parallel {self.data_parallel} × micro_batch {self.micro_batch} × accumulation {self.accumulation} = {made}, not global_batch {self.global_batch}"
            )
        if self.devices % self.processes:
            raise ValueError(f"devices {self.devices} is not a multiple of processes {self.processes}")
        return self

    @property
    def per_device_batch(self) -> int:
        """Instances per device and optimizer step."""
        return self.micro_batch * self.accumulation

    @property
    def devices_per_process(self) -> int:
        return self.devices // self.processes


def split_batch(global_batch: int, devices: int, max_micro_batch: int) -> tuple[int, int]:
    """(micro_batch, accumulation) with `devices · micro_batch · accumulation == global_batch`, exactly.

    Fewer devices mean more accumulation: the micro-batch is the largest divisor of the per-device batch that is at most
    `max_micro_batch`, so what one forward pass needs of memory never grows. Raises ConfigurationError when the devices
    do not divide the batch.
    """
    if global_batch % devices:
        raise ConfigurationError(
            f"global_batch {global_batch} cannot be split exactly over {devices} devices; use a device count that divides it"
        )
    per_device = global_batch // devices
    micro_batch = next(m for m in range(min(per_device, max(max_micro_batch, 1)), 0, -1) if per_device % m == 0)
    return micro_batch, per_device // micro_batch
