"""What we look at in the objects of the cluster: names of labels, conditions, times; and the rest thrown away. Pure.

The caches hold only what `prune_*` leaves: heartbeats and other noise must neither fill the memory nor count as news.
"""

import datetime
from collections.abc import Iterable
from typing import Any

from trainer.rundir.records import Evidence

Object = dict[str, Any]

RUN_LABEL, ATTEMPT_LABEL = "untildone.dev/run", "untildone.dev/attempt"
NONCE_ANNOTATION, DIRECTORY_ANNOTATION = "untildone.dev/nonce", "untildone.dev/run-directory"
JOBSET_NAME, JOBSET_UID = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/jobset-uid"
JOB_INDEX, RESTART_ATTEMPT = "jobset.sigs.k8s.io/job-index", "jobset.sigs.k8s.io/restart-attempt"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"
QUEUE_LABEL, PRIORITY_LABEL = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
ACCELERATOR, TOPOLOGY = "cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"
NODE_POOL = "cloud.google.com/gke-nodepool"
TPU = "google.com/tpu"

TRAINER = "trainer"  # the container of a host's first process; the next is trainer-1

# Node labels and taints that say what happens to a host. An announcement long in advance is not among them.
_NODE_LABELS = ("cloud.google.com/active-node-maintenance", "cloud.google.com/fault-behavior")
_NODE_TAINTS = (
    "node.kubernetes.io/not-ready",
    "node.kubernetes.io/unreachable",
    "node.kubernetes.io/out-of-service",
    "cloud.google.com/impending-node-termination",
    "cloud.google.com/maintenance-window-started",
    "ToBeDeletedByClusterAutoscaler",
)
# What the node controller makes of the condition Ready, a while after it changed.
_READINESS_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
# Waiting reasons that no waiting ends: image, command or a reference is wrong.
CANNOT_START = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
)


def condition(obj: Object | None, kind: str) -> Object:
    """The condition of this type, or an empty one."""
    conditions: Iterable[Object] = ((obj or {}).get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c["type"] == kind), {})


def is_true(obj: Object | None, kind: str) -> bool:
    return condition(obj, kind).get("status") == "True"


def seconds(text: str | None) -> float | None:
    """UNIX seconds of a time as the API writes it."""
    return datetime.datetime.fromisoformat(text).timestamp() if text else None


def since(obj: Object | None, kind: str) -> float | None:
    """When the condition of this type last changed."""
    return seconds(condition(obj, kind).get("lastTransitionTime"))


def label(obj: Object, name: str) -> str:
    return str((obj["metadata"].get("labels") or {}).get(name, ""))


def number(obj: Object, name: str, missing: int = 0) -> int:
    """A label that is a number."""
    text = label(obj, name)
    return int(text) if text.isdecimal() else missing


def said(c: Object) -> str:
    """Reason and message of a condition."""
    return ": ".join(part for part in (c.get("reason"), c.get("message")) if part)


def evictions(workload: Object | None) -> int:
    """How often Kueue has evicted this Workload. Counted in the very write that sets Evicted=True."""
    stats = ((workload or {}).get("status") or {}).get("schedulingStats") or {}
    return sum(int(entry.get("count", 0)) for entry in stats.get("evictions") or ())


def node_signals(name: str, node: Object | None) -> tuple[Evidence, ...]:
    """What a node says about a host that is, or is about to be, of no use. None: there is no such node."""
    source = f"Node {name}"
    if node is None:
        return (Evidence(source=source, field="Ready", value="NotReady: the node is gone"),)
    found = []
    ready = condition(node, "Ready")
    if ready and ready.get("status") != "True":
        found.append(Evidence(source=source, field="Ready", value=f"NotReady ({ready['status']}): {said(ready)}"))
    for taint in node["spec"].get("taints") or ():
        left_over = taint["key"] in _READINESS_TAINTS and ready.get("status") == "True"  # it is being taken away
        if taint["key"] in _NODE_TAINTS and not left_over:
            found.append(Evidence(source=source, field="taint", value=f"{taint['key']}:{taint['effect']}"))
    for key, value in (node["metadata"].get("labels") or {}).items():
        if key in _NODE_LABELS:
            found.append(Evidence(source=source, field="label", value=f"{key}={value}"))
    return tuple(found)


def is_unreachable(node: Object | None) -> bool:
    """A node that is gone, or whose agent does not report: what runs there cannot be ended or proven ended."""
    return node is None or condition(node, "Ready").get("status") != "True"


# -- what the caches keep


def prune_jobset(obj: Object) -> Object | None:
    """None for one that only carries our label: what untildone did not make it must not touch."""
    if NONCE_ANNOTATION not in (obj["metadata"].get("annotations") or {}):
        return None
    spec = obj.get("spec") or {}
    jobs = [
        {
            "name": job["name"],
            "replicas": job.get("replicas", 1),
            "template": {"spec": _shape(job["template"].get("spec") or {})},
        }
        for job in spec.get("replicatedJobs") or ()
    ]
    status = _only(obj.get("status"), "conditions", "restarts", "terminalState")
    return {
        "metadata": _metadata(obj, annotations=(NONCE_ANNOTATION, DIRECTORY_ANNOTATION)),
        "spec": {"suspend": spec.get("suspend", False), "replicatedJobs": jobs},
        "status": status,
    }


def _shape(job: Object) -> Object:
    pod = (job.get("template") or {}).get("spec") or {}
    return {
        "completions": job.get("completions", 1),
        "template": {"spec": {"containers": [{"name": c["name"]} for c in pod.get("containers") or ()]}},
    }


def prune_workload(obj: Object) -> Object | None:
    """None for what is not the Workload of a JobSet."""
    owners = obj["metadata"].get("ownerReferences") or ()
    if not any(owner.get("kind") == "JobSet" for owner in owners):
        return None
    status = _only(obj.get("status"), "conditions", "admission", "schedulingStats", "requeueState", "admissionChecks")
    return {
        "metadata": _metadata(obj),
        "spec": _only(obj.get("spec"), "active", "queueName", "priority"),
        "status": status,
    }


def prune_pod(obj: Object) -> Object | None:
    """None for one that is not of a JobSet."""
    if not label(obj, JOBSET_UID):
        return None
    status = obj.get("status") or {}
    names = (RUN_LABEL, ATTEMPT_LABEL, JOBSET_NAME, JOBSET_UID, JOB_INDEX, RESTART_ATTEMPT, COMPLETION_INDEX)
    pruned = _only(status, "phase", "reason", "message")
    pruned["conditions"] = [
        _only(c, "type", "status", "reason", "message", "lastTransitionTime")
        for c in status.get("conditions") or ()
        if c["type"] in ("DisruptionTarget", "TerminationTarget", "PodScheduled", "KueueFailureRecovery")
    ]
    for field in ("initContainerStatuses", "containerStatuses"):
        pruned[field] = [_only(c, "name", "state", "restartCount") for c in status.get(field) or ()]
    spec = obj.get("spec") or {}
    return {
        "metadata": _metadata(obj, labels=names, annotations=(NONCE_ANNOTATION,)),
        "spec": _only(spec, "nodeName", "terminationGracePeriodSeconds"),
        "status": pruned,
    }


def prune_node(obj: Object) -> Object:
    ready = [_only(condition(obj, "Ready"), "type", "status", "reason", "message")]
    return {
        "metadata": _metadata(obj, labels=_NODE_LABELS),
        "spec": {"taints": [t for t in (obj.get("spec") or {}).get("taints") or () if t["key"] in _NODE_TAINTS]},
        "status": {"conditions": [c for c in ready if c]},
    }


def prune_cluster_queue(obj: Object) -> Object:
    status = _only(obj.get("status"), "conditions", "flavorsReservation")
    spec = _only(obj.get("spec"), "resourceGroups", "cohortName", "cohort", "stopPolicy")
    return {"metadata": _metadata(obj, labels=()), "spec": spec, "status": status}


def prune_local_queue(obj: Object) -> Object:
    spec = _only(obj.get("spec"), "clusterQueue", "stopPolicy")
    return {"metadata": _metadata(obj, labels=()), "spec": spec, "status": _only(obj.get("status"), "conditions")}


def prune_flavor(obj: Object) -> Object:
    return {"metadata": _metadata(obj, labels=()), "spec": _only(obj.get("spec"), "nodeLabels"), "status": {}}


def _metadata(obj: Object, labels: Iterable[str] | None = None, annotations: Iterable[str] = ()) -> Object:
    """Of the metadata what we use; labels None: all of them."""
    metadata = obj["metadata"]
    kept = _only(
        metadata,
        "name",
        "namespace",
        "uid",
        "resourceVersion",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "ownerReferences",
    )
    own = metadata.get("labels") or {}
    kept["labels"] = dict(own) if labels is None else _only(own, *labels)
    kept["annotations"] = _only(metadata.get("annotations"), *annotations)
    return kept


def _only(obj: Object | None, *names: str) -> Object:
    obj = obj or {}
    return {name: obj[name] for name in names if name in obj}
