"""What each rung of a ladder costs: the table of `untildone plan`. From the committed table of compiled plans. Pure.

A step's time is known from below: the compiler's cycles, with attention kernels at the peak of the matrix units and no
communication to wait for. What a step will take is estimated as that divided by REACHED.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.planning import Rung
from trainer.hardware import device_type
from trainer.plan import Plan, filling
from trainer.preflight.choice import choose, exact_near
from trainer.preflight.table import Row
from trainer.recipe import Recipe

# MaxText's OLMo 3 7B on Ironwood: 44.5 % MFU measured (as published), 50.5 % by the same count of cycles.
REACHED = 44.5 / 50.5
DAY = 86_400.0


@dataclass(frozen=True)
class PlanRow:
    """One line of `untildone plan`. None where nothing is known: see `source`."""

    rung: int
    device_type: str
    slices: int
    chips: int
    devices: int
    processes: int
    mesh: str
    micro_batch: int
    accumulation: int
    data_parallel: int
    per_device_batch: int
    padding: int  # rows per step that hold no instance
    efficiency: float  # of the rows, the share that does
    warning: str | None  # what those rows cost, and which slices have none
    remat: str
    wait_in_queue: float
    source: str  # of the memory: "compiled", "estimated", or "" where nothing bounds it
    peak_gib: float | None
    limit_gib: float | None
    executed_over_model: float | None
    mfu_ceiling: float | None
    step_seconds_at_least: float | None
    step_seconds_estimate: float | None
    tokens_per_second: float | None
    days: float | None
    chip_hours: float | None
    against_best: float | None  # tokens per second, as a share of the fastest rung's

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_table(
    rungs: Sequence[Rung], recipe: Recipe, steps: int, compiled: Mapping[int, Row] | None = None
) -> tuple[PlanRow, ...]:
    """The rows for `steps` steps. `compiled` are rows by rung that the committed table does not have."""
    made = [_row(rung, recipe, steps, (compiled or {}).get(rung.index)) for rung in rungs]
    best = max((row.tokens_per_second for row in made if row.tokens_per_second), default=None)
    return tuple(_against(row, best) for row in made)


def _row(rung: Rung, recipe: Recipe, steps: int, given: Row | None) -> PlanRow:
    plan, kind = rung.plan, device_type(rung.plan.device_type)
    source, peak, row = "", None, given
    if given is not None:
        source, peak = "compiled", given.peak_gib
    elif kind.hbm_gib_per_device is not None:
        choice = choose(recipe, kind, plan.slices)
        source, peak, row = choice.source, choice.peak_gib, choice.row
    floor = row.step_seconds_floor if row is not None else None
    estimate = max(floor / REACHED, row.seconds) if row is not None and floor is not None else None
    chips = kind.chips * plan.slices
    seconds = estimate * steps if estimate is not None else None
    return PlanRow(
        rung=rung.index,
        device_type=plan.device_type,
        slices=plan.slices,
        chips=chips,
        devices=plan.devices,
        processes=plan.processes,
        mesh=mesh(plan, recipe),
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        data_parallel=plan.data_parallel,
        per_device_batch=plan.per_device_batch,
        padding=plan.padding,
        efficiency=plan.efficiency,
        warning=_warning(plan, recipe),
        remat=plan.remat,
        wait_in_queue=rung.wait_in_queue,
        source=source,
        peak_gib=peak,
        limit_gib=kind.hbm_gib_per_device,
        executed_over_model=row.executed_over_model if row is not None else None,
        mfu_ceiling=row.mfu_ceiling if row is not None else None,
        step_seconds_at_least=floor,
        step_seconds_estimate=estimate,
        tokens_per_second=recipe.global_batch * recipe.sequence_length / estimate if estimate is not None else None,
        days=seconds / DAY if seconds is not None else None,
        chip_hours=seconds / 3600 * chips if seconds is not None else None,
        against_best=None,
    )


def _warning(plan: Plan, recipe: Recipe) -> str | None:
    lost = filling(plan)
    if lost is None:
        return None
    kind = device_type(plan.device_type)
    near = exact_near(recipe, kind, plan.slices)
    return f"{lost}; of {kind.family}, these divide it: {near}" if near else lost


def mesh(plan: Plan, recipe: Recipe) -> str:
    """The axes of the plan's mesh: "fsdp=128", "fsdp=512 sequence=2", "slice=2 fsdp=128"."""
    apart = plan.slices_apart(recipe)
    sizes = {"slice": apart, "fsdp": plan.data_parallel // apart, "sequence": plan.sequence, "tensor": plan.tensor}
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1 or name == "fsdp")


def _against(row: PlanRow, best: float | None) -> PlanRow:
    if best is None or row.tokens_per_second is None:
        return row
    return PlanRow(**{**asdict(row), "against_best": row.tokens_per_second / best})
