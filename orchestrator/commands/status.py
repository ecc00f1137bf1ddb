"""`untildone status`: one line per run."""

from pathlib import Path

import click

from orchestrator.cli import Exit
from orchestrator.commands.output import columns, duration, json_option, local_option, write_json


@click.command("status")
@click.argument("run", required=False)
@local_option
@json_option
def status_command(run: str | None, local: Path | None, as_json: bool) -> int:
    """List the runs that the local cluster knows, or one RUN (a name, or a run directory).

    STEP is the last completed step, COMMITTED the one that a resumed run continues from. Exits 5 when the truth about a
    run could not be read.
    """
    from orchestrator.looking import age, glance
    from orchestrator.registry import default_local, find_run, known_runs

    state = local or default_local()
    runs = [find_run(state, run)] if run else known_runs(state)
    glances = [glance(known, state) for known in runs]
    if as_json:
        write_json("RunStatusList", {"runs": [g.explanation.model_dump(mode="json") for g in glances]})
    elif not glances:
        click.echo(f"no runs in {state}; begin one with: untildone run -f FILE", err=True)
    else:
        rows = [
            (
                g.explanation.run,
                g.explanation.status,
                str(max(g.explanation.step or 0, g.explanation.committed_step)),
                str(g.explanation.target_step or "-"),
                (g.explanation.plan or "-").replace(" ", ""),
                f"{g.explanation.attempt}.{g.explanation.start}" if g.explanation.attempt else "-",
                str(g.explanation.committed_step),
                duration(age(g)),
            )
            for g in glances
        ]
        click.echo(columns(("NAME", "STATUS", "STEP", "TARGET", "PLAN", "ATTEMPT", "COMMITTED", "AGE"), rows))
    return Exit.UNKNOWN if any(g.explanation.status == "TruthUnknown" for g in glances) else Exit.DONE
