"""What the pods of one admission say: who they are, how their containers ended, why they do not start or end. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from orchestrator.clusters.base import ContainerEnd
from orchestrator.clusters.kubernetes_memory import FINAL, PodFacts
from orchestrator.clusters.kubernetes_objects import (
    CANNOT_START,
    COMPLETION_INDEX,
    JOB_INDEX,
    TRAINER,
    Object,
    condition,
    is_unreachable,
    node_signals,
    number,
    said,
    seconds,
)
from trainer.rundir.records import Evidence

# Beyond its grace period, for the node to kill what is left and to say so.
STUCK_SLACK_SECONDS = 10.0


@dataclass(frozen=True)
class Shape:
    """Hosts of a slice, and trainer processes on a host."""

    hosts: int
    host_processes: int


def shape_of(jobset: Object | None, pods: Iterable[PodFacts]) -> Shape:
    """From the JobSet, or, when it is gone, from its pods."""
    if jobset is not None and jobset["spec"].get("replicatedJobs"):
        job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
        names = [c["name"] for c in job["template"]["spec"]["containers"]]
        return Shape(int(job["completions"]), max(1, sum(_process(name) is not None for name in names)))
    facts = list(pods)
    hosts = 1 + max((number(p.pod, COMPLETION_INDEX) for p in facts), default=0)
    names = [c["name"] for p in facts for c in p.pod["status"].get("containerStatuses") or ()]
    return Shape(hosts, 1 + max((n for name in names if (n := _process(name)) is not None), default=0))


def rank_of(pod: Object, shape: Shape, process: int = 0) -> int:
    """The JAX process index of one trainer container of a pod."""
    host = number(pod, JOB_INDEX) * shape.hosts + number(pod, COMPLETION_INDEX)
    return host * shape.host_processes + process


def is_over(facts: PodFacts) -> bool:
    """Its processes have ended for certain."""
    return not facts.present or facts.pod["status"].get("phase") in FINAL


def stuck(facts: PodFacts, nodes: Mapping[str, Object] | None) -> tuple[Evidence, ...]:
    """Why this pod will not go away by itself: past its deletion and grace, on a node that does not answer.

    Neither a Job's failure nor a JobSet's restart nor a deletion is complete before its last pod is.
    """
    if is_over(facts) or facts.deleting_for is None:
        return ()
    metadata, spec = facts.pod["metadata"], facts.pod["spec"]
    grace = metadata.get("deletionGracePeriodSeconds")
    if grace is None:
        grace = spec.get("terminationGracePeriodSeconds", 30)
    name = spec.get("nodeName")
    if facts.deleting_for < float(grace) + STUCK_SLACK_SECONDS or not name or nodes is None:
        return ()
    node = nodes.get(name)
    if not is_unreachable(node):
        return ()
    why = "; ".join(signal.value for signal in node_signals(name, node)) or "its Node does not report"
    value = f"should have ended by {metadata['deletionTimestamp']}; Node {name}: {why}"
    return (Evidence(source=f"pod {metadata['name']}", field="deletionTimestamp", value=value),)


def cannot_start(facts: PodFacts) -> tuple[Evidence, ...]:
    """Containers that wait for something that no waiting brings."""
    pod = facts.pod
    return tuple(
        Evidence(source=f"pod {pod['metadata']['name']}", field=f"container {c['name']}", value=said(waiting))
        for c in _statuses(pod)
        if (waiting := (c.get("state") or {}).get("waiting") or {}).get("reason") in CANNOT_START
    )


def why_pending(facts: PodFacts) -> str:
    """Why a pod has not started, as scheduler or node say it."""
    scheduled = condition(facts.pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return said(scheduled)
    for status in _statuses(facts.pod):
        waiting = (status.get("state") or {}).get("waiting") or {}
        if waiting.get("message") or waiting.get("reason") in CANNOT_START:
            return said(waiting)
    node = facts.pod["spec"].get("nodeName")
    return f"waiting for Node {node}" if node else "waiting for the scheduler"


def pod_signals(facts: PodFacts) -> tuple[Evidence, ...]:
    """What the pod itself says about why it ended, verbatim."""
    pod = facts.pod
    source = f"pod {pod['metadata']['name']}"
    found = [
        Evidence(source=source, field=c["type"], value=said(c))
        for c in pod["status"].get("conditions") or ()
        if c["type"] != "PodScheduled" and c["status"] == "True"
    ]
    if pod["status"].get("phase") == "Failed" and pod["status"].get("reason"):
        found.append(Evidence(source=source, field="status", value=said(pod["status"])))
    for status in _statuses(pod):
        ended = (status.get("state") or {}).get("terminated") or {}
        if ended.get("reason") not in (None, "Error", "Completed"):
            found.append(Evidence(source=source, field=f"container {status['name']}", value=said(ended)))
    return tuple(found) + cannot_start(facts)


def container_ends(pods: Iterable[PodFacts], shape: Shape) -> tuple[ContainerEnd, ...]:
    """How the trainer containers ended, first death first.

    The times of the cluster are whole seconds, and the first death brings down the others within one: a container that
    ended after its pod's deletion had been asked for, by whoever cleaned up after a failure, is put behind that failure.
    """
    ends = [(facts, end) for facts in pods for end in _ends(facts, shape)]
    by_itself = [end.time for facts, end in ends if not _asked_before(facts, end) and _failed(end)]
    first = min(by_itself, default=None)
    moved = [
        replace(end, time=max(end.time, first) + 0.5)
        if first is not None and _asked_before(facts, end) and facts.asked is not None and facts.asked >= first
        else end
        for facts, end in ends
    ]
    return tuple(sorted(moved, key=lambda end: (end.time, end.rank)))


def _ends(facts: PodFacts, shape: Shape) -> Iterator[ContainerEnd]:
    pod = facts.pod
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    for status in pod["status"].get("containerStatuses") or ():
        process = _process(status["name"])
        ended = (status.get("state") or {}).get("terminated")
        if process is not None and ended is not None:
            yield _end(name, uid, rank_of(pod, shape, process), ended)
    for status in pod["status"].get("initContainerStatuses") or ():
        ended = (status.get("state") or {}).get("terminated")
        if ended is not None and ended.get("exitCode") != 0 and pod["status"].get("phase") == "Failed":
            yield _end(f"{name}, init container {status['name']}", uid, rank_of(pod, shape), ended)


def _end(pod: str, uid: str, rank: int, ended: Object) -> ContainerEnd:
    number = ended.get("signal") or None
    return ContainerEnd(
        pod=pod,
        pod_uid=uid,
        rank=rank,
        exit_code=None if number else ended.get("exitCode"),
        signal=number,
        time=seconds(ended.get("finishedAt")) or 0.0,
    )


def _failed(end: ContainerEnd) -> bool:
    return end.exit_code != 0 or end.signal is not None


def _asked_before(facts: PodFacts, end: ContainerEnd) -> bool:
    return facts.asked is not None and facts.asked <= end.time


def _process(container: str) -> int | None:
    """Which process of its host a container is; None for one that is none of the trainer's."""
    if container == TRAINER:
        return 0
    rest = container.removeprefix(f"{TRAINER}-")
    return int(rest) if rest != container and rest.isdecimal() else None


def _statuses(pod: Object) -> list[Object]:
    status = pod["status"]
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
