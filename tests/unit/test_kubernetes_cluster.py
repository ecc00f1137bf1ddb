"""Carrying out on a small API server: what is created once, what counts as done, and what nobody may conclude."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.api import TrainingRun, parse_run
from orchestrator.clusters import kubernetes_reflector
from orchestrator.clusters.base import ClusterUnavailable, SubmitConflict
from orchestrator.clusters.kubernetes import KubernetesCluster
from orchestrator.clusters.kubernetes_caches import Caches
from orchestrator.clusters.kubernetes_objects import JOBSET_UID
from tests.support.api_server import ApiServer, Exchange, refusal
from tests.support.kube_objects import NAMESPACE, UID, jobset_object, node_object, pod_object, request, workload_object
from trainer.errors import ConfigurationError

Object = dict[str, Any]
JOBSETS = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/jobsets"
WORKLOADS = f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{NAMESPACE}/workloads"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
NODES = "/api/v1/nodes"
RBAC = 'jobsets.jobset.x-k8s.io is forbidden: User "system:serviceaccount:x:y" cannot create resource "jobsets"'


class Small:
    """Enough of an API server: collections that can be listed, watched (in silence), created in and deleted from."""

    def __init__(self) -> None:
        self.items: dict[str, dict[str, Object]] = {}
        self.version = 10
        self.refusals: dict[tuple[str, str], Object] = {}  # (method, path prefix) -> arguments of `refusal`
        self.created: list[Object] = []
        self.deleted: list[Object] = []
        self.lists: list[str] = []
        self.lock = threading.Lock()
        self.released = threading.Event()

    def put(self, path: str, *objects: Object) -> None:
        for obj in objects:
            self.version += 1
            obj["metadata"]["resourceVersion"] = str(self.version)
            self.items.setdefault(path, {})[obj["metadata"]["name"]] = obj

    def __call__(self, exchange: Exchange) -> None:
        for (method, prefix), arguments in self.refusals.items():
            if exchange.method == method and exchange.path.startswith(prefix):
                refusal(**arguments)(exchange)
                return
        with self.lock:
            answer = getattr(self, exchange.method.lower())(exchange)
        if answer is None:  # a watch: silent until the end of the test
            exchange.begin()
            self.released.wait(20)
            exchange.end()
        else:
            exchange.answer(*answer)

    def get(self, exchange: Exchange) -> tuple[int, Object] | None:
        if exchange.watching:
            return None
        folder, _, name = exchange.path.rpartition("/")
        if exchange.path == "/api/v1/namespaces/kube-system":
            return 200, {"metadata": {"name": "kube-system", "uid": "cluster-1"}}
        if name in self.items.get(folder, {}):
            return 200, self.items[folder][name]
        if folder in self.items and folder.endswith("jobsets"):
            return 404, {"reason": "NotFound", "details": {"name": name}}
        self.lists.append(exchange.path)
        key, _, value = exchange.query.get("labelSelector", "").partition("=")
        found = [
            obj
            for obj in self.items.get(exchange.path, {}).values()
            if not value or (obj["metadata"].get("labels") or {}).get(key) == value
        ]
        return 200, {"metadata": {"resourceVersion": str(self.version)}, "items": found}

    def post(self, exchange: Exchange) -> tuple[int, Object]:
        name = exchange.body["metadata"].get("name", "generated")
        if name in self.items.get(exchange.path, {}):
            return 409, {"reason": "AlreadyExists", "message": "exists", "details": {"name": name}}
        obj = json.loads(json.dumps(exchange.body))
        obj["metadata"] |= {"uid": UID, "creationTimestamp": "2026-11-29T00:00:00Z", "resourceVersion": "1"}
        if exchange.query.get("dryRun") != "All":
            self.put(exchange.path, obj)
        self.created.append(obj | {"dryRun": exchange.query.get("dryRun")})
        return 201, obj

    def delete(self, exchange: Exchange) -> tuple[int, Object]:
        folder, _, name = exchange.path.rpartition("/")
        obj = self.items.get(folder, {}).get(name)
        if obj is None:
            return 404, {"reason": "NotFound", "details": {"name": name}}
        if exchange.body["preconditions"]["uid"] != obj["metadata"]["uid"]:
            return 409, {"reason": "Conflict", "message": "the UID in the precondition does not match"}
        self.deleted.append(exchange.body)
        self.version += 1
        obj["metadata"] |= {"deletionTimestamp": "2026-11-29T00:00:01Z", "resourceVersion": str(self.version)}
        return 200, {"kind": "JobSet", **obj}


class World:
    def __init__(self) -> None:
        self.small = Small()
        self.server = ApiServer(default=self.small)
        self.dirty: list[tuple[str, str]] = []
        self.api = self.server.api()
        self.caches = Caches(self.api, [NAMESPACE], lambda namespace, run: self.dirty.append((namespace, run)))
        self.cluster = KubernetesCluster(self.api, NAMESPACE, self.caches)

    def start(self) -> None:
        self.caches.start()
        assert self.caches.wait(10)

    def stop(self) -> None:
        self.caches.stop()
        self.small.released.set()
        self.server.stop()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(kubernetes_reflector, "FORBIDDEN_SECONDS", 0.05)
    made = World()
    yield made
    made.stop()


def run(**spec: Any) -> TrainingRun:
    return parse_run(
        {
            "apiVersion": "untildone.dev/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": "demo", "namespace": NAMESPACE},
            "spec": {
                "recipe": {"name": "tiny"},
                "data": {"root": "gs://data"},
                "targetStep": 10,
                "runDirectory": "gs://bucket/demo",
                "ladder": [{"deviceType": "tpu7x-2x2x2"}, {"deviceType": "v5p-4x4x4", "slices": 2}],
                "image": "example.com/trainer@sha256:0",
                "queue": "tpus",
                **spec,
            },
        },
        "run.yaml",
    )


# -- submit


def test_submit_creates_and_the_answer_is_known_at_once(world: World) -> None:
    world.start()
    gang = world.cluster.submit(request())
    assert (gang.name, gang.uid, gang.phase, gang.nonce) == ("demo-a1", UID, "Queued", "nonce-1")
    lists = len(world.small.lists)
    assert [g.uid for g in world.cluster.observe("demo").gangs] == [UID]
    assert len(world.small.lists) == lists  # nobody had to be asked


def test_submit_again_is_success_with_our_nonce_and_a_conflict_with_another(world: World) -> None:
    world.start()
    world.cluster.submit(request())
    assert world.cluster.submit(request()).uid == UID
    assert len(world.small.created) == 1
    with pytest.raises(
        SubmitConflict, match=r"nonce nonce-1, run directory gs://bucket/demo.*kubectl delete jobset demo-a1"
    ):
        world.cluster.submit(request(nonce="other"))
    world.small.created[0]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    with pytest.raises(ClusterUnavailable, match="still being deleted"):
        world.cluster.submit(request())  # what is on its way out is no submission


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            {
                "status": 422,
                "reason": "Invalid",
                "message": "invalid",
                "causes": [{"field": "spec.replicatedJobs[0].name", "message": "too long"}],
            },
            r"refuses the JobSet: spec.replicatedJobs\[0\].name: too long",
        ),
        (
            {
                "status": 403,
                "reason": "Forbidden",
                "message": 'admission webhook "vjobset.kb.io" denied the request: x',
            },
            "refuses the JobSet: admission webhook",
        ),
        ({"status": 400, "reason": "BadRequest", "message": "strict decoding error"}, "strict decoding error"),
        (
            {"status": 403, "reason": "Forbidden", "message": RBAC},
            f"needed is the verb create on jobsets.jobset.x-k8s.io in namespace {NAMESPACE}",
        ),
    ],
)
def test_refusals_name_the_field_or_the_right(world: World, answer: Object, message: str) -> None:
    world.small.refusals["POST", JOBSETS] = answer
    with pytest.raises(ConfigurationError, match=message):
        world.cluster.submit(request())


@pytest.mark.parametrize("status", [404, 429, 500, 503])
def test_answers_that_leave_a_submission_open(world: World, status: int) -> None:
    world.small.refusals["POST", JOBSETS] = {"status": status, "message": "failed calling webhook"}
    with pytest.raises(ClusterUnavailable, match="failed calling webhook"):
        world.cluster.submit(request())


# -- delete


def test_delete_names_the_uid_and_waits_for_the_pods(world: World) -> None:
    world.start()
    world.cluster.submit(request())
    world.cluster.delete("demo-a1", UID, 30)
    assert world.small.deleted[0]["preconditions"] == {"uid": UID}
    assert world.small.deleted[0]["propagationPolicy"] == "Foreground"
    assert world.cluster.observe("demo").gangs[0].phase == "Deleting"


def test_gone_already_and_another_of_that_name_are_success(world: World) -> None:
    world.start()
    world.cluster.submit(request())
    world.cluster.delete("demo-a1", "another-uid", 30)
    assert world.cluster.observe("demo").gangs[0].phase == "Queued"
    del world.small.items[JOBSETS]["demo-a1"]
    world.cluster.delete("demo-a1", UID, 30)
    assert world.cluster.observe("demo").gangs == ()


def test_a_missing_right_to_delete_is_said(world: World) -> None:
    world.small.refusals["DELETE", JOBSETS] = {"status": 403, "message": RBAC.replace("create", "delete")}
    with pytest.raises(ConfigurationError, match="needed is the verb delete on jobsets"):
        world.cluster.delete("demo-a1", UID, 30)


# -- observe


def test_observe_puts_the_objects_of_one_run_together(world: World) -> None:
    world.small.put(JOBSETS, jobset_object())
    world.small.put(WORKLOADS, workload_object())
    world.small.put(PODS, pod_object(0), pod_object(1))
    world.small.put(NODES, node_object("node-0-0", ready="Unknown"), node_object("node-0-1"))
    world.start()
    view = world.cluster.observe("demo")
    assert view.cluster_uid == "cluster-1" and view.quota_devices is None
    (gang,) = view.gangs
    assert gang.phase == "Running" and len(gang.admissions[0].pod_uids) == 2
    assert [s.source for s in gang.admissions[0].node_signals] == ["Node node-0-0"]
    assert (NAMESPACE, "demo") in world.dirty
    assert world.cluster.observe("other").gangs == ()


def test_before_a_run_has_no_gang_the_server_itself_is_asked(world: World) -> None:
    world.start()
    world.small.put(JOBSETS, jobset_object())  # the watch is silent about it
    assert [g.uid for g in world.cluster.observe("demo").gangs] == [UID]
    world.small.refusals["GET", JOBSETS] = {"status": 503, "message": "away"}
    with pytest.raises(ClusterUnavailable, match="away"):
        world.cluster.observe("another")


def test_before_an_end_is_told_the_server_itself_is_asked(world: World) -> None:
    """The JobSet's failure is known, the eviction that caused it is not yet: it must not be taken for a crash."""
    world.small.put(JOBSETS, jobset_object(terminal="Failed", suspend=True))
    world.small.put(WORKLOADS, workload_object())
    world.small.put(PODS, pod_object(0, codes=(143, 143), phase="Failed", deleted=101))
    world.start()
    world.small.put(WORKLOADS, workload_object(evicted="Preempted"))
    (gang,) = world.cluster.observe("demo").gangs
    assert [s.field for s in gang.admissions[0].queue_signals] == ["Evicted", "Preempted"]
    lists = len(world.small.lists)
    world.cluster.observe("demo")
    assert len(world.small.lists) == lists  # once is enough


def test_pods_without_their_jobset_are_a_gang_that_is_being_deleted(world: World) -> None:
    world.small.put(PODS, pod_object(0))
    world.start()
    (gang,) = world.cluster.observe("demo").gangs
    assert (gang.phase, gang.uid, gang.attempt) == ("Deleting", UID, 1)
    world.small.items[PODS].clear()
    world.cluster.caches.refresh(NAMESPACE, "demo")
    assert world.cluster.observe("demo").gangs == ()


def test_two_attempts_at_once_are_told_apart(world: World) -> None:
    second = jobset_object(request(attempt=2))
    second["metadata"]["uid"] = "second"
    world.small.put(JOBSETS, second, jobset_object(deleted=True))
    world.small.put(PODS, pod_object(0))
    world.start()
    gangs = world.cluster.observe("demo").gangs
    assert [(g.attempt, g.phase, sum(len(a.pod_uids) for a in g.admissions)) for g in gangs] == [
        (1, "Deleting", 1),
        (2, "Running", 0),
    ]


@pytest.mark.parametrize(
    ("path", "resource"), [(JOBSETS, "jobsets.jobset"), (WORKLOADS, "workloads.kueue"), (PODS, "pods")]
)
def test_what_must_be_readable(world: World, path: str, resource: str) -> None:
    world.small.refusals["GET", path] = {"status": 403, "reason": "Forbidden", "message": "no"}
    world.start()
    with pytest.raises(ClusterUnavailable, match=f"needed are the verbs list, watch on {resource}"):
        world.cluster.observe("demo")


def test_what_may_be_missing_is_a_warning(world: World) -> None:
    for path in (NODES, "/apis/kueue.x-k8s.io/v1beta2/clusterqueues"):
        world.small.refusals["GET", path] = {"status": 403, "reason": "Forbidden", "message": "no"}
    world.small.put(JOBSETS, jobset_object())
    world.start()
    view = world.cluster.observe("demo")
    assert view.quota_devices is None and len(view.gangs) == 1
    assert [w.partition(":")[0] for w in view.warnings[:2]] == [
        "the state of nodes is not among the evidence of why a start ended",
        "nothing is known of the quota",
    ]
    assert "spec.queue tpus: there is no LocalQueue" in view.warnings[2]


def test_an_outage_is_never_an_empty_view(world: World) -> None:
    world.small.put(JOBSETS, jobset_object())
    world.start()
    world.cluster.observe("demo")
    world.small.refusals["GET", "/"] = {"status": 503, "message": "away"}
    world.small.released.set()  # the watches end
    deadline = time.monotonic() + 5
    while True:
        try:
            assert world.cluster.observe("demo").gangs
        except ClusterUnavailable:
            break
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- check and program


def test_check_tries_every_rung_and_creates_nothing(world: World) -> None:
    world.cluster.check(run())
    assert [(c["kind"], c["dryRun"]) for c in world.small.created] == [("Pod", "All"), ("JobSet", "All")] * 2
    assert [c["spec"]["replicatedJobs"][0]["replicas"] for c in world.small.created[1::2]] == [1, 2]
    assert world.small.items == {}
    world.cluster.submit(request())
    world.cluster.check(run())  # one of its name is there already


def test_check_says_what_is_wrong_with_a_pod_and_needs_no_right_for_that(world: World) -> None:
    causes = [{"field": "spec.containers[0].image", "message": "Required value"}]
    world.small.refusals["POST", PODS] = {"status": 422, "message": "invalid", "causes": causes}
    with pytest.raises(ConfigurationError, match=r"refuses the trainer's pod: spec\.containers\[0\]\.image: Required"):
        world.cluster.check(run())
    security = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'
    world.small.refusals["POST", PODS] = {"status": 403, "message": security}
    with pytest.raises(ConfigurationError, match="violates PodSecurity"):
        world.cluster.check(run())
    world.small.refusals["POST", PODS] = {"status": 403, "message": RBAC.replace("jobsets.jobset.x-k8s.io", "pods")}
    world.cluster.check(run())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"image": None}, r"^spec\.image: needed on Kubernetes"),
        ({"queue": None}, r"^spec\.queue: needed on Kubernetes"),
        (
            {"ladder": [{"deviceType": "tpu7x-4x4x4"}, {"deviceType": "cpu-8"}]},
            r"^spec\.ladder\[1\]\.deviceType 'cpu-8'",
        ),
        ({"podTemplate": {"spec": {"restartPolicy": "Always"}}}, r"^spec\.podTemplate\.spec\.restartPolicy"),
    ],
)
def test_check_names_the_field(world: World, spec: Object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        world.cluster.check(run(**spec))


def test_check_passes_on_what_the_cluster_says(world: World) -> None:
    world.small.refusals["POST", JOBSETS] = {"status": 403, "message": RBAC}
    with pytest.raises(ConfigurationError, match="needed is the verb create"):
        world.cluster.check(run())
    world.small.refusals["POST", JOBSETS] = {"status": 503, "message": "away"}
    world.cluster.check(run())  # no error of the run's
    elsewhere = run()
    metadata = elsewhere.metadata.model_copy(update={"namespace": "elsewhere"})
    with pytest.raises(ConfigurationError, match=f"namespace {NAMESPACE!r}"):
        world.cluster.check(elsewhere.model_copy(update={"metadata": metadata}))


def test_the_program_is_what_the_run_says(world: World) -> None:
    secret = {"name": "T", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    program = world.cluster.program(
        run(env=[secret], serviceAccount="sa", podTemplate={"spec": {"priorityClassName": "p"}})
    )
    assert program.env == (secret,) and program.service_account == "sa"
    assert program.pod_template == {"spec": {"priorityClassName": "p"}}
    assert program.command == ("python", "-m", "trainer", "train")


def test_what_only_carries_our_label_is_not_ours(world: World) -> None:
    """Nobody's own JobSet or pod may be taken for a gang, and deleted."""
    foreign, loose = jobset_object(), pod_object(0)
    del foreign["metadata"]["annotations"]
    del loose["metadata"]["labels"][JOBSET_UID]
    world.small.put(JOBSETS, foreign)
    world.small.put(PODS, loose)
    world.start()
    assert world.cluster.observe("demo").gangs == ()
