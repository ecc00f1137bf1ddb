"""Looking after one run in the foreground: what `run` and `resume-until-done` have in common."""

import threading
from collections.abc import Callable
from typing import Any

import click

from orchestrator import logs
from orchestrator.api import TrainingRun
from orchestrator.cli import Exit
from orchestrator.clusters.base import Cluster
from orchestrator.commands.output import duration, on_terminal, write_json
from orchestrator.commands.progress import Watch, plain_watch, terminal_watch
from orchestrator.daemon import Look, resume_until_done


def look_after(
    run: TrainingRun,
    connect: Callable[[], Cluster],
    place: str,
    *,
    timeout: float | None,
    as_json: bool,
    on_look: Callable[[Look], None] = lambda _look: None,
    **options: Any,
) -> Exit:
    """Until the run is done, or `timeout` seconds are over; shows it, and returns the exit code.

    `place` is the run directory as it is shown; `options` are those of resume_until_done.
    """
    watched = on_terminal() and not as_json
    watch: Watch = terminal_watch(run) if watched else plain_watch(run, quiet=as_json)
    stop, expired = threading.Event(), threading.Event()

    def expire() -> None:
        expired.set()
        stop.set()

    def show(look: Look) -> None:
        on_look(look)
        watch.show(look)

    timer = threading.Timer(timeout, expire) if timeout is not None else None
    with watch:
        # On a terminal the watch owns the screen, and only what is wrong is logged beside it.
        logs.configure(level="warning" if watched else "info")
        if timer is not None:
            timer.daemon = True
            timer.start()
        outcome = resume_until_done(run, connect(), on_change=show, stop=stop, **options)
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
