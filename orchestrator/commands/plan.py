"""`untildone plan`: what each rung of the ladder costs, without touching anything."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli import Exit
from orchestrator.commands.output import columns, duration, file_option, json_option, write_json

if TYPE_CHECKING:
    from orchestrator.plan_table import PlanRow
    from orchestrator.planning import Rung
    from trainer.preflight.table import Row
    from trainer.recipe import Recipe

HEADER = (
    "RUNG",
    "PLAN",
    "MESH",
    "BATCH",
    "REMAT",
    "GIB/LIMIT",
    "STEP",
    "TOKENS/S",
    "DAYS",
    "CHIP-HOURS",
    "VS-BEST",
    "WAIT",
)


@click.command("plan")
@file_option
@click.option(
    "--device", "devices", multiple=True, metavar="TYPE", help="Plan for this device type instead of the ladder."
)
@click.option("--slices", type=click.IntRange(min=1), default=1, show_default=True, help="Slices of --device.")
@click.option(
    "--compile", "compiling", is_flag=True, help="Compile what the table lacks: minutes each, needs libtpu, no TPU."
)
@json_option
def plan_command(file: Path, devices: tuple[str, ...], slices: int, compiling: bool, as_json: bool) -> int:
    """Show what the recipe costs on each rung of the ladder, or on other hardware.

    The global batch is the same on every rung: micro-batch × accumulation × devices. Where these do not divide it, empty
    rows fill it up, and what they cost is said. Reads FILE, the recipe and the table of compiled plans that untildone
    carries; no data, no cluster.
    """
    from orchestrator.api import load_run
    from orchestrator.plan_table import plan_table
    from orchestrator.planning import Rung, ladder, make_plan
    from orchestrator.preparing import load_recipe
    from trainer.hardware import device_type

    if slices > 1 and not devices:
        raise click.UsageError("--slices needs --device; the ladder in FILE says its own slices")
    run = load_run(file)
    recipe = load_recipe(run)
    if devices:
        plans = [make_plan(recipe, name, slices, "--device: ") for name in devices]
        rungs = tuple(Rung(i, plan, device_type(plan.device_type).family, 0.0) for i, plan in enumerate(plans))
    else:
        rungs = ladder(run, recipe)
    rows = plan_table(rungs, recipe, run.spec.target_step)
    if compiling:
        compiled = {i: made for i, row in enumerate(rows) if (made := _compiled(rungs[i], row, recipe)) is not None}
        rows = plan_table(rungs, recipe, run.spec.target_step, compiled)
    if as_json:
        body = {
            "run": run.name,
            "recipe": recipe.name,
            "global_batch": recipe.global_batch,
            "sequence_length": recipe.sequence_length,
            "target_step": run.spec.target_step,
            "plans": [row.to_json() for row in rows],
        }
        write_json("Plan", body)
        return Exit.DONE
    _show(rows, recipe, run.spec.target_step, file, ladder_of_file=not devices)
    return Exit.DONE


def _show(rows: Sequence["PlanRow"], recipe: "Recipe", steps: int, file: Path, ladder_of_file: bool) -> None:
    from orchestrator.plan_table import REACHED

    tokens = recipe.global_batch * recipe.sequence_length
    click.echo(
        f"{recipe.name}: {recipe.global_batch:,} instances × {recipe.sequence_length:,} tokens = {tokens:,} tokens per step,"
        f" {steps:,} steps, on any hardware"
    )
    click.echo(columns(HEADER, [_cells(row, ladder_of_file) for row in rows]))
    more = ", and rows without an instance" if any(row.padding for row in rows) else ""
    click.echo(f"BATCH: micro-batch × accumulation × fsdp devices = {recipe.global_batch:,}{more}")
    for row in rows:
        if row.warning is not None:
            click.echo(f"! {_name(row)}: {row.warning}")
    if any(row.step_seconds_estimate is not None for row in rows):
        click.echo(
            f"STEP and what follows from it: estimates, cycles of the compiled program ÷ {REACHED:.2f}, "
            "or with its waiting for the links where that is more; none was measured."
        )
    unknown = [row for row in rows if row.source == "estimated"]
    if unknown:
        names = ", ".join(_name(row) for row in unknown)
        where = "" if ladder_of_file else "".join(f" --device {r.device_type}" for r in unknown)
        where += f" --slices {unknown[0].slices}" if where and unknown[0].slices > 1 else ""
        again = f"untildone plan -f {file}{where}"
        click.echo(f"~ not compiled, memory by the planner's model: {names}. To compile: {again} --compile")


def _name(row: "PlanRow") -> str:
    return row.device_type if row.slices == 1 else f"{row.slices}×{row.device_type}"


def _cells(row: "PlanRow", ladder_of_file: bool) -> list[str]:
    mark = "~" if row.source == "estimated" else ""
    return [
        str(row.rung) if ladder_of_file else "-",
        _name(row),
        row.mesh,
        f"{row.micro_batch}×{row.accumulation}×{row.data_parallel}",
        row.remat,
        "-" if row.peak_gib is None else f"{mark}{row.peak_gib:.1f}/{row.limit_gib}",
        "-" if row.step_seconds_estimate is None else f"{row.step_seconds_estimate:.2f}s",
        "-" if row.tokens_per_second is None else f"{row.tokens_per_second / 1e6:.2f}M",
        "-" if row.days is None else f"{row.days:.1f}",
        "-" if row.chip_hours is None else f"{row.chip_hours:,.0f}",
        "-" if row.against_best is None else f"{row.against_best:.0%}",
        duration(row.wait_in_queue) if ladder_of_file else "-",
    ]


def _compiled(rung: "Rung", row: "PlanRow", recipe: "Recipe") -> "Row | None":
    """The outcome of a preflight, for a rung that the committed table does not have."""
    from orchestrator import trainer_process
    from trainer.preflight.accounting import report_of
    from trainer.preflight.table import row_of

    if row.source != "estimated":
        return None
    plan = rung.plan
    click.echo(f"compiling for {_name(row)} …", err=True)
    with tempfile.NamedTemporaryFile("wb", suffix=".json") as file:
        file.write(recipe.canonical())
        file.flush()
        done = trainer_process.call(
            "preflight", "--recipe", file.name, "--device", plan.device_type, "--slices", str(plan.slices),
            "--micro-batch", str(plan.micro_batch), "--sequence", str(plan.sequence), "--remat", plan.remat, "--json",
        )  # fmt: skip
    if done.returncode not in (0, 1) or not done.stdout.strip():
        raise trainer_process.failure(done)
    made = row_of(recipe, report_of(json.loads(done.stdout)))
    if not made.fits:
        click.echo(f"{_name(row)}: {made.verdict}: {made.reason}", err=True)
        return None
    return made
