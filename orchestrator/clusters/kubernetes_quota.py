"""What a run could have of its queue now, from Kueue's own objects. Pure.

All pods of a JobSet are one PodSet, and Kueue gives a PodSet one flavor: so what a run could have at most is what is
free in one flavor, not in all of them together. A flavor that names a topology is of use to that device type alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kubernetes.utils.quantity import parse_quantity

from orchestrator.clusters.kubernetes_objects import ACCELERATOR, TOPOLOGY, TPU, Object, condition, said
from trainer.hardware import GENERATIONS

GENERATION_OF = {generation.accelerator: generation for generation in GENERATIONS}


@dataclass(frozen=True)
class Queue:
    """A run's LocalQueue and what is behind it. None: it does not exist, or may not be read."""

    name: str
    local: Object | None
    cluster: Object | None
    flavors: tuple[Object, ...] = ()


def quota_devices(queue: Queue, own: Iterable[Object]) -> dict[str, int] | None:
    """JAX devices that a run could have at most now, by family (tpu7x, v5p) and by device type (tpu7x-4x4x4).

    A device type that has an entry of its own goes by that one. `own` are the run's own Workloads: what they hold
    counts as free. None: it cannot be told, because the queue may borrow, or is not known.
    """
    cluster = queue.cluster
    if queue.local is None or cluster is None or cluster["spec"].get("cohortName") or cluster["spec"].get("cohort"):
        return None
    closed = _stopped(queue.local) or _stopped(cluster)
    reserved = _reserved(cluster)
    for workload in own:
        for flavor, chips in _held(workload).items():
            reserved[flavor] = reserved.get(flavor, 0) - chips
    known = {flavor["metadata"]["name"]: flavor["spec"].get("nodeLabels") or {} for flavor in queue.flavors}
    devices: dict[str, int] = {}
    for name, nominal in _nominal(cluster).items():
        if name not in known:
            return None
        chips = 0 if closed else max(0, nominal - max(0, reserved.get(name, 0)))
        for key, per_chip in _keys(known[name]):
            devices[key] = max(devices.get(key, 0), chips * per_chip)
    return devices


def warnings(queue: Queue) -> tuple[str, ...]:
    """What is wrong with the queue itself, in words for whoever waits."""
    if queue.local is None:
        return (
            f"spec.queue {queue.name}: there is no LocalQueue of this name in the namespace; create it, or correct spec.queue",
        )
    found = []
    name = queue.local["spec"].get("clusterQueue")
    for what, obj in ((f"LocalQueue {queue.name}", queue.local), (f"ClusterQueue {name}", queue.cluster)):
        if obj is None:
            continue
        active = condition(obj, "Active")
        if _stopped(obj):
            found.append(
                f"{what} is stopped (stopPolicy {obj['spec']['stopPolicy']}): nothing is admitted until it is None"
            )
        elif active.get("status") == "False":
            found.append(f"{what} is not active: {said(active)}")
    return tuple(found)


def _keys(labels: dict[str, str]) -> Iterable[tuple[str, int]]:
    """(family or device type, devices per chip) of the nodes that a flavor stands for."""
    accelerator, topology = labels.get(ACCELERATOR), labels.get(TOPOLOGY)
    generations = [GENERATION_OF[accelerator]] if accelerator in GENERATION_OF else [] if accelerator else GENERATIONS
    for generation in generations:
        yield generation.family, generation.devices_per_chip
        if topology:
            yield f"{generation.family}-{topology}", generation.devices_per_chip


def _nominal(cluster: Object) -> dict[str, int]:
    return {
        flavor["name"]: _number(resource["nominalQuota"])
        for group in cluster["spec"].get("resourceGroups") or ()
        for flavor in group.get("flavors") or ()
        for resource in flavor.get("resources") or ()
        if resource["name"] == TPU
    }


def _reserved(cluster: Object) -> dict[str, int]:
    return {
        flavor["name"]: _number(resource.get("total", 0))
        for flavor in cluster["status"].get("flavorsReservation") or ()
        for resource in flavor.get("resources") or ()
        if resource["name"] == TPU
    }


def _held(workload: Object) -> dict[str, int]:
    """Chips by flavor that a Workload has reserved."""
    held: dict[str, int] = {}
    admission = workload["status"].get("admission") or {}
    for assignment in admission.get("podSetAssignments") or ():
        flavor = (assignment.get("flavors") or {}).get(TPU)
        if flavor is not None:
            held[flavor] = held.get(flavor, 0) + _number((assignment.get("resourceUsage") or {}).get(TPU, 0))
    return held


def _stopped(obj: Object) -> bool:
    return obj["spec"].get("stopPolicy") in ("Hold", "HoldAndDrain")


def _number(quantity: object) -> int:
    return int(parse_quantity(quantity))
