"""Why a start ended: one cause, and the evidence that decided it, verbatim. Pure.

The order is fixed: signals of the queue, of the node, of the pod, the container that terminated earliest, its exit
record, unknown. The first death of a gang brings down the rest (peers lose their connections, the supervisor kills what
is left), so later deaths say nothing; and a peer that merely says "the other side is gone" is never the cause. What
cannot be told apart is `unknown`: it is never guessed to be the program's own fault.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.clusters.base import Admission, ContainerEnd
from trainer.errors import ExitCode
from trainer.rundir.records import Category, Evidence, ExitRecord


@dataclass(frozen=True)
class Verdict:
    """A cause. `charged`: it counts against the budget of its cause. `certain` is False when a death by signal, or an
    orderly stop, leaves open who asked for it: then a stop that is known from elsewhere explains it better."""

    cause: Category
    evidence: tuple[Evidence, ...]
    charged: bool = True
    certain: bool = True


# What takes a gang away without any fault of the run. Charged only where it is inferred from an exit code alone.
FREE: frozenset[Category] = frozenset({"preempted", "maintenance", "plan-change", "completed", "unknown-while-absent"})

# Reasons of the Workload conditions Evicted and Preempted, by prefix, strongest first (kueue v1beta1 and v1beta2).
_QUEUE: tuple[tuple[str, Category], ...] = (
    ("Deactivated", "deactivated"),
    ("NodeFailures", "host-failure"),
    ("PodsReadyTimeout", "unknown"),  # never came up, or did not come back up: the queue does not say why
    ("", "preempted"),  # Preempted, In*, AdmissionCheck, ClusterQueueStopped, LocalQueueStopped, FlavorMigration, …
)

# Node taints, labels and conditions, by a part of field or value.
_NODE: tuple[tuple[str, Category], ...] = (
    ("not-ready", "host-failure"),
    ("NotReady", "host-failure"),
    ("Ready=False", "host-failure"),
    ("Ready=Unknown", "host-failure"),
    ("unreachable", "host-failure"),
    ("out-of-service", "host-failure"),
    ("fault-behavior", "host-failure"),
    ("TerminationEvent", "host-failure"),
    ("preempt", "preempted"),
    ("spot", "preempted"),
    ("maintenance", "maintenance"),
    ("impending-node-termination", "maintenance"),
    ("ToBeDeletedByClusterAutoscaler", "maintenance"),
    ("unschedulable", "maintenance"),
    ("", "host-failure"),
)

# Reasons of pod conditions and of waiting or terminated containers.
_POD: tuple[tuple[str, Category], ...] = (
    ("PreemptionByScheduler", "preempted"),
    ("WorkloadEvictedDueToDeactivated", "deactivated"),
    ("WorkloadEvictedDueToNodeFailures", "host-failure"),
    ("WorkloadEvictedDueToPodsReadyTimeout", "unknown"),
    ("WorkloadEvicted", "preempted"),
    ("EvictionByEvictionAPI", "maintenance"),
    ("DeletionByTaintManager", "host-failure"),
    ("DeletionByPodGC", "host-failure"),
    ("TerminationByKubelet", "host-failure"),
    ("KueueForcefullyTerminated", "host-failure"),
    ("NodeLost", "host-failure"),
    ("OOMKilled", "application-error"),
    ("InvalidImageName", "bad-configuration"),
)

_TRAINER: dict[int, Category] = {
    ExitCode.DONE: "completed",
    ExitCode.APPLICATION_ERROR: "application-error",
    2: "bad-configuration",  # usage error of the command line
    ExitCode.BAD_CONFIGURATION: "bad-configuration",
    ExitCode.STORAGE_UNAVAILABLE: "storage",
    ExitCode.PREEMPTED: "preempted",
    ExitCode.FENCED: "fenced",
    ExitCode.WATCHDOG: "hang",
    ExitCode.NON_FINITE: "non-finite",
    ExitCode.MIXED_GANG: "mixed-gang",
    126: "bad-configuration",  # the command cannot be run
    127: "bad-configuration",  # there is no such command
}
# Codes that only the program itself can produce, knowing why.
_TELLING = frozenset({1, 2, 64, 74, 77, 78, 79, 126, 127})
_SIGKILL, _SIGTERM = 9, 15

# Texts of exit records. A peer that lost the others; a machine that was not usable; a store that was not.
_PEER_LOST = re.compile(
    r"socket closed|connection (reset|refused|closed|aborted)|broken pipe|closed by peer|\bunavailable\b|heartbeat"
    r"|coordination (service|agent)|different incarnation|peer(s)? (is|are|was|were)? ?(gone|lost|dead)|gloo"
    r"|barrier timed out|deadline_?\s?exceeded",
    re.IGNORECASE,
)
_MACHINE = re.compile(
    r"no healthy devices|/dev/vfio|device or resource busy|address already in use|failed to bind|bus error"
    r"|uncorrectable|tpu (driver|initiali[sz]ation)|unable to initialize backend",
    re.IGNORECASE,
)
_STORE = re.compile(
    r"no space left|enospc|disk quota|read-only file system|input/output error|storageunavailable|stale file handle"
    r"|service unavailable|too many requests|\b(429|502|503|504)\b",
    re.IGNORECASE,
)


def classify(
    admission: Admission | None, exits: Mapping[str, ExitRecord], start_exit: ExitRecord | None = None
) -> Verdict:
    """The cause of the end of one admission, or of a claimed start of which the cluster shows nothing any more.

    `exits` are exit records by pod uid; `start_exit` is the one of the start. Without an admission, and where Kueue's
    suspension deleted the pods, only exit records are left; if there is none either: unknown-while-absent, uncharged.
    """
    if admission is not None:
        if admission.queue_signals:
            return _by_signal(admission.queue_signals, _QUEUE)
        if admission.containers and all(_code(end) == (0, None) for end in admission.containers):
            return _by_containers(
                admission.containers, exits, start_exit
            )  # all done: whatever the node says, it did not end them
        if admission.node_signals:
            return _by_signal(admission.node_signals, _NODE)
        known = [signal for signal in admission.pod_signals if _match(signal, _POD)]
        if known:
            return _by_signal(tuple(known), _POD)
        if admission.containers:
            verdict = _by_containers(admission.containers, exits, start_exit)
            # What the pods said and we do not understand stays in the ledger.
            return Verdict(verdict.cause, verdict.evidence + admission.pod_signals, verdict.charged, verdict.certain)
        if admission.pod_signals:
            return Verdict("unknown", admission.pod_signals, certain=False)
    records = [record for record in (start_exit, *(exits[uid] for uid in sorted(exits))) if record is not None]
    if records:
        first = min(records, key=lambda record: (record.time, record.code, record.reason))
        return _by_record(first)
    evidence = Evidence(source="cluster", field="pods", value="none left, and no exit record")
    return Verdict("unknown-while-absent", (evidence,), charged=False, certain=False)


def stopped(verdict: Verdict, cause: Category, evidence: Evidence) -> Verdict:
    """`verdict`, given that a stop for `cause` was under way: it explains deaths that nothing else explains."""
    if verdict.certain:
        return verdict
    charged = cause not in FREE and verdict.charged
    return Verdict(cause, (evidence, *verdict.evidence), charged)


def _match(signal: Evidence, table: tuple[tuple[str, Category], ...]) -> Category | None:
    prefix = table is _QUEUE
    texts = (signal.value.strip(), signal.field)
    for part, category in table:
        if any(text.startswith(part) if prefix else part in text for text in texts):
            return category
    return None


def _by_signal(signals: tuple[Evidence, ...], table: tuple[tuple[str, Category], ...]) -> Verdict:
    """The strongest signal of one level decides; all of them are kept."""
    found: list[Category] = [category for signal in signals if (category := _match(signal, table)) is not None]
    order: list[Category] = [category for _, category in table]
    cause = min(found, key=order.index)
    return Verdict(cause, signals, charged=cause not in FREE)


def _code(end: ContainerEnd) -> tuple[int | None, int | None]:
    """(exit code, signal): 128+n is signal n; a shell or the kubelet reports either form."""
    if end.signal is not None:
        return None, end.signal
    if end.exit_code is not None and 128 < end.exit_code <= 128 + 64:
        return None, end.exit_code - 128
    if end.exit_code is not None and end.exit_code < 0:
        return None, -end.exit_code
    return end.exit_code, None


def _order(end: ContainerEnd) -> tuple[float, int, int, str]:
    """By time; within one tick of the cluster's clock a death from outside comes before one from inside."""
    _, signal = _code(end)
    return end.time, 0 if signal in (_SIGKILL, _SIGTERM) else 1, end.rank, end.pod_uid


def _by_containers(
    containers: tuple[ContainerEnd, ...], exits: Mapping[str, ExitRecord], start_exit: ExitRecord | None
) -> Verdict:
    ends = sorted(containers, key=_order)
    failed = [end for end in ends if _code(end) != (0, None)]
    if not failed:
        return Verdict("completed", tuple(_shown(end) for end in ends), charged=False, certain=False)

    def record(end: ContainerEnd) -> ExitRecord | None:
        own = exits.get(end.pod_uid)
        return own or (start_exit if start_exit is not None and start_exit.rank == end.rank else None)

    first = failed[0]
    if not _is_victim(first, record(first)):
        return _by_end(first, record(first))
    # The earliest lost its peers. One that says why by itself decides; their clocks may differ by a little.
    for end in failed[1:]:
        code, _ = _code(end)
        if code in _TELLING and not _is_victim(end, record(end)):
            return _by_end(end, record(end))
    evidence = (_shown(first), *_quoted(first, record(first)))
    others = [end for end in failed[1:] if _code(end)[1] is not None]
    if others:
        # It missed a peer whose process was still there and had to be killed: that one hung.
        return Verdict("hang", (*evidence, *(_shown(end) for end in others)), certain=False)
    return Verdict("host-failure", evidence, certain=False)


def _is_victim(end: ContainerEnd, record: ExitRecord | None) -> bool:
    """Whether this container only says that its peers are gone."""
    code, signal = _code(end)
    if record is None or (code != 1 and signal not in (6, 11)):
        return False
    return _PEER_LOST.search(f"{record.reason}\n{record.error}") is not None


def _by_end(end: ContainerEnd, record: ExitRecord | None) -> Verdict:
    """The cause of one container's death, taken alone."""
    code, signal = _code(end)
    evidence = (_shown(end), *_quoted(end, record))
    if record is not None and signal is not None and record.code in _TELLING:
        code, signal = record.code, None  # it had said why; on its way out it was killed, or the runtime aborted it
    if signal == _SIGKILL:
        return Verdict("host-failure", evidence, certain=False)
    if signal == _SIGTERM:
        return Verdict("preempted", evidence, certain=False)
    if signal is not None or code is None:
        return Verdict("unknown", evidence)
    return _by_code(code, record, evidence)


def _by_record(record: ExitRecord) -> Verdict:
    """The cause according to an exit record alone."""
    evidence = (
        Evidence(source="exit.json", field="code", value=str(record.code)),
        Evidence(source="exit.json", field="reason", value=_short(record.reason)),
    )
    if record.code == 1 and _PEER_LOST.search(f"{record.reason}\n{record.error}"):
        return Verdict("unknown", evidence, certain=False)
    return _by_code(record.code, record, evidence)


def _by_code(code: int, record: ExitRecord | None, evidence: tuple[Evidence, ...]) -> Verdict:
    cause = _TRAINER.get(code, "unknown")
    if cause == "application-error" and record is not None:
        text = f"{record.reason}\n{record.error}"
        if _MACHINE.search(text):
            cause = "host-failure"
        elif _STORE.search(text):
            cause = "storage"
    if cause == "completed":
        return Verdict(cause, evidence, charged=False, certain=False)
    return Verdict(cause, evidence, certain=code not in (ExitCode.PREEMPTED, ExitCode.FENCED))


def _shown(end: ContainerEnd) -> Evidence:
    code, signal = _code(end)
    what = ("signal", str(signal)) if signal is not None else ("exit code", str(code))
    return Evidence(source=f"pod {end.pod}", field=what[0], value=what[1])


def _quoted(end: ContainerEnd, record: ExitRecord | None) -> tuple[Evidence, ...]:
    if record is None:
        return ()
    # Often the error is the reason with its class in front: said once.
    said_once = record.error.endswith(record.reason)
    text = record.error if record.error and said_once else f"{record.reason}: {record.error}".removesuffix(": ")
    return (Evidence(source=f"exit.json of pod {end.pod}", field="reason", value=_short(text)),)


def _short(text: str, limit: int = 500) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
