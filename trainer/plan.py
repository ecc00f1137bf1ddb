"""How a recipe is laid out on devices. Made by the orchestrator's planner, recorded per attempt, read by the trainer.

Importable without JAX.
"""

from typing import Literal

from pydantic import Field, model_validator

from trainer.errors import ConfigurationError
from trainer.frozen import Frozen
from trainer.recipe import Recipe

# What the backward pass computes again: nothing that holds a matrix product; gate and up, the widest of what is saved,
# two fifths of a layer's forward pass; or the whole layer, of which the input alone is saved (trainer.preflight.policies).
Remat = Literal["none", "mlp", "full"]


class Plan(Frozen):
    """recipe × device type × slices. `rows = data_parallel × micro_batch × accumulation` is global_batch, exactly.

    Where it cannot be, `rows` are the fewest per device that hold the batch, and those from number global_batch on hold
    no instance: nothing is read for them, and they add zero to every sum.
    `devices = data_parallel × sequence × tensor`: neighbouring devices share the sequences of the same instances, and
    their nearest neighbours the heads and the hidden width of each layer.
    """

    device_type: str = Field(description="canonical name, e.g. cpu-8 or tpu7x-4x4x4")
    slices: int = Field(default=1, gt=0)
    processes: int = Field(gt=0, description="JAX processes over all slices")
    devices: int = Field(gt=0, description="JAX devices over all slices")
    global_batch: int = Field(gt=0)
    data_parallel: int = Field(gt=0)
    sequence: int = Field(default=1, gt=0, description="devices that share each instance's sequence")
    tensor: int = Field(default=1, ge=1, le=2, description="devices that divide the heads of each layer, and its MLP")
    micro_batch: int = Field(gt=0, description="instances per forward pass of a device, or of those that share them")
    accumulation: int = Field(gt=0, description="forward passes per optimizer step")
    remat: Remat = "none"

    @model_validator(mode="after")
    def _exact(self) -> "Plan":
        wanted = rows_per_device(self.global_batch, self.data_parallel) * self.data_parallel
        if self.rows != wanted:
            holding = "" if wanted == self.global_batch else f"the {wanted} rows that hold "
            raise ValueError(
                f"data_parallel {self.data_parallel} × micro_batch {self.micro_batch} × accumulation {self.accumulation} = {self.rows}, not {holding}global_batch {self.global_batch}"
            )
        if self.devices % self.processes:
            raise ValueError(f"devices {self.devices} is not a multiple of processes {self.processes}")
        if self.data_parallel * self.together != self.devices:
            tensor = f" × tensor {self.tensor}" if self.tensor > 1 else ""
            raise ValueError(
                f"data_parallel {self.data_parallel} × sequence {self.sequence}{tensor} must equal devices {self.devices}"
            )
        if self.devices % self.slices:
            raise ValueError(f"devices {self.devices} is not a multiple of slices {self.slices}")
        if not is_whole(self.together, self.devices_per_process):
            tensor = f" × tensor {self.tensor}" if self.tensor > 1 else ""
            raise ValueError(
                f"sequence {self.sequence}{tensor} and the {self.devices_per_process} devices of a process do not divide one another"
            )
        return self

    @property
    def per_device_batch(self) -> int:
        """Rows per optimizer step and device, or devices that share a sequence."""
        return self.micro_batch * self.accumulation

    @property
    def together(self) -> int:
        """Devices that work on the same rows."""
        return self.sequence * self.tensor

    def slices_apart(self, recipe: Recipe) -> int:
        """How many slices hold all of the state each (`replicas`)."""
        return replicas(self.devices, self.slices, self.together, recipe.reduction == "invariant")

    @property
    def rows_per_pass(self) -> int:
        """Of all devices in one forward pass."""
        return self.data_parallel * self.micro_batch

    @property
    def rows(self) -> int:
        """Per optimizer step: one for each instance, and `padding`."""
        return self.rows_per_pass * self.accumulation

    @property
    def padding(self) -> int:
        """Rows per optimizer step that hold no instance, the last ones."""
        return self.rows - self.global_batch

    @property
    def efficiency(self) -> float:
        """Of the rows, the share that holds an instance."""
        return self.global_batch / self.rows

    @property
    def devices_per_process(self) -> int:
        return self.devices // self.processes


def replicas(devices: int, slices: int, together: int, invariant: bool) -> int:
    """How many slices hold all of the state each (trainer.sharding). 1 where it is cut over all devices: where some of
    several slices work `together`, or `reduction: invariant` lets the devices' numbers alone decide on the order of sums.
    """
    return 1 if invariant or devices % (slices * together) else slices


def is_whole(sequence: int, devices_per_process: int) -> bool:
    """Whether a process holds whole sequences, or is one of several that hold one."""
    return devices_per_process % sequence == 0 or sequence % devices_per_process == 0


def rows_per_device(global_batch: int, data_parallel: int) -> int:
    """The fewest per device, or group of devices that share a sequence, that together hold the batch."""
    return -(-global_batch // data_parallel)


def filling(plan: Plan) -> str | None:
    """What the rows without an instance cost, as a clause; None where there are none."""
    if not plan.padding:
        return None
    enough = rows_per_device(plan.global_batch, plan.per_device_batch)
    # Devices that share sequences wait for each other: fewer of them, or none, may be as fast in other ways.
    fewer = f", and {enough:,} devices would be as fast" if plan.together == 1 and enough < plan.devices else ""
    counting = min(round(100 * plan.efficiency), 99)  # never all of it
    return (
        f"{plan.padding:,} of {plan.rows:,} rows per step hold no instance, as {plan.devices:,} devices do not divide "
        f"global_batch {plan.global_batch:,}: {counting}% of the work counts{fewer}"
    )


def sequence_factors(recipe: Recipe, devices: int, processes: int, multiple: int = 1) -> list[int]:
    """Over how many devices each sequence of the recipe can be divided, fewest first.

    Each device holds two chunks of it (trainer.sequence), each a multiple of `multiple` tokens. 1: it is not divided.
    """
    most = recipe.sequence_length // (2 * multiple) if recipe.reduction == "fast" else 1
    return [
        n
        for n in range(1, max(1, min(devices, most)) + 1)
        if devices % n == 0
        and (n == 1 or (recipe.sequence_length % (2 * n * multiple) == 0 and is_whole(n, devices // processes)))
    ]


def require_fit(plan: Plan, recipe: Recipe) -> None:
    """Raises ConfigurationError for a recipe whose instances cannot be laid out on devices as `plan` says."""
    if plan.padding and recipe.reduction == "invariant":
        raise ConfigurationError(
            f"plan.devices {plan.devices}: reduction invariant adds instances in pairs, device by device, so that their "
            f"number must be a power of two and at most global_batch {plan.global_batch}; or use reduction fast"
        )
    if plan.tensor > 1:
        _require_tensor(plan, recipe)
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


def _require_tensor(plan: Plan, recipe: Recipe) -> None:
    model, parts = recipe.model, plan.tensor
    sizes = {"n_heads": model.n_heads, "n_kv_heads": model.n_kv_heads, "mlp_hidden": model.mlp_hidden}
    uneven = [f"model.{name} {size}" for name, size in sizes.items() if size % parts]
    tokens = plan.micro_batch * recipe.sequence_length // plan.sequence
    if tokens % parts:
        uneven.append(f"the {tokens} tokens of a forward pass")
    if uneven:
        raise ConfigurationError(f"plan.tensor {parts} does not divide {', '.join(uneven)}; use tensor 1")
    if recipe.reduction == "invariant":
        raise ConfigurationError(
            f"plan.tensor {parts}: reduction invariant keeps each instance on one device; use tensor 1, or reduction fast"
        )


def split_batch(global_batch: int, devices: int, max_micro_batch: int) -> tuple[int, int]:
    """(micro_batch, accumulation) with the fewest rows, `devices · micro_batch · accumulation`, that hold the batch.

    Fewer devices mean more accumulation: the micro-batch is the largest divisor of the per-device batch that is at most
    `max_micro_batch`, so what one forward pass needs of memory never grows. Devices that share a sequence count as one.
    """
    per_device = rows_per_device(global_batch, devices)
    micro_batch = next(m for m in range(min(per_device, max(max_micro_batch, 1)), 0, -1) if per_device % m == 0)
    return micro_batch, per_device // micro_batch
