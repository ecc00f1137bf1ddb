"""A compiled step → what it costs: memory, FLOPs against the model's, cycles by kind, communication. Pure, no JAX."""

import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trainer.hardware import DeviceType
from trainer.plan import Plan
from trainer.preflight import buffers, collectives, cycles
from trainer.preflight.executions import Executions
from trainer.preflight.hlo import parse
from trainer.preflight.kernels import Kernel, kernels
from trainer.preflight.matmuls import Matmul, matmuls
from trainer.preflight.model_flops import model_flops
from trainer.preflight.overlap import Schedule
from trainer.recipe import Recipe

GIB = 2**30
Verdict = Literal["fits", "out of memory", "does not compile"]


@dataclass(frozen=True)
class Flops:
    """Per device and step."""

    model: int
    matmul: int
    attention: int
    recomputed: int  # part of `matmul`

    @property
    def executed_over_model(self) -> float:
        return (self.matmul + self.attention) / self.model


@dataclass(frozen=True)
class Report:
    """Outcome of one preflight. Figures are per device; FLOPs, cycles and bytes per optimizer step."""

    recipe: str
    plan: dict[str, Any]
    compiler_options: dict[str, str]
    versions: dict[str, str]
    program: str  # hash of what the compiler was given: recipe, plan, sources, versions
    verdict: Verdict
    reason: str  # empty when it fits
    limit_gib: float
    peak_gib: float | None  # None where the compiler gave none
    compile_seconds: float
    flops: Flops | None = None
    cycles: dict[str, float] = field(default_factory=dict)
    step_seconds_floor: float | None = None
    mfu_ceiling: float | None = None
    waiting_seconds: float | None = None  # for communication, at the peak of the links
    communication: list[dict[str, Any]] = field(default_factory=list)
    largest: list[dict[str, Any]] = field(default_factory=list)
    products: list[dict[str, Any]] = field(default_factory=list)  # matmuls by the cycles they take
    recomputed: list[dict[str, Any]] = field(default_factory=list)
    attention: list[dict[str, Any]] = field(default_factory=list)
    uncounted_loops: list[str] = field(default_factory=list)  # their length depends on data; taken to run once

    def to_json(self) -> dict[str, Any]:
        body = asdict(self)
        if self.flops is not None:
            body["flops"]["executed_over_model"] = self.flops.executed_over_model
        return body


def report_of(body: dict[str, Any]) -> Report:
    """Inverse of `to_json`."""
    flops = body["flops"]
    made = {name: flops[name] for name in ("model", "matmul", "attention", "recomputed")} if flops else None
    return Report(**{**body, "flops": Flops(**made) if made else None})


def refused(error: str) -> tuple[Verdict, str, float | None]:
    """Verdict, reason in one line, and the GiB it would need, from a message of the compiler."""
    line = " ".join(error.split("See https://")[0].split())
    needed = re.search(r"(?:total memory required for [^(]*\(|Used )([0-9.]+)([KMG])", line)
    if "RESOURCE_EXHAUSTED" in line and "hbm" in line.lower():
        unit = {"K": 2**10, "M": 2**20, "G": 2**30}
        return "out of memory", line, float(needed[1]) * unit[needed[2]] / GIB if needed else None
    return "does not compile", line, None


def account(
    recipe: Recipe, plan: Plan, kind: DeviceType, outcome: dict[str, Any], text: str | None, common: dict[str, Any]
) -> Report:
    """The report of one compilation. `outcome` is the worker's, `text` the program, `common` the report's first fields."""
    return account_program(model_flops(recipe) // plan.devices, kind, outcome, text, common)


def account_program(
    model: int, kind: DeviceType, outcome: dict[str, Any], text: str | None, common: dict[str, Any]
) -> Report:
    """The same for any program that does `model` FLOPs of a model's work per device, whoever wrote it."""
    assert kind.hbm_gib_per_device is not None and kind.peak_flops_per_device is not None
    assert kind.links_bytes_per_second is not None
    common = common | {"limit_gib": kind.hbm_gib_per_device, "compile_seconds": round(outcome["compile_seconds"], 1)}
    if outcome["error"] is not None or text is None:
        verdict, reason, needed = refused(outcome["error"] or "the compiler wrote no program")
        return Report(**common, verdict=verdict, reason=reason, peak_gib=needed)
    executions = Executions(parse(text))
    products, pallas = matmuls(executions), kernels(executions)
    attention = [k for k in pallas if k.is_attention]
    peak, clock = kind.peak_flops_per_device, cycles.CLOCK[kind.family]
    done = cycles.work(executions, pallas, kind.family, peak)
    flops = Flops(
        model=model,
        matmul=sum(m.flops * m.times for m in products),
        attention=sum(k.flops * k.times for k in attention),
        recomputed=sum(m.flops * m.times for m in products if m.is_recomputed),
    )
    total = sum(item.cycles for item in done)
    per_execution = {w.instruction.name: w.instruction.cycles for w in done} | {
        k.instruction.name: cycles.of_kernel(k, kind.family, peak) for k in pallas
    }
    found = collectives.collectives(executions, per_execution)
    seconds_of = {name: value / clock for name, value in per_execution.items()}
    schedule = Schedule(executions, found, seconds_of, kind.links_bytes_per_second)
    return Report(
        **common,
        verdict="fits",
        reason="",
        peak_gib=outcome["memory"]["peak_memory"] / GIB,
        flops=flops,
        cycles={kind: round(value) for kind, value in cycles.by_kind(done).items()},
        step_seconds_floor=total / clock,
        mfu_ceiling=flops.model / (total / clock * peak),
        waiting_seconds=sum(schedule.waits.values()),
        communication=[
            row | {"seconds": schedule.seconds[key], "waiting_seconds": schedule.waits[key]}
            for row in collectives.by_kind(found)
            for key in [(str(row["kind"]), str(row["dtype"]))]
        ],
        largest=[asdict(b) for b in buffers.largest(executions)],
        products=_products(executions, products, peak / clock),
        recomputed=_recomputed(executions, products),
        attention=_kernels(attention),
        uncounted_loops=executions.uncounted,
    )


def _products(executions: Executions, products: list[Matmul], peak: float) -> list[dict[str, Any]]:
    """Matmuls of one place and shape, with everything fused into them. `peak` is FLOPs per cycle."""
    groups: dict[str, list[float]] = {}
    counted: set[str] = set()
    for product in products:
        entry = groups.setdefault(_where(executions, product), [0, 0, 0.0])
        entry[0] += product.times
        entry[1] += product.flops * product.times
        if product.scheduled.name not in counted:  # a fusion may hold two products; its cycles count once
            counted.add(product.scheduled.name)
            entry[2] += product.scheduled.cycles * product.times
    ordered = sorted(groups.items(), key=lambda item: -item[1][2])
    return [
        {
            "where": where,
            "executions": int(times),
            "flops": int(total),
            "cycles": int(cycles_),
            "of_peak": round(total / (cycles_ * peak), 3) if cycles_ else None,
        }
        for where, (times, total, cycles_) in ordered
    ]


def _recomputed(executions: Executions, products: list[Matmul]) -> list[dict[str, Any]]:
    groups: dict[str, list[int]] = {}
    for product in products:
        if product.is_recomputed:
            entry = groups.setdefault(_where(executions, product), [0, 0])
            entry[0] += product.times
            entry[1] += product.flops * product.times
    ordered = sorted(groups.items(), key=lambda item: -item[1][1])
    return [{"where": where, "executions": times, "flops": total} for where, (times, total) in ordered]


def _where(executions: Executions, product: Matmul) -> str:
    """Line of ours that asked for a product, whether for a gradient, and its result's shape."""
    stack = executions.module.stack(product.instruction.frame)
    ours = next((f for f in stack if f.file in ("model", "loss") and "matmul" not in f.function), None)
    place = f"{ours.file}.py:{ours.line} {ours.function}" if ours else product.instruction.op_name
    backward = ", backward" if "transpose(" in product.instruction.op_name else ""
    return f"{place}{backward} → {product.instruction.arrays[0]}"


def _kernels(attention: list[Kernel]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, int | None, int], int] = {}
    for k in attention:
        key = (k.direction, k.blocks, k.flops)
        groups[key] = groups.get(key, 0) + k.times
    return [
        {"direction": direction, "blocks": blocks, "flops": flops, "executions": times}
        for (direction, blocks, flops), times in sorted(groups.items(), key=lambda item: str(item))
    ]
