"""A preflight's report as text."""

from collections.abc import Iterator
from typing import Any

from trainer.plan import Plan, filling
from trainer.preflight.accounting import GIB, Report

SHOWN = 12  # rows of a table


def lines(report: Report) -> Iterator[str]:
    """The report, the verdict first."""
    plan = report.plan
    slices = f"{plan['slices']} × " if plan["slices"] > 1 else ""
    together = plan["sequence"] * plan.get("tensor", 1)
    shared = f" in groups of {together}" if together > 1 else ""
    shared += " that divide the heads" if plan.get("tensor", 1) > 1 else ""
    rows = plan["data_parallel"] * plan["micro_batch"] * plan["accumulation"]
    held = f" rows for {plan['global_batch']:,} instances" if rows > plan["global_batch"] else ""
    yield (
        f"{report.recipe} on {slices}{plan['device_type']}: {plan['devices']:,} devices{shared}: {plan['data_parallel']:,} × "
        f"{plan['micro_batch']} micro-batch × {plan['accumulation']} accumulation = {rows:,}{held}, remat {plan['remat']}"
    )
    if lost := filling(Plan.parse(plan, "plan")):
        yield lost
    peak = "an unknown size" if report.peak_gib is None else f"{report.peak_gib:.2f} GiB"
    yield f"verdict: {report.verdict}; {peak} of {report.limit_gib:.2f} GiB (compiled in {report.compile_seconds:.0f} s)"
    if report.reason:
        yield f"reason: {report.reason}"
    if report.flops is None or report.mfu_ceiling is None or report.step_seconds_floor is None:
        return
    f = report.flops
    yield (
        f"FLOPs per device and step: {f.model:.4g} model, {f.matmul:.4g} in matmuls ({f.recomputed / f.model:.1%} of the"
        f" model's recomputed), {f.attention:.4g} in attention; executed ÷ model {f.executed_over_model:.3f}"
    )
    yield (
        f"step: at least {report.step_seconds_floor:.3f} s by the compiler's cycles; MFU ceiling {report.mfu_ceiling:.1%}"
        " (kernels at peak, no exposed communication)"
    )
    sent = sum(row["seconds"] for row in report.communication)
    if report.waiting_seconds is not None and sent:
        yield (
            f"communication: {sent:.3f} s at the peak of the links, {1 - report.waiting_seconds / sent:.0%} of it beside work;"
            f" {report.waiting_seconds:.3f} s to wait for"
        )
    total = sum(report.cycles.values())
    yield from _table("cycles", [(f"{v / total:6.1%}", name) for name, v in report.cycles.items()])
    yield from _table(
        "matmuls, by cycles",
        [
            (
                f"{p['cycles'] / total:6.1%}",
                f"{p['executions']:,} × {p['where']}: {'?' if p['of_peak'] is None else format(p['of_peak'], '.0%')} of peak",
            )
            for p in report.products
        ],
    )
    yield from _table(
        "attention kernels",
        [
            (f"{k['executions']:,} ×", f"{k['direction']}, {k['blocks']} blocks, {k['flops']:.4g} FLOPs")
            for k in report.attention
        ],
    )
    yield from _table("communication per step", [_communication(row) for row in report.communication])
    yield from _table("largest arrays", [_buffer(row) for row in report.largest])
    yield from _table(
        "recomputed matmuls",
        [(f"{r['executions']:,} ×", f"{r['where']}: {r['flops'] / f.model:.1%}") for r in report.recomputed],
    )
    yield from _table(
        "loops of a length that data decides, taken to run once", [("", w) for w in report.uncounted_loops]
    )


def _communication(row: dict[str, Any]) -> tuple[str, str]:
    share = row["asynchronous_bytes"] / row["bytes"] if row["bytes"] else 0
    return (
        f"{row['bytes'] / GIB:7.2f} GiB",
        f"{row['kind']} {row['dtype']}, {row['executions']:,} times, {share:.0%} asynchronous, {row['seconds']:.3g} s at the"
        f" peak of the links, {row['waiting_seconds']:.3g} s of them waited for",
    )


def _buffer(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['bytes'] * row['count'] / GIB:6.2f} GiB", f"{row['count']} × {row['shape']} {row['made_by']}"


def _table(title: str, rows: list[tuple[str, str]]) -> Iterator[str]:
    if rows:
        yield f"{title}:"
    for left, right in rows[:SHOWN]:
        yield f"  {left}  {right}"
    if len(rows) > SHOWN:
        yield f"  … and {len(rows) - SHOWN} more (--json has them)"
