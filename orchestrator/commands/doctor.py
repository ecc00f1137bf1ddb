"""`untildone doctor`: whether an installation in a cluster can work."""

from pathlib import Path

import click

from orchestrator.cli import Exit
from orchestrator.commands.output import columns, json_option, seconds_option, write_json


@click.command("doctor")
@click.option(
    "--config",
    "config",
    required=True,
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The operator's configuration file.",
)
@click.option(
    "--kubeconfig",
    metavar="FILE",
    type=click.Path(exists=True, path_type=Path),
    help="Which cluster.  [default: as kubectl]",
)
@click.option("--context", metavar="NAME", help="Context of the kubeconfig.")
@click.option(
    "--wait",
    "patience",
    metavar="TIME",
    default="30s",
    callback=seconds_option,
    help="To see an operator work.  [default: 30s]",
)
@json_option
def doctor_command(config: Path, kubeconfig: Path | None, context: str | None, patience: float, as_json: bool) -> int:
    """Check an installation: the cluster, its kinds, the rights of whoever runs this, and whether an operator works.

    Exits 1 when a check failed, 5 when the cluster did not answer. `helm test` runs it as the operator.
    """
    from orchestrator.clusters.kubernetes_api import KubernetesApi, configuration_from
    from orchestrator.operating.configuration import load_configuration
    from orchestrator.operating.doctor import examine

    configuration = load_configuration(config)
    checks = list(examine(KubernetesApi(configuration_from(kubeconfig, context)), configuration, patience))
    if as_json:
        write_json("Checks", {"checks": [{"name": c.name, "result": c.result, "message": c.message} for c in checks]})
    else:
        click.echo(columns(("CHECK", "RESULT", "MESSAGE"), [(c.name, c.result, c.message) for c in checks]))
    results = {check.result for check in checks}
    if "FAIL" in results:
        return Exit.FAILED
    return Exit.UNKNOWN if "UNKNOWN" in results else Exit.DONE
