"""How a recipe is laid out on a slice: the fastest plan that was compiled and fits, else the best that should fit.

What has been compiled is known; where nothing has, the memory model decides, with a margin. Importable without JAX.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Literal

from trainer.errors import ConfigurationError
from trainer.hardware import DeviceType, device_types
from trainer.plan import Plan, rows_per_device
from trainer.preflight import table
from trainer.preflight.dividing import divides, factors, step_seconds
from trainer.preflight.memory import MemoryModel, shape_of
from trainer.preflight.plans import plan_of
from trainer.preflight.policies import POLICIES, Policy
from trainer.recipe import Recipe

SUGGESTIONS = 4


@dataclass(frozen=True)
class Candidate:
    """One way to lay a recipe out on a slice."""

    plan: Plan
    policy: Policy
    predicted_gib: float
    margin_gib: float


@dataclass(frozen=True)
class Choice:
    """The plan taken. `peak_gib` and `row` are the compiler's where there is a row, else the model's estimate."""

    plan: Plan
    peak_gib: float
    source: Literal["compiled", "estimated"]
    row: table.Row | None


def candidates(recipe: Recipe, kind: DeviceType, slices: int, model: MemoryModel | None = None) -> Iterator[Candidate]:
    """Plans, best first: by the time of a step (dividing.step_seconds).

    Devices that share a sequence exchange its keys and values in every layer, as many bytes for each whatever their
    number; recomputing costs FLOPs; a smaller micro-batch costs gathers of the weights, most of which run beside the
    products. With `reduction: invariant` a larger micro-batch than one would need whole gradients (trainer.step).
    """
    model = table.memory_model() if model is None else model
    for sequence, policy, micro_batch in _ways(recipe, kind, slices):
        plan = plan_of(recipe, kind, slices, micro_batch, policy.name, sequence)
        shape = replace(shape_of(recipe), sequence_length=recipe.sequence_length // sequence)
        sharing_state = plan.devices // plan.slices_apart(recipe)
        predicted = model.predict(shape, sharing_state, micro_batch, plan.accumulation, policy)
        yield Candidate(plan, policy, predicted, model.margin(predicted, policy))


def _ways(recipe: Recipe, kind: DeviceType, slices: int) -> list[tuple[int, Policy, int]]:
    """(devices to a sequence, policy, micro-batch), best first."""
    found = []
    for sequence, policy in product(factors(recipe, kind, slices), POLICIES):
        rows = rows_per_device(recipe.global_batch, kind.devices * slices // sequence)
        for micro_batch in range(1 if recipe.reduction == "invariant" else rows, 0, -1):
            if rows % micro_batch == 0:
                seconds = step_seconds(recipe, kind, slices, sequence, policy.recomputed, rows // micro_batch)
                found.append((seconds, (sequence, policy, micro_batch)))
    return [way for _, way in sorted(found, key=lambda f: f[0])]


def choose(recipe: Recipe, kind: DeviceType, slices: int = 1, known: Sequence[table.Row] | None = None) -> Choice:
    """The plan of `recipe` on `slices` slices of `kind`, of a TPU family.

    The fastest that is known to fit. Before anything has been compiled for this slice: the best that should.
    Raises ConfigurationError when the batch must divide and does not (`refuse_inexact`), or none fits.
    """
    if known is not None:
        return _choose(recipe, kind, slices, known, table.fitted(known))
    # Of the corpus only how it is masked counts. Its files, thousands, would be hashed at every call, and kept.
    corpus = recipe.data.model_copy(update={"files": recipe.data.files[:1], "held_out": (), "omitted_files": ()})
    return _committed_choice(recipe.model_copy(update={"name": "", "data": corpus}), kind, slices)


@lru_cache(maxsize=1024)
def _committed_choice(recipe: Recipe, kind: DeviceType, slices: int) -> Choice:
    """By the committed rows. Remembered: an operator asks for each rung whenever it looks at a run."""
    return _choose(recipe, kind, slices, table.rows(), table.memory_model())


def _choose(recipe: Recipe, kind: DeviceType, slices: int, known: Sequence[table.Row], model: MemoryModel) -> Choice:
    refuse_inexact(recipe, kind, slices)
    assert kind.hbm_gib_per_device is not None
    compiled = table.of_recipe(recipe, known)
    tried = list(candidates(recipe, kind, slices, model))
    rows = {c.plan: next((r for r in compiled if r.is_for(c.plan)), None) for c in tried}
    fitting = [(row, plan) for plan, row in rows.items() if row is not None and row.fits]
    for row, plan in sorted(fitting, key=lambda found: found[0].seconds):
        if row.peak_gib is not None:
            return Choice(plan, row.peak_gib, "compiled", row)
    for candidate in tried:
        fits = candidate.predicted_gib + candidate.margin_gib <= kind.hbm_gib_per_device
        if rows[candidate.plan] is None and fits:
            return Choice(candidate.plan, candidate.predicted_gib, "estimated", None)
    least = min(tried, key=lambda c: c.predicted_gib)
    shared = least.plan.sequence
    per = "per device" if shared == 1 else f"on {shared} devices"
    raise ConfigurationError(
        f"deviceType {kind.name!r}: one instance of {recipe.sequence_length:,} tokens {per} needs about "
        f"{least.predicted_gib:.0f} GiB with remat {least.policy.name}, and {kind.name} has {kind.hbm_gib_per_device} GiB "
        f"per device; {_larger(recipe, kind, model)}"
    )


def _larger(recipe: Recipe, kind: DeviceType, model: MemoryModel) -> str:
    """What of the same family would do, by the memory model."""
    found = []
    for other in device_types(kind.family):
        if divides(recipe, other, 1) and other.devices > kind.devices:
            assert other.hbm_gib_per_device is not None
            every = candidates(recipe, other, 1, model)
            if any(c.predicted_gib + c.margin_gib <= other.hbm_gib_per_device for c in every):
                found.append(f"{other.name} ({other.devices} devices)")
    if found:
        return f"of {kind.family}, these should do: {', '.join(found[:SUGGESTIONS])}"
    return f"no slice of {kind.family} would do: a shorter sequence_length or a family with more memory per device is needed"


def refuse_inexact(recipe: Recipe, kind: DeviceType, slices: int) -> None:
    """Raises ConfigurationError, with what would fit, when the devices must divide the batch and do not."""
    if factors(recipe, kind, slices):
        return
    batch, devices = recipe.global_batch, kind.devices * slices
    has = f"{slices} × {kind.name} has {devices} devices" if slices > 1 else f"{kind.name} has {devices} devices"
    if devices > batch:
        what = f"global_batch {batch} is smaller than {devices}: reduction invariant keeps each instance on one device"
    else:
        what = (
            f"global_batch {batch} ÷ {devices} = {batch // devices} remainder {batch % devices}: reduction invariant adds "
            "instances in pairs, device by device, and has no place for rows without one"
        )
    hint = (
        f"of {kind.family}, these fit: {near}"
        if (near := exact_near(recipe, kind, slices))
        else f"no slice of {kind.family} fits"
    )
    raise ConfigurationError(f"deviceType {kind.name!r}: {has}, and {what}; {hint}")


def exact_near(recipe: Recipe, kind: DeviceType, slices: int) -> str:
    """Slices of the same family whose devices divide the batch, the nearest first: "tpu7x-4x4x8 (256 devices), …"."""
    devices = kind.devices * slices
    near = sorted(_exact(recipe, kind), key=lambda n: (abs(n[0] - devices), n[0], n[2]))[:SUGGESTIONS]
    return ", ".join(
        f"{name} ({count} devices)" if n == 1 else f"{n} × {name} ({count} devices)" for count, name, n in near
    )


def _exact(recipe: Recipe, kind: DeviceType) -> Iterator[tuple[int, str, int]]:
    """(devices, name, slices) of the same family for which the batch is exact; several slices of `kind` among them."""
    for other in device_types(kind.family):
        if divides(recipe, other, 1):
            yield other.devices, other.name, 1
    for n in range(2, recipe.global_batch // kind.devices + 1):
        if divides(recipe, kind, n):
            yield kind.devices * n, kind.name, n
