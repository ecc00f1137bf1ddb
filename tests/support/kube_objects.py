"""Objects of a cluster made by hand, as the API would show them: a JobSet of one attempt, its Workload, pods, nodes."""

import datetime
from typing import Any

from orchestrator.clusters import kubernetes_objects as objects
from orchestrator.clusters.base import Gang, GangRequest
from orchestrator.clusters.kubernetes_gangs import Facts, gang_of
from orchestrator.clusters.kubernetes_memory import Memories
from orchestrator.jobset import jobset
from trainer.hardware import device_type
from trainer.plan import Plan
from trainer.rundir.records import AttemptSpec, Program
from trainer.settings import Settings

Object = dict[str, Any]
NAMESPACE, RUN, UID = "research", "demo", "11111111-aaaa-bbbb-cccc-000000000001"
WORKLOAD_UID = "0badcafe-0000-4000-8000-000000000001"
BEGAN = 1_790_000_000
PROGRAM = Program(image="example.com/trainer@sha256:0", command=("python", "-m", "trainer", "train"))


def at(second: float) -> str:
    """The time `second` seconds after the beginning, as the API writes times."""
    return datetime.datetime.fromtimestamp(BEGAN + second, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def request(
    device: str = "tpu7x-2x2x2",
    slices: int = 1,
    *,
    run: str = RUN,
    attempt: int = 1,
    program: Program | None = PROGRAM,
    nonce: str = "nonce-1",
    queue: str | None = "tpus",
    **more: Any,
) -> GangRequest:
    """A submission of `slices` slices of `device`."""
    kind = device_type(device)
    devices = kind.devices * slices
    plan = Plan(
        device_type=kind.name,
        slices=slices,
        processes=kind.processes * slices,
        devices=devices,
        global_batch=devices,
        data_parallel=devices,
        micro_batch=1,
        accumulation=1,
    )
    spec = AttemptSpec(
        attempt=attempt,
        nonce=nonce,
        gang=f"{run}-a{attempt}",
        plan=plan,
        settings=Settings(target_step=100, data_root="gs://data"),
        image=program.image if program else "none",
        program=program,
    )
    return GangRequest(run=run, run_directory="gs://bucket/demo", spec=spec, queue=queue, **more)


def jobset_object(
    asked: GangRequest | None = None,
    *,
    suspend: bool = False,
    restarts: int = 0,
    terminal: str = "",
    message: str = "",
    deleted: bool = False,
    version: int = 1,
) -> Object:
    """A JobSet as it is some time after it was created."""
    made = jobset(asked or request(), NAMESPACE)
    made["metadata"] |= {"uid": UID, "resourceVersion": str(version), "creationTimestamp": at(0)}
    if deleted:
        made["metadata"]["deletionTimestamp"] = at(500)
    made["spec"]["suspend"] = suspend
    made["status"] = {"restarts": restarts, "terminalState": terminal, "conditions": []}
    if terminal:
        made["status"]["conditions"].append(_condition(terminal, True, "FailedJobs", message, 400))
    return made


def workload_object(
    *,
    admitted: float | None = 1,
    evicted: str | None = None,
    evicted_at: float = 100,
    evictions: int | None = None,
    active: bool = True,
    pending: str | None = None,
    uid: str = WORKLOAD_UID,
    version: int = 1,
) -> Object:
    """A Workload: admitted at a second, or evicted for a reason, or pending with a message."""
    conditions = []
    if evicted is not None:
        conditions += [
            _condition("QuotaReserved", False, "Pending", evicted, evicted_at + 2),
            _condition("Admitted", False, "NoReservation", "", evicted_at + 2),
            _condition("Evicted", True, evicted, "taken back", evicted_at),
        ]
        if evicted == "Preempted":
            conditions.append(_condition("Preempted", True, "InClusterQueue", "taken back", evicted_at))
    elif pending is not None or admitted is None:
        conditions.append(_condition("QuotaReserved", False, "WaitingForQuota", pending or "", 1))
    else:
        conditions += [
            _condition("QuotaReserved", True, "QuotaReserved", "", admitted),
            _condition("Admitted", True, "Admitted", "", admitted),
        ]
        if evictions:
            conditions.append(_condition("Evicted", False, "QuotaReserved", "Previously: taken back", admitted))
    count = evictions if evictions is not None else int(evicted is not None)
    reason = "Deactivated" if (evicted or "").startswith("Deactivated") else evicted or "Preempted"
    stats = {"evictions": [{"reason": reason, "underlyingCause": "", "count": count}]} if count else {}
    status: Object = {"conditions": conditions, "schedulingStats": stats}
    if admitted is not None and evicted is None and pending is None:
        assignment = {"name": "slice", "flavors": {objects.TPU: "tpu7x"}, "resourceUsage": {objects.TPU: "8"}}
        status["admission"] = {"clusterQueue": "tpus", "podSetAssignments": [assignment]}
    return {
        "metadata": {
            "name": "jobset-demo-a1-12345",
            "namespace": NAMESPACE,
            "uid": uid,
            "resourceVersion": str(version),
            "creationTimestamp": at(0),
            "labels": {objects.JOB_UID_LABEL: UID},
            "ownerReferences": [{"kind": "JobSet", "name": f"{RUN}-a1", "uid": UID}],
        },
        "spec": {"active": active, "queueName": "tpus"},
        "status": status,
    }


def pod_object(
    host: int = 0,
    *,
    slice_: int = 0,
    restart: int = 0,
    created: float = 2,
    phase: str = "Running",
    codes: tuple[int | None, ...] = (None, None),
    ended: float = 50,
    deleted: float | None = None,
    grace: int = 30,
    node: str | None = None,
    reason: str | None = None,
    conditions: tuple[Object, ...] = (),
    waiting: str | None = None,
    uid: str | None = None,
    version: int = 1,
) -> Object:
    """A pod of two trainer containers, each running, or ended with a code at the second `ended`; `deleted`: asked then."""
    name = f"{RUN}-a1-slice-{slice_}-{host}"
    statuses = []
    for process, code in enumerate(codes):
        state: Object = {"running": {}} if code is None else {"terminated": _terminated(code, ended, reason)}
        if waiting is not None:
            state = {"waiting": {"reason": waiting, "message": "it is wrong"}}
        statuses.append({"name": "trainer" if process == 0 else f"trainer-{process}", "state": state})
    metadata: Object = {
        "name": f"{name}-{restart}{int(created)}",
        "namespace": NAMESPACE,
        "uid": uid or f"{name}-r{restart}-{int(created)}",
        "resourceVersion": str(version),
        "creationTimestamp": at(created),
        "labels": {
            objects.RUN_LABEL: RUN,
            objects.ATTEMPT_LABEL: "1",
            objects.JOBSET_NAME: f"{RUN}-a1",
            objects.JOBSET_UID: UID,
            objects.JOB_INDEX: str(slice_),
            objects.COMPLETION_INDEX: str(host),
            objects.RESTART_ATTEMPT: str(restart),
        },
        "annotations": {objects.NONCE_ANNOTATION: "nonce-1"},
    }
    if deleted is not None:
        metadata |= {"deletionTimestamp": at(deleted + grace), "deletionGracePeriodSeconds": grace}
    return {
        "metadata": metadata,
        "spec": {"nodeName": node or f"node-{slice_}-{host}", "terminationGracePeriodSeconds": grace},
        "status": {"phase": phase, "conditions": list(conditions), "containerStatuses": statuses},
    }


def node_object(name: str, *, ready: str = "True", taints: tuple[str, ...] = (), **labels: str) -> Object:
    """A node that says of itself whether it is Ready."""
    return {
        "metadata": {"name": name, "uid": name, "resourceVersion": "1", "labels": labels},
        "spec": {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints]},
        "status": {"conditions": [_condition("Ready", None, "Kubelet", "said the node", 0) | {"status": ready}]},
    }


def disruption(reason: str) -> Object:
    return _condition("DisruptionTarget", True, reason, "said whoever took it", 50)


class Cluster:
    """What one process would know of one gang after seeing these objects, on a clock that is moved by hand."""

    def __init__(self, *nodes: Object) -> None:
        self.now = 0.0
        self.nodes: dict[str, Object] | None = {node["metadata"]["name"]: node for node in nodes}
        self.memories = Memories(self._node, lambda: self.now)
        self.jobset: Object | None = jobset_object()
        self.workload: Object | None = workload_object()

    def _node(self, name: str) -> Object | bool | None:
        if self.nodes is None:
            return False
        return self.nodes.get(name, node_object(name))

    def see(self, *pods: Object, gone: bool = False) -> None:
        """Pods in a new state, or `gone`, in which case these are the last states."""
        for pod in pods:
            pruned = objects.prune_pod(pod)
            assert pruned is not None
            self.memories.see_pod(pruned, self._workload(), gone=gone)

    def _workload(self) -> Object | None:
        return objects.prune_workload(self.workload) if self.workload else None

    def gang(self) -> Gang:
        workload = self._workload()
        if workload is not None:
            self.memories.see_workload(UID, workload)
        pods, past = self.memories.recall(UID, workload)
        names = {p.pod["spec"]["nodeName"] for p in pods}
        nodes = None
        if self.nodes is not None:
            nodes = {name: node for name in names if isinstance(node := self._node(name), dict)}
        return gang_of(Facts(objects.prune_jobset(self.jobset) if self.jobset else None, workload, pods, past, nodes))


def _terminated(code: int, ended: float, reason: str | None) -> Object:
    return {"exitCode": code, "reason": reason or ("Error" if code else "Completed"), "finishedAt": at(ended)}


def _condition(kind: str, status: bool | None, reason: str, message: str, when: float) -> Object:
    return {
        "type": kind,
        "status": str(status),
        "reason": reason,
        "message": message,
        "lastTransitionTime": at(when),
    }
