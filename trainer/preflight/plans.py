"""A plan by its numbers, checked."""

from trainer.errors import ConfigurationError
from trainer.hardware import DeviceType
from trainer.plan import Plan, rows_per_device
from trainer.recipe import Recipe


def plan_of(
    recipe: Recipe, kind: DeviceType, slices: int, micro_batch: int, remat: str, sequence: int = 1, tensor: int = 1
) -> Plan:
    """The plan with this micro-batch. Raises ConfigurationError when it does not divide what a device has to do."""
    devices = kind.devices * slices
    together = sequence * tensor
    if devices % together:
        named = f"sequence {sequence}" + (f" × tensor {tensor}" if tensor > 1 else "")
        raise ConfigurationError(f"{named} does not divide the {devices} devices")
    parts = devices // together
    rows = rows_per_device(recipe.global_batch, parts)
    if rows % micro_batch:
        fitting = ", ".join(str(m) for m in range(1, rows + 1) if rows % m == 0)
        shared = f"{devices} devices" if together == 1 else f"{parts} groups of {together} devices"
        raise ConfigurationError(
            f"micro_batch {micro_batch} does not divide {rows}, the rows of each of {shared} for global_batch "
            f"{recipe.global_batch}; take one of {fitting}"
        )
    body = {
        "device_type": kind.name,
        "slices": slices,
        "processes": kind.processes * slices,
        "devices": devices,
        "global_batch": recipe.global_batch,
        "data_parallel": parts,
        "sequence": sequence,
        "tensor": tensor,
        "micro_batch": micro_batch,
        "accumulation": rows // micro_batch,
        "remat": remat,
    }
    return Plan.parse(body, "plan")
