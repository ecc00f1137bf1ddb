"""`untildone operator`: look after the TrainingRuns of a cluster."""

import signal
import threading
from pathlib import Path

import click

from orchestrator.cli import Exit


@click.command("operator")
@click.option(
    "-n", "--namespace", "namespaces", multiple=True, metavar="NAME", help="Look after the runs of this namespace only."
)
@click.option("--config", "file", type=click.Path(dir_okay=False, path_type=Path), help="Configuration, as YAML.")
@click.option("--kubeconfig", type=click.Path(dir_okay=False, path_type=Path), help="Default: as kubectl has it.")
@click.option("--context", metavar="NAME", help="Context of the kubeconfig.")
def operator_command(
    namespaces: tuple[str, ...], file: Path | None, kubeconfig: Path | None, context: str | None
) -> int:
    """Look after all TrainingRuns of a cluster, until it is told to stop.

    In a pod it uses the pod's service account, elsewhere the kubeconfig. -n can be given several times; without it, the
    configuration's watchNamespaces count, and without those all namespaces.
    """
    from orchestrator import logs
    from orchestrator.clusters.kubernetes_api import KubernetesApi, configuration_from
    from orchestrator.operating.configuration import Configuration, load_configuration
    from orchestrator.operator import Operator

    configuration = load_configuration(file) if file is not None else Configuration()
    if namespaces:
        configuration = configuration.model_copy(update={"watch_namespaces": namespaces})
    logs.configure(level=configuration.log_level)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    Operator(KubernetesApi(configuration_from(kubeconfig, context)), configuration).run(stopping)
    return Exit.DONE
