"""`untildone status`: one line per run."""

from pathlib import Path

import click

from orchestrator.cli import Exit
from orchestrator.commands.output import cluster_options, columns, duration, json_option, local_option, write_json

HEADER = ("NAME", "STATUS", "STEP", "TARGET", "PLAN", "ATTEMPT", "COMMITTED", "LEFT", "AGE")

HEADER_IN_CLUSTER = tuple(name for name in HEADER if name != "LEFT")


@click.command("status")
@click.argument("run", required=False)
@cluster_options
@local_option
@json_option
def status_command(
    run: str | None,
    local: Path | None,
    namespace: str | None,
    kubeconfig: Path | None,
    context: str | None,
    as_json: bool,
) -> int:
    """List the runs that the local cluster knows, or one RUN (a name, or a run directory).

    With -n, the TrainingRuns in that namespace of a Kubernetes cluster, as the operator wrote their status last.

    STEP is the last completed step, COMMITTED the one that a resumed run continues from, LEFT the time to TARGET at the
    present pace. Exits 5 when the truth about a
    run could not be read.
    """
    if namespace is not None:
        return _in_cluster(namespace, run, kubeconfig, context, as_json)
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
                duration(g.explanation.seconds_left),
                duration(age(g)),
            )
            for g in glances
        ]
        click.echo(columns(HEADER, rows))
    return Exit.UNKNOWN if any(g.explanation.status == "TruthUnknown" for g in glances) else Exit.DONE


def _in_cluster(namespace: str, run: str | None, kubeconfig: Path | None, context: str | None, as_json: bool) -> int:
    from orchestrator.clusters.kubernetes_api import KubernetesApi, configuration_from
    from orchestrator.looking_in_cluster import listed

    runs = listed(KubernetesApi(configuration_from(kubeconfig, context)), namespace, run)
    words = [one.status.condition("Succeeded").reason if one.status else "-" for one in runs]
    if as_json:
        statuses = [{"run": one.name, "status": one.status.to_object() if one.status else None} for one in runs]
        write_json("RunStatusList", {"namespace": namespace, "runs": statuses})
    elif not runs:
        click.echo(f"no TrainingRuns in namespace {namespace}", err=True)
    else:
        rows = []
        for one, word in zip(runs, words, strict=True):
            s = one.status
            attempt = f"{s.attempt}.{s.start or 0}" if s and s.attempt else "-"
            figures = [s.step, s.target_step, s.plan] if s else [None] * 3
            shown = ["-" if figure is None else str(figure) for figure in figures]
            committed = "-" if s is None or s.committed_step is None else str(s.committed_step)
            rows.append((one.name, word, *shown, attempt, committed, duration(one.age)))
        click.echo(columns(HEADER_IN_CLUSTER, rows))
    return Exit.UNKNOWN if "TruthUnknown" in words else Exit.DONE
