"""`untildone report`: the page, its pictures and summary.json."""

from pathlib import Path

import click

from orchestrator.cli import Exit
from orchestrator.commands.output import json_option, local_option, write_json


@click.command("report")
@click.argument("rundir", metavar="RUNDIR")
@click.option("--reference", metavar="RUNDIR", help="An uninterrupted run of the same recipe, to compare with.")
@click.option(
    "-o",
    "--output",
    "folder",
    required=True,
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder to write into; made if it is missing.",
)
@local_option
@json_option
def report_command(rundir: str, reference: str | None, folder: Path, local: Path | None, as_json: bool) -> int:
    """Write report.html (one file, pictures inside), loss.png, timeline.png, coverage.png and summary.json.

    A run that is still going is reported as far as it is. Exits 1 when a proof fails; the report says which.
    """
    try:
        from orchestrator.report.write import write_report
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise click.UsageError(
            "the report draws with matplotlib; install it: pip install 'untildone[report]'"
        ) from None
    from orchestrator.registry import default_local, find_run
    from trainer.rundir.rundir import RunDirectory

    state = local or default_local()
    run = RunDirectory.open(find_run(state, rundir).run_directory)
    other = RunDirectory.open(find_run(state, reference).run_directory) if reference else None
    report = write_report(run, other, folder)
    if as_json:
        write_json("Report", {"files": [str(path) for path in report.files], "summary": report.summary})
    else:
        from orchestrator.report.page import headline

        click.echo(headline(report.run, report.verdict, report.summary))
        click.echo(str(report.html))
    return Exit.DONE if report.verdict.passed else Exit.FAILED
