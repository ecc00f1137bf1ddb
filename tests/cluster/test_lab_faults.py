"""The lab's hosts do what hosts do, and Kubernetes, JobSet and Kueue answer as they do in a cluster."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import faults
from tests.lab.api import STRATEGIC, Api, Object, condition, is_true
from tests.lab.lab import Lab
from tests.lab.queues import install_queue
from tests.support.lab_objects import (
    DEPLOYMENTS,
    JOBSETS,
    PODS,
    TPU,
    delete_all,
    jobset,
    phase,
    plain_pod,
    pods,
    started,
    usable,
    wait,
    workload,
)

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def queue(lab: Lab, api: Api) -> Iterator[None]:
    """Eight tpu7x chips, whatever other tests made of the queue; and nothing of this test for the next."""
    install_queue(api, {"tpu7x-2x2x2": 8})
    yield
    delete_all(lab)


# The gang restarts in place for as long as the orchestrator lets it, but not after an exit code that says it is useless.
RESTARTS = {
    "maxRestarts": 0,
    "restartStrategy": "BlockingRecreate",
    "rules": [
        {"name": "useless", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
        {
            "name": "again",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["BackoffLimitExceeded"],
        },
    ],
}


def test_a_killed_process_restarts_the_gang_in_place(lab: Lab, api: Api, tmp_path: Path) -> None:
    folder = tmp_path / "gang"
    owner = api.create(jobset("gang", "low", folder, failurePolicy=RESTARTS))
    wait("two processes", lambda: len(started(folder)) == 2)
    first = workload(api, owner)
    faults.command(lab.ports["nodes"], "kill_pod", pod=pods(api, "gang")[0]["metadata"]["name"])
    wait("two more processes", lambda: len(started(folder)) == 4)
    again = workload(api, owner)
    assert again["metadata"]["uid"] == first["metadata"]["uid"]
    assert is_true(again, "Admitted") and not is_true(again, "Evicted")
    assert api.get(f"{JOBSETS}/gang")["status"]["restarts"] == 1
    (folder / "end").touch()
    wait("done", lambda: is_true(api.get(f"{JOBSETS}/gang"), "Completed"))
    api.delete(f"{JOBSETS}/gang")
    wait("no pods", lambda: not pods(api, "gang"))


def test_a_pod_stuck_in_terminating_holds_the_next_gang(lab: Lab, api: Api, tmp_path: Path) -> None:
    folder = tmp_path / "stuck"
    api.create(jobset("stuck", "low", folder, failurePolicy=RESTARTS))
    wait("two processes", lambda: len(started(folder)) == 2)
    one, other = (pod["metadata"]["name"] for pod in pods(api, "stuck"))
    faults.command(lab.ports["nodes"], "hang_pod", pod=other)
    faults.command(lab.ports["nodes"], "kill_pod", pod=one)
    wait("deletion", lambda: (p := api.find(f"{PODS}/{other}")) and p["metadata"].get("deletionTimestamp"))
    time.sleep(6)  # past its grace period of 5 s
    assert api.find(f"{PODS}/{other}") is not None
    assert len(started(folder)) == 2
    faults.command(lab.ports["nodes"], "release_pod", pod=other)
    wait("two more processes", lambda: len(started(folder)) == 4)
    (folder / "end").touch()
    wait("done", lambda: is_true(api.get(f"{JOBSETS}/stuck"), "Completed"))
    api.delete(f"{JOBSETS}/stuck")
    wait("no pods", lambda: not pods(api, "stuck"))


def test_a_lost_host_holds_the_gang_until_it_is_repaired(lab: Lab, api: Api, tmp_path: Path) -> None:
    folder = tmp_path / "lost"
    owner = api.create(jobset("lost", "low", folder, failurePolicy=RESTARTS))
    wait("two processes", lambda: len(started(folder)) == 2)
    first, victim = workload(api, owner), pods(api, "lost")[0]
    node, path = victim["spec"]["nodeName"], f"{PODS}/{victim['metadata']['name']}"
    assert faults.command(lab.ports["nodes"], "kill_host", node=node) == 1
    try:
        wait("deletion", lambda: api.get(path)["metadata"].get("deletionTimestamp"), 40)
        disruption = condition(api.get(path), "DisruptionTarget")
        assert disruption["reason"] == "DeletionByTaintManager"
        assert phase(api, victim["metadata"]["name"]) == "Running"  # nobody can know
    finally:
        faults.command(lab.ports["nodes"], "heal", node=node)
    wait("two more processes", lambda: len(started(folder)) == 4)
    assert workload(api, owner)["metadata"]["uid"] == first["metadata"]["uid"]
    (folder / "end").touch()
    wait("done", lambda: is_true(api.get(f"{JOBSETS}/lost"), "Completed"))
    api.delete(f"{JOBSETS}/lost")
    wait("no pods", lambda: not pods(api, "lost"))


def test_a_deployments_container_is_restarted(lab: Lab, api: Api, tmp_path: Path) -> None:
    script = f"import pathlib, time; p = pathlib.Path({str(tmp_path / 'once')!r}); q = p.exists(); p.touch(); time.sleep(600 * q)"
    pod = plain_pod("unused", script)["spec"] | {"restartPolicy": "Always", "terminationGracePeriodSeconds": 1}
    labels = {"app": "restarted"}
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    metadata = {"name": "restarted", "namespace": "default"}
    api.create({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec})
    path = f"{DEPLOYMENTS}/restarted"
    wait("a restart", lambda: [p for p in api.items(PODS, labelSelector="app=restarted") if _restarts(p) == 1])
    wait("available", lambda: is_true(api.get(path), "Available"))
    api.delete(path)
    wait("no pods", lambda: not api.items(PODS, labelSelector="app=restarted"))


def test_a_node_that_refuses_pods_leaves_them_pending(lab: Lab, api: Api) -> None:
    node = "tpu7x-2x2x2-0-0"
    faults.command(lab.ports["nodes"], "refuse_pods", node=node)
    api.create(plain_pod("waits", "pass", nodeSelector={"kubernetes.io/hostname": node}, tolerations=[TPU]))
    wait("it is bound", lambda: api.get(f"{PODS}/waits")["spec"].get("nodeName") == node)
    time.sleep(1)
    assert phase(api, "waits") == "Pending"
    faults.command(lab.ports["nodes"], "accept_pods", node=node)
    wait("it has run", lambda: phase(api, "waits") == "Succeeded")
    api.delete(f"{PODS}/waits")


def test_the_api_server_comes_back_with_everything(lab: Lab, api: Api, tmp_path: Path) -> None:
    script = f"import os, pathlib, time\npathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\ntime.sleep(600)"
    # Nodes that were not heard of may be called not ready at first, which is no reason to evict this one.
    stays = [{"operator": "Exists", "effect": "NoExecute"}]
    api.create(plain_pod("steady", script, terminationGracePeriodSeconds=1, tolerations=stays))
    wait("it runs", lambda: phase(api, "steady") == "Running" and (tmp_path / "pid").exists())
    uid = api.get(f"{PODS}/steady")["metadata"]["uid"]
    lab.stop_processes("kube-apiserver")
    time.sleep(2)
    os.kill(int((tmp_path / "pid").read_text()), 0)
    lab.start_processes("kube-apiserver")
    assert api.get(f"{PODS}/steady")["metadata"]["uid"] == uid
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
    wait("its end is reported", lambda: phase(api, "steady") == "Failed", 30)
    status = api.get(f"{PODS}/steady")["status"]["containerStatuses"][0]
    assert status["state"]["terminated"]["exitCode"] == 143
    api.delete(f"{PODS}/steady")
    lab.restart_controllers()


def test_a_node_called_not_ready_by_mistake_says_that_it_is(lab: Lab, api: Api) -> None:
    path = "/api/v1/nodes/tpu7x-2x2x2-1-0"
    unknown = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": "by mistake"}
    api.patch(f"{path}/status", {"status": {"conditions": [unknown]}}, STRATEGIC)
    wait("it is usable", lambda: usable(api.get(path)), 20)
    time.sleep(2)
    assert usable(api.get(path))


def test_warnings_of_termination_and_maintenance_come_and_go(lab: Lab, api: Api) -> None:
    node = "tpu7x-2x2x2-1-1"
    for name in ("warn_of_termination", "begin_maintenance"):
        faults.command(lab.ports["nodes"], name, node=node)
    found = api.get(f"/api/v1/nodes/{node}")
    assert "cloud.google.com/impending-node-termination" in {t["key"] for t in found["spec"]["taints"]}
    assert found["metadata"]["labels"]["cloud.google.com/active-node-maintenance"] == "ONGOING"
    faults.command(lab.ports["nodes"], "end_warnings", node=node)
    found = api.get(f"/api/v1/nodes/{node}")
    assert {t["key"] for t in found["spec"]["taints"]} == {"google.com/tpu"}
    assert "cloud.google.com/active-node-maintenance" not in found["metadata"]["labels"]


def _restarts(pod: Object) -> int:
    statuses = pod["status"].get("containerStatuses") or [{}]
    return int(statuses[0].get("restartCount", 0))
