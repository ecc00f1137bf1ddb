"""`python -m trainer data check | order | audit`, and what makes token files (commands_make.py). Plain text when piped, a
progress bar on a terminal.

Exit codes of `audit`: 0 clean, 1 a problem was found, 4 no such run. Other errors carry their own (trainer/errors.py).
"""

import json
from typing import TYPE_CHECKING

import click

from trainer.data import commands_make as make
from trainer.data.bars import bar

if TYPE_CHECKING:
    from trainer.data.audit import Comparison, RunCoverage
    from trainer.recipe import Recipe
    from trainer.rundir.rundir import RunDirectory

NO_SUCH_RUN = 4


@click.group()
def data() -> None:
    """Tokenise text, build a data order's table, and audit what a run has read."""


for command in (make.tokenize, make.write_bytes, make.examples, make.pack):
    data.add_command(command)


@data.command()
@click.option("--recipe", "reference", required=True, help="Recipe name or file.")
@click.option("--data-root", required=True, help="Folder or gs:// prefix of the token files.")
@click.option(
    "--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Recipe override, e.g. data.order.seed=1."
)
@click.option("--sets", multiple=True, metavar="NAME|NAME=FILE,…", help="Held-out sets that the run will evaluate.")
def check(reference: str, data_root: str, overrides: tuple[str, ...], sets: tuple[str, ...]) -> None:
    """Look at a recipe's token files as a first start would: all there, whole, and no held-out text trained on."""
    from trainer.data.ends import unended
    from trainer.data.held_out import check_corpus
    from trainer.evaluation_settings import expand, parse_sets
    from trainer.freezing import freeze
    from trainer.recipe import load, parse_overrides

    recipe = freeze(load(reference, parse_overrides(overrides)), data_root)
    said = unended(recipe, data_root)
    held_out, whole = check_corpus(recipe, data_root, expand(parse_sets(sets)))
    where = "none of them in the training files" if whole else "none of them in a sample of the training files"
    click.echo(
        f"{recipe.instances:,} training instances in {len(recipe.data.files):,} files; {held_out:,} held out, {where}"
    )
    if said:
        click.echo(f"warning: {said}", err=True)
    if recipe.data.omitted_files:
        click.echo(_left_out(recipe.data.omitted_files))


def _left_out(files: tuple[str, ...]) -> str:
    shown = ", ".join(files[:3]) + (", …" if len(files) > 3 else "")
    return f"left out of the mix by the recipe, and not among the instances: {len(files):,} files ({shown})"


@data.command()
@click.option("--run-directory", required=True, help="Folder or gs:// prefix of the run.")
@click.option("--epochs", default=1, show_default=True, type=click.IntRange(1), help="Tables for the first N epochs.")
@click.option("--recipe", "reference", help="Recipe name or file, for a run that has not begun (with --data-root).")
@click.option("--data-root", help="Folder or gs:// prefix of the token files, to measure them.")
@click.option(
    "--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Recipe override, e.g. data.order.seed=1."
)
def order(
    run_directory: str, epochs: int, reference: str | None, data_root: str | None, overrides: tuple[str, ...]
) -> None:
    """Build the tables of an `olmo_core` order in the run directory. Other orders need none."""
    from trainer.data.order_table import build_table, needs_table

    if bool(reference) != bool(data_root):
        raise click.UsageError("--recipe and --data-root belong together: a recipe is frozen by measuring its files")
    rundir, recipe = _run_and_recipe(run_directory, reference, data_root, overrides)
    if not needs_table(recipe):
        why = "is computed per index" if recipe.data.order.kind == "feistel" else "is small enough to be computed"
        click.echo(f"order {recipe.data.order.kind} of {recipe.instances:,} instances {why}: no table needed")
        return
    for epoch in range(epochs):
        key, written = build_table(rundir.store, recipe, epoch, lambda text: click.echo(text, err=True))
        click.echo(f"{rundir.path(key)}: {'written' if written else 'already there, the same'}")


@data.command()
@click.argument("run_directory", metavar="RUNDIR")
@click.option("--against", metavar="RUNDIR2", help="Also say how far this other run is equal bit by bit.")
@click.option("--data-root", help="Where the token files are now; by default where the newest attempt had them.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def audit(
    context: click.Context, run_directory: str, against: str | None, data_root: str | None, as_json: bool
) -> None:
    """Rebuild from the step logs which instances were read how often along the committed steps of a run.

    The tokens of up to 64 steps, and of the first step of each start, are compared with the corpus.
    """
    from trainer.data.audit import NoSuchRun, compare
    from trainer.data.audit import audit as audit_run

    try:
        rundir = _open(run_directory)
        other = _open(against) if against else None
        with bar("auditing", None) as advance:
            coverage = audit_run(rundir, lambda done, total: advance(done, total), data_root)
        comparison = compare(rundir, other) if other else None
    except NoSuchRun as error:
        click.echo(f"error: {error}", err=True)
        context.exit(NO_SUCH_RUN)
    if as_json:
        body = coverage.model_dump(mode="json") | {"against": comparison and comparison.model_dump(mode="json")}
        click.echo(json.dumps(body))
    else:
        click.echo(report(coverage, comparison))
    context.exit(0 if coverage.ok else 1)


def report(coverage: "RunCoverage", comparison: "Comparison | None" = None) -> str:
    """The audit as plain text."""
    c = coverage
    lines = [
        f"run {c.run}: recipe {c.recipe}, order {c.order}, {c.instances:,} instances, batches of {c.global_batch:,}",
        f"steps {c.first_step + 1:,}..{c.last_step:,}: {c.steps:,} logged, {c.commits:,} commits",
    ]
    if c.omitted_files:
        lines.append(_left_out(c.omitted_files))
    lines += [
        f"epoch {e.epoch}: {e.steps:,} steps{' (whole)' if e.whole else ''}, "
        f"{e.read:,} instances read, {e.repeated:,} repeated, {e.missed:,} missed"
        for e in c.epochs
    ]
    lines.append(
        f"steps done again: {c.redone_steps:,}; on an equal plan {c.redone_steps_compared:,}, "
        f"of these {c.redone_steps_bitwise_equal:,} equal bit by bit"
    )
    lines.append(
        f"tokens not compared with the corpus: {c.tokens_unread}"
        if c.tokens_unread
        else f"tokens compared with the corpus: {c.token_steps_compared:,} steps, {c.token_steps_unequal:,} unequal"
    )
    for problem in c.problems:
        lines.append(f"problem: {problem.text} [{problem.where}]")
    if c.problem_count > len(c.problems):
        lines.append(f"… and {c.problem_count - len(c.problems):,} more problems")
    if comparison:
        d = comparison
        lines.append(
            f"against {d.against}: {d.steps_compared:,} common steps; equal until step: "
            f"ids {d.ids_equal_until_step:,}, tokens {d.data_equal_until_step:,}, loss {d.loss_equal_until_step:,}, "
            f"gradient norm {d.grad_norm_equal_until_step:,}, state digests {d.digest_equal_until_step:,}"
            f" (of {d.digests_compared:,} common commits)"
        )
    if not c.steps:
        lines.append("nothing committed yet: nothing to audit")
    elif c.ok:
        lines.append("every instance due was read, none twice")
    else:
        lines.append(
            f"NOT clean: {c.repeated_instances:,} instances repeated, {c.missed_instances:,} missed, "
            f"{c.problem_count:,} problems"
        )
    return "\n".join(lines)


def _open(uri: str) -> "RunDirectory":
    """The run directory at `uri`. Raises NoSuchRun where there is none, StorageUnavailable where that is not known."""
    from trainer.data.audit import NoSuchRun
    from trainer.rundir.rundir import RunDirectory
    from trainer.rundir.store import StoreMissing

    try:
        return RunDirectory.open(uri)
    except StoreMissing as error:
        raise NoSuchRun(str(error)) from None


def _run_and_recipe(
    uri: str, reference: str | None, root: str | None, overrides: tuple[str, ...]
) -> "tuple[RunDirectory, Recipe]":
    """The run directory (made if need be) and its recipe: the stored one, else `reference` frozen below `root`."""
    from trainer.errors import ConfigurationError
    from trainer.freezing import freeze
    from trainer.recipe import load, parse_overrides
    from trainer.rundir.rundir import RunDirectory

    rundir = RunDirectory.open(uri, create=reference is not None)
    stored = rundir.read_recipe()
    if reference and root:
        recipe = freeze(load(reference, parse_overrides(overrides)), root)
        if stored and stored.fingerprint != recipe.fingerprint():
            raise ConfigurationError(f"{uri} belongs to another recipe; leave --recipe out to use the stored one")
        return rundir, recipe
    if stored is None:
        raise ConfigurationError(f"{uri} has no recipe.json yet; give --recipe and --data-root")
    return rundir, stored.recipe
