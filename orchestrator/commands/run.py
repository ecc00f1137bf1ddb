"""`untildone run`: look after one run in the foreground until its target step is committed."""

import os
import threading
from pathlib import Path

import click

from orchestrator.commands.output import (
    file_option,
    json_option,
    local_option,
    seconds_option,
)


@click.command("run")
@file_option
@local_option
@click.option(
    "--timeout", metavar="TIME", callback=seconds_option, help="Stop looking after it after this long; exit 3."
)
@click.option("--take-over", is_flag=True, help="The cluster this run was on is gone for good: continue it here.")
@json_option
def run_command(file: Path, local: Path | None, timeout: float | None, take_over: bool, as_json: bool) -> int:
    """Keep the run in FILE going on this machine until a commit at its target step exists.

    Interrupted, killed or called again, it adopts what it finds. Ctrl-C ends only this command: the training goes on,
    and the same command comes back to it. A run that is done already says so and submits nothing.
    """
    from orchestrator.api import load_run
    from orchestrator.clusters.local import LocalCluster
    from orchestrator.commands.foreground import look_after
    from orchestrator.daemon import Look
    from orchestrator.decisions import Freeze, OwnedByOther, Refused
    from orchestrator.registry import KnownRun, default_local, known_runs, remember

    run = load_run(file)
    folder = local or default_local()
    noted = threading.Event()
    place = run.spec.run_directory
    place = place if "://" in place else os.path.abspath(place)
    known = KnownRun(name=run.name, run_directory=place, file=str(file.resolve()))
    elsewhere = any(other.name == run.name and other.run_directory != place for other in known_runs(folder))

    def note(look: Look) -> None:
        # What was refused is not noted: `status` goes on with the file that the run was last accepted with. Nor is one
        # that takes the name of a run elsewhere, until it is certain that it may.
        refused = isinstance(look.decision, (Refused, OwnedByOther))
        if not noted.is_set() and not refused and not (isinstance(look.decision, Freeze) and elsewhere):
            remember(folder, known)
            noted.set()

    return look_after(
        run,
        lambda: LocalCluster(folder),
        place,
        timeout=timeout,
        as_json=as_json,
        on_look=note,
        take_over=take_over,
    )
