"""A plan by its numbers, checked."""

from trainer.errors import ConfigurationError
from trainer.hardware import DeviceType
from trainer.plan import Plan
from trainer.recipe import Recipe


def plan_of(recipe: Recipe, kind: DeviceType, slices: int, micro_batch: int, remat: str) -> Plan:
    """The plan with this micro-batch. Raises ConfigurationError when the batch does not divide exactly."""
    devices = kind.devices * slices
    if recipe.global_batch % (devices * micro_batch):
        fitting = [m for m in range(1, recipe.global_batch + 1) if recipe.global_batch % (devices * m) == 0]
        which = f"with {', '.join(map(str, fitting))} it does" if fitting else "no micro-batch makes it"
        raise ConfigurationError(
            f"micro_batch {micro_batch} × {devices} devices does not divide global_batch {recipe.global_batch}: {which}"
        )
    body = {
        "device_type": kind.name,
        "slices": slices,
        "processes": kind.processes * slices,
        "devices": devices,
        "global_batch": recipe.global_batch,
        "data_parallel": devices,
        "micro_batch": micro_batch,
        "accumulation": recipe.global_batch // devices // micro_batch,
        "remat": remat,
    }
    return Plan.parse(body, "plan")
