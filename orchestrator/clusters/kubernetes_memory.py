"""What one process remembers of gangs beyond what the cluster still shows: how pods ended, why a queue took them.

JobSet deletes the pods of a gang that it restarts, and Kueue's suspension those of a gang that it evicts; Kueue resets
the condition that said why. What was seen of them is kept here for a while, in bounds. It holds no truth: what is lost
with the process is backfilled from the run directory.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from orchestrator.clusters.kubernetes_objects import (
    JOBSET_UID,
    Object,
    condition,
    evictions,
    is_true,
    label,
    node_signals,
    said,
    seconds,
    since,
)
from trainer.rundir.records import Evidence

REMEMBER_SECONDS = 3600.0
REMEMBER_PODS = 10_000  # that have vanished, of all gangs together
# A node that was unwell explains an end that came at most this much later; then it was well again.
NODE_SIGNAL_SECONDS = 120.0
# A pod that is created this long after an eviction is of the next admission, which our copy does not show yet.
LATE_SECONDS = 5.0
FINAL = ("Succeeded", "Failed")


@dataclass(frozen=True)
class PodFacts:
    """One pod of a gang. `pod` is its last state that was seen; durations are by our own clock."""

    pod: Object
    epoch: int  # evictions of the Workload before the admission that it belongs to
    present: bool = True  # the cluster still shows it
    deleting_for: float | None = None  # seconds
    asked: float | None = None  # when its deletion was asked for, by the cluster's clock
    node_signals: tuple[Evidence, ...] = ()


@dataclass(frozen=True)
class Past:
    """What is remembered of a gang's admissions, by epoch: why they ended, and when they began and were queued."""

    evicted: Mapping[int, tuple[Evidence, ...]] = field(default_factory=dict)
    evicted_at: Mapping[int, float] = field(default_factory=dict)
    admitted_at: Mapping[int, float] = field(default_factory=dict)


@dataclass
class _Pod:
    pod: Object
    epoch: int | None = None
    asked: float | None = None
    deleting_since: float | None = None
    over_since: float | None = None
    vanished: float | None = None
    signals: dict[Evidence, float] = field(default_factory=dict)  # when last seen


@dataclass
class _Gang:
    pods: dict[str, _Pod] = field(default_factory=dict)
    workload: Object | None = None
    evicted: dict[int, tuple[Evidence, ...]] = field(default_factory=dict)
    evicted_at: dict[int, float] = field(default_factory=dict)
    admitted_at: dict[int, float] = field(default_factory=dict)
    touched: float = 0.0

    def start_over(self) -> None:
        """Evictions are counted by a new Workload from now on."""
        self.pods = {uid: known for uid, known in self.pods.items() if known.over_since is None}
        for known in self.pods.values():
            known.epoch = None
        for past in (self.evicted, self.evicted_at, self.admitted_at):
            past.clear()


# The node of this name: the object, None where there is none, and False where nothing is known of nodes.
NodeOf = Callable[[str], Object | bool | None]


class Memories:
    """Of all gangs, by the uid of their JobSet. Safe to share between threads."""

    def __init__(self, node_of: NodeOf = lambda _: False, clock: Callable[[], float] = time.monotonic) -> None:
        self._node_of = node_of
        self._clock = clock
        self._lock = threading.Lock()
        self._gangs: dict[str, _Gang] = {}

    def see_pod(self, pod: Object, workload: Object | None, *, gone: bool = False) -> None:
        """The pod is as it says, or `gone`: then `pod` is the last that was seen of it."""
        now = self._clock()
        with self._lock:
            gang = self._gang(label(pod, JOBSET_UID), now)
            known = gang.pods.setdefault(pod["metadata"]["uid"], _Pod(pod))
            if known.vanished is not None:
                return
            known.pod = pod
            if known.epoch is None and workload is not None:
                known.epoch = epoch_of(pod, workload)
            self._note_node(known, now)
            if pod["metadata"].get("deletionTimestamp") is not None and known.deleting_since is None:
                known.deleting_since, known.asked = now, _asked(pod)
            if (gone or pod["status"].get("phase") in FINAL) and known.over_since is None:
                known.over_since = now
            if gone:
                known.vanished = now
                self._forget(now)

    def see_workload(self, jobset_uid: str, workload: Object) -> None:
        """Why and when Kueue admitted or evicted it."""
        now, count = self._clock(), evictions(workload)
        with self._lock:
            gang = self._gang(jobset_uid, now)
            if gang.workload is not None and gang.workload["metadata"]["uid"] != workload["metadata"]["uid"]:
                gang.start_over()  # somebody deleted the Workload, and Kueue has made another
            gang.workload = workload
            if is_true(workload, "Evicted"):
                gang.evicted[count - 1] = eviction_signals(workload)
                gang.evicted_at[count - 1] = since(workload, "Evicted") or 0.0
            elif is_true(workload, "Admitted"):
                gang.admitted_at[count] = since(workload, "Admitted") or 0.0

    def workload(self, jobset_uid: str) -> Object | None:
        """The gang's Workload as it was last seen: it goes before the JobSet does, and admissions are named after it."""
        with self._lock:
            gang = self._gangs.get(jobset_uid)
            return gang.workload if gang is not None else None

    def see_node(self, name: str) -> None:
        """The node of this name has changed: its pods remember that."""
        now = self._clock()
        with self._lock:
            for gang in self._gangs.values():
                for known in gang.pods.values():
                    if known.vanished is None and known.pod["spec"].get("nodeName") == name:
                        self._note_node(known, now)

    def recall(self, jobset_uid: str, workload: Object | None) -> tuple[tuple[PodFacts, ...], Past]:
        """Everything known about the pods of a gang, and about its admissions."""
        now = self._clock()
        with self._lock:
            gang = self._gangs.get(jobset_uid)
            if gang is None:
                return (), Past()
            gang.touched = now
            return (
                tuple(self._facts(known, workload, now) for known in gang.pods.values()),
                Past(dict(gang.evicted), dict(gang.evicted_at), dict(gang.admitted_at)),
            )

    def _facts(self, known: _Pod, workload: Object | None, now: float) -> PodFacts:
        if known.over_since is None:
            self._note_node(known, now)
            if workload is not None and _is_live(known.pod, workload):
                known.epoch = evictions(workload)
        if known.epoch is None and workload is not None:
            known.epoch = epoch_of(known.pod, workload)
        until = known.over_since if known.over_since is not None else now
        return PodFacts(
            pod=known.pod,
            epoch=known.epoch if known.epoch is not None else evictions(workload),
            present=known.vanished is None,
            deleting_for=now - known.deleting_since if known.deleting_since is not None else None,
            asked=known.asked,
            node_signals=tuple(s for s, seen in known.signals.items() if seen >= until - NODE_SIGNAL_SECONDS),
        )

    def _note_node(self, known: _Pod, now: float) -> None:
        name = known.pod["spec"].get("nodeName")
        node = self._node_of(name) if name and known.over_since is None else False
        if isinstance(node, bool):
            return
        for signal in node_signals(str(name), node):
            known.signals[signal] = now

    def _gang(self, uid: str, now: float) -> _Gang:
        gang = self._gangs.setdefault(uid, _Gang())
        gang.touched = now
        return gang

    def _forget(self, now: float) -> None:
        """Drop what is old, and the oldest of what is too much."""
        vanished = sorted(
            (known.vanished, uid, pod)
            for uid, gang in self._gangs.items()
            for pod, known in gang.pods.items()
            if known.vanished is not None
        )
        too_many = max(0, len(vanished) - REMEMBER_PODS)
        for index, (when, uid, pod) in enumerate(vanished):
            if index < too_many or now - when > REMEMBER_SECONDS:
                del self._gangs[uid].pods[pod]
        for uid, gang in list(self._gangs.items()):
            if not gang.pods and now - gang.touched > REMEMBER_SECONDS:
                del self._gangs[uid]


def epoch_of(pod: Object, workload: Object) -> int | None:
    """How many evictions came before the admission that brought this pod up; None: our copies do not agree yet.

    Compares times of the cluster only where a pod that has ended may be left over from the admission before.
    """
    count, created = evictions(workload), seconds(pod["metadata"].get("creationTimestamp")) or 0.0
    if is_true(workload, "Evicted"):
        evicted = since(workload, "Evicted")
        return None if evicted is not None and created > evicted + LATE_SECONDS else count - 1
    admitted = since(workload, "Admitted") if is_true(workload, "Admitted") else None
    left_over = count > 0 and admitted is not None and created < admitted
    return count - 1 if left_over and not _is_live(pod, workload) else count


def eviction_signals(workload: Object) -> tuple[Evidence, ...]:
    """Why Kueue took the quota back, in its own words."""
    source = f"Workload {workload['metadata']['name']}"
    return tuple(
        Evidence(source=source, field=kind, value=said(condition(workload, kind)))
        for kind in ("Evicted", "Preempted")
        if is_true(workload, kind)
    )


def _is_live(pod: Object, workload: Object) -> bool:
    """Runs, or is about to, while its Workload is admitted: so it belongs to the present admission."""
    ended = pod["status"].get("phase") in FINAL or pod["metadata"].get("deletionTimestamp") is not None
    return not ended and is_true(workload, "Admitted") and not is_true(workload, "Evicted")


def _asked(pod: Object) -> float | None:
    due = seconds(pod["metadata"].get("deletionTimestamp"))
    return None if due is None else due - float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)
