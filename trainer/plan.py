"""How a recipe is laid out on devices. Made by the orchestrator's planner, recorded per attempt, read by the trainer.

Importable without JAX.
"""

from typing import Literal

from pydantic import Field, model_validator

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
