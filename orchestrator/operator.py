"""`untildone operator`: looks after all TrainingRuns of some namespaces, or of all.

Level-based: news only say which runs to visit. Each visit looks at everything anew, decides, carries out at most one
act, and tells the result (operating/keeper.py). So it does not matter which events were seen, how often, or by which
of several operators, and this process may be killed between any two calls.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import structlog

from orchestrator.clusters.base import Cluster, ClusterUnavailable
from orchestrator.clusters.kubernetes import KubernetesCluster
from orchestrator.clusters.kubernetes_api import KubernetesApi, Object
from orchestrator.clusters.kubernetes_caches import Caches
from orchestrator.clusters.kubernetes_reflector import Kind, Reflector
from orchestrator.operating.configuration import Configuration, own_namespace
from orchestrator.operating.health import serve_health
from orchestrator.operating.keeper import TAKE_OVER, Keeper, Surroundings
from orchestrator.operating.lease import Lease
from orchestrator.operating.metrics import Metrics, Told
from orchestrator.operating.queue import KeyedQueue
from orchestrator.operating.words import RIGHTS

Key = tuple[str, str]  # namespace, name

PREPARERS = 4
POLL_SECONDS = 1.0
STUCK_SECONDS = 900.0  # a visit that takes longer than this will not end
END_SECONDS = 20.0
TELL_EVERY_SECONDS = 60.0


def _without_managed_fields(obj: Object) -> Object:
    metadata = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    return {**obj, "apiVersion": "untildone.dev/v1alpha1", "kind": "TrainingRun", "metadata": metadata}


TRAINING_RUNS = Kind("untildone.dev/v1alpha1", "trainingruns", _without_managed_fields)


def own_identity() -> str:
    """Of this process, among the replicas."""
    return os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"


class Operator:
    """One replica. `run` works until it is told to stop."""

    def __init__(self, api: KubernetesApi, configuration: Configuration, identity: str | None = None) -> None:
        self.identity = identity or own_identity()
        self.queue: KeyedQueue[Key] = KeyedQueue()
        self.log = structlog.get_logger()
        scopes = configuration.watch_namespaces or None
        self.caches = Caches(api, scopes, self._wake)
        self.runs: dict[str | None, Reflector] = {
            scope: Reflector(api, TRAINING_RUNS, scope, self._run_changed) for scope in scopes or (None,)
        }
        self.lease: Lease | None = None
        if configuration.lease.enabled:
            namespace = configuration.lease.namespace or own_namespace()
            self.lease = Lease(api, namespace, configuration.lease.name, self.identity)
        self._configuration = configuration
        self._clusters: dict[str, Cluster] = {}
        self._keepers: dict[Key, Keeper] = {}
        self._visits: dict[int, float] = {}  # worker → since when
        self._told: dict[str, float] = {}  # missing right → when it was told
        self._lock = threading.Lock()
        self._workers: list[threading.Thread] = []
        self._metrics = Metrics(self._told_runs, lambda: len(self.queue), lambda: self._leads)
        self._threads = ThreadPoolExecutor(PREPARERS, thread_name_prefix="prepare")
        self._around = Surroundings(
            api=api,
            clusters=self._cluster,
            configuration=configuration,
            threads=self._threads,
            wake=self._wake,
            cluster_uid=lambda: api.cluster_uid,
            identity=self.identity,
        )

    def run(self, stopping: threading.Event) -> None:
        """Work until `stopping` is set, then leave in order."""
        with self._health():
            self.log.info("operator", identity=self.identity, namespaces=sorted(filter(None, self.runs)) or "all")
            self.caches.start()
            for reflector in self.runs.values():
                reflector.start()
            leading = threading.Thread(target=self.lease.run, args=(stopping,), name="lease") if self.lease else None
            if leading is not None:
                leading.start()
            for number in range(self._configuration.workers):
                worker = threading.Thread(target=self._work, args=(number,), name=f"worker-{number}", daemon=True)
                self._workers.append(worker)
                worker.start()
            while not stopping.wait(POLL_SECONDS):
                self._tell_rights()
            self._leave(leading)

    # -- news

    def _wake(self, namespace: str, name: str) -> None:
        self.queue.add((namespace, name))

    def _run_changed(self, old: Object | None, new: Object | None) -> None:
        """Our own statuses come back as changes, and are no news."""
        if old is None or new is None or _wanted(old) != _wanted(new):
            metadata = (new or old or {})["metadata"]
            self._wake(metadata["namespace"], metadata["name"])

    # -- visits

    def _work(self, number: int) -> None:
        while True:
            if not self._leads:
                if self.queue.closed:
                    return
                time.sleep(0.2)
                continue
            found = self.queue.get()
            if found is None:
                return
            key, since = found
            self._visits[number] = time.monotonic()
            try:
                self._visit(key, since)
            finally:
                self._metrics.waited.observe(self._visits[number] - since)
                self._metrics.visits.observe(time.monotonic() - self._visits.pop(number))
                self.queue.done(key)

    @property
    def _leads(self) -> bool:
        return self.lease is None or self.lease.leads

    def _visit(self, key: Key, since: float) -> None:
        log = self.log.bind(namespace=key[0], run=key[1])
        keeper: Keeper | None = None
        began = time.monotonic()
        try:
            obj = self._object(key)
            keeper = self._keeper(key, obj)
            pause = keeper.visit(obj) if keeper is not None and obj is not None else None
        except ClusterUnavailable as error:
            self._metrics.failures.labels("unavailable").inc()
            log.warning("no answer", error=str(error), again_in=self.queue.retry(key))
            return
        except Exception as error:
            self._metrics.failures.labels("error").inc()
            log.exception("a visit failed", again_in=self.queue.retry(key))
            if keeper is not None:
                with contextlib.suppress(Exception):
                    keeper.fail(error)
            return
        self.queue.forget(key)
        if pause is not None:
            self.queue.add_after(key, pause)
        log.debug("visited", waited=began - since, took=time.monotonic() - began, again_in=pause)

    def _object(self, key: Key) -> Object | None:
        """The object; None when it is gone, or about to be. Raises ClusterUnavailable when that is not certain."""
        reflector = self.runs.get(None) or self.runs.get(key[0])
        if reflector is None:
            return None
        found = reflector.get(key[1], key[0])
        if found is None:
            reflector.check()  # an empty copy is no proof
            return None
        return None if found["metadata"].get("deletionTimestamp") else found

    def _keeper(self, key: Key, obj: Object | None) -> Keeper | None:
        with self._lock:
            keeper = self._keepers.get(key)
        if keeper is not None and (obj is None or keeper.subject.uid != obj["metadata"]["uid"]):
            # Its JobSets go with it: their owner references see to that.
            self.log.info("the run was deleted", namespace=key[0], run=key[1])
            with self._lock:
                del self._keepers[key]
            keeper.close()
            keeper = None
        if keeper is None and obj is not None:
            keeper = Keeper(obj, self._around)
            with self._lock:
                self._keepers[key] = keeper
        return keeper

    def _told_runs(self) -> Iterator[Told]:
        with self._lock:
            keepers = list(self._keepers.items())
        for (namespace, name), keeper in keepers:
            status = keeper.status
            if status is not None:
                yield namespace, name, status

    def _cluster(self, namespace: str) -> Cluster:
        with self._lock:
            if namespace not in self._clusters:
                self._clusters[namespace] = KubernetesCluster(self._around_api, namespace, self.caches)
            return self._clusters[namespace]

    # -- beginning and end

    @property
    def _around_api(self) -> KubernetesApi:
        return self.caches.api

    def _leave(self, leading: threading.Thread | None) -> None:
        self.log.info("leaving")
        self.queue.close()
        end = time.monotonic() + END_SECONDS
        for worker in self._workers:
            worker.join(max(0.0, end - time.monotonic()))
        if leading is not None and self.lease is not None:
            leading.join(max(0.0, end - time.monotonic()))
            self.lease.release()
        # owner.json is not released: the replica that follows has the same name, and is there in a moment.
        self.caches.stop()
        for reflector in self.runs.values():
            reflector.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextlib.contextmanager
    def _health(self) -> Iterator[None]:
        port = self._configuration.health.port
        if port is None:
            yield
            return
        checks = {"/healthz": self._unwell, "/readyz": self._unready}
        server, port = serve_health(port, checks, {"/metrics": self._metrics.text})
        self.log.info("answering probes", port=port)
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()

    def _unwell(self) -> str | None:
        """What only a restart can cure."""
        dead = [worker.name for worker in self._workers if not worker.is_alive()]
        if dead:
            return f"threads ended: {', '.join(dead)}"
        longest = max((time.monotonic() - since for since in list(self._visits.values())), default=0.0)
        return f"a visit has taken {longest:.0f} s" if longest > STUCK_SECONDS else None

    def _unready(self) -> str | None:
        """Whether the runs have been read once. A replica that waits for the Lease is ready to take over."""
        for reflector in self.runs.values():
            if reflector.forbidden:
                return reflector.forbidden
            if not reflector.wait(0.0):
                return "TrainingRuns have not been read yet"
        return None

    def _tell_rights(self) -> None:
        """Rights that no run can show: without some nothing is known of any, without others just less of all."""
        missing = [reflector.forbidden for reflector in self.runs.values() if reflector.forbidden]
        for scope in self.runs:
            missing += self.caches.warnings(scope or "")
        now = time.monotonic()
        for message in missing:
            if now - self._told.get(message, float("-inf")) > TELL_EVERY_SECONDS:
                self._told[message] = now
                self.log.error("a right is missing", error=message + RIGHTS)


def _wanted(obj: Object) -> object:
    """What of an object makes a visit worth while."""
    metadata = obj["metadata"]
    annotations = metadata.get("annotations") or {}
    names = ("uid", "generation", "deletionTimestamp")
    return [metadata.get(name) for name in names], annotations.get(TAKE_OVER)
