"""`untildone recover`: write HEAD again when it is lost, after a person has looked."""

import click

from orchestrator.cli import Exit
from orchestrator.commands.output import json_option, write_json


@click.command("recover")
@click.argument("rundir", metavar="RUNDIR")
@click.option("--attempt", type=int, default=0, metavar="N", help="The highest attempt you know of.")
@click.option("--yes", is_flag=True, help="Write it. You know that no trainer of this run is alive.")
@json_option
def recover_command(rundir: str, attempt: int, yes: bool, as_json: bool) -> int:
    """Rebuild HEAD from the commit records of the run directory RUNDIR.

    For a HEAD that is missing, unreadable or older than known; a HEAD that is fine is left alone. Without --yes it
    only shows what it would write. A trainer that is still alive cannot be fenced by this: end all of them first.
    """
    from trainer.errors import TruthUnknown
    from trainer.rundir import recover
    from trainer.rundir.rundir import RunDirectory

    directory = RunDirectory.open(rundir)
    why = ""
    try:
        found = directory.head(at_least=attempt)
        head = found[0] if found else None
    except TruthUnknown as error:
        why = str(error)
        head = recover.propose(directory, attempt)
        if yes:
            recover.write(directory, head)
    commit = str(head.commit) if head and head.commit else "none"
    named = f"attempt {head.attempt}, start {head.start}, commit: {commit}" if head else "no attempt yet"
    if as_json:
        body = head.model_dump(mode="json") if head else None
        written = bool(why) and yes
        write_json("Recovery", {"run_directory": directory.uri, "needed": bool(why), "written": written, "head": body})
    elif not why:
        click.echo(f"HEAD is fine, nothing was changed: {named}")
    elif yes:
        click.echo(f"HEAD was written: {named}")
    else:
        click.echo(f"{why.partition('. ')[0]}\nwould write HEAD: {named}\nrun it again with --yes to write it")
    return Exit.DONE
