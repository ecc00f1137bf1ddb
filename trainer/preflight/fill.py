"""`python -m trainer.preflight.fill`: compile what the committed table lacks, and write docs/plans.md. Resumable.

For each slice of the ladder the planner's candidates are compiled from best to worst until one fits; each outcome is
written at once. What was compiled by other versions, or is told to with --again, is compiled anew.
"""

from collections.abc import Iterator
from pathlib import Path

import click

from trainer.errors import ConfigurationError
from trainer.hardware import device_type
from trainer.plan import Plan
from trainer.preflight import cache, document, table
from trainer.preflight.choice import candidates, refuse_inexact
from trainer.preflight.ladder import LADDER, Entry
from trainer.preflight.plans import plan_of
from trainer.preflight.preflight import preflight
from trainer.recipe import Recipe, load

HOPELESS = 1.15  # a prediction this many times the limit is not compiled; the next smaller candidate is


@click.command()
@click.option("--only", multiple=True, metavar="TEXT", help="entries whose name has this in it, e.g. tpu7x-4x4x4")
@click.option("--again", is_flag=True, help="compile anew what is in the table")
@click.option("--list", "as_list", is_flag=True, help="say what would be compiled, and stop")
@click.option("--document", "only_document", is_flag=True, help="only write docs/plans.md from the table")
def main(only: tuple[str, ...], again: bool, as_list: bool, only_document: bool) -> None:
    """Compile what the table of plans lacks; a 7B program takes minutes."""
    root = Path(__file__).parents[2]
    for entry in () if only_document else LADDER:
        if only and not any(text in entry.name for text in only):
            continue
        recipe = load(entry.recipe)
        for plan in _wanted(entry, recipe, again):
            click.echo(
                f"{entry.name}: micro-batch {plan.micro_batch} × {plan.accumulation}, remat {plan.remat}", err=True
            )
            if as_list:
                break
            row = table.row_of(recipe, preflight(recipe, plan))
            table.write(table.FILE, table.added(table.read(table.FILE), row))
            table.rows.cache_clear()
            table.memory_model.cache_clear()
            peak = "?" if row.peak_gib is None else f"{row.peak_gib:.2f}"
            click.echo(
                f"{entry.name}: {row.verdict}, {peak} of {row.limit_gib} GiB, {row.compile_seconds:.0f} s", err=True
            )
            if row.fits:
                break
    (root / "docs" / "plans.md").write_text(document.markdown())


def _wanted(entry: Entry, recipe: Recipe, again: bool) -> Iterator[Plan]:
    """The candidates still to be compiled, best first, up to the first that is known to fit."""
    kind = device_type(entry.device_type)
    try:
        refuse_inexact(recipe, kind, entry.slices)
    except ConfigurationError:
        return  # the table says why
    assert kind.hbm_gib_per_device is not None
    for candidate in list(candidates(recipe, kind, entry.slices)):
        plan = candidate.plan
        if entry.tensor > 1:
            plan = plan_of(recipe, kind, entry.slices, plan.micro_batch, plan.remat, plan.sequence, entry.tensor)
        row = next((r for r in table.of_recipe(recipe, table.read(table.FILE)) if r.is_for(plan)), None)
        if row is not None and not again and row.versions == cache.versions():
            if row.fits:
                return
            continue
        if candidate.predicted_gib > HOPELESS * kind.hbm_gib_per_device:
            continue
        yield plan


if __name__ == "__main__":
    main()
