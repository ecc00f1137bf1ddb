"""`python -m trainer metrics tensorboard | export | overlay | alarm | acknowledge`. Everything is read from committed records.

Exit codes of `overlay` and `alarm`: 0 within the tolerance (silent), 1 beyond it (alarm). Other errors carry their own.
"""

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from trainer.data.bars import bar
from trainer.errors import StorageUnavailable
from trainer.flops import COUNTINGS, REPORTED, Counting
from trainer.metrics.tables import FORMATS
from trainer.places import check_writable, written

if TYPE_CHECKING:
    from trainer.metrics.committed import Committed
    from trainer.metrics.curves import Curve
    from trainer.metrics.overlay import Overlay

counting = click.option(
    "--mfu",
    "counting",
    type=click.Choice(COUNTINGS),
    default=REPORTED,
    show_default=True,
    help="How MFU counts attention: the pairs computed; OLMo-core's count of 2025; or all pairs.",
)
columns = (
    click.option("--step-column", metavar="NAME", help="Column of the steps, where its name does not say so."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)


@click.group()
def metrics() -> None:
    """Curves of a run: TensorBoard, tables, a reference beside them, and the memorisation alarm."""


@metrics.command()
@click.argument("run_directory", metavar="RUNDIR")
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder, one per run.")
@click.option("--follow", is_flag=True, help="Go on until the run's target is committed.")
@click.option("--every", default=30.0, show_default=True, type=click.FloatRange(min=0.1), help="Seconds between looks.")
@counting
def tensorboard(run_directory: str, out: Path, follow: bool, every: float, counting: Counting) -> None:
    """Write what is committed, and its evaluations, as TensorBoard's event files. Again: only what is new since then.

    Names are OLMo-core's. No step is there twice, whatever the run and this command went through.
    """
    from trainer.metrics.event_files import event_messages
    from trainer.metrics.tensorboard import Export

    event_messages()
    run = _committed(run_directory, counting)
    with written(f"--out {out}"):
        export = Export(run, out)
    while True:
        try:
            done = follow and _done(run)  # first: what is committed until then is written below
            with written(f"--out {out}"), bar("writing", None) as advance:
                points = export.update(advance)
        except StorageUnavailable as error:
            if not follow:
                raise
            click.echo(f"{error}; trying again", err=True)
            points, done = 0, False
        if points or not follow:
            click.echo(f"{out}: {points:,} new points, up to step {export.committed:,}")
        if not follow or done:
            return
        time.sleep(every)


@metrics.command()
@click.argument("run_directory", metavar="RUNDIR")
@click.option("--format", "form", type=click.Choice(FORMATS), default="jsonl", show_default=True)
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="File; standard output if not given."
)
@counting
def export(run_directory: str, form: str, out: Path | None, counting: Counting) -> None:
    """Write one row per committed step, with OLMo-core's names."""
    from trainer.metrics import tables

    write = tables.write_csv if form == "csv" else tables.write_json_lines
    run = _committed(run_directory, counting)
    with bar("reading", None) as advance:
        points = tables.rows(run, advance)
        if out is None:
            write(points, sys.stdout)
            return
        temporary = out.with_name(f".{out.name}.{os.getpid()}.part")
        with written(f"--out {out}"):
            try:
                with temporary.open("w", newline="") as file:
                    count = write(points, file)
                temporary.replace(out)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
    click.echo(f"{out}: {count:,} steps")


@metrics.command()
@click.argument("ours")
@click.argument("reference")
@click.option("--metric", default="train/CE loss", show_default=True, help="By OLMo-core's name.")
@click.option("--column", metavar="NAME", help="The reference's column or tag, where its name is another.")
@click.option(
    "--window", default=100, show_default=True, type=click.IntRange(1), help="Steps that differences are means of."
)
@click.option("--from-step", default=0, type=click.IntRange(0), help="Compare from this step on.")
@click.option("--tolerance", type=click.FloatRange(min=0), help="Exit 1 where a window differs by more.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Picture: .png, .svg or .pdf.")
@columns[0]
@columns[1]
@click.pass_context
def overlay(
    context: click.Context,
    ours: str,
    reference: str,
    metric: str,
    column: str | None,
    window: int,
    from_step: int,
    tolerance: float | None,
    plot: Path | None,
    step_column: str | None,
    as_json: bool,
) -> None:
    """Lay a run over a reference and say where they differ.

    OURS and REFERENCE: a run directory, TensorBoard's folder, or a table (CSV as W&B or TensorBoard export it, JSON lines).
    Compared are the steps that both have.
    """
    from trainer.metrics import draw
    from trainer.metrics.curves import load
    from trainer.metrics.overlay import overlay as compare

    if plot is not None:
        draw.check(plot)
        check_writable("--plot", plot)
    mine = load(ours, (metric,))
    theirs = load(reference, (metric, *_also(metric)), column, step_column)
    found = compare(mine, theirs, window, from_step)
    if plot is not None:
        with written(f"--plot {plot}"):
            draw.draw(found, plot, metric, (_label(ours), _label(reference)), tolerance)
    left = found.leaves(tolerance) if tolerance is not None else None
    if as_json:
        click.echo(json.dumps(_as_json(found, mine, theirs, metric, tolerance)))
    else:
        click.echo(_report(found, mine, theirs, metric, tolerance))
        if plot is not None:
            click.echo(f"picture: {plot}")
    context.exit(0 if left is None else 1)


@metrics.command()
@click.argument("source")
@click.option("--held-out", metavar="SOURCE", help="Where the held-out loss is, if not in SOURCE too.")
@click.option("--column", metavar="NAME", help="Column or tag of the training loss.")
@click.option("--held-out-column", metavar="NAME", help="Column or tag of the held-out loss.")
@click.option("--same-text", is_flag=True, help="The held-out text was split off the training text at random.")
@click.option("--held-out-tokens", type=click.IntRange(1), help="Targets in the held-out set: how far it may be off.")
@click.option(
    "--until", metavar="STEP", type=click.IntRange(1), help="Only up to here, e.g. the end of the first epoch."
)
@columns[0]
@columns[1]
@click.pass_context
def alarm(
    context: click.Context,
    source: str,
    held_out: str | None,
    column: str | None,
    held_out_column: str | None,
    same_text: bool,
    held_out_tokens: int | None,
    until: int | None,
    step_column: str | None,
    as_json: bool,
) -> None:
    """Judge two curves of any run: does the training loss fall below what the held-out loss speaks for?

    SOURCE as for `overlay`. Exits 1 where it does: text is being read again.
    """
    from trainer.metrics import memorisation as rule
    from trainer.metrics.curves import HELD_OUT, TRAINING, load

    train = load(source, TRAINING, column, step_column)
    held = load(held_out or source, HELD_OUT, held_out_column, step_column)
    last = math.inf if until is None else until
    chosen, at = train.steps <= last, held.steps <= last
    pairs = rule.intervals(train.steps[chosen], train.values[chosen], held.steps[at], held.values[at])
    verdict = rule.judge(pairs, same_text, tolerance=rule.tolerance_for(held_out_tokens))
    scores = verdict.score[np.isfinite(verdict.score)]
    judged, lowest = scores.size, float(scores.min(initial=0.0))
    if as_json:
        body: dict[str, Any] = {"alarm_step": verdict.alarm_step, "evaluations": judged, "lowest_score": lowest}
        click.echo(json.dumps(body | {"training": train.taken, "held_out": held.taken, "threshold": -rule.THRESHOLD}))
    else:
        click.echo(f"training loss: {train.taken} of {train.source}; held-out loss: {held.taken} of {held.source}")
        click.echo(f"{judged:,} evaluations judged, lowest score {lowest:.1f} (the alarm is at {-rule.THRESHOLD:g})")
        if not judged:
            click.echo(
                f"nothing to judge: it takes {rule.FEWEST} evaluations with training losses between them, and one more"
            )
        elif verdict.alarm is None:
            click.echo("silent: the training loss is where the held-out loss says it should be")
        else:
            below = verdict.expected[verdict.alarm] - pairs.train[verdict.alarm]
            click.echo(
                f"ALARM at step {verdict.alarm_step:,}: the training loss is {below:.3f} nats too low; text is read again"
            )
    context.exit(0 if verdict.alarm is None else 1)


@metrics.command()
@click.argument("run_directory", metavar="RUNDIR")
@click.argument("name", metavar="ALARM")
@click.option("--why", required=True, help="What was found; kept beside the alarm.")
def acknowledge(run_directory: str, name: str, why: str) -> None:
    """Close an alarm of a run, as `untildone explain` shows it. The run's next look, at its next commit, sees it."""
    from trainer.rundir.alarms import acknowledge as close
    from trainer.rundir.rundir import RunDirectory

    close(RunDirectory.open(run_directory), name, why)
    click.echo(f"{name}: acknowledged")


# -- inside


def _committed(run_directory: str, counting: Counting) -> "Committed":
    from trainer.metrics.committed import Committed
    from trainer.rundir.rundir import RunDirectory

    return Committed(RunDirectory.open(run_directory), counting)


def _done(run: "Committed") -> bool:
    found = run.rundir.head()
    spec = run.rundir.read_spec(found[0].attempt) if found else None
    commit = found[0].commit if found else None
    return spec is not None and commit is not None and commit.step >= spec.settings.target_step


def _also(metric: str) -> tuple[str, ...]:
    """Other names of the same metric in tables that people make."""
    from trainer.metrics.curves import HELD_OUT, TRAINING

    return next((others for others in (TRAINING, HELD_OUT) if metric in others), ())


def _label(source: str) -> str:
    return source.rstrip("/").rpartition("/")[2] or source


def _report(o: "Overlay", ours: "Curve", reference: "Curve", metric: str, tolerance: float | None) -> str:
    largest, at = o.largest
    lines = [
        f"ours: {ours.taken} of {ours.source}",
        f"reference: {reference.taken} of {reference.source}",
        f"{metric}: {o.steps.size:,} common steps, {o.steps[0]:,.0f} to {o.steps[-1]:,.0f}; differences are ours - reference",
        f"{'steps':>23} {'ours':>10} {'reference':>10} {'mean':>10} {'largest':>10} at step",
    ]
    for part in o.parts():
        span = f"{part.first:,}..{part.last:,}"
        lines.append(
            f"{span:>23} {part.ours:>10.5g} {part.reference:>10.5g} {part.difference:>+10.4g} "
            + ("         -" if part.largest is None else f"{part.largest:>+10.4g} {part.at:,}")
        )
    lines.append(f"mean difference {o.mean:+.6g}; largest over {o.window:,} steps {largest:+.6g}, at step {at:,}")
    if tolerance is not None:
        left = o.leaves(tolerance)
        lines.append(
            f"within {tolerance:g} everywhere"
            if left is None
            else f"NOT within {tolerance:g}: from step {left:,} on, in {o.beyond(tolerance):.1%} of the windows"
        )
    return "\n".join(lines)


def _as_json(o: "Overlay", ours: "Curve", reference: "Curve", metric: str, tolerance: float | None) -> dict[str, Any]:
    largest, at = o.largest
    return {
        "metric": metric,
        "ours": {"source": ours.source, "taken": ours.taken},
        "reference": {"source": reference.source, "taken": reference.taken},
        "common_steps": int(o.steps.size),
        "first_step": int(o.steps[0]),
        "last_step": int(o.steps[-1]),
        "window": o.window,
        "mean_difference": o.mean,
        "largest_difference": largest,
        "largest_at_step": at,
        "tolerance": tolerance,
        "leaves_at_step": o.leaves(tolerance) if tolerance is not None else None,
        "parts": [vars(part) for part in o.parts()],
    }
