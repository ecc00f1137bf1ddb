"""One gang from the objects of the cluster: its phase, its admissions and what each of them ended by. Pure.

The key of an admission is derived alike by everybody who looks: `e` evictions of the Workload and `r` restarts of the
JobSet came before it. An admission has ended when its last process has: until then it is the current one, whatever
JobSet and Kueue have decided already, because a trainer may still be committing in its grace period, and because what
its containers say at the end is the evidence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.clusters.base import Admission, Gang, GangPhase
from orchestrator.clusters.kubernetes_memory import Past, PodFacts, eviction_signals
from orchestrator.clusters.kubernetes_objects import (
    ATTEMPT_LABEL,
    JOBSET_NAME,
    JOBSET_UID,
    NONCE_ANNOTATION,
    RESTART_ATTEMPT,
    Object,
    condition,
    evictions,
    is_true,
    label,
    number,
    said,
    seconds,
    since,
)
from orchestrator.clusters.kubernetes_pods import (
    Shape,
    cannot_start,
    container_ends,
    is_over,
    pod_signals,
    rank_of,
    shape_of,
    stuck,
    why_pending,
)
from trainer.rundir.records import Evidence

AdmissionId = tuple[int, int]  # (evictions, restarts) before it


@dataclass(frozen=True)
class Facts:
    """What is known of one gang. `nodes` None: the nodes may not be read."""

    jobset: Object | None
    workload: Object | None = None
    pods: tuple[PodFacts, ...] = ()
    past: Past = field(default_factory=Past)
    nodes: Mapping[str, Object] | None = None

    @property
    def suspended(self) -> bool:
        return self.jobset is None or bool(self.jobset["spec"].get("suspend"))

    @property
    def terminal(self) -> bool:
        return self.jobset is not None and bool(self.jobset["status"].get("terminalState"))

    @property
    def evicted(self) -> bool:
        return is_true(self.workload, "Evicted")

    @property
    def deactivated(self) -> bool:
        """Kueue, or a person, has switched the Workload off: it does not come up again by itself."""
        if self.workload is None:
            return False
        reason = str(condition(self.workload, "Evicted").get("reason", "")) if self.evicted else ""
        return self.workload["spec"].get("active") is False or reason.startswith("Deactivated")

    @property
    def restarts(self) -> int:
        return int(self.jobset["status"].get("restarts", 0)) if self.jobset else 0


def gang_of(facts: Facts) -> Gang:
    """The gang. There is a JobSet, or at least one pod that the cluster still shows."""
    jobset = facts.jobset
    source = jobset if jobset is not None else facts.pods[0].pod
    metadata = source["metadata"]
    admissions, ending = _admissions(facts)
    phase = _phase(facts, ending)
    current = [p for p in facts.pods if p.present and _id(p) == max(map(_id, facts.pods))]
    return Gang(
        name=metadata["name"] if jobset is not None else label(source, JOBSET_NAME),
        uid=metadata["uid"] if jobset is not None else label(source, JOBSET_UID),
        attempt=number(source, ATTEMPT_LABEL),
        nonce=str((metadata.get("annotations") or {}).get(NONCE_ANNOTATION, "")),
        phase=phase,
        admissions=admissions,
        queued_since=_queued_since(facts) if phase == "Queued" else None,
        message=_message(facts, phase, ending, current),
        stuck=tuple(signal for p in facts.pods for signal in stuck(p, facts.nodes)),
        cannot_start=tuple(signal for p in current for signal in cannot_start(p)),
    )


# -- phase and message


def _phase(facts: Facts, ending: bool) -> GangPhase:
    """`ending`: processes of an admission that is over as far as JobSet and Kueue are concerned still run."""
    jobset = facts.jobset
    if jobset is None or jobset["metadata"].get("deletionTimestamp") is not None:
        return "Deleting"
    if ending:
        return "Running"
    if facts.terminal:
        return "Succeeded" if jobset["status"]["terminalState"] == "Completed" else "Failed"
    if facts.deactivated and facts.suspended:
        return "Deactivated"
    return "Running" if _live(facts) is not None else "Queued"


def _queued_since(facts: Facts) -> float | None:
    since_eviction = since(facts.workload, "Evicted") if facts.evicted else None
    assert facts.jobset is not None
    return since_eviction or seconds(facts.jobset["metadata"].get("creationTimestamp"))


def _message(facts: Facts, phase: GangPhase, ending: bool, current: list[PodFacts]) -> str:
    jobset, workload = facts.jobset, facts.workload
    if phase == "Deleting":
        left = sum(1 for p in facts.pods if p.present)
        return f"being deleted; {left} of its pods are left" if left else "being deleted"
    if phase in ("Succeeded", "Failed"):
        return said(condition(jobset, "Completed" if phase == "Succeeded" else "Failed"))
    if phase == "Deactivated":
        return said(condition(workload, "Evicted")) if facts.evicted else "the Workload's spec.active is false"
    if phase == "Queued":
        return _why_waiting(facts)
    if ending:
        what = "restarting in place"
        if facts.evicted:
            what = f"evicted by Kueue ({said(condition(workload, 'Evicted'))})"
        elif facts.terminal:
            what = said(condition(jobset, "Failed")) or "finished"
        return f"{what}; its last processes are ending"
    if not current:
        name = facts.jobset["metadata"]["name"] if facts.jobset else ""
        return f"its pods have not been created yet; if it stays so, kubectl describe jobset {name} says why"
    pending = [p for p in current if p.pod["status"].get("phase", "Pending") == "Pending"]
    if pending:
        return f"{len(pending)} of {len(current)} pods have not started: {why_pending(pending[0])}"
    return ""


def _why_waiting(facts: Facts) -> str:
    """In Kueue's own words."""
    workload = facts.workload
    if workload is None:
        return "Kueue has made no Workload for it yet: it does not run, or it does not look after this namespace"
    parts = []
    if facts.evicted:
        parts.append(f"evicted ({said(condition(workload, 'Evicted'))})")
    if not is_true(workload, "QuotaReserved"):
        reserved = condition(workload, "QuotaReserved")
        if reserved and reserved.get("message") != condition(workload, "Evicted").get("message"):
            parts.append(said(reserved))
        again = (workload["status"].get("requeueState") or {}).get("requeueAt")
        if again:
            parts.append(f"Kueue tries again at {again}")
    else:
        checks = workload["status"].get("admissionChecks") or ()
        parts += [
            f"admission check {c['name']} is {c['state']}: {c.get('message', '')}"
            for c in checks
            if c["state"] != "Ready"
        ]
    return "; ".join(parts) or "Kueue has not looked at it yet"


# -- admissions


def _admissions(facts: Facts) -> tuple[tuple[Admission, ...], bool]:
    """The ended admissions that are known, and last the current one; and whether that one is only ending."""
    groups: dict[AdmissionId, list[PodFacts]] = {}
    for pod in facts.pods:
        groups.setdefault(_id(pod), []).append(pod)
    live, closing = _live(facts), _closing(facts)
    shape = shape_of(facts.jobset, facts.pods)
    found: list[Admission] = []
    for which in sorted({*groups, *(w for w in (live, closing) if w is not None)}):
        pods = groups.get(which, [])
        stopping = which == closing and not facts.terminal and not facts.suspended
        running = stopping or not all(is_over(p) for p in pods)
        if which == live or running:
            found.append(_admission(facts, which, pods, shape, groups, over=False))
            return tuple(found), which != live and facts.jobset is not None
        # Without its Workload an admission has no name that others would give it too; its starts are backfilled.
        if facts.workload is not None or facts.terminal:
            found.append(_admission(facts, which, pods, shape, groups, over=True))
    return tuple(found), False


def _live(facts: Facts) -> AdmissionId | None:
    """The admission that runs now, as far as Kueue and JobSet are concerned."""
    deleting = facts.jobset is None or facts.jobset["metadata"].get("deletionTimestamp") is not None
    if deleting or facts.terminal or facts.evicted or facts.suspended:
        return None
    # Without a Workload nobody has to admit it: Kueue is being installed, or has forgotten a finished one.
    if facts.workload is not None and not is_true(facts.workload, "Admitted"):
        return None
    return evictions(facts.workload), facts.restarts


def _closing(facts: Facts) -> AdmissionId | None:
    """The admission that the eviction in force ended, or the end of the whole JobSet.

    A Workload can be evicted that was never admitted: a person deactivates it in the queue.
    """
    if not facts.evicted:
        return (evictions(facts.workload), facts.restarts) if facts.terminal else None
    admitted, evicted = condition(facts.workload, "Admitted"), since(facts.workload, "Evicted")
    changed = since(facts.workload, "Admitted")
    if admitted.get("status") == "True" or (changed is not None and evicted is not None and changed >= evicted):
        return evictions(facts.workload) - 1, facts.restarts
    return None


def _admission(
    facts: Facts,
    which: AdmissionId,
    pods: list[PodFacts],
    shape: Shape,
    groups: Mapping[AdmissionId, list[PodFacts]],
    *,
    over: bool,
) -> Admission:
    epoch, restart = which
    pods = sorted(pods, key=lambda p: (rank_of(p.pod, shape), p.pod["metadata"]["creationTimestamp"]))
    created = [t for p in pods if (t := seconds(p.pod["metadata"].get("creationTimestamp"))) is not None]
    ends = container_ends(pods, shape)
    admitted = facts.past.admitted_at.get(epoch)
    first = (epoch, restart - 1) not in groups  # as far as we have seen, Kueue brought it up, not JobSet
    ended = None
    if over:
        said_so = (facts.past.evicted_at.get(epoch), since(facts.jobset, "Failed"), since(facts.jobset, "Completed"))
        ended = max([end.time for end in ends] or [t for t in said_so if t is not None], default=0.0)
    return Admission(
        key=key_of(facts.workload, which),
        restart_attempt=restart,
        queued_at=_queued_at(facts, which) if first else None,
        began=min(created, default=admitted),
        ended=ended,
        queue_signals=_queue_signals(facts, which, groups),
        node_signals=_distinct(signal for p in pods for signal in p.node_signals),
        pod_signals=_distinct(signal for p in pods for signal in pod_signals(p)),
        containers=ends,
        pod_uids=tuple(p.pod["metadata"]["uid"] for p in pods),
    )


def key_of(workload: Object | None, which: AdmissionId) -> str:
    """`e` evictions and `r` restarts came before it; should Kueue make a new Workload, its counts begin anew."""
    of = f".{workload['metadata']['uid'][:8]}" if workload is not None else ""
    return f"e{which[0]}.r{which[1]}{of}"


def _queued_at(facts: Facts, which: AdmissionId) -> float | None:
    epoch, restart = which
    if epoch > 0:
        return facts.past.evicted_at.get(epoch - 1)
    return seconds(facts.jobset["metadata"].get("creationTimestamp")) if facts.jobset and restart == 0 else None


def _queue_signals(
    facts: Facts, which: AdmissionId, groups: Mapping[AdmissionId, list[PodFacts]]
) -> tuple[Evidence, ...]:
    """Why Kueue ended it; nothing when it did not: it is the present one, or JobSet restarted it in place."""
    epoch, restart = which
    count = evictions(facts.workload)
    if facts.workload is None or epoch >= count or (epoch, restart + 1) in groups:
        return ()
    if facts.evicted and epoch == count - 1:
        return eviction_signals(facts.workload)
    if epoch in facts.past.evicted:
        return facts.past.evicted[epoch]
    entries = facts.workload["status"]["schedulingStats"]["evictions"]
    reasons = {f"{entry.get('reason', '')}{entry.get('underlyingCause', '')}" for entry in entries}
    if len(reasons) > 1:
        return ()  # one of several reasons, and nobody knows which
    name = facts.workload["metadata"]["name"]
    return (
        Evidence(
            source=f"Workload {name}", field="schedulingStats", value=f"{reasons.pop()}: {count} evictions in all"
        ),
    )


def _id(pod: PodFacts) -> AdmissionId:
    return pod.epoch, number(pod.pod, RESTART_ATTEMPT)


def _distinct(signals: object) -> tuple[Evidence, ...]:
    return tuple(dict.fromkeys(signals))  # type: ignore[call-overload]
