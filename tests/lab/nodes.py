"""Nodes as GKE makes them for TPU slices, and one plain node for everything else. Registration and heartbeats."""

import datetime
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.lab.api import Api, ApiError, Object
from trainer.hardware import DeviceType, device_type

ZONE = "us-central1-a"
SYSTEM_NODE = "system-0"


@dataclass
class Node:
    """A host: what it is, and how it behaves at the moment. The switches are turned by fault commands."""

    name: str
    pool: str
    device: DeviceType | None  # None: a host without TPUs
    beats: threading.Event = field(default_factory=threading.Event)  # clear: no heartbeats, so NotReady soon
    reachable: threading.Event = field(default_factory=threading.Event)  # clear: sees and reports nothing
    accepts: threading.Event = field(default_factory=threading.Event)  # clear: new pods stay Pending

    def __post_init__(self) -> None:
        for switch in (self.beats, self.reachable, self.accepts):
            switch.set()

    @property
    def path(self) -> str:
        return f"/api/v1/nodes/{self.name}"

    @property
    def lease_path(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{self.name}"


def nodes_of(pools: dict[str, int]) -> Iterator[Node]:
    """One node per host of every slice, each slice a node pool; and the plain node."""
    yield Node(SYSTEM_NODE, "system", None)
    for name, slices in pools.items():
        device = device_type(name)
        for number in range(slices):
            for host in range(device.hosts):
                yield Node(f"{device.name}-{number}-{host}", f"{device.name}-{number}", device)


def register(api: Api, node: Node, port: int) -> None:
    """Create the Node (one that is there already is kept), its status and its lease. `port` serves its logs."""
    try:
        api.create({"apiVersion": "v1", "kind": "Node", "metadata": _metadata(node), "spec": {"taints": _taints(node)}})
    except ApiError as error:
        if error.status != 409:
            raise
    report_ready(api, node, port)
    heartbeat(api, node)


def report_ready(api: Api, node: Node, port: int) -> None:
    """The node's status: what it has, and that it is Ready."""
    api.patch(f"{node.path}/status", {"status": _status(node, port)}, "application/strategic-merge-patch+json")


def heartbeat(api: Api, node: Node) -> None:
    """Renew the node's lease."""
    spec = {"holderIdentity": node.name, "leaseDurationSeconds": 40, "renewTime": now(micro=True)}
    try:
        api.patch(node.lease_path, {"spec": spec})
    except ApiError as error:
        if error.status != 404:
            raise
        metadata = {"name": node.name, "namespace": "kube-node-lease"}
        api.create({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec})


def now(micro: bool = False) -> str:
    """This moment as the API writes times."""
    form = "%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ"
    return datetime.datetime.now(datetime.UTC).strftime(form)


def _metadata(node: Node) -> Object:
    labels = {
        "kubernetes.io/hostname": node.name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "topology.kubernetes.io/zone": ZONE,
        "topology.kubernetes.io/region": ZONE.rpartition("-")[0],
        "cloud.google.com/gke-nodepool": node.pool,
        "node.kubernetes.io/instance-type": (node.device.machine_type if node.device else None) or "n2-standard-8",
    }
    if node.device is not None:
        labels["cloud.google.com/gke-tpu-accelerator"] = node.device.gke_accelerator or ""
        labels["cloud.google.com/gke-tpu-topology"] = node.device.gke_topology or ""
        labels["cloud.google.com/gke-accelerator-count"] = str(node.device.chips_per_host)
    return {"name": node.name, "labels": labels}


def _taints(node: Node) -> list[Object]:
    return [{"key": "google.com/tpu", "value": "present", "effect": "NoSchedule"}] if node.device else []


def _status(node: Node, port: int) -> Object:
    # Far more than this machine has: the lab is about TPUs, and pods are small processes here.
    resources = {"cpu": "200", "memory": "800Gi", "ephemeral-storage": "100Gi", "pods": "110"}
    if node.device is not None:
        resources["google.com/tpu"] = str(node.device.chips_per_host)
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "the node runs pods"}
    return {
        "capacity": resources,
        "allocatable": resources,
        "addresses": [{"type": "Hostname", "address": node.name}, {"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        "conditions": [{**ready, "lastHeartbeatTime": now(), "lastTransitionTime": now()}],
        "nodeInfo": {
            "kubeletVersion": "v1.36.3-lab",
            "operatingSystem": "linux",
            "architecture": "amd64",
            "osImage": "untildone lab",
            "containerRuntimeVersion": "process://1",
            "kernelVersion": "",
            "kubeProxyVersion": "",
            "machineID": "",
            "systemUUID": "",
            "bootID": "",
        },
    }
