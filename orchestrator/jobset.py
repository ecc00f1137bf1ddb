"""The JobSet of one attempt: a pure function of what is submitted. Submitting again collides, it does not double.

One replicated Job per slice, one pod per host, one container per trainer process of a host. JobSet restarts the gang as
a whole, inside the same Workload, after everything that is nobody's fault (signals, lost hosts, 75, 77); after exit
codes that another try does not change, it fails and leaves the decision to untildone. Nothing here limits how often: the
run's budgets do. Rules for GKE's TPU slices as in xpk, the restricted Pod Security Standard, no token of the cluster.
"""

from dataclasses import dataclass
from typing import Any

from orchestrator.api import LadderRung, TrainingRun
from orchestrator.clusters.base import GangRequest
from orchestrator.clusters.kubernetes_objects import (
    ACCELERATOR,
    ATTEMPT_LABEL,
    COMPLETION_INDEX,
    DIRECTORY_ANNOTATION,
    JOB_INDEX,
    NODE_POOL,
    NONCE_ANNOTATION,
    PRIORITY_LABEL,
    QUEUE_LABEL,
    RESTART_ATTEMPT,
    RUN_LABEL,
    TOPOLOGY,
    TPU,
    TRAINER,
)
from orchestrator.planning import settings
from orchestrator.pod_template import merged
from trainer.errors import ConfigurationError, ExitCode
from trainer.hardware import DeviceType, device_type
from trainer.plan import Plan
from trainer.rundir.records import AttemptSpec, Program

Object = dict[str, Any]

API_VERSION = "jobset.x-k8s.io/v1alpha2"
MANAGER = "untildone"
COORDINATOR_PORT = 8482  # jax's own since 0.8.1
# Another try does not change these: application error, usage, configuration, storage gave up, fenced, non-finite, mixed
# gang; and the shell's "cannot be run" and "not found".
FINAL_EXIT_CODES = (
    ExitCode.APPLICATION_ERROR,
    2,
    ExitCode.BAD_CONFIGURATION,
    ExitCode.STORAGE_UNAVAILABLE,
    ExitCode.FENCED,
    ExitCode.NON_FINITE,
    ExitCode.MIXED_GANG,
    126,
    127,
)
NAME_LIMIT = 63  # of a DNS label, which the name of a pod has to be
POD_SUFFIX = len("-abcde")  # that Kubernetes adds to it
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"


@dataclass(frozen=True)
class Gang:
    """What the manifest is made from: `request` with its hardware looked up."""

    name: str
    kind: DeviceType
    slices: int
    job: str  # name of the replicated Job

    @property
    def first_host(self) -> str:
        """DNS name of host 0 of slice 0, in the namespace."""
        return f"{self.name}-{self.job}-0-0.{self.name}"

    @property
    def containers(self) -> tuple[str, ...]:
        return tuple(TRAINER if n == 0 else f"{TRAINER}-{n}" for n in range(self.kind.processes_per_host))


def jobset(request: GangRequest, namespace: str) -> Object:
    """The manifest of `request` in `namespace`.

    Raises ConfigurationError, naming the field of the run, for hardware that Kubernetes does not have, a missing image
    or queue, a name that gets too long, and a pod template that would break something.
    """
    spec = request.spec
    if spec.program is None:
        raise ConfigurationError("spec.image: needed on Kubernetes, with its digest (image@sha256:…)")
    if request.queue is None:
        raise ConfigurationError(
            "spec.queue: needed on Kubernetes: the Kueue LocalQueue, in the run's namespace, to wait in"
        )
    gang = gang_for(spec.gang, spec.plan.device_type, spec.plan.slices)
    labels = {RUN_LABEL: request.run, ATTEMPT_LABEL: str(spec.attempt), "app.kubernetes.io/managed-by": MANAGER}
    annotations = {NONCE_ANNOTATION: spec.nonce, DIRECTORY_ANNOTATION: request.run_directory}
    metadata: Object = {
        "name": gang.name,
        "namespace": namespace,
        "labels": {**labels, QUEUE_LABEL: request.queue},
        # All hosts of a Job, and only they, in one node pool: that is what a slice is on GKE.
        "annotations": {**annotations, EXCLUSIVE: NODE_POOL},
    }
    if request.priority_class is not None:
        metadata["labels"][PRIORITY_LABEL] = request.priority_class
    if request.owner_uid is not None:
        metadata["ownerReferences"] = [_owner(request.run, request.owner_uid)]
    template = {"metadata": {"labels": labels, "annotations": annotations}, "spec": _pod(request, spec.program, gang)}
    job = {
        "parallelism": gang.kind.hosts,
        "completions": gang.kind.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [_final_rule(container) for container in gang.containers]},
        "template": merged(template, spec.program.pod_template, gang.containers),
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "suspend": True,  # Kueue lets it go
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": _failure_policy(),
            "replicatedJobs": [{"name": gang.job, "replicas": gang.slices, "template": {"spec": job}}],
        },
    }


def check_gang(run: TrainingRun, rung: LadderRung, program: Program, namespace: str) -> Object:
    """The manifest of an attempt of `run` on this rung, as far as the cluster judges it: to be tried, not to be run.

    Raises ConfigurationError as `jobset` does.
    """
    kind = device_type(rung.device_type)
    devices = kind.devices * rung.slices
    plan = Plan(
        device_type=kind.name,
        slices=rung.slices,
        processes=kind.processes * rung.slices,
        devices=devices,
        global_batch=devices,
        data_parallel=devices,
        micro_batch=1,
        accumulation=1,
    )
    spec = AttemptSpec(
        attempt=1,
        nonce="dry-run",
        gang=run.gang(1),
        plan=plan,
        settings=settings(run),
        image=program.image,
        program=program,
    )
    request = GangRequest(
        run=run.name,
        run_directory=run.spec.run_directory,
        spec=spec,
        queue=run.spec.queue,
        priority_class=run.spec.priority_class,
        owner_uid=run.metadata.uid,
    )
    return jobset(request, namespace)


def gang_for(name: str, device: str, slices: int) -> Gang:
    """The hardware of a gang and the names it gets. Raises ConfigurationError."""
    kind = device_type(device)
    if kind.gke_accelerator is None:
        raise ConfigurationError(
            f"spec.ladder deviceType {device!r}: Kubernetes has no nodes of this type; give a TPU slice, e.g. tpu7x-4x4x4"
        )
    # "slice" reads well in the names of pods; where the run's name leaves no room for it, a letter has to do.
    for job in ("slice", "s"):
        longest = len(f"{name}-{job}-{slices - 1}-{kind.hosts - 1}") + POD_SUFFIX
        if longest <= NAME_LIMIT:
            return Gang(name, kind, slices, job)
    raise ConfigurationError(
        f"metadata.name: {name}-{job}-{slices - 1}-{kind.hosts - 1}-… has {longest} characters, and a pod's name at most "
        f"{NAME_LIMIT}; shorten the run's name by {longest - NAME_LIMIT}"
    )


def _owner(run: str, uid: str) -> Object:
    """The run's JobSets go with the run, by the cluster's own garbage collection."""
    return {
        "apiVersion": "untildone.dev/v1alpha1",
        "kind": "TrainingRun",
        "name": run,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _final_rule(container: str) -> Object:
    codes = sorted(int(code) for code in FINAL_EXIT_CODES)
    return {"action": "FailJob", "onExitCodes": {"containerName": container, "operator": "In", "values": codes}}


def _failure_policy() -> Object:
    return {
        "maxRestarts": 0,  # counts only restarts by rules that are not here
        "restartStrategy": "BlockingRecreate",  # no pod of the next gang before the last of this one is gone
        "rules": [
            {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
            {
                "name": "again",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["BackoffLimitExceeded"],
            },
        ],
    }


def _pod(request: GangRequest, program: Program, gang: Gang) -> Object:
    containers = [_container(request, program, gang, process) for process in range(len(gang.containers))]
    pod: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": max(1, round(request.spec.settings.grace_seconds)),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "nodeSelector": {ACCELERATOR: gang.kind.gke_accelerator, TOPOLOGY: gang.kind.gke_topology},
        # GKE taints its TPU nodes. Only the taint itself: one that warns of an end has to keep new pods away.
        "tolerations": [{"key": TPU, "operator": "Exists", "effect": "NoSchedule"}],
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": containers,
        "volumes": [
            # Of the pod's memory: JAX and the data loader's workers pass arrays through it, and the default is 64 MiB.
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            # One each: libtpu keeps its lock file there, and the processes of a host have chips of their own.
            *({"name": f"tmp-{name}", "emptyDir": {}} for name in gang.containers),
        ],
    }
    if program.service_account is not None:
        pod["serviceAccountName"] = program.service_account
    return pod


def _container(request: GangRequest, program: Program, gang: Gang, process: int) -> Object:
    name = gang.containers[process]
    chips = str(gang.kind.chips_per_host // len(gang.containers))
    return {
        "name": name,
        "image": program.image,
        "command": list(program.command),
        "env": [*_environment(request, gang, process), *(dict(variable) for variable in program.env)],
        "resources": {"requests": {TPU: chips}, "limits": {TPU: chips}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        # Where a traceback, or what a runtime printed last, is found by kubectl describe.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": f"tmp-{name}", "mountPath": "/tmp"}],
    }


def _environment(request: GangRequest, gang: Gang, process: int) -> list[Object]:
    """What trainer/environment.py reads, and what libtpu needs to join slices."""
    spec, kind = request.spec, gang.kind
    variables = [
        _value("UNTILDONE_RUN_DIRECTORY", request.run_directory),
        _value("UNTILDONE_ATTEMPT", spec.attempt),
        _value("UNTILDONE_NONCE", spec.nonce),
        _field("UNTILDONE_POD_UID", "metadata.uid"),
        _label("UNTILDONE_RESTART_ATTEMPT", RESTART_ATTEMPT),
        _label("UNTILDONE_SLICE", JOB_INDEX),
        _label("UNTILDONE_HOST", COMPLETION_INDEX),
        _value("UNTILDONE_HOST_PROCESS", process),
        _value("UNTILDONE_HOSTS", kind.hosts),
        _value("UNTILDONE_HOST_PROCESSES", kind.processes_per_host),
        _value("UNTILDONE_PROCESS_COUNT", spec.plan.processes),
        _value("UNTILDONE_COORDINATOR", f"{gang.first_host}:{COORDINATOR_PORT}"),
    ]
    if gang.slices > 1:  # GKE sets them for some JobSets; said here, they are the same everywhere
        variables += [
            _value("MEGASCALE_NUM_SLICES", gang.slices),
            _label("MEGASCALE_SLICE_ID", JOB_INDEX),
            _value("MEGASCALE_COORDINATOR_ADDRESS", gang.first_host),
        ]
    return variables


def _value(name: str, value: object) -> Object:
    return {"name": name, "value": str(value)}


def _field(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def _label(name: str, key: str) -> Object:
    return _field(name, f"metadata.labels['{key}']")
