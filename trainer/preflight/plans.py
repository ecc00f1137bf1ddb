"""A plan by its numbers, checked."""

from trainer.errors import ConfigurationError
from trainer.hardware import DeviceType
from trainer.plan import Plan
from trainer.recipe import Recipe


def plan_of(recipe: Recipe, kind: DeviceType, slices: int, micro_batch: int, remat: str, sequence: int = 1) -> Plan:
    """The plan with this micro-batch. Raises ConfigurationError when the batch does not divide exactly."""
    devices = kind.devices * slices
    if devices % sequence:
        raise ConfigurationError(f"sequence {sequence} does not divide the {devices} devices")
    parts = devices // sequence
    if recipe.global_batch % (parts * micro_batch):
        fitting = [m for m in range(1, recipe.global_batch + 1) if recipe.global_batch % (parts * m) == 0]
        which = f"with {', '.join(map(str, fitting))} it does" if fitting else "no micro-batch makes it"
        shared = f"{devices} devices" if sequence == 1 else f"{parts} groups of {sequence} devices"
        raise ConfigurationError(
            f"micro_batch {micro_batch} × {shared} does not divide global_batch {recipe.global_batch}: {which}"
        )
    body = {
        "device_type": kind.name,
        "slices": slices,
        "processes": kind.processes * slices,
        "devices": devices,
        "global_batch": recipe.global_batch,
        "data_parallel": parts,
        "sequence": sequence,
        "micro_batch": micro_batch,
        "accumulation": recipe.global_batch // parts // micro_batch,
        "remat": remat,
    }
    return Plan.parse(body, "plan")
