"""The lab's pure parts: names, environments, nodes."""

from pathlib import Path

import pytest
import yaml

from tests.lab.api import path_of
from tests.lab.build import COMPONENTS, KUBERNETES, MODULES
from tests.lab.containers import expand, tpu_environment
from tests.lab.manifests import _by_url, _managed
from tests.lab.nodes import nodes_of
from trainer.hardware import device_type


@pytest.mark.parametrize(
    ("version", "kind", "namespace", "path"),
    [
        ("v1", "Node", None, "/api/v1/nodes/x"),
        ("v1", "Pod", "a", "/api/v1/namespaces/a/pods/x"),
        ("kueue.x-k8s.io/v1beta2", "LocalQueue", "a", "/apis/kueue.x-k8s.io/v1beta2/namespaces/a/localqueues/x"),
        ("kueue.x-k8s.io/v1beta2", "Topology", None, "/apis/kueue.x-k8s.io/v1beta2/topologies/x"),
        ("scheduling.k8s.io/v1", "PriorityClass", None, "/apis/scheduling.k8s.io/v1/priorityclasses/x"),
    ],
)
def test_paths(version: str, kind: str, namespace: str | None, path: str) -> None:
    metadata = {"name": "x"} | ({"namespace": namespace} if namespace else {})
    assert path_of({"apiVersion": version, "kind": kind, "metadata": metadata}) == path


def test_references_expand_as_kubernetes_does() -> None:
    assert expand("$(A)/$(B) $$(A) $A $(", {"A": "1"}) == "1/$(B) $(A) $A $("


def test_a_slice_is_as_many_nodes_as_it_has_hosts() -> None:
    nodes = list(nodes_of({"tpu7x-2x2x4": 2, "v5p-2x2x1": 1}))
    assert [n.name for n in nodes if n.pool == "tpu7x-2x2x4-1"] == [f"tpu7x-2x2x4-1-{host}" for host in range(4)]
    assert len(nodes) == 1 + 2 * 4 + 1


def test_pods_of_a_slice_get_what_gke_injects() -> None:
    labels = {
        "jobset.sigs.k8s.io/jobset-name": "run-a1",
        "jobset.sigs.k8s.io/replicatedjob-name": "slice",
        "jobset.sigs.k8s.io/replicatedjob-replicas": "2",
        "jobset.sigs.k8s.io/job-index": "1",
        "batch.kubernetes.io/job-completion-index": "1",
    }
    pod = {"metadata": {"labels": labels}, "spec": {"subdomain": "run-a1"}}
    environment = tpu_environment(pod, device_type("tpu7x-2x2x2"), chips=4)
    assert environment["TPU_WORKER_ID"] == "1"
    assert environment["TPU_WORKER_HOSTNAMES"] == "run-a1-slice-1-0.run-a1,run-a1-slice-1-1.run-a1"
    assert environment["MEGASCALE_SLICE_ID"] == "1" and environment["MEGASCALE_NUM_SLICES"] == "2"
    assert environment["MEGASCALE_COORDINATOR_ADDRESS"] == "run-a1-slice-0-0.run-a1"
    for device, chips, devices in (("tpu7x-2x2x2", 4, 8), ("tpu7x-2x2x2", 2, 4), ("v5p-2x2x2", 4, 4)):
        flags = tpu_environment(pod, device_type(device), chips)["XLA_FLAGS"].split()
        assert f"--xla_force_host_platform_device_count={devices}" in flags


def test_webhooks_lead_to_this_machine() -> None:
    text = """
    name: mpod.kb.io
    clientConfig: {service: {name: webhook-service, namespace: system, path: /mutate--v1-pod}}
    rules: [{apiGroups: [""], resources: [pods]}]
    """
    hook = yaml.safe_load(text)
    changed = _by_url(hook, 1234, b"ca")
    assert changed["clientConfig"] == {"url": "https://127.0.0.1:1234/mutate--v1-pod", "caBundle": "Y2E="}
    assert changed["objectSelector"]["matchExpressions"][0]["key"] == "jobset.sigs.k8s.io/jobset-name"
    assert not _managed(hook)


def test_every_component_is_a_tool_of_the_module_file() -> None:
    text = (MODULES / "go.mod").read_text()
    tools = {line.strip() for line in text.partition("\ntool (")[2].partition(")")[0].splitlines() if line.strip()}
    assert tools == {component.package for component in COMPONENTS}
    assert f"k8s.io/kubernetes {KUBERNETES} " in text
    assert Path(MODULES / "go.sum").stat().st_size < 1 << 20
