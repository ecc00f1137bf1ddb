"""What the tests on the lab share: objects to create, and ways to look at what became of them."""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lab import faults
from tests.lab.api import Api, ApiError, Object, is_true
from tests.lab.lab import Lab

JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
WORKLOADS = "/apis/kueue.x-k8s.io/v1beta2/namespaces/default/workloads"
PODS = "/api/v1/namespaces/default/pods"
COLLECTED_SECONDS = 15.0  # within which pods usually follow their JobSet
TPU = {"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}

# Says where it runs and whom it sees, then works until it is told to end.
SCRIPT = """
import os, signal, socket, sys, time
folder = sys.argv[1]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
worker = os.environ["TPU_WORKER_ID"]
names = os.environ["TPU_WORKER_HOSTNAMES"].split(",")
deadline = time.monotonic() + 20
while True:
    try:
        addresses = [socket.gethostbyname(name) for name in names]
        break
    except OSError:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.1)
own = socket.gethostbyname(socket.gethostname())
assert own == addresses[int(worker)], (own, addresses)
name = f"{folder}/{os.environ['POD']}"
with open(name + ".part", "w") as file:
    file.write(" ".join([worker, *addresses]))
os.rename(name + ".part", name)
while not os.path.exists(f"{folder}/end"):
    time.sleep(0.05)
"""


def wait(what: str, look: Callable[[], Any], seconds: float = 60.0, every: float = 0.1) -> Any:
    """What `look` gives once it is true; it looks `every` so many seconds."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(every)
    return found


def jobset(name: str, priority: str, folder: Path, **spec: Any) -> Object:
    """Two hosts of one tpu7x-2x2x2 slice, all of its chips, running SCRIPT. `spec` adds to the JobSet's."""
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    container = {
        "name": "trainer",
        "image": "none",
        "command": ["python", str(folder / "script.py"), str(folder)],
        "env": [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "resources": {"limits": {"google.com/tpu": "4"}, "requests": {"google.com/tpu": "4"}},
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
        "tolerations": [TPU],
    }
    job = {
        "parallelism": 2,
        "completions": 2,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    labels = {"kueue.x-k8s.io/queue-name": "tpus", "kueue.x-k8s.io/priority-class": priority}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "namespace": "default", "labels": labels},
        "spec": {
            **spec,
            "suspend": True,
            "replicatedJobs": [{"name": "slice", "replicas": 1, "template": {"spec": job}}],
        },
    }


def workload(api: Api, owner: Object) -> Object:
    """The Workload of a JobSet."""
    found = wait(
        f"Workload of {owner['metadata']['name']}",
        lambda: api.items(WORKLOADS, labelSelector=f"kueue.x-k8s.io/job-uid={owner['metadata']['uid']}"),
    )
    return found[0]


def pods(api: Api, name: str) -> list[Object]:
    return api.items(PODS, labelSelector=f"jobset.sigs.k8s.io/jobset-name={name}")


def started(folder: Path) -> list[Path]:
    """What the processes of a JobSet wrote when they found each other."""
    return [file for file in folder.glob("*-slice-*") if file.suffix != ".part"]


def plain_pod(name: str, script: str, **spec: Any) -> Object:
    container = {"name": "main", "image": "none", "command": ["python", "-c", script]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"restartPolicy": "Never", "containers": [container], **spec},
    }


def phase(api: Api, name: str) -> str:
    return api.get(f"{PODS}/{name}")["status"]["phase"]


def usable(node: Object) -> bool:
    """Ready, and without the taints that the node controller gives to those that it does not hear."""
    taints = node["spec"].get("taints") or []
    return is_true(node, "Ready") and not any(t["key"].startswith("node.kubernetes.io/") for t in taints)


def delete_all(lab: Lab) -> None:
    """Nothing of a test is left, however it ended: no fault, no JobSet, no Deployment and no pod in the namespace default.

    Pods are deleted with their JobSets, and once more by themselves: when the API server has been away, Kubernetes'
    garbage collector may not see for minutes, or ever, that they have no owner. Those that do not go fail this test
    alone: they are told with what is known of them, and taken away by force.
    """
    api = lab.api
    for kind in (JOBSETS, DEPLOYMENTS):
        for owner in api.items(kind):
            api.delete(f"{kind}/{owner['metadata']['name']}")
    faults.command(lab.ports["nodes"], "repair")
    deadline, next_try = time.monotonic() + 90, time.monotonic() + COLLECTED_SECONDS
    for pod in api.items(PODS):
        if not pod["metadata"].get("ownerReferences"):
            api.delete(f"{PODS}/{pod['metadata']['name']}")
    while left := api.items(PODS):
        paths = [f"{PODS}/{pod['metadata']['name']}" for pod in left]
        if time.monotonic() > deadline:
            for path in paths:
                with contextlib.suppress(ApiError):  # it went just now
                    api.patch(path, {"metadata": {"finalizers": None}})
                    api.delete(path, grace=0)
            raise AssertionError(
                "pods that did not go within 90 s:\n" + "\n".join([*map(json.dumps, left), lab.log("nodes")])
            )
        if time.monotonic() > next_try:
            next_try += COLLECTED_SECONDS
            for path in paths:
                api.delete(path)
        time.sleep(0.1)
    wait("every node is usable again", lambda: all(map(usable, api.items("/api/v1/nodes"))))
