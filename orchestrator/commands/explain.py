"""`untildone explain`: what a run does, why, and what comes next."""

from pathlib import Path

import click

from orchestrator.cli import Exit
from orchestrator.commands.output import cluster_options, json_option, local_option, painted, write_json


@click.command("explain")
@click.argument("run")
@cluster_options
@local_option
@json_option
def explain_command(
    run: str,
    local: Path | None,
    namespace: str | None,
    kubeconfig: Path | None,
    context: str | None,
    as_json: bool,
) -> int:
    """Say what RUN (a name, or a run directory) does or waits for, since when, on what evidence, and what is next.

    With -n, RUN is a TrainingRun in that namespace of a Kubernetes cluster. It looks once and decides as an orchestrator would, but carries nothing out. Exits 5 when the truth is not known.
    """
    from orchestrator.explain import render
    from orchestrator.looking import glance, with_profiles
    from orchestrator.preparing import STORE_PATIENCE_SECONDS
    from orchestrator.registry import default_local, find_run
    from trainer.rundir.rundir import RunDirectory

    if namespace is not None:
        from orchestrator.clusters.kubernetes_api import KubernetesApi, configuration_from
        from orchestrator.looking_in_cluster import explain_in_cluster

        found = explain_in_cluster(KubernetesApi(configuration_from(kubeconfig, context)), namespace, run)
    else:
        state = local or default_local()
        known = find_run(state, run)
        found = glance(known, state).explanation
        if found.attempt:  # else there is no run directory yet, or it cannot be read
            found = with_profiles(
                found, RunDirectory.open(known.run_directory, patience_seconds=STORE_PATIENCE_SECONDS)
            )
    if as_json:
        write_json("RunExplanation", found.model_dump(mode="json"))
    else:
        text = render(found)
        click.echo(text.replace(found.status, painted(found.status), 1))
    return Exit.UNKNOWN if found.status == "TruthUnknown" else Exit.DONE
