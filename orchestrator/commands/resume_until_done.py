"""`untildone resume-until-done`: look after one run in a Kubernetes cluster from here, without an operator."""

import threading
from pathlib import Path

import click

from orchestrator.commands.output import cluster_options, file_option, json_option, seconds_option

POLL_SECONDS = 10.0  # of the run directory; the cluster tells its news


@click.command("resume-until-done")
@file_option
@cluster_options
@click.option(
    "--timeout", metavar="TIME", callback=seconds_option, help="Stop looking after it after this long; exit 3."
)
@click.option(
    "--take-over", is_flag=True, help="Take the run from whoever looks after it, or from a cluster that is gone."
)
@json_option
def resume_until_done_command(
    file: Path,
    namespace: str | None,
    kubeconfig: Path | None,
    context: str | None,
    timeout: float | None,
    take_over: bool,
    as_json: bool,
) -> int:
    """Keep the run in FILE going in a cluster until a commit at its target step exists.

    It needs JobSet and Kueue in the cluster, but neither the operator nor its CustomResourceDefinition. Interrupted,
    killed or called again, it adopts what it finds; Ctrl-C ends only this command. While somebody else looks after the
    run it waits, and says so. The namespace is that of -n, else of the file, else as for kubectl.
    """
    from orchestrator.api import load_run
    from orchestrator.clusters.kubernetes import KubernetesCluster
    from orchestrator.clusters.kubernetes_api import KubernetesApi, configuration_from, current_namespace
    from orchestrator.clusters.kubernetes_caches import Caches
    from orchestrator.commands.foreground import look_after
    from orchestrator.operating.preparation import read_config_map
    from orchestrator.owners import daemon_owner

    run = load_run(file)
    api = KubernetesApi(configuration_from(kubeconfig, context))
    where = namespace or run.metadata.namespace or current_namespace(kubeconfig, context)
    news = threading.Event()

    def notice(_namespace: str, name: str) -> None:
        if name == run.name:
            news.set()

    caches = Caches(api, [where], notice)
    caches.start()

    def connect() -> KubernetesCluster:
        return KubernetesCluster(api, where, caches)

    try:
        return look_after(
            run,
            connect,
            run.spec.run_directory,
            timeout=timeout,
            as_json=as_json,
            poll=POLL_SECONDS,
            take_over=take_over,
            news=news,
            owner=daemon_owner(where, run.name),
            config_maps=lambda key: read_config_map(api, where, key),
        )
    finally:
        caches.stop()
