"""The committed table of compiled plans: plans.json beside this file. Importable without JAX.

One row per compiled program, those that did not fit included: they are what the memory model learns from.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from trainer.plan import Plan, replicas
from trainer.preflight.accounting import GIB, Report
from trainer.preflight.memory import MemoryModel, Shape, fit, point, shape_of
from trainer.preflight.policies import POLICIES
from trainer.recipe import Recipe

FILE = Path(__file__).parent / "plans.json"
KINDS_KEPT = 8


@dataclass(frozen=True)
class Row:
    """What a compiled plan costs, per device. See `accounting.Report`."""

    recipe: str
    key: str  # of what decides the cost: `cost_key`
    device_type: str
    slices: int
    devices: int
    micro_batch: int
    accumulation: int
    remat: str
    verdict: str
    peak_gib: float | None
    limit_gib: float
    compile_seconds: float
    versions: dict[str, str]
    shape: dict[str, Any]
    sequence: int = 1
    tensor: int = 1
    reason: str = ""
    model_flops: int | None = None
    executed_over_model: float | None = None
    recomputed_over_model: float | None = None
    mfu_ceiling: float | None = None
    step_seconds_floor: float | None = None
    cycle_shares: dict[str, float] = field(default_factory=dict)
    gib_sent: dict[str, float] = field(default_factory=dict)
    communication_seconds: float | None = None  # alone, at the peak of the links; None: compiled before it was reckoned
    waiting_seconds: float | None = None  # of them what the schedule does not hide behind work

    @property
    def fits(self) -> bool:
        return self.verdict == "fits"

    def is_for(self, plan: "Plan | Row") -> bool:
        """Whether it is of this plan, or that row's; the recipe is another matter."""
        names = ("device_type", "slices", "sequence", "tensor", "micro_batch", "accumulation", "remat")
        return all(getattr(self, name) == getattr(plan, name) for name in names)

    @property
    def sharing_state(self) -> int:
        """Devices that hold the state once."""
        invariant = bool(self.shape.get("invariant"))
        return self.devices // replicas(self.devices, self.slices, self.sequence * self.tensor, invariant)

    @property
    def groups(self) -> int:
        """Groups of devices that work on rows of their own."""
        return self.devices // (self.sequence * self.tensor)

    @property
    def seconds(self) -> float:
        """Of a step: the compiler's cycles and the waiting for the links; infinite where that was not reckoned."""
        return math.inf if self.step_seconds_floor is None else self.step_seconds_floor + (self.waiting_seconds or 0.0)

    @property
    def hidden(self) -> float | None:
        """The share of the communication that the schedule hides behind work."""
        if not self.communication_seconds or self.waiting_seconds is None:
            return None
        return 1 - self.waiting_seconds / self.communication_seconds

    @property
    def tokens(self) -> Shape:
        """What decides the memory, with as many tokens as a device has of an instance."""
        shape = Shape(**self.shape)
        return replace(shape, sequence_length=shape.sequence_length // self.sequence)


def cost_key(recipe: Recipe) -> str:
    """The same for recipes whose programs cost the same: rates, seeds and file names do not matter."""
    data = recipe.data
    body = {
        "model": recipe.model.model_dump(mode="json"),
        "global_batch": recipe.global_batch,
        "sequence_length": recipe.sequence_length,
        "compute_dtype": recipe.compute_dtype,
        "reduction": recipe.reduction,
        "masks": [
            data.packing is not None,
            data.mask_documents,
            data.repetition_filter is not None,
            data.untrained_bit,
        ],
    }
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def row_of(recipe: Recipe, report: Report) -> Row:
    """A report cut down to what the table keeps."""
    plan, flops = report.plan, report.flops
    total = sum(report.cycles.values())
    shares = {kind: round(value / total, 4) for kind, value in list(report.cycles.items())[:KINDS_KEPT]}
    sent = {f"{row['kind']} {row['dtype']}": round(row["bytes"] / GIB, 3) for row in report.communication}
    return Row(
        recipe=recipe.name,
        key=cost_key(recipe),
        device_type=plan["device_type"],
        slices=plan["slices"],
        devices=plan["devices"],
        sequence=plan["sequence"],
        tensor=plan.get("tensor", 1),
        micro_batch=plan["micro_batch"],
        accumulation=plan["accumulation"],
        remat=plan["remat"],
        verdict=report.verdict,
        peak_gib=None if report.peak_gib is None else round(report.peak_gib, 2),
        limit_gib=report.limit_gib,
        compile_seconds=report.compile_seconds,
        versions=report.versions,
        shape=asdict(shape_of(recipe)),
        reason=report.reason,
        model_flops=flops.model if flops else None,
        executed_over_model=round(flops.executed_over_model, 4) if flops else None,
        recomputed_over_model=round(flops.recomputed / flops.model, 4) if flops else None,
        mfu_ceiling=round(report.mfu_ceiling, 4) if report.mfu_ceiling is not None else None,
        step_seconds_floor=round(report.step_seconds_floor, 4) if report.step_seconds_floor is not None else None,
        cycle_shares=shares,
        gib_sent={kind: gib for kind, gib in sent.items() if gib >= 0.001},
        communication_seconds=round(sum(r["seconds"] for r in report.communication), 4) if sent else None,
        waiting_seconds=None if report.waiting_seconds is None else round(report.waiting_seconds, 4),
    )


@cache
def rows() -> tuple[Row, ...]:
    """The committed rows, in the order they were compiled in."""
    return read(FILE)


def read(path: Path) -> tuple[Row, ...]:
    return tuple(Row(**body) for body in json.loads(path.read_text())) if path.is_file() else ()


def added(rows: Sequence[Row], new: Row) -> list[Row]:
    """`rows` with `new`, in place of the row of the same plan; and, if it fits, of rows that fit the same slices by another
    compiler's count: the fastest plan is taken, and two compilers do not count alike.
    """
    names = ("key", "device_type", "slices", "tensor")

    def replaced(old: Row) -> bool:
        if any(getattr(new, name) != getattr(old, name) for name in names):
            return False
        return new.is_for(old) or (new.fits and old.fits and new.versions != old.versions)

    return [*(row for row in rows if not replaced(row)), new]


def write(path: Path, kept: Sequence[Row]) -> None:
    """One row a line, so that a change of one is one line of a diff."""
    lines = ",\n".join(json.dumps(_filled(row), sort_keys=True) for row in kept)
    path.write_text(f"[\n{lines}\n]\n")


def _filled(row: Row) -> dict[str, Any]:
    return {
        name: value
        for name, value in asdict(row).items()
        if value not in (None, "", {}) and (name, value) not in (("sequence", 1), ("tensor", 1))
    } | {"peak_gib": row.peak_gib}


def of_recipe(recipe: Recipe, known: Sequence[Row] | None = None) -> tuple[Row, ...]:
    """The rows that tell what `recipe` costs."""
    key = cost_key(recipe)
    return tuple(row for row in (rows() if known is None else known) if row.key == key)


def fitted(known: Sequence[Row]) -> MemoryModel:
    """The memory model of these rows. Those of policies that exist no more teach nothing, nor those of divided heads."""
    by_name = {p.name: p for p in POLICIES}
    return fit(
        point(row.tokens, row.sharing_state, row.micro_batch, row.accumulation, by_name[row.remat], row.peak_gib)
        for row in known
        if row.peak_gib is not None and row.remat in by_name and row.tensor == 1
    )


@cache
def memory_model() -> MemoryModel:
    """The memory model of the committed rows."""
    return fitted(rows())
