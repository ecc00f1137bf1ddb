"""`untildone profile`: ask a run for a trace of some steps, or for its compiled program; show what came of it."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli import Exit
from orchestrator.commands.output import cluster_options, columns, json_option, local_option, write_json

if TYPE_CHECKING:
    from trainer.rundir.profiles import Profile
    from trainer.rundir.rundir import RunDirectory

MOST_STEPS = 20  # trainer.rundir.records.MOST_PROFILED_STEPS, which is not imported for --help


@click.command("profile")
@click.argument("run")
@click.option("--at", type=click.IntRange(min=1), metavar="STEP", help="The first step to trace.  [default: the next]")
@click.option("--steps", type=click.IntRange(1, MOST_STEPS), default=5, show_default=True, metavar="N")
@click.option("--everybody", is_flag=True, help="A trace of each process, to find a slow one, instead of process 0's.")
@click.option("--hlo", is_flag=True, help="No trace: the text of the compiled step alone.")
@click.option("--list", "listing", is_flag=True, help="Ask for nothing; show what was asked for.")
@cluster_options
@local_option
@json_option
def profile_command(
    run: str,
    at: int | None,
    steps: int,
    everybody: bool,
    hlo: bool,
    listing: bool,
    local: Path | None,
    namespace: str | None,
    kubeconfig: Path | None,
    context: str | None,
    as_json: bool,
) -> int:
    """Have RUN (a name, or a run directory) trace N steps, and write the compiled step beside the trace.

    It is a request in the run directory: process 0 looks every 10 s, and each request is taken once at most. The numbers
    of the run do not change. With -n, RUN is a TrainingRun in that namespace; its run directory is written with your
    rights. The trace is for xprof: xprof --logdir FOLDER.
    """
    from trainer.rundir import profiles
    from trainer.rundir.rundir import RunDirectory

    if (listing or hlo) and (at is not None or everybody):
        raise click.UsageError(
            f"--at and --everybody say what to trace; with {'--list' if listing else '--hlo'} nothing is"
        )
    rundir = RunDirectory.open(_run_directory(run, local, namespace, kubeconfig, context))
    if listing:
        found = profiles.profiles(rundir, not_understood=lambda why: click.echo(f"warning: {why}", err=True))
    else:
        found = [_ask(rundir, at, steps, everybody, hlo)]
    if as_json:
        write_json("ProfileList", {"run_directory": rundir.uri, "items": [_body(one, rundir) for one in found]})
    elif not listing:
        where = f"{run} -n {namespace}" if namespace else run
        click.echo(f"profile/{found[0].identifier} asked: {found[0].what}")
        if _nobody_trains(rundir):
            click.echo("no trainer runs now: the next start takes it")
        click.echo(f"see: untildone profile {where} --list")
    else:
        rows = [(one.identifier, one.steps, one.status, one.outcome) for one in found]
        click.echo(
            columns(("NAME", "STEPS", "STATUS", "WHERE"), rows) if rows else f"no profile was asked of {rundir.uri}"
        )
    return Exit.DONE


def _run_directory(
    run: str, local: Path | None, namespace: str | None, kubeconfig: Path | None, context: str | None
) -> str:
    if namespace is not None:
        from orchestrator.clusters.kubernetes_api import KubernetesApi, configuration_from
        from orchestrator.looking_in_cluster import run_directory

        return run_directory(KubernetesApi(configuration_from(kubeconfig, context)), namespace, run)
    from orchestrator.registry import default_local, find_run

    return find_run(local or default_local(), run).run_directory


def _ask(rundir: "RunDirectory", at: int | None, steps: int, everybody: bool, hlo: bool) -> "Profile":
    """Write the request. Raises ConfigurationError when no start can ever obey it."""
    from trainer.errors import ConfigurationError
    from trainer.rundir import profiles
    from trainer.rundir.records import Request

    found = rundir.head()
    if found is None:
        raise ConfigurationError(f"run directory {rundir.uri}: nothing was submitted yet, so there is nobody to ask")
    head = found[0]
    spec = rundir.read_spec(head.attempt)
    target = spec.settings.target_step if spec else None
    committed = head.commit.step if head.commit else 0
    if target is not None and committed >= target:
        raise ConfigurationError(
            f"run directory {rundir.uri}: its target, step {target}, is committed: no step is left"
        )
    if target is not None and at is not None and at > target:
        raise ConfigurationError(f"--at {at}: the run's target is step {target}; give a step up to it")
    now = time.time()
    request = Request(
        kind="dump" if hlo else "profile",
        attempt=head.attempt,
        at=at,
        steps=steps,
        everybody=everybody,
        reason="untildone profile",
        time=now,
    )
    identifier = profiles.new_identifier(now)
    rundir.request(identifier, request)
    return profiles.Profile(identifier, request)


def _nobody_trains(rundir: "RunDirectory") -> bool:
    """No start of the newest attempt has begun, or the last one has said why it ended: suspended, say, or preempted."""
    found = rundir.head()
    if found is None:
        return True
    attempt = found[0].attempt
    last = rundir.last_start(attempt)
    return last == 0 or rundir.read_exit(attempt, last) is not None


def _body(one: "Profile", rundir: "RunDirectory") -> dict[str, Any]:
    """For scripts. `first` and `last` are the steps traced, null as long as that is not known."""
    done, begun = one.done, one.begun
    traced = done is not None and done.first is not None
    return {
        "name": one.identifier,
        "kind": one.request.kind,
        "status": one.status,
        "first": done.first if done is not None and traced else begun.first if begun else None,
        "last": done.step if done is not None and traced else begun.last if begun else None,
        "place": rundir.path(done.place) if done is not None and done.place else None,
        "failed": done.failed if done is not None and done.failed else None,
    }
