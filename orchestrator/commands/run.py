"""`untildone run`: look after one run in the foreground until its target step is committed."""

import os
import threading
from pathlib import Path

import click

from orchestrator.cli import Exit
from orchestrator.commands.output import (
    duration,
    file_option,
    json_option,
    local_option,
    on_terminal,
    seconds_option,
    write_json,
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
    from orchestrator import logs
    from orchestrator.api import load_run
    from orchestrator.clusters.local import LocalCluster
    from orchestrator.commands.progress import Watch, plain_watch, terminal_watch
    from orchestrator.daemon import Look, resume_until_done
    from orchestrator.decisions import Freeze, Refused
    from orchestrator.registry import KnownRun, default_local, known_runs, remember

    run = load_run(file)
    folder = local or default_local()
    watched = on_terminal() and not as_json
    watch: Watch = terminal_watch(run) if watched else plain_watch(run, quiet=as_json)
    stop = threading.Event()
    expired = threading.Event()
    noted = threading.Event()

    def expire() -> None:
        expired.set()
        stop.set()

    timer = threading.Timer(timeout, expire) if timeout is not None else None
    cluster = LocalCluster(folder)
    place = run.spec.run_directory
    place = place if "://" in place else os.path.abspath(place)
    known = KnownRun(name=run.name, run_directory=place, file=str(file.resolve()))

    elsewhere = any(other.name == run.name and other.run_directory != place for other in known_runs(folder))

    def show(look: Look) -> None:
        # What was refused is not noted: `status` goes on with the file that the run was last accepted with. Nor is one
        # that takes the name of a run elsewhere, until it is certain that it may.
        refused = isinstance(look.decision, Refused) or (isinstance(look.decision, Freeze) and elsewhere)
        if not noted.is_set() and not refused:
            remember(folder, known)
            noted.set()
        watch.show(look)

    with watch:
        # On a terminal the watch owns the screen, and only what is wrong is logged beside it.
        logs.configure(level="warning" if watched else "info")
        if timer is not None:
            timer.daemon = True
            timer.start()
        outcome = resume_until_done(run, cluster, on_change=show, take_over=take_over, stop=stop)
        if timer is not None:
            timer.cancel()
    code = {"Completed": Exit.DONE, "Interrupted": Exit.TIMEOUT if expired.is_set() else Exit.INTERRUPTED}.get(
        outcome.word, Exit.FAILED
    )
    message = outcome.message
    if outcome.word == "Completed" and not watch.acted:
        message = f"already done: {message}; nothing was submitted"
    if expired.is_set() and outcome.word == "Interrupted" and timeout is not None:
        message = f"not done within {duration(timeout)}: {message}"
    if as_json:
        write_json("RunResult", {"run": run.name, "status": outcome.word, "message": message, "run_directory": place})
    else:
        click.echo(f"{run.name}: {message}", err=code not in (Exit.DONE, Exit.INTERRUPTED))
    return code
