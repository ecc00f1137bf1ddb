"""A Kubernetes cluster with JobSet and Kueue: one attempt is one JobSet. Carries out decisions; makes none.

What is seen comes from the shared copies (kubernetes_caches.py) as long as they can be believed, else nothing is known.
Twice the API server itself is asked: before a run is said to have no gang, and before the end of an admission is told
for the first time – the copies of different kinds are not of one moment, and a preemption must not be taken for a crash
because the news of it came later.
"""

import contextlib
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from orchestrator.api import TrainingRun
from orchestrator.clusters import kubernetes_objects as objects
from orchestrator.clusters import kubernetes_quota as quota
from orchestrator.clusters.base import ClusterUnavailable, ClusterView, Gang, GangRequest, SubmitConflict
from orchestrator.clusters.kubernetes_api import ApiError, KubernetesApi, Object, configuration_from, current_namespace
from orchestrator.clusters.kubernetes_caches import CLUSTER_QUEUES, FLAVORS, JOBSETS, LOCAL_QUEUES, PODS, Caches
from orchestrator.clusters.kubernetes_gangs import Facts, gang_of
from orchestrator.clusters.kubernetes_memory import PodFacts
from orchestrator.clusters.kubernetes_objects import JOBSET_UID, QUEUE_LABEL, label
from orchestrator.jobset import check_gang, jobset
from trainer.errors import ConfigurationError
from trainer.rundir.records import Program

CONFIRMED_LIMIT = 10_000
SYNC_SECONDS = 15.0


class KubernetesCluster:
    """The Cluster protocol on Kubernetes, for the runs of one namespace. Cheap: what is known is in `caches`."""

    def __init__(self, api: KubernetesApi, namespace: str, caches: Caches) -> None:
        self.namespace = namespace
        self.caches = caches
        self._api = api
        # Ends of admissions that were told after asking the API server itself: gang uid and key.
        self._confirmed: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def uid(self) -> str:
        """Raises ClusterUnavailable when it has never been read."""
        return self._api.cluster_uid

    # -- the Cluster protocol ---------------------------------------------------------------------------------------

    def check(self, run: TrainingRun) -> None:
        """Raises ConfigurationError for what Kubernetes cannot run, by our own rules and by the API server's.

        A JobSet is submitted for each rung, as a dry run: CRD, webhooks and rights answer as they would. So is a pod of
        it where pods may be created: what is wrong with one would otherwise show only in an event of a Job. An API
        server that does not answer now is no error of the run's.
        """
        wanted = run.metadata.namespace
        if wanted is not None and wanted != self.namespace:
            raise ConfigurationError(f"metadata.namespace {wanted!r}: this is about namespace {self.namespace!r}")
        for index, rung in enumerate(run.spec.ladder):
            try:
                manifest = check_gang(run, rung, self._program(run), self.namespace)
            except ConfigurationError as error:
                text = str(error)
                raise ConfigurationError(text.replace("spec.ladder ", f"spec.ladder[{index}].", 1)) from None
            try:
                self._try(manifest)
            except ClusterUnavailable:
                return

    def program(self, run: TrainingRun) -> Program:
        """What an attempt submitted now would run."""
        return self._program(run)

    def observe(self, run: str) -> ClusterView:
        """The gangs of `run`, ended ones included until they are deleted."""
        namespace, caches = self.namespace, self.caches
        caches.check(namespace)
        asked = False
        if not caches.jobsets(namespace, run):
            caches.refresh(namespace, run)
            asked = True
        gangs = self._gangs(run)
        if not asked and self._unconfirmed(gangs):
            caches.refresh(namespace, run)
            gangs = self._gangs(run)
        self._confirm(gangs)
        devices, warnings = self._quota(run)
        return ClusterView(
            cluster_uid=self.uid,
            gangs=tuple(sorted(gangs, key=lambda gang: (gang.attempt, gang.uid))),
            quota_devices=devices,
            warnings=(*caches.warnings(namespace), *warnings),
        )

    def submit(self, request: GangRequest) -> Gang:
        """Create the JobSet, or return the one of our nonce.

        Raises SubmitConflict; ConfigurationError when the API server or a webhook refuses the manifest, or the right to
        create it is missing: the message names the field, or the verb.
        """
        manifest = jobset(request, self.namespace)
        try:
            created = self._create(manifest)
        except ApiError as error:
            if error.status != 409:
                raise
            created = self._existing(request)
        self.caches.of(JOBSETS, self.namespace).put(created)
        seen = objects.prune_jobset(created)
        assert seen is not None  # it carries our nonce
        return gang_of(self._facts(seen))

    def delete(self, name: str, uid: str, grace_seconds: float) -> None:
        """Delete the JobSet if its uid is still `uid`; it is there until its pods are gone.

        The grace is the one that the pods were made with. Raises ConfigurationError when the right is missing.
        """
        options: Object = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Foreground",
            "preconditions": {"uid": uid},
        }
        jobsets = self.caches.of(JOBSETS, self.namespace)
        try:
            answer = self._api.request("DELETE", f"{self._path}/{name}", options)
        except ApiError as error:
            if error.status == 404 and error.details.get("name") == name:
                jobsets.drop(name, self.namespace, uid)
            elif error.status != 409:  # another JobSet has the name: ours is gone
                raise self._refused(error, "delete") from error
            return
        if answer.get("kind") == "JobSet":
            jobsets.put(answer)

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _path(self) -> str:
        return JOBSETS.path(self.namespace)

    def _program(self, run: TrainingRun) -> Program:
        spec = run.spec
        if spec.image is None:
            raise ConfigurationError("spec.image: needed on Kubernetes, with its digest (image@sha256:…)")
        if spec.queue is None:
            raise ConfigurationError(
                "spec.queue: needed on Kubernetes: the Kueue LocalQueue, in the run's namespace, to wait in"
            )
        return Program(
            image=spec.image,
            command=spec.command,
            env=tuple(variable.model_dump(mode="json", by_alias=True, exclude_none=True) for variable in spec.env),
            service_account=spec.service_account,
            pod_template=spec.pod_template,
        )

    def _create(self, manifest: Object, *, dry_run: bool = False) -> Object:
        """The created object. Raises ApiError for 409, ConfigurationError for every other refusal."""
        try:
            return self._api.request("POST", self._path, manifest, query={"dryRun": "All"} if dry_run else None)
        except ApiError as error:
            if error.status == 409:
                raise
            raise self._refused(error, "create") from error

    def _try(self, manifest: Object) -> None:
        """Submit a JobSet and a pod of it as dry runs. Raises ConfigurationError, ClusterUnavailable."""
        # Before the JobSet: what it names is more exact.
        template = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        metadata = {**template["metadata"], "generateName": f"{manifest['metadata']['name']}-"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        query = {"dryRun": "All", "fieldValidation": "Strict"}
        try:
            self._api.request("POST", PODS.path(self.namespace), pod, query=query)
        except ApiError as error:
            if error.status != 404 and not _is_missing_right(error):
                raise ConfigurationError(f"the cluster refuses the trainer's pod: {_fields(error)}") from error
        with contextlib.suppress(ApiError):  # there is one of this name already
            self._create(manifest, dry_run=True)

    def _refused(self, error: ApiError, verb: str) -> Exception:
        """What a refusal means to whoever can do something about it."""
        if error.status == 404:
            # Also what an API server says that has just come up and does not know its own kinds yet.
            return ClusterUnavailable(
                f"JobSet is not installed, or namespace {self.namespace} does not exist: {error.message}"
            )
        if _is_missing_right(error):
            return ConfigurationError(
                f"not allowed: needed is the verb {verb} on {JOBSETS.resource} in namespace {self.namespace}; give it to "
                f"the identity that untildone uses there. The API server says: {error.message}"
            )
        return ConfigurationError(f"the cluster refuses the JobSet: {_fields(error)}")

    def _existing(self, request: GangRequest) -> Object:
        """The JobSet of our name and nonce. Raises SubmitConflict when it is another's."""
        name = request.spec.gang
        try:
            found = self._api.request("GET", f"{self._path}/{name}")
        except ApiError as error:
            raise ClusterUnavailable(f"JobSet {name} exists, but cannot be read: {error}") from error
        annotations = found["metadata"].get("annotations") or {}
        nonce = annotations.get(objects.NONCE_ANNOTATION)
        if nonce != request.spec.nonce:
            raise SubmitConflict(
                f"JobSet {name!r} exists in namespace {self.namespace} and belongs to another submission (nonce {nonce}, "
                f"run directory {annotations.get(objects.DIRECTORY_ANNOTATION)}); give the run another name, or delete it: "
                f"kubectl delete jobset {name} -n {self.namespace}"
            )
        if found["metadata"].get("deletionTimestamp"):  # it will not come up any more, and its name is not free yet
            raise ClusterUnavailable(f"JobSet {name} of an earlier submission is still being deleted")
        return found

    def _gangs(self, run: str) -> list[Gang]:
        jobsets = self.caches.jobsets(self.namespace, run)
        gangs = [gang_of(self._facts(jobset)) for jobset in jobsets]
        known = {jobset["metadata"]["uid"] for jobset in jobsets}
        orphans = {label(pod, JOBSET_UID) for pod in self.caches.pods(self.namespace, run)} - known
        return gangs + [gang_of(facts) for uid in orphans if (facts := self._orphaned(uid)).pods]

    def _facts(self, jobset: Object) -> Facts:
        uid = jobset["metadata"]["uid"]
        workload = self.caches.workload(self.namespace, uid)
        if workload is not None:
            self.caches.memories.see_workload(uid, workload)
        else:
            workload = self.caches.memories.workload(uid)
        pods, past = self.caches.memories.recall(uid, workload)
        return Facts(jobset, workload, pods, past, self._nodes(pods))

    def _orphaned(self, uid: str) -> Facts:
        """Pods whose JobSet is gone, as far as the cluster still shows them."""
        workload = self.caches.memories.workload(uid)
        pods, past = self.caches.memories.recall(uid, workload)
        present = tuple(pod for pod in pods if pod.present)
        return Facts(None, workload, present, past, self._nodes(present))

    def _nodes(self, pods: tuple[PodFacts, ...]) -> dict[str, Object] | None:
        return self.caches.nodes({str(p.pod["spec"]["nodeName"]) for p in pods if p.pod["spec"].get("nodeName")})

    def _unconfirmed(self, gangs: list[Gang]) -> bool:
        with self._lock:
            return any(key not in self._confirmed for key in _ends(gangs))

    def _confirm(self, gangs: list[Gang]) -> None:
        with self._lock:
            for key in _ends(gangs):
                self._confirmed[key] = None
                self._confirmed.move_to_end(key)
            while len(self._confirmed) > CONFIRMED_LIMIT:
                self._confirmed.popitem(last=False)

    def _quota(self, run: str) -> tuple[dict[str, int] | None, tuple[str, ...]]:
        """What the queue of the newest gang has for this run. None, and no warnings, where that cannot be told."""
        jobsets = self.caches.jobsets(self.namespace, run)
        newest = max(jobsets, key=lambda j: j["metadata"]["creationTimestamp"], default=None)
        name = label(newest, QUEUE_LABEL) if newest is not None else ""
        local_queues = self.caches.of(LOCAL_QUEUES, self.namespace)
        cluster_queues, flavors = self.caches.of(CLUSTER_QUEUES), self.caches.of(FLAVORS)
        try:
            local_queues.check()
        except ClusterUnavailable:
            return None, ()
        if not name:
            return None, ()
        local = local_queues.get(name, self.namespace)
        try:
            cluster_queues.check()
            flavors.check()
        except ClusterUnavailable:
            return None, quota.warnings(quota.Queue(name, local, None))
        cluster = cluster_queues.get(local["spec"]["clusterQueue"]) if local is not None else None
        queue = quota.Queue(name, local, cluster, tuple(flavors.objects()))
        own = [w for j in jobsets if (w := self.caches.workload(self.namespace, j["metadata"]["uid"])) is not None]
        return quota.quota_devices(queue, own), quota.warnings(queue)


def connect(
    kubeconfig: str | Path | None = None, context: str | None = None, namespace: str | None = None
) -> KubernetesCluster:
    """The cluster that kubectl would talk to, with copies of its own for one namespace, begun.

    Raises ConfigurationError when there is no configuration for a cluster.
    """
    api = KubernetesApi(configuration_from(kubeconfig, context))
    where = namespace or current_namespace(kubeconfig, context)
    caches = Caches(api, [where])
    caches.start()
    caches.wait(SYNC_SECONDS)
    return KubernetesCluster(api, where, caches)


def _ends(gangs: list[Gang]) -> list[tuple[str, str]]:
    return [(g.uid, a.key) for g in gangs for a in g.admissions if a.ended is not None]


def _is_missing_right(error: ApiError) -> bool:
    """Not every 403 is one: webhooks, quota and Pod Security refuse with it too."""
    return error.status == 403 and " is forbidden: User " in error.message


def _fields(error: ApiError) -> str:
    """The fields that a refusal names, with the words of whoever refused."""
    causes: list[dict[str, Any]] = error.details.get("causes") or []
    said = [f"{c['field']}: {c.get('message', '')}" if c.get("field") else str(c.get("message", "")) for c in causes]
    return "; ".join(said) or error.message
