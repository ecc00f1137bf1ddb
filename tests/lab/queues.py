"""Kueue objects for the lab: one flavor per device type, one cluster queue, local queues, priorities."""

import time

from tests.lab.api import Api, Object
from trainer.hardware import device_type

KUEUE = "kueue.x-k8s.io/v1beta2"
PRIORITIES = {"low": 100, "high": 1000}


def install_queue(api: Api, quotas: dict[str, int], name: str = "tpus", namespace: str = "default") -> None:
    """A queue `name` that admits up to so many chips of each device type, in this order; higher priority preempts."""
    for flavor in quotas:
        api.apply(_flavor(flavor))
    for priority, value in PRIORITIES.items():
        api.apply(
            {"apiVersion": KUEUE, "kind": "WorkloadPriorityClass", "metadata": {"name": priority}, "value": value}
        )
    api.apply(cluster_queue(name, quotas))
    metadata = {"name": name, "namespace": namespace}
    api.apply({"apiVersion": KUEUE, "kind": "LocalQueue", "metadata": metadata, "spec": {"clusterQueue": name}})


def cluster_queue(name: str, quotas: dict[str, int]) -> Object:
    """The ClusterQueue with these quotas: apply it again with others to take capacity away, or give it back."""
    flavors = [
        {"name": flavor_name(flavor), "resources": [{"name": "google.com/tpu", "nominalQuota": chips}]}
        for flavor, chips in quotas.items()
    ]
    spec: Object = {
        "namespaceSelector": {},
        "queueingStrategy": "BestEffortFIFO",
        "preemption": {"withinClusterQueue": "LowerPriority", "reclaimWithinCohort": "Never"},
        "resourceGroups": [{"coveredResources": ["google.com/tpu"], "flavors": flavors}],
    }
    return {"apiVersion": KUEUE, "kind": "ClusterQueue", "metadata": {"name": name}, "spec": spec}


def flavor_name(device: str) -> str:
    """The ResourceFlavor of a device type."""
    return device_type(device).name


def _flavor(device: str) -> Object:
    kind = device_type(device)
    labels = {
        "cloud.google.com/gke-tpu-accelerator": kind.gke_accelerator,
        "cloud.google.com/gke-tpu-topology": kind.gke_topology,
    }
    toleration = {"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}
    spec = {"nodeLabels": labels, "tolerations": [toleration]}
    return {"apiVersion": KUEUE, "kind": "ResourceFlavor", "metadata": {"name": kind.name}, "spec": spec}


def cut(api: Api, quotas: dict[str, int], name: str = "tpus", seconds: float = 30.0) -> None:
    """Set the quotas of a queue and take away what it holds: Kueue itself evicts nobody because a quota was cut."""
    path = f"/apis/kueue.x-k8s.io/v1beta2/clusterqueues/{name}"
    api.apply(cluster_queue(name, quotas))
    api.patch(path, {"spec": {"stopPolicy": "HoldAndDrain"}})
    deadline = time.monotonic() + seconds
    while api.get(path).get("status", {}).get("admittedWorkloads") and time.monotonic() < deadline:
        time.sleep(0.1)
    api.patch(path, {"spec": {"stopPolicy": "None"}})
