"""Gangs of small processes on the lab, submitted and looked at through the product's own KubernetesCluster."""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import urllib3

from orchestrator.clusters.base import ClusterUnavailable, ClusterView, Gang, GangRequest
from orchestrator.clusters.kubernetes import KubernetesCluster
from orchestrator.clusters.kubernetes_api import KubernetesApi, configuration_from
from orchestrator.clusters.kubernetes_caches import Caches
from orchestrator.clusters.kubernetes_objects import RUN_LABEL, evictions, is_true
from tests.lab.api import Api, Object
from tests.lab.lab import Lab
from tests.lab.queues import install_queue
from tests.support.kube_objects import request
from tests.support.lab_objects import wait
from trainer.rundir.records import Program

# Ends with 75 when told to; where CODE is set, the processes of HOST end with it by themselves, in the first start only.
SCRIPT = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
first = os.environ["UNTILDONE_RESTART_ATTEMPT"] == "0"
if first and os.environ.get("CODE") and os.environ["UNTILDONE_HOST"] == os.environ.get("HOST", "0"):
    time.sleep(1)
    sys.exit(int(os.environ["CODE"]))
time.sleep(600)
"""
GRACE_SECONDS = 5


def program(**environment: str) -> Program:
    """SCRIPT with this environment."""
    env = tuple({"name": name, "value": value} for name, value in environment.items())
    return Program(image="example.com/trainer", command=("python", "-c", SCRIPT), env=env)


def small(run: str, queue: str, priority: str = "low", device: str = "tpu7x-2x2x2", **environment: str) -> GangRequest:
    """A submission of one slice."""
    asked = request(device, run=run, queue=queue, priority_class=priority, program=program(**environment))
    settings = asked.spec.settings.model_copy(update={"grace_seconds": GRACE_SECONDS})
    return replace(asked, spec=asked.spec.model_copy(update={"settings": settings}))


class Gangs:
    """A namespace with a queue of its own, of one tpu7x slice, and the product's view of it."""

    def __init__(self, lab: Lab, name: str, chips: int = 8) -> None:
        self.lab, self.name = lab, name
        # Pods that would not meet the restricted Pod Security Standard are refused here.
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        lab.api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        wait("the default service account", lambda: lab.api.find(account))
        install_queue(lab.api, {"tpu7x-2x2x2": chips}, name=name, namespace=name)
        self.dirty: list[tuple[str, str]] = []
        self.api = KubernetesApi(configuration_from(lab.kubeconfig))
        self.caches = Caches(self.api, [name], lambda *key: self.dirty.append(key))
        self.cluster = KubernetesCluster(self.api, name, self.caches)
        self.caches.start()
        assert self.caches.wait(20)

    def stop(self) -> None:
        self.caches.stop()

    def submit(self, run: str, **options: str) -> Gang:
        return self.cluster.submit(small(run, self.name, **options))

    def gang(self, run: str) -> Gang | None:
        """The newest gang of the run."""
        gangs = self.cluster.observe(run).gangs
        return gangs[-1] if gangs else None

    def until(self, what: str, run: str, look: Callable[[Gang], Any], seconds: float = 60.0) -> Gang:
        """The gang once `look` is true of it."""
        last: list[Gang | None] = [None]

        def found() -> Gang | None:
            last[0] = self.gang(run)
            return last[0] if last[0] is not None and look(last[0]) else None

        try:
            return wait(what, found, seconds)  # type: ignore[no-any-return]
        except AssertionError as error:
            raise AssertionError(f"{error}; last: {last[0]}") from None

    def until_up(self, run: str, admissions: int = 1, seconds: float = 60.0) -> Gang:
        """Both of its pods run, in so manieth an admission."""

        def up(gang: Gang) -> bool:
            live = gang.phase == "Running" and not gang.message and len(gang.admissions) == admissions
            return live and gang.admissions[-1].ended is None and len(gang.admissions[-1].pod_uids) == 2

        return self.until("two pods run", run, up, seconds)

    def until_view(self, what: str, run: str, look: Callable[[ClusterView], Any], seconds: float = 60.0) -> ClusterView:
        def found() -> ClusterView | None:
            try:
                view = self.cluster.observe(run)
            except ClusterUnavailable:
                return None
            return view if look(view) else None

        return wait(what, found, seconds)  # type: ignore[no-any-return]

    def remove(self, run: str) -> None:
        """Delete its gang and wait until nothing of it is left."""
        for gang in self.cluster.observe(run).gangs:
            self.cluster.delete(gang.name, gang.uid, GRACE_SECONDS)
        self.until_view("gone", run, lambda view: not view.gangs)

    def clear(self) -> None:
        """Delete whatever a test left, and wait until it is gone."""
        path = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{self.name}/jobsets"
        runs = {str(obj["metadata"]["labels"][RUN_LABEL]) for obj in self.lab.api.items(path)}
        for run in runs:
            self.remove(run)

    def workload(self, gang: Gang) -> Object:
        """The gang's Workload, from the API server."""
        path = f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{self.name}/workloads"
        (found,) = self.lab.api.items(path, labelSelector=f"kueue.x-k8s.io/job-uid={gang.uid}")
        return found

    def pods(self, gang: Gang) -> list[Object]:
        """The gang's pods, from the API server."""
        path = f"/api/v1/namespaces/{self.name}/pods"
        return self.lab.api.items(path, labelSelector=f"jobset.sigs.k8s.io/jobset-uid={gang.uid}")


class EvictionWatch(threading.Thread):
    """Follows a namespace's Workloads, and notes (is evicted, evictions counted) in each of their versions."""

    def __init__(self, api: Api, namespace: str) -> None:
        super().__init__(daemon=True)
        self.states: dict[str, list[tuple[bool, int]]] = {}  # by Workload uid
        self._api = api
        self._path = f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{namespace}/workloads"
        self._version = api.get(self._path)["metadata"]["resourceVersion"]

    def run(self) -> None:
        with contextlib.suppress(urllib3.exceptions.HTTPError):  # the lab ends before the watch does
            for kind, workload in self._api.watch(self._path, self._version, 600):
                if kind in ("ADDED", "MODIFIED"):
                    state = (is_true(workload, "Evicted"), evictions(workload))
                    self.states.setdefault(workload["metadata"]["uid"], []).append(state)
