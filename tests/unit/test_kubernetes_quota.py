"""What a run could have of its queue, from Kueue's objects."""

from typing import Any

import pytest

from orchestrator.clusters.kubernetes_objects import ACCELERATOR, TOPOLOGY, TPU
from orchestrator.clusters.kubernetes_quota import Queue, quota_devices, warnings
from tests.support.kube_objects import workload_object

Object = dict[str, Any]


def flavor(name: str, accelerator: str | None = "tpu7x", topology: str | None = None) -> Object:
    labels = {ACCELERATOR: accelerator, TOPOLOGY: topology}
    return {"metadata": {"name": name}, "spec": {"nodeLabels": {k: v for k, v in labels.items() if v}}}


def cluster_queue(quotas: dict[str, int | str], reserved: dict[str, int] | None = None, **spec: Any) -> Object:
    def resources(key: str, value: object) -> list[Object]:
        return [{"name": "cpu", key: "100"}, {"name": TPU, key: str(value)}]

    flavors = [{"name": name, "resources": resources("nominalQuota", chips)} for name, chips in quotas.items()]
    held = [{"name": name, "resources": resources("total", chips)} for name, chips in (reserved or {}).items()]
    return {
        "metadata": {"name": "tpus"},
        "spec": {"resourceGroups": [{"flavors": flavors}], **spec},
        "status": {"flavorsReservation": held, "conditions": []},
    }


LOCAL: Object = {"metadata": {"name": "tpus"}, "spec": {"clusterQueue": "tpus"}, "status": {}}


def queue(cluster: Object, *flavors: Object, local: Object | None = LOCAL) -> Queue:
    return Queue("tpus", local, cluster, flavors)


def test_free_chips_are_devices_of_the_family() -> None:
    one = queue(
        cluster_queue({"tpu7x": 64, "v5p": 32}, {"tpu7x": 8, "v5p": 0}), flavor("tpu7x"), flavor("v5p", "tpu-v5p-slice")
    )
    assert quota_devices(one, []) == {"tpu7x": 112, "v5p": 32}


def test_what_the_run_holds_itself_is_free_to_it() -> None:
    one = queue(cluster_queue({"tpu7x": 16}, {"tpu7x": 16}), flavor("tpu7x"))
    assert quota_devices(one, []) == {"tpu7x": 0}
    assert quota_devices(one, [workload_object()]) == {"tpu7x": 16}


def test_flavors_are_not_added_up_since_a_gang_gets_one() -> None:
    one = queue(cluster_queue({"reserved": 64, "spot": 32}), flavor("reserved"), flavor("spot"))
    assert quota_devices(one, []) == {"tpu7x": 128}


def test_a_flavor_with_a_topology_is_for_that_device_type() -> None:
    one = queue(
        cluster_queue({"small": 8, "large": 64}),
        flavor("small", topology="2x2x2"),
        flavor("large", topology="4x4x4"),
    )
    assert quota_devices(one, []) == {"tpu7x": 128, "tpu7x-2x2x2": 16, "tpu7x-4x4x4": 128}


def test_a_flavor_without_labels_is_for_every_family() -> None:
    devices = quota_devices(queue(cluster_queue({"any": "1k"}), flavor("any", None)), [])
    assert devices == {"tpu7x": 2000, "v5p": 1000, "v6e": 1000, "v5e": 1000}
    assert quota_devices(queue(cluster_queue({"gpu": 8}), flavor("gpu", "nvidia-h100")), []) == {}


def test_more_reserved_than_there_is_leaves_nothing() -> None:
    assert quota_devices(queue(cluster_queue({"tpu7x": 4}, {"tpu7x": 16}), flavor("tpu7x")), []) == {"tpu7x": 0}


@pytest.mark.parametrize("field", ["cohortName", "cohort"])
def test_a_queue_that_may_borrow_cannot_be_told(field: str) -> None:
    assert quota_devices(queue(cluster_queue({"tpu7x": 4}, **{field: "all"}), flavor("tpu7x")), []) is None


def test_what_is_not_known_cannot_be_told() -> None:
    assert quota_devices(queue(cluster_queue({"tpu7x": 4})), []) is None  # its flavor
    assert quota_devices(queue(cluster_queue({"tpu7x": 4}), flavor("tpu7x"), local=None), []) is None
    assert quota_devices(Queue("tpus", LOCAL, None), []) is None


def test_a_stopped_queue_gives_nothing_and_says_so() -> None:
    one = queue(cluster_queue({"tpu7x": 4}, stopPolicy="HoldAndDrain"), flavor("tpu7x"))
    assert quota_devices(one, []) == {"tpu7x": 0}
    assert warnings(one) == (
        "ClusterQueue tpus is stopped (stopPolicy HoldAndDrain): nothing is admitted until it is None",
    )


def test_a_queue_that_is_missing_or_broken_says_so() -> None:
    assert "create it, or correct spec.queue" in warnings(Queue("typo", None, None))[0]
    broken = cluster_queue({"tpu7x": 4})
    broken["status"]["conditions"] = [
        {"type": "Active", "status": "False", "reason": "FlavorNotFound", "message": "no flavor x"}
    ]
    assert warnings(queue(broken)) == ("ClusterQueue tpus is not active: FlavorNotFound: no flavor x",)
    assert warnings(queue(cluster_queue({"tpu7x": 4}))) == ()
