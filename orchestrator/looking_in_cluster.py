"""One look at TrainingRuns in a Kubernetes cluster, for `status -n`, `explain -n` and `profile -n`. Carries nothing out."""

import time
from dataclasses import dataclass
from datetime import datetime

from orchestrator.api import TrainingRun, from_object
from orchestrator.clusters.base import ClusterUnavailable
from orchestrator.clusters.kubernetes import SYNC_SECONDS, KubernetesCluster
from orchestrator.clusters.kubernetes_api import ApiError, KubernetesApi, Object
from orchestrator.clusters.kubernetes_caches import Caches
from orchestrator.daemon import Caretaker
from orchestrator.explain import Explanation, explanation
from orchestrator.looking import with_profiles
from orchestrator.operating.preparation import read_config_map
from orchestrator.preparing import STORE_PATIENCE_SECONDS, prepare
from orchestrator.registry import RunNotFound
from orchestrator.status import RunStatus
from trainer.rundir.rundir import RunDirectory


@dataclass(frozen=True)
class Listed:
    """A TrainingRun and the status that an operator wrote last; `age` in seconds."""

    name: str
    status: RunStatus | None
    age: float


def listed(api: KubernetesApi, namespace: str, name: str | None = None) -> list[Listed]:
    """The TrainingRuns of a namespace, or one of them. Raises RunNotFound, ClusterUnavailable."""
    if name is not None:
        found = [_read(api, namespace, name)]
    else:
        found = _request(api, _path(namespace), f"TrainingRuns in namespace {namespace}").get("items") or []
    return [Listed(str(obj["metadata"]["name"]), RunStatus.of(obj), _age(obj)) for obj in found]


def run_directory(api: KubernetesApi, namespace: str, name: str) -> str:
    """Where a TrainingRun keeps its run directory. Raises RunNotFound, ConfigurationError, ClusterUnavailable."""
    return from_object(_read(api, namespace, name)).spec.run_directory


def explain_in_cluster(api: KubernetesApi, namespace: str, name: str) -> Explanation:
    """What an operator would decide about the run now, in words.

    Reads the cluster and the run directory with the rights of whoever asks. Raises RunNotFound, ConfigurationError,
    StorageUnavailable, ClusterUnavailable.
    """
    run: TrainingRun = from_object(_read(api, namespace, name))
    recipe = prepare(run, lambda key: read_config_map(api, namespace, key))
    rundir = RunDirectory.open(run.spec.run_directory, patience_seconds=STORE_PATIENCE_SECONDS)
    caches = Caches(api, [namespace])
    caches.start()
    try:
        caches.wait(SYNC_SECONDS)
        look = Caretaker(run, recipe, KubernetesCluster(api, namespace, caches), rundir).look()
    finally:
        caches.stop()
    return with_profiles(explanation(run, look.observation, look.decision, look.now), rundir)


def _read(api: KubernetesApi, namespace: str, name: str) -> Object:
    return _request(api, f"{_path(namespace)}/{name}", f"TrainingRun {name} in namespace {namespace}")


def _path(namespace: str) -> str:
    return f"/apis/untildone.dev/v1alpha1/namespaces/{namespace}/trainingruns"


def _request(api: KubernetesApi, path: str, what: str) -> Object:
    try:
        return api.request("GET", path)
    except ApiError as error:
        if error.status == 404:
            raise RunNotFound(f"{what}: not there (see kubectl get trun --all-namespaces)") from None
        raise ClusterUnavailable(f"{what}: {error}") from None


def _age(obj: Object) -> float:
    return time.time() - datetime.fromisoformat(str(obj["metadata"]["creationTimestamp"])).timestamp()
