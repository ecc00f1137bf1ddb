"""`python -m trainer preflight`: what a recipe's train step costs on a slice that is not here."""

import json
import sys
from pathlib import Path

import click


@click.command()
@click.option("--recipe", required=True, metavar="NAME", help="a recipe's name, or a .py, .yaml or .json file")
@click.option("--device", required=True, metavar="TYPE", help="for example tpu7x-4x4x4 or v5p-4x4x8")
@click.option("--slices", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--micro-batch", type=click.IntRange(min=1), help="instances per device; default: what the planner takes")
@click.option(
    "--sequence", type=click.IntRange(min=1), help="devices that share a sequence; default: what the planner prefers"
)
@click.option("--tensor", type=click.IntRange(1, 2), default=1, show_default=True, help="devices that divide the heads")
@click.option("--remat", help="what the backward pass computes again; default: what the planner takes")
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="override a recipe field; dotted")
@click.option("--xla", multiple=True, metavar="NAME=VALUE", help="an option of the compiler, for an experiment")
@click.option(
    "--keep", type=click.Path(path_type=Path), metavar="FILE", help="write the optimised program's text there"
)
@click.option("--fresh", is_flag=True, help="compile again even if the same program was compiled before")
@click.option("--timeout", type=float, default=3600, show_default=True, metavar="SECONDS")
@click.option("--json", "as_json", is_flag=True, help="one JSON object on standard output")
def preflight(
    recipe: str,
    device: str,
    slices: int,
    micro_batch: int | None,
    sequence: int | None,
    tensor: int,
    remat: str | None,
    overrides: tuple[str, ...],
    xla: tuple[str, ...],
    keep: Path | None,
    fresh: bool,
    timeout: float,
    as_json: bool,
) -> int:
    """Compile the step that trains for a TPU slice, without one: does it fit, and what does it cost?

    Needs libtpu and no TPU; a 7B step takes minutes and about 5 GiB. Ends with 0 when it fits, else with 1.
    """
    from trainer.hardware import device_type
    from trainer.plan import require_fit
    from trainer.preflight.choice import choose, refuse_inexact
    from trainer.preflight.dividing import factors
    from trainer.preflight.plans import plan_of
    from trainer.preflight.preflight import check
    from trainer.preflight.preflight import preflight as run
    from trainer.preflight.render import lines
    from trainer.recipe import load, parse_overrides

    options = {name: str(value) for name, value in parse_overrides(xla).items()}
    loaded = load(recipe, parse_overrides(overrides))
    kind = device_type(device)
    check(kind)
    refuse_inexact(loaded, kind, slices)
    if micro_batch is None or remat is None:
        chosen = choose(loaded, kind, slices).plan
        micro_batch, remat = micro_batch or chosen.micro_batch, remat or chosen.remat
        sequence = sequence or chosen.sequence
    sequence = sequence or factors(loaded, kind, slices)[0]
    plan = plan_of(loaded, kind, slices, micro_batch, remat, sequence, tensor)
    require_fit(plan, loaded)
    if sys.stderr.isatty():
        click.echo(f"compiling {loaded.name} for {device} …", err=True)
    report = run(loaded, plan, options, keep, fresh, timeout)
    if as_json:
        click.echo(json.dumps(report.to_json(), sort_keys=True))
    else:
        for line in lines(report):
            click.echo(line)
    return 0 if report.verdict == "fits" else 1
