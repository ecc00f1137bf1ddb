"""`untildone verify`: PASS or FAIL per proof, with figures."""

from pathlib import Path

import click

from orchestrator.cli import Exit
from orchestrator.commands.output import columns, json_option, local_option, write_json


@click.command("verify")
@click.argument("rundir", metavar="RUNDIR")
@click.option("--against", metavar="RUNDIR2", help="A run of the same recipe that this one must equal, bit for bit.")
@click.option("--so-far", is_flag=True, help="Accept a run that has not reached its target yet.")
@local_option
@json_option
def verify_command(rundir: str, against: str | None, so_far: bool, local: Path | None, as_json: bool) -> int:
    """Prove from its records that a run is what it claims to be.

    RUNDIR is a run directory, or the name of a run that the local cluster knows. Checked are the committed target, the
    unbroken lineage of commits, one recipe throughout, commits by allowed starts only, a complete ledger, undamaged
    checkpoints, and which instances were read how often. Exits 0 when every proof passes, 1 when one fails.
    """
    from orchestrator.registry import default_local, find_run
    from orchestrator.verify import verify
    from trainer.rundir.rundir import RunDirectory

    state = local or default_local()
    run = RunDirectory.open(find_run(state, rundir).run_directory)
    other = RunDirectory.open(find_run(state, against).run_directory) if against else None
    verdict, _ = verify(run, other, unfinished=so_far)
    if as_json:
        checks = [{"name": c.name, "passed": c.passed, "text": c.text} for c in verdict.checks]
        body = {"run_directory": run.uri, "passed": verdict.passed, "checks": checks, "figures": dict(verdict.figures)}
        write_json("Verification", body)
    else:
        rows = [("PASS" if check.passed else "FAIL", check.name, check.text) for check in verdict.checks]
        click.echo(columns(("RESULT", "PROOF", "FIGURES"), rows))
        failed = [check.name for check in verdict.checks if not check.passed]
        click.echo(
            f"not proven: {', '.join(failed)}" if failed else f"all {len(verdict.checks)} proofs passed: {run.uri}"
        )
    return Exit.DONE if verdict.passed else Exit.FAILED
