"""`untildone plan`: the ladder's arithmetic, without touching anything."""

from pathlib import Path

import click

from orchestrator.cli import Exit
from orchestrator.commands.output import columns, duration, file_option, json_option, write_json


@click.command("plan")
@file_option
@click.option(
    "--device", "devices", multiple=True, metavar="TYPE", help="Plan for this device type instead of the ladder."
)
@click.option("--slices", type=click.IntRange(min=1), default=1, show_default=True, help="Slices of --device.")
@json_option
def plan_command(file: Path, devices: tuple[str, ...], slices: int, as_json: bool) -> int:
    """Show how the recipe is laid out on each rung of the ladder, or on other hardware.

    global batch = devices × micro-batch × accumulation, exactly, on every rung. Reads FILE and the recipe; no data, no
    cluster.
    """
    from orchestrator.api import load_run
    from orchestrator.planning import Rung, ladder, make_plan, plan_rows, shown
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
    if as_json:
        body = {
            "run": run.name,
            "recipe": recipe.name,
            "global_batch": recipe.global_batch,
            "sequence_length": recipe.sequence_length,
            "plans": [row.to_json() for row in plan_rows(rungs)],
        }
        write_json("Plan", body)
        return Exit.DONE
    tokens = recipe.global_batch * recipe.sequence_length
    click.echo(
        f"{recipe.name}: {recipe.global_batch:,} instances × {recipe.sequence_length:,} tokens"
        f" = {tokens:,} tokens per step, on any hardware"
    )
    header = ["RUNG", "PLAN", "DEVICES", "PROCESSES", "MICRO-BATCH", "ACCUMULATION", "PER-DEVICE", "REMAT", "WAIT"]
    rows = [
        [
            str(rung.index) if not devices else "-",
            shown(rung.plan).replace(" ", ""),
            f"{rung.plan.devices:,}",
            f"{rung.plan.processes:,}",
            f"{rung.plan.micro_batch:,}",
            f"{rung.plan.accumulation:,}",
            f"{rung.plan.per_device_batch:,}",
            rung.plan.remat,
            duration(rung.wait_in_queue) if not devices else "-",
        ]
        for rung in rungs
    ]
    click.echo(columns(header, rows))
    for rung in rungs:
        p = rung.plan
        click.echo(
            f"{shown(p)}: {p.data_parallel:,} devices × {p.micro_batch:,} micro-batch × {p.accumulation:,} accumulation"
            f" = {p.global_batch:,}"
        )
    return Exit.DONE
