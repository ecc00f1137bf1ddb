"""JobSets of the product on a real JobSet and Kueue: accepted, and observed through everything that happens to them."""

import itertools
import time
from collections.abc import Iterator

import pytest

from orchestrator.api import TrainingRun, parse_run
from orchestrator.causes import classify
from orchestrator.clusters.base import ClusterUnavailable, Gang
from orchestrator.clusters.kubernetes import KubernetesCluster
from orchestrator.clusters.kubernetes_api import KubernetesApi, Object, configuration_from
from orchestrator.clusters.kubernetes_caches import Caches
from orchestrator.jobset import jobset
from tests.lab import faults
from tests.lab.lab import Lab
from tests.lab.queues import cluster_queue
from tests.support.kube_objects import PROGRAM, request
from tests.support.lab_gangs import EvictionWatch, Gangs, small
from tests.support.lab_objects import wait
from trainer.errors import ConfigurationError
from trainer.hardware import device_types

pytestmark = pytest.mark.cluster

NAMESPACE = "gangs"
TEMPLATE: Object = {
    "metadata": {"labels": {"team": "nlp"}},
    "spec": {
        "volumes": [{"name": "data", "emptyDir": {}}],
        "tolerations": [
            {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        ],
        "containers": [
            {
                "name": "trainer",
                "resources": {"limits": {"memory": "10Gi"}},
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            }
        ],
        "initContainers": [{"name": "proxy", "image": "proxy", "restartPolicy": "Always"}],
    },
}


@pytest.fixture(scope="module")
def namespace(lab: Lab) -> Iterator[Gangs]:
    made = Gangs(lab, NAMESPACE)
    yield made
    made.stop()


@pytest.fixture
def gangs(namespace: Gangs) -> Iterator[Gangs]:
    """The namespace, left empty for the next test."""
    yield namespace
    namespace.clear()


def keys(gang: Gang) -> list[tuple[str, bool]]:
    """(evictions and restarts before it, has ended) of its admissions."""
    return [(a.key.rpartition(".")[0], a.ended is not None) for a in gang.admissions]


def cause(gang: Gang, index: int = -1) -> str:
    return classify(gang.admissions[index], {}).cause


def command(gangs: Gangs, name: str, **arguments: str) -> object:
    return faults.command(gangs.lab.ports["nodes"], name, **arguments)


# -- manifests


def test_the_webhooks_accept_every_slice(gangs: Gangs) -> None:
    path = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/jobsets"
    secret = {"name": "T", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    full = PROGRAM.model_copy(update={"env": (secret,), "service_account": "trainer", "pod_template": TEMPLATE})
    kinds = [kind for family in ("tpu7x", "v5p", "v5e", "v6e") for kind in device_types(family)[::3]]  # type: ignore[arg-type]
    assert len(kinds) > 30
    for index, kind in enumerate(kinds):
        asked = request(
            kind.name,
            slices=(1, 2, 9)[index % 3],
            run=("demo", "x" * 40)[index % 2],
            attempt=(1, 999_999)[index % 2],
            program=(PROGRAM, full)[index % 2],
            queue=NAMESPACE,
            priority_class="low",
            owner_uid="5b2bb0a6-6f1a-4a3a-8d3e-5a3b1c0f9b11",
        )
        made = gangs.api.request(
            "POST", path, jobset(asked, NAMESPACE), query={"dryRun": "All", "fieldValidation": "Strict"}
        )
        assert made["metadata"]["uid"], kind.name


def run(**spec: object) -> TrainingRun:
    base = {
        "recipe": {"name": "tiny"},
        "data": {"root": "gs://data"},
        "targetStep": 10,
        "runDirectory": "gs://bucket/demo",
        "ladder": [{"deviceType": "tpu7x-2x2x2"}, {"deviceType": "v5p-4x4x4", "slices": 2}],
        "image": "example.com/trainer@sha256:0",
        "queue": NAMESPACE,
    }
    metadata = {"name": "checked", "namespace": NAMESPACE}
    document = {
        "apiVersion": "untildone.dev/v1alpha1",
        "kind": "TrainingRun",
        "metadata": metadata,
        "spec": base | spec,
    }
    return parse_run(document, "run.yaml")


def test_check_finds_what_only_the_cluster_knows(gangs: Gangs) -> None:
    gangs.cluster.check(run())
    containers = [{"name": "trainer", "resources": {"limits": {"memory": "lots"}}}]
    with pytest.raises(ConfigurationError, match=r"refuses the trainer's pod: .*quantities must match"):
        gangs.cluster.check(run(podTemplate={"spec": {"containers": containers}}))
    volumes = [{"name": "Data", "emptyDir": {}}]
    with pytest.raises(ConfigurationError, match=r"pod: spec\.volumes\[3\]\.name: Invalid value"):
        gangs.cluster.check(run(podTemplate={"spec": {"volumes": volumes}}))
    with pytest.raises(ConfigurationError, match=r"pod: .*violates PodSecurity.*hostNetwork"):
        gangs.cluster.check(run(podTemplate={"spec": {"hostNetwork": True}}))
    with pytest.raises(ConfigurationError, match=r"pod: .*serviceaccount \"nobody\" not found"):
        gangs.cluster.check(run(serviceAccount="nobody"))
    with pytest.raises(ConfigurationError, match=r"pod: .*unknown field \"spec.nodeSelectro\""):
        gangs.cluster.check(run(podTemplate={"spec": {"nodeSelectro": {"a": "b"}}}))
    assert gangs.gang("checked") is None


# -- what happens to a gang


def test_preempted_it_keeps_its_workload_and_comes_back(gangs: Gangs) -> None:
    watch = EvictionWatch(gangs.lab.api, NAMESPACE)
    watch.start()
    submitted = gangs.submit("pre")
    assert gangs.submit("pre").uid == submitted.uid
    first = gangs.until_up("pre")
    assert keys(first) == [("e0.r0", False)] and first.uid == submitted.uid
    assert [p["metadata"]["uid"] for p in sorted(gangs.pods(first), key=lambda p: p["metadata"]["name"])] == list(
        first.admissions[0].pod_uids
    )
    before = gangs.workload(first)

    gangs.submit("winner", priority="high")
    waiting = gangs.until("preempted", "pre", lambda g: g.phase == "Queued")
    assert keys(waiting) == [("e0.r0", True)] and cause(waiting) == "preempted"
    assert {end.exit_code for end in waiting.admissions[0].containers} == {75}
    assert waiting.queued_since is not None and "evicted (Preempted" in waiting.message
    gangs.until_up("winner")
    gangs.remove("winner")

    again = gangs.until_up("pre", admissions=2)
    after = gangs.workload(again)
    assert keys(again) == [("e0.r0", True), ("e1.r0", False)] and again.uid == submitted.uid
    assert cause(again, 0) == "preempted"
    assert set(again.admissions[0].pod_uids).isdisjoint(again.admissions[1].pod_uids)
    for field in ("uid", "creationTimestamp"):
        assert after["metadata"][field] == before["metadata"][field]

    gangs.submit("winner", priority="high")
    gangs.until("preempted again", "pre", lambda g: keys(g)[1:] == [("e1.r0", True)])
    gangs.remove("winner")
    gangs.until_up("pre", admissions=3)
    gangs.remove("pre")
    states = watch.states[before["metadata"]["uid"]]
    # Every key rests on this: the count goes up in the very write that says Evicted, and at no other time.
    assert states[-1] == (False, 2)
    for (was, counted), (now, counts) in itertools.pairwise(states):
        assert counts == counted + (now and not was), states


def test_a_killed_process_restarts_the_gang_in_place(gangs: Gangs) -> None:
    gangs.submit("kill")
    up = gangs.until_up("kill")
    before = gangs.workload(up)
    victim = max(gangs.pods(up), key=lambda p: str(p["metadata"]["name"]))
    command(gangs, "kill_pod", pod=f"{NAMESPACE}/{victim['metadata']['name']}")
    again = gangs.until_up("kill", admissions=2)
    assert keys(again) == [("e0.r0", True), ("e0.r1", False)]
    assert cause(again, 0) == "host-failure"
    first = again.admissions[0].containers[0]
    assert (first.exit_code, first.rank, first.pod_uid) == (137, 2, victim["metadata"]["uid"])
    assert gangs.workload(again)["metadata"]["uid"] == before["metadata"]["uid"]
    gangs.remove("kill")


@pytest.mark.parametrize(("code", "expected"), [("64", "bad-configuration"), ("1", "application-error")])
def test_an_exit_code_that_is_final_fails_it(gangs: Gangs, code: str, expected: str) -> None:
    name = f"final-{code}"
    gangs.submit(name, CODE=code, HOST="1")
    over = gangs.until("failed", name, lambda g: g.phase == "Failed")
    assert keys(over) == [("e0.r0", True)] and cause(over) == expected
    assert {end.exit_code for end in over.admissions[0].containers} == {int(code), 75}
    assert "FailJobSet" in over.message
    gangs.remove(name)


def test_75_restarts_it(gangs: Gangs) -> None:
    gangs.submit("orderly", CODE="75")
    again = gangs.until_up("orderly", admissions=2)
    assert keys(again) == [("e0.r0", True), ("e0.r1", False)]
    gangs.remove("orderly")


def test_all_zero_succeeds(gangs: Gangs) -> None:
    asked = small("done", NAMESPACE)
    program = PROGRAM.model_copy(update={"command": ("python", "-c", "pass")})
    spec = asked.spec.model_copy(update={"program": program})
    gangs.cluster.submit(type(asked)(**{**asked.__dict__, "spec": spec}))
    over = gangs.until("succeeded", "done", lambda g: g.phase == "Succeeded")
    assert cause(over) == "completed" and keys(over) == [("e0.r0", True)]
    gangs.remove("done")


def test_deactivated_by_a_person(gangs: Gangs) -> None:
    gangs.submit("off")
    up = gangs.until_up("off")
    workload = gangs.workload(up)
    path = f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{NAMESPACE}/workloads/{workload['metadata']['name']}"
    gangs.lab.api.patch(path, {"spec": {"active": False}})
    off = gangs.until("deactivated", "off", lambda g: g.phase == "Deactivated")
    assert keys(off) == [("e0.r0", True)] and cause(off) == "deactivated"
    gangs.remove("off")


def test_deactivated_in_the_queue_nothing_of_it_has_ended(gangs: Gangs) -> None:
    gangs.submit("first")
    gangs.until_up("first")
    gangs.submit("second")
    waiting = gangs.until("it waits", "second", lambda g: "insufficient unused quota" in g.message)
    path = (
        f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{NAMESPACE}/workloads/{gangs.workload(waiting)['metadata']['name']}"
    )
    gangs.lab.api.patch(path, {"spec": {"active": False}})
    off = gangs.until("deactivated", "second", lambda g: g.phase == "Deactivated" and "Deactivated" in g.message)
    assert off.admissions == ()
    gangs.remove("second")
    gangs.remove("first")


def test_deleted_while_it_runs(gangs: Gangs) -> None:
    gangs.submit("gone")
    up = gangs.until_up("gone")
    gangs.cluster.delete(up.name, "another-uid", 5)
    assert gangs.gang("gone") is not None
    gangs.cluster.delete(up.name, up.uid, 5)
    assert gangs.gang("gone").phase == "Deleting"  # type: ignore[union-attr]
    gangs.until_view("gone", "gone", lambda view: not view.gangs)
    assert not gangs.pods(up)
    gangs.cluster.delete(up.name, up.uid, 5)  # gone is fine


def test_a_lost_host_is_stuck_until_it_is_repaired(gangs: Gangs) -> None:
    gangs.submit("lost")
    up = gangs.until_up("lost")
    peer, victim = sorted(gangs.pods(up), key=lambda p: str(p["metadata"]["name"]))
    node = victim["spec"]["nodeName"]
    command(gangs, "kill_host", node=node)
    try:
        # A trainer would notice that its peer is gone, and end.
        command(gangs, "kill_pod", pod=f"{NAMESPACE}/{peer['metadata']['name']}")
        stuck = gangs.until("stuck", "lost", lambda g: g.stuck, 90)
        assert node in stuck.stuck[0].value and "NotReady" in stuck.stuck[0].value
        # Not even its Job has failed yet: that waits for the last pod, as everything else does.
        assert stuck.phase == "Running" and keys(stuck) == [("e0.r0", False)] and cause(stuck) == "host-failure"
        assert {s.source for s in stuck.admissions[0].node_signals} == {f"Node {node}"}
        gangs.until(  # evictions from a host that is not ready come some seconds after it is found so
            "its pod is evicted",
            "lost",
            lambda g: any(s.value.startswith("DeletionByTaintManager") for s in g.admissions[0].pod_signals),
        )
    finally:
        command(gangs, "heal", node=node)
    again = gangs.until_up("lost", admissions=2)
    assert again.stuck == () and keys(again) == [("e0.r0", True), ("e0.r1", False)]
    gangs.remove("lost")


def test_a_reference_that_does_not_exist_cannot_start(gangs: Gangs) -> None:
    asked = small("secret", NAMESPACE)
    assert asked.spec.program is not None
    env = ({"name": "T", "valueFrom": {"secretKeyRef": {"name": "no-such-secret", "key": "k"}}},)
    spec = asked.spec.model_copy(update={"program": asked.spec.program.model_copy(update={"env": env})})
    gangs.cluster.submit(type(asked)(**{**asked.__dict__, "spec": spec}))
    gang = gangs.until("it cannot start", "secret", lambda g: g.cannot_start)
    assert gang.phase == "Running" and "no-such-secret" in gang.cannot_start[0].value
    gangs.remove("secret")


# -- the queue


def test_quota_is_what_the_run_could_have(gangs: Gangs) -> None:
    def quota(run: str, devices: int) -> None:
        gangs.until_view("the quota", run, lambda v: v.quota_devices and v.quota_devices["tpu7x"] == devices)

    gangs.submit("holder")
    gangs.until_up("holder")
    gangs.submit("waiter")
    quota("holder", 16)
    quota("waiter", 0)
    gangs.lab.api.apply(cluster_queue(NAMESPACE, {"tpu7x-2x2x2": 16}))
    try:
        quota("waiter", 16)
        gangs.until_up("waiter")
    finally:
        gangs.lab.api.apply(cluster_queue(NAMESPACE, {"tpu7x-2x2x2": 8}))
        gangs.remove("waiter")
        gangs.remove("holder")


def test_a_queue_that_is_not_there_is_said(gangs: Gangs) -> None:
    gangs.cluster.submit(small("astray", "no-such-queue"))
    view = gangs.until_view("a warning", "astray", lambda v: v.warnings)
    assert (
        view.warnings[0].startswith("spec.queue no-such-queue: there is no LocalQueue") and view.quota_devices is None
    )
    assert view.gangs[0].phase == "Queued"
    gangs.remove("astray")


# -- rights and outages


def _limited(gangs: Gangs, name: str, rules: list[Object]) -> KubernetesCluster:
    """The namespace as seen with a service account of these rights."""
    api = gangs.lab.api
    metadata = {"name": name, "namespace": NAMESPACE}
    api.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
    rbac = "rbac.authorization.k8s.io"
    api.apply({"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": metadata, "rules": rules})
    subject = {"kind": "ServiceAccount", **metadata}
    reference = {"apiGroup": rbac, "kind": "Role", "name": name}
    binding = {"kind": "RoleBinding", "metadata": metadata, "subjects": [subject], "roleRef": reference}
    api.apply({"apiVersion": f"{rbac}/v1", **binding})
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{name}/token"
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = api.request("POST", path, body)["status"]["token"]
    admin = configuration_from(gangs.lab.kubeconfig)

    def configure() -> object:
        configuration = admin()
        configuration.api_key["BearerToken"] = f"Bearer {token}"
        configuration.refresh_api_key_hook = None
        return configuration

    limited = KubernetesApi(configure)
    caches = Caches(limited, [NAMESPACE])
    caches.start()
    assert caches.wait(20)
    return KubernetesCluster(limited, NAMESPACE, caches)


def test_missing_rights_are_named(gangs: Gangs) -> None:
    read = {"apiGroups": ["", "kueue.x-k8s.io"], "resources": ["pods", "workloads"], "verbs": ["list", "watch"]}
    blind = _limited(gangs, "blind", [read])
    with pytest.raises(
        ClusterUnavailable, match=f"verbs list, watch on jobsets.jobset.x-k8s.io in namespace {NAMESPACE}"
    ):
        blind.observe("any")
    blind.caches.stop()
    jobsets = {"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": ["list", "watch"]}
    reader = _limited(gangs, "reader", [read, jobsets])
    with pytest.raises(ConfigurationError, match=r"needed is the verb create on jobsets\.jobset"):
        reader.submit(small("any", NAMESPACE))
    with pytest.raises(ConfigurationError, match=r"needed is the verb delete on jobsets\.jobset"):
        reader.delete("any-a1", "uid", 5)
    warnings = reader.caches.warnings(NAMESPACE)
    assert len(warnings) == 4 and "list, watch on nodes in the cluster" in warnings[0]
    with pytest.raises(ClusterUnavailable, match="get on namespaces, name kube-system"):
        reader.observe("any")
    reader.caches.stop()


def test_an_outage_is_unknown_and_everything_is_right_afterwards(gangs: Gangs) -> None:
    gangs.submit("outage")
    up = gangs.until_up("outage")
    gangs.lab.stop_processes("kube-apiserver")
    try:

        def unavailable() -> bool:
            try:
                assert gangs.cluster.observe("outage").gangs  # never an empty view
                return False
            except ClusterUnavailable:
                return True

        wait("unavailable", unavailable, 10)
        with pytest.raises(ClusterUnavailable):
            gangs.submit("outage")
        with pytest.raises(ClusterUnavailable):
            gangs.cluster.delete(up.name, up.uid, 5)
        time.sleep(1)
        with pytest.raises(ClusterUnavailable):
            gangs.cluster.observe("outage")
    finally:
        gangs.lab.start_processes("kube-apiserver")
    view = gangs.until_view("it is known again", "outage", lambda v: v.gangs and not v.gangs[0].message, 30)
    assert view.gangs[0].uid == up.uid and keys(view.gangs[0]) == [("e0.r0", False)]
    assert view.gangs[0].admissions[0].pod_uids == up.admissions[0].pod_uids
    gangs.until_view("rights are known again", "outage", lambda v: v.gangs, 30)
    gangs.lab.restart_controllers()
    gangs.remove("outage")
