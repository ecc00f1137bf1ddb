"""The copies of everything that observations are made from, shared by all runs of one process.

One reflector per kind, for the whole cluster or per namespace. JobSets, Workloads and Pods have to be known. Nodes and
the queues' own objects are worth having: where they may not be read, their signals are missing, and `warnings` says
which right is.
"""

import time
from collections.abc import Callable, Iterable, Iterator

from orchestrator.clusters import kubernetes_objects as objects
from orchestrator.clusters.base import ClusterUnavailable
from orchestrator.clusters.kubernetes_api import KubernetesApi
from orchestrator.clusters.kubernetes_memory import Memories
from orchestrator.clusters.kubernetes_objects import Object, label
from orchestrator.clusters.kubernetes_reflector import Change, Key, Kind, Reflector

JOBSET, KUEUE = "jobset.x-k8s.io/v1alpha2", "kueue.x-k8s.io/v1beta2"


def _by_run(obj: Object) -> Key:
    return obj["metadata"]["namespace"], label(obj, objects.RUN_LABEL)


def _by_job(obj: Object) -> Key | None:
    uid = jobset_uid(obj)
    return (obj["metadata"]["namespace"], uid) if uid else None


def jobset_uid(workload: Object) -> str:
    """The uid of the JobSet that this Workload stands for."""
    owners = workload["metadata"].get("ownerReferences") or ()
    return next((str(owner["uid"]) for owner in owners if owner.get("kind") == "JobSet"), "")


JOBSETS = Kind(JOBSET, "jobsets", objects.prune_jobset, _by_run, objects.RUN_LABEL)
PODS = Kind("v1", "pods", objects.prune_pod, _by_run, f"{objects.RUN_LABEL},{objects.JOBSET_UID}")
WORKLOADS = Kind(KUEUE, "workloads", objects.prune_workload, _by_job, objects.JOB_UID_LABEL)
NODES = Kind("v1", "nodes", objects.prune_node, selector=objects.ACCELERATOR, namespaced=False)
LOCAL_QUEUES = Kind(KUEUE, "localqueues", objects.prune_local_queue)
CLUSTER_QUEUES = Kind(KUEUE, "clusterqueues", objects.prune_cluster_queue, namespaced=False)
FLAVORS = Kind(KUEUE, "resourceflavors", objects.prune_flavor, namespaced=False)
REQUIRED = (JOBSETS, PODS, WORKLOADS)
OPTIONAL = {
    NODES: "the state of nodes is not among the evidence of why a start ended",
    LOCAL_QUEUES: "nothing is known of the queue",
    CLUSTER_QUEUES: "nothing is known of the quota",
    FLAVORS: "nothing is known of the quota",
}


class Caches:
    """What is known of the cluster, in these `namespaces` or (None) in all. `start` begins, `stop` ends it.

    `on_change(namespace, run)` is called, from many threads, when something about a run may be news: it must be quick.
    """

    def __init__(
        self,
        api: KubernetesApi,
        namespaces: Iterable[str] | None = None,
        on_change: Callable[[str, str], None] = lambda _namespace, _run: None,
    ) -> None:
        self.api = api
        self.memories = Memories(self._node_of)
        self._scopes: tuple[str | None, ...] = tuple(sorted(set(namespaces))) if namespaces is not None else (None,)
        self._on_change = on_change
        handlers: dict[Kind, Change] = {
            JOBSETS: self._jobset,
            PODS: self._pod,
            WORKLOADS: self._workload,
            NODES: self._node,
        }
        self._reflectors: dict[tuple[Kind, str | None], Reflector] = {}
        for kind in (*REQUIRED, *OPTIONAL):
            for scope in self._scopes if kind.namespaced else (None,):
                change: Change = handlers.get(kind, lambda _old, _new: None)
                self._reflectors[kind, scope] = Reflector(api, kind, scope, change)

    def start(self) -> None:
        for reflector in self._reflectors.values():
            reflector.start()

    def wait(self, seconds: float) -> bool:
        """Whether everything has been read, or refused, once within so long."""
        deadline = time.monotonic() + seconds
        return all(r.wait(max(0.0, deadline - time.monotonic())) for r in self._reflectors.values())

    def stop(self) -> None:
        for reflector in self._reflectors.values():
            reflector.stop()

    def check(self, namespace: str) -> None:
        """Raises ClusterUnavailable when what is known of a namespace's runs cannot be believed."""
        for kind in REQUIRED:
            self.of(kind, namespace).check()
        nodes = self.of(NODES)
        if not nodes.forbidden:
            nodes.check()

    def warnings(self, namespace: str) -> tuple[str, ...]:
        """Which rights are missing, and what for."""
        missing = ((kind, self.of(kind, namespace).forbidden) for kind in OPTIONAL)
        return tuple(f"{OPTIONAL[kind]}: {why}" for kind, why in missing if why)

    def of(self, kind: Kind, namespace: str | None = None) -> Reflector:
        """The copy of one kind that covers `namespace`. KeyError when that namespace is not watched."""
        cluster_wide = not kind.namespaced or self._scopes == (None,)
        return self._reflectors[kind, None if cluster_wide else namespace]

    # -- what is asked

    def jobsets(self, namespace: str, run: str) -> list[Object]:
        return self.of(JOBSETS, namespace).indexed((namespace, run))

    def pods(self, namespace: str, run: str) -> list[Object]:
        return self.of(PODS, namespace).indexed((namespace, run))

    def workload(self, namespace: str, uid: str) -> Object | None:
        """The Workload of the JobSet with this uid; the newest, should there be more than one."""
        found = self.of(WORKLOADS, namespace).indexed((namespace, uid))
        return max(found, key=lambda w: (w["metadata"]["creationTimestamp"], w["metadata"]["name"]), default=None)

    def nodes(self, names: Iterable[str]) -> dict[str, Object] | None:
        """Those of these nodes that there are; None where nodes may not be read."""
        known = self.of(NODES)
        if known.forbidden:
            return None
        return {name: node for name in names if (node := known.get(name)) is not None}

    def refresh(self, namespace: str, run: str) -> None:
        """Ask the API server now about everything of one run. Raises ClusterUnavailable."""
        selector = f"{objects.RUN_LABEL}={run}"
        for kind in (JOBSETS, PODS):
            self.of(kind, namespace).refresh(selector, (namespace, run))
        for jobset in self.jobsets(namespace, run):
            uid = jobset["metadata"]["uid"]
            self.of(WORKLOADS, namespace).refresh(f"{objects.JOB_UID_LABEL}={uid}", (namespace, uid))

    def _node_of(self, name: str) -> Object | bool | None:
        """For the memory: False where nothing is known of nodes now."""
        nodes = self.of(NODES)
        try:
            nodes.check()
        except ClusterUnavailable:
            return False
        return nodes.get(name)

    # -- news

    def _jobset(self, old: Object | None, new: Object | None) -> None:
        self._on_change(*_by_run(_either(old, new)))

    def _pod(self, old: Object | None, new: Object | None) -> None:
        pod = _either(old, new)
        workload = self.workload(pod["metadata"]["namespace"], label(pod, objects.JOBSET_UID))
        self.memories.see_pod(pod, workload, gone=new is None)
        self._on_change(*_by_run(pod))

    def _workload(self, old: Object | None, new: Object | None) -> None:
        workload = _either(old, new)
        namespace, uid = workload["metadata"]["namespace"], jobset_uid(workload)
        for run in self._runs_of(namespace, uid):
            if new is not None:
                self.memories.see_workload(uid, new)
            self._on_change(namespace, run)

    def _node(self, old: Object | None, new: Object | None) -> None:
        name = _either(old, new)["metadata"]["name"]
        self.memories.see_node(name)
        for scope in self._scopes:
            touched = {_by_run(pod) for pod in self.of(PODS, scope).objects() if pod["spec"].get("nodeName") == name}
            for namespace, run in touched:
                self._on_change(namespace, run)

    def _runs_of(self, namespace: str, uid: str) -> Iterator[str]:
        """The run whose JobSet has this uid, if it is one of ours and known: if not yet, its own arrival is the news."""
        for jobset in self.of(JOBSETS, namespace).objects():
            if jobset["metadata"]["uid"] == uid:
                yield label(jobset, objects.RUN_LABEL)


def _either(old: Object | None, new: Object | None) -> Object:
    found = new if new is not None else old
    assert found is not None
    return found
