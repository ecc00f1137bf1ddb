"""What the orchestrator sees of a cluster and may do to it. Carries out decisions; makes none.

A *gang* is what one attempt runs as: a JobSet (with its Kueue Workload) on Kubernetes, a supervised group of processes
on the local cluster. Kueue and JobSet may take a gang down and bring it up again; each coming-up is an *admission*
with its own key, so that the ending of one is never taken for the ending of another.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from orchestrator.api import TrainingRun
from trainer.rundir.records import AttemptSpec, Evidence, Program


class ClusterUnavailable(Exception):
    """The cluster did not answer; nothing is known, nothing may be concluded."""


class SubmitConflict(Exception):
    """A gang of this name exists and is not ours (another nonce)."""


@dataclass(frozen=True)
class ContainerEnd:
    """How one trainer container ended. `time` is the cluster's clock, used only to order the containers of one gang."""

    pod: str
    pod_uid: str
    rank: int
    exit_code: int | None = None
    signal: int | None = None
    time: float = 0.0


@dataclass(frozen=True)
class Admission:
    """One coming-up of a gang. Its signals are in the order in which they decide: queue, node, pod, container."""

    key: str
    restart_attempt: int
    queued_at: float | None = None
    began: float | None = None
    ended: float | None = None
    # Evidence about why it ended, by kind of source; each list may be empty.
    queue_signals: tuple[Evidence, ...] = ()  # e.g. Workload Evicted=True/Preempted
    node_signals: tuple[Evidence, ...] = ()  # e.g. node NotReady, termination taint
    pod_signals: tuple[Evidence, ...] = ()  # e.g. DisruptionTarget
    containers: tuple[ContainerEnd, ...] = ()
    pod_uids: tuple[str, ...] = ()


# Deleted: every process is proven gone; only the record of how it ended is left.
GangPhase = Literal["Queued", "Running", "Succeeded", "Failed", "Deactivated", "Deleting", "Deleted"]


@dataclass(frozen=True)
class Gang:
    """One attempt's gang as the cluster shows it. `admissions` holds ended ones and, last, the current one if any."""

    name: str
    uid: str
    attempt: int
    nonce: str
    phase: GangPhase
    admissions: tuple[Admission, ...] = ()
    queued_since: float | None = None
    message: str = ""
    # Pods that should have ended long ago, on hosts that do not answer: the cluster will not bring the gang up again
    # while they are there, and only the fence keeps their processes from doing harm.
    stuck: tuple[Evidence, ...] = ()
    # Pods that cannot start as they are (image, command, a missing Secret), where the cluster only waits and retries.
    cannot_start: tuple[Evidence, ...] = ()


@dataclass(frozen=True)
class ClusterView:
    """All gangs of one run, and what capacity there is. `quota_devices` None: the cluster cannot tell."""

    cluster_uid: str
    gangs: tuple[Gang, ...] = ()
    # Gangs that were deleted, phase Deleted, where the cluster still remembers how their admissions ended (the local
    # cluster does, Kubernetes does not). They are gone: they hold no capacity and run nothing. For the ledger only.
    deleted: tuple[Gang, ...] = ()
    quota_devices: dict[str, int] | None = None  # family (cpu, tpu7x, v5p) -> devices this run could have at most now
    warnings: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class GangRequest:
    """What to submit: everything is derived from (run, attempt, plan), so that a second submission collides."""

    run: str
    run_directory: str
    spec: AttemptSpec
    # Of the local cluster only; elsewhere the attempt's program says it.
    command: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    # Of Kubernetes only.
    queue: str | None = None
    priority_class: str | None = None
    owner_uid: str | None = None  # of the TrainingRun object; None: a daemon looks after the run


class Cluster(Protocol):
    """Carries out. Every call is idempotent; every call may raise ClusterUnavailable."""

    @property
    def uid(self) -> str: ...

    @property
    def namespace(self) -> str: ...

    def check(self, run: TrainingRun) -> None:
        """Raises ConfigurationError when `run` asks for what this cluster cannot give. Touches nothing."""

    def program(self, run: TrainingRun) -> Program | None:
        """What an attempt submitted now would run; None where it is this installation."""

    def observe(self, run: str) -> ClusterView:
        """The gangs of `run`, ended ones included until they are deleted."""

    def submit(self, request: GangRequest) -> Gang:
        """Create the gang named request.spec.gang, or return the one of our nonce. Raises SubmitConflict."""

    def delete(self, name: str, uid: str, grace_seconds: float) -> None:
        """End the gang `name` if its uid is still `uid`: SIGTERM, after the grace SIGKILL. At once; gone is fine."""
