"""docs/plans.md, written from the committed table: `python -m trainer.preflight.fill --document`."""

from collections.abc import Iterator

from trainer.errors import ConfigurationError
from trainer.hardware import device_type
from trainer.preflight import table
from trainer.preflight.choice import refuse_inexact
from trainer.preflight.ladder import LADDER, Entry
from trainer.preflight.table import Row
from trainer.recipe import load

TITLES = {
    "olmo3_7b_stage1": "Stage 1: 512 instances of 8,192 tokens",
    "olmo3_7b_stage2": "Stage 2: 256 instances of 8,192 tokens",
    "olmo3_7b_stage3": "Stage 3: 64 instances of 65,536 tokens",
}
HEADER = (
    "slice",
    "devices",
    "batch",
    "remat",
    "peak of limit, GiB",
    "executed ÷ model",
    "MFU ceiling",
    "step ≥",
    "tokens/s ≤",
)
INTRODUCTION = """# Plans of OLMo 3 7B, compiled

Written by `make plans` from `trainer/preflight/plans.json`; do not edit. Each row is the step that trains, compiled for that
slice by libtpu on a machine without a TPU. Nothing here was measured on hardware: [planning.md](planning.md) says what the
columns mean and how to compile other plans. Steps and tokens/s are without waiting for the links, which the lists below the tables say.
"""


def markdown() -> str:
    """The whole page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield INTRODUCTION.rstrip()
    for recipe, title in TITLES.items():
        entries = [entry for entry in LADDER if entry.recipe == recipe]
        yield f"\n## {title}\n"
        yield f"| {' | '.join(HEADER)} |"
        yield "|" + "---|" * len(HEADER)
        for entry in entries:
            yield from _entry(entry)
        yield from _cycles(entries)
    yield from _refused()


def _rows(entry: Entry) -> list[Row]:
    return [
        row
        for row in table.of_recipe(load(entry.recipe))
        if (row.device_type, row.slices, row.tensor) == (entry.device_type, entry.slices, entry.tensor)
    ]


def best(entry: Entry) -> Row | None:
    """The row of the plan that is taken (choice.choose), or compared where heads are divided."""
    return min((row for row in _rows(entry) if row.fits), key=lambda row: row.seconds, default=None)


def _entry(entry: Entry) -> Iterator[str]:
    name = entry.name.removeprefix(f"{entry.recipe} ")
    kind = device_type(entry.device_type)
    devices = f"{kind.devices * entry.slices:,}"
    try:
        refuse_inexact(load(entry.recipe), kind, entry.slices)
    except ConfigurationError as error:
        yield f"| {name} | {devices} | refused: {str(error).partition(': ')[2].partition('; of ')[0]} |" + " |" * 6
        return
    row = best(entry)
    if row is None:
        yield f"| {name} | {devices} | not compiled yet: `{entry.command}` |" + " |" * 6
        return
    assert row.step_seconds_floor is not None and row.peak_gib is not None
    recipe = load(entry.recipe)
    tokens = recipe.global_batch * recipe.sequence_length / row.step_seconds_floor
    yield (
        f"| {name} | {devices} | {_batch(row)} | {row.remat} | {row.peak_gib:.1f} of {row.limit_gib} | {row.executed_over_model:.3f} |"
        f" {row.mfu_ceiling:.1%} | {row.step_seconds_floor:.2f} s | {tokens / 1e6:.2f} M |"
    )


def _batch(row: Row) -> str:
    """ "2 × 2 × 128", and the share of it that holds an instance where that is not all."""
    groups, batch = row.groups, load(row.recipe).global_batch
    rows = row.micro_batch * row.accumulation * groups
    filled = f" ({batch / rows:.0%})" if rows > batch else ""
    return f"{row.micro_batch} × {row.accumulation} × {groups:,}{filled}"


def _cycles(entries: list[Entry]) -> Iterator[str]:
    found = [(entry, row) for entry in entries if (row := best(entry)) is not None]
    if not found:
        return
    yield "\nWhere the cycles go, and what is sent per device and step:\n"
    for entry, row in found:
        shares = ", ".join(f"{kind} {share:.0%}" for kind, share in row.cycle_shares.items() if share >= 0.01)
        sent = ", ".join(f"{kind} {gib:.1f}" for kind, gib in row.gib_sent.items() if gib >= 0.1)
        name, hidden = entry.name.removeprefix(f"{entry.recipe} "), ""
        if row.hidden is not None:
            hidden = f"; {row.communication_seconds:.2f} s at the peak of the links, {row.hidden:.0%} of it behind work"
        yield f"- {name}: {shares}. GiB: {sent}{hidden}."


def _refused() -> Iterator[str]:
    """What was compiled and did not fit."""
    found = [row for row in table.rows() if not row.fits]
    if not found:
        return
    yield "\n## Compiled, and too large\n"
    yield "| recipe | slice | batch | remat | verdict | needs, GiB | limit |"
    yield "|" + "---|" * 7
    for row in found:
        slices = f"{row.slices} × " if row.slices > 1 else ""
        needs = "?" if row.peak_gib is None else f"{row.peak_gib:.1f}"
        yield f"| {row.recipe} | {slices}{row.device_type} | {_batch(row)} | {row.remat} | {row.verdict} | {needs} | {row.limit_gib} |"
