"""A cluster and trainers in memory, with a clock of their own: what decide() acts on in model tests.

Small on purpose: trainers claim and commit only through HEAD, as PROTOCOL says; the cluster queues, admits, evicts and
restarts gangs as JobSet and Kueue do. Faults are methods; each happens at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from orchestrator.api import TrainingRun, parse_run
from orchestrator.clusters.base import Admission, ClusterUnavailable, ClusterView, ContainerEnd, Gang, GangRequest
from orchestrator.decisions import (
    AppendEnding,
    DeleteGang,
    RecordSubmitted,
    RequestCommit,
    StopForPlanChange,
    SubmitGang,
    SwapHead,
    WriteRecipe,
    WriteSpec,
)
from tests.support.memory_run_directory import MemoryRunDirectory
from trainer.errors import Fenced
from trainer.hardware import device_type
from trainer.recipe import Recipe, load
from trainer.rundir.records import (
    AttemptSpec,
    CommitRef,
    Evidence,
    ExitRecord,
    Head,
    Phase,
    Program,
    Progress,
    RecipeRecord,
    Request,
    RequestDone,
    StartRecord,
    Submitted,
)

COMMIT_EVERY = 4
TARGET = 24
FAMILY = "cpu"


def tiny_recipe() -> Recipe:
    """The recipe `tiny`, frozen with sizes that nobody measured: no file is read in these tests."""
    return load(
        "tiny",
        {
            "sequence_length": 64,
            "data.files": [{"path": "train.bin", "bytes": 1_000_000}],
            "data.held_out": [{"path": "heldout.bin", "bytes": 100_000}],
        },
    )


def run_of(**spec: Any) -> TrainingRun:
    """A run on cpu-8, then cpu-2, with short times; `spec` in the words of the YAML replaces fields."""
    body: dict[str, Any] = {
        "recipe": {"name": "tiny"},
        "data": {"root": "/data"},
        "targetStep": TARGET,
        "runDirectory": "/runs/demo",
        "ladder": [{"deviceType": "cpu-8", "waitInQueue": 20}, {"deviceType": "cpu-2", "waitInQueue": 20}],
        "checkpoint": {"everySteps": COMMIT_EVERY},
        "goUp": {"after": 10, "every": 30},
        "backoff": {"initial": 2, "max": 20},
        "hang": {"step": 10, "start": 20},
        "gracePeriod": 3,
        "progressEvery": 1,
        **spec,
    }
    document = {
        "apiVersion": "untildone.dev/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": "demo"},
        "spec": body,
    }
    return parse_run(document, "test")


@dataclass
class Process:
    """The trainers of one coming-up: all of them as one. `silent`: a hang; `free`: cut off, out of anyone's reach."""

    pod: str
    attempt: int
    restart: int
    phase: Phase = "Starting"
    start: int = 0
    step: int = 0
    beats: int = 0
    silent: bool = False
    stopping: int | None = None  # ticks of grace left


@dataclass
class SimulatedGang:
    """A JobSet with its Workload."""

    name: str
    uid: str
    spec: AttemptSpec
    queued_since: float
    phase: str = "Queued"
    admissions: list[Admission] = field(default_factory=list)
    process: Process | None = None
    restarts: int = 0
    evicting: bool = False

    def shown(self) -> Gang:
        return Gang(
            name=self.name,
            uid=self.uid,
            attempt=self.spec.attempt,
            nonce=self.spec.nonce,
            phase=self.phase,  # type: ignore[arg-type]
            admissions=tuple(self.admissions),
            queued_since=self.queued_since,
            message="",
        )


class World:
    """Everything around decide(). One tick is one second."""

    def __init__(self, run: TrainingRun, remembers: bool = True, quota: dict[str, int] | None = None) -> None:
        self.run = run
        self.recipe = tiny_recipe()
        self.now = 1000.0
        self.rundir = MemoryRunDirectory()
        self.full = quota or {FAMILY: 8}
        self.quota = dict(self.full)
        self.tells_quota = True
        self.remembers = remembers  # whether deleted gangs can still be seen, as on the local cluster
        self.cluster_down = False
        self.stale_view: ClusterView | None = None  # an old answer, as from a cache
        self.gangs: dict[str, SimulatedGang] = {}
        self.deleted: list[Gang] = []
        self.free: list[Process] = []  # cut-off trainers that nobody can stop
        self.uid, self.namespace = "cluster-1", "default"
        self.application_errors = 0
        self.wanted: Program | None = None  # as a cluster that builds pods says
        self.broken: set[str] = set()  # images whose trainers end at once
        self.answers_requests = True
        self.commits: list[tuple[int, int, int]] = []
        self._ids = count(1)

    @property
    def capacity(self) -> int:
        """Devices of the CPU family."""
        return self.quota[FAMILY]

    @capacity.setter
    def capacity(self, devices: int) -> None:
        self.quota[FAMILY] = devices

    # -- the Cluster protocol

    def check(self, run: TrainingRun) -> None:
        pass

    def program(self, run: TrainingRun) -> Program | None:
        return self.wanted

    def observe(self, run: str) -> ClusterView:
        if self.cluster_down:
            raise ClusterUnavailable("the API server does not answer")
        if self.stale_view is not None:
            return self.stale_view
        quota = dict(self.quota) if self.tells_quota else None
        gangs = tuple(gang.shown() for gang in self.gangs.values())
        return ClusterView(self.uid, gangs, tuple(self.deleted) if self.remembers else (), quota)

    def submit(self, request: GangRequest) -> Gang:
        if self.cluster_down:
            raise ClusterUnavailable("the API server does not answer")
        spec = request.spec
        known = self.gangs.get(spec.gang)
        if known is None:
            known = SimulatedGang(spec.gang, f"uid-{next(self._ids)}", spec, self.now)
            self.gangs[spec.gang] = known
        assert known.spec.nonce == spec.nonce
        return known.shown()

    def delete(self, name: str, uid: str, grace_seconds: float) -> None:
        if self.cluster_down:
            raise ClusterUnavailable("the API server does not answer")
        gang = self.gangs.get(name)
        if gang is None or gang.uid != uid or gang.phase == "Deleting":
            return
        if gang.process is None:
            self._forget(gang)
        else:
            gang.phase = "Deleting"
            gang.process.stopping = int(grace_seconds)

    def carry_out(self, act: Any) -> None:
        """What orchestrator.carry_out does, on this world."""
        store = self.rundir
        if isinstance(act, SubmitGang):
            self.submit(GangRequest(self.run.name, "/runs/demo", act.spec))
        elif isinstance(act, (DeleteGang, StopForPlanChange)):
            self.delete(act.name, act.uid, act.grace_seconds)
        else:
            store._ask()
            if isinstance(act, WriteRecipe):
                store.recipe = store.recipe or RecipeRecord(fingerprint=act.recipe.fingerprint(), recipe=act.recipe)
            elif isinstance(act, WriteSpec):
                store.specs.setdefault(act.spec.attempt, act.spec)
            elif isinstance(act, SwapHead):
                self._swap_to(act)
            elif isinstance(act, RecordSubmitted):
                record = Submitted(cluster_uid=self.uid, namespace="default", gang_uid=act.gang_uid)
                store.submitted.setdefault(act.attempt, record)
            elif isinstance(act, AppendEnding):
                store.append_ending(act.ending)
            elif isinstance(act, RequestCommit):
                request = Request(kind="commit", attempt=act.attempt, reason=act.why, time=self.now)
                store.requests.setdefault(act.identifier, request)
            else:
                raise AssertionError(f"not an act: {act}")

    def _swap_to(self, act: SwapHead) -> None:
        head = self.rundir.head_
        if head is not None and head.attempt == act.attempt:
            return
        if self.rundir.generation != act.seen:
            raise Fenced("HEAD moved since the decision")
        assert act.attempt in self.rundir.specs
        commit = head.commit if head else None
        self.rundir.swap(Head(attempt=act.attempt, start=0, commit=commit, op_id=f"op-{next(self._ids)}"))

    # -- time

    def tick(self) -> None:
        """One second: the queue evicts and admits, trainers work, gangs that are done end."""
        self.now += 1.0
        self._queue()
        for gang in list(self.gangs.values()):
            if gang.process is not None:
                self._work(gang)
        for process in list(self.free):
            if self._train(process) is not None:
                self.free.remove(process)

    def _queue(self) -> None:
        for family, capacity in self.quota.items():
            self._queue_of(capacity, [g for g in self.gangs.values() if family_of(g) == family])

    def _queue_of(self, capacity: int, gangs: list[SimulatedGang]) -> None:
        admitted = [gang for gang in gangs if gang.process is not None]
        used = sum(gang.spec.plan.devices for gang in admitted)
        for gang in reversed(admitted):
            if used > capacity and not gang.evicting and gang.phase == "Running":
                gang.evicting = True
                assert gang.process is not None
                gang.process.stopping = 3
                signal = Evidence(source=f"Workload {gang.name}", field="Evicted", value="Preempted: quota reclaimed")
                gang.admissions[-1] = replace(gang.admissions[-1], queue_signals=(signal,))
                used -= gang.spec.plan.devices
        used = sum(gang.spec.plan.devices for gang in admitted)
        for gang in gangs:
            if gang.phase == "Queued" and used + gang.spec.plan.devices <= capacity:
                used += gang.spec.plan.devices
                self._come_up(gang)

    def _come_up(self, gang: SimulatedGang) -> None:
        pod = f"pod-{next(self._ids)}"
        gang.phase = "Running"
        gang.process = Process(pod, gang.spec.attempt, gang.restarts)
        admission = Admission(
            f"adm-{len(gang.admissions) + 1}", gang.restarts, gang.queued_since, self.now, pod_uids=(pod, f"{pod}-peer")
        )
        gang.admissions.append(admission)

    def _work(self, gang: SimulatedGang) -> None:
        assert gang.process is not None
        code = self._train(gang.process)
        if code is not None:
            self._end(gang, code)

    def _train(self, process: Process) -> int | None:
        """One second of a trainer; an exit code (128+n: signal n) when it ended."""
        if process.stopping is not None:
            process.stopping -= 1
            if process.stopping < 0:
                return 137
            if process.silent:
                return None
            if process.phase == "Training" and not self._commit(process):
                return 76
            return 75
        if process.silent:
            return None
        store = self.rundir
        if process.phase == "Starting":
            head = store.head_
            assert head is not None
            if store.down:
                return None
            if process.attempt < head.attempt or process.restart < head.restart_attempt:
                return 76
            if process.attempt > head.attempt:
                return None
            self._claim(process, head)
            return None
        spec = store.specs[process.attempt]
        if spec.program is not None and spec.program.image in self.broken:
            self.application_errors += 1
            return 1
        process.step += 1
        asked = self._requested(process)
        if asked:
            if not self._commit(process):
                return 76
            done = RequestDone(attempt=process.attempt, start=process.start, step=process.step, time=self.now)
            store.answers.update(dict.fromkeys(asked, done))
        if process.step % COMMIT_EVERY == 0 or process.step >= TARGET:
            if store.down:
                return 74
            if not self._commit(process):
                return 76
            if process.step >= TARGET:
                return 0
        self._report(process)
        return None

    def _requested(self, process: Process) -> list[str]:
        """Requests that this start answers now."""
        store = self.rundir
        if store.down or not self.answers_requests:
            return []
        return [
            name for name, r in store.requests.items() if r.attempt == process.attempt and name not in store.answers
        ]

    def _claim(self, process: Process, head: Head) -> None:
        store = self.rundir
        process.start, process.phase = head.start + 1, "Training"
        process.step = store.committed
        claimed = head.model_copy(
            update={
                "start": process.start,
                "pod_uid": process.pod,
                "restart_attempt": process.restart,
                "op_id": process.pod,
            }
        )
        store.swap(claimed)
        spec = store.specs[process.attempt]
        store.starts[process.attempt, process.start] = StartRecord(
            attempt=process.attempt,
            start=process.start,
            pod_uid=process.pod,
            restart_attempt=process.restart,
            processes=2,
            devices=spec.plan.devices,
            device_kind="cpu",
            restored=head.commit,
            versions={},
            fingerprint=self.recipe.fingerprint(),
            settings=spec.settings,
            plan=spec.plan,
            time=self.now,
        )
        self._report(process)

    def _commit(self, process: Process) -> bool:
        """Swap HEAD to a commit at the present step; False when HEAD belongs to another start: fenced."""
        store = self.rundir
        head = store.head_
        assert head is not None
        if store.down or (head.attempt, head.start, head.pod_uid) != (process.attempt, process.start, process.pod):
            return False
        ref = CommitRef(attempt=process.attempt, start=process.start, step=process.step)
        store.swap(head.model_copy(update={"commit": ref, "op_id": f"op-{next(self._ids)}"}))
        self.commits.append((process.attempt, process.start, process.step))
        return True

    def _report(self, process: Process) -> None:
        if not self.rundir.down:
            process.beats += 1
            self.rundir.progress[process.attempt, process.start] = Progress(
                phase=process.phase, step=process.step, beats=process.beats, time=self.now
            )

    def _end(self, gang: SimulatedGang, code: int, reason: str = "") -> None:
        """The gang's present coming-up ends, first by its rank 0, then the rest of it."""
        process = gang.process
        assert process is not None
        first = ContainerEnd(f"{gang.name}-0", process.pod, 0, *_code(code), time=self.now)
        peer = ContainerEnd(f"{gang.name}-1", f"{process.pod}-peer", 1, 1, None, time=self.now + 0.5)
        containers = (first,) if code in (0, 75) else (first, peer)
        last = gang.admissions[-1]
        gang.admissions[-1] = replace(last, ended=self.now, containers=containers)
        if reason and process.start:
            self.rundir.exits[process.attempt, process.start] = ExitRecord(
                code=code, reason=reason, rank=0, time=self.now
            )
        gang.process = None
        if gang.phase == "Deleting":
            self._forget(gang)
        elif gang.evicting:
            gang.evicting = False
            gang.phase, gang.queued_since = "Queued", self.now
            # Kueue's suspension deletes the pods: on a cluster that forgets, nothing of them is left.
            if not self.remembers:
                gang.admissions[-1] = replace(gang.admissions[-1], containers=())
        elif code == 0:
            gang.phase = "Succeeded"
        elif code in (1, 64, 74, 76, 78, 79):
            gang.phase = "Failed"
        else:
            gang.restarts += 1
            self._come_up(gang)

    def _forget(self, gang: SimulatedGang) -> None:
        del self.gangs[gang.name]
        self.deleted.append(replace(gang.shown(), phase="Deleted"))

    # -- faults

    def running(self) -> SimulatedGang | None:
        return next(
            (gang for gang in self.gangs.values() if gang.process is not None and gang.phase == "Running"), None
        )

    def kill(self) -> None:
        self._on_running(lambda gang: self._end(gang, 137))

    def fail(self) -> None:
        def crash(gang: SimulatedGang) -> None:
            self.application_errors += 1
            self._end(gang, 1, "ValueError: wrong")

        self._on_running(crash)

    def hang(self) -> None:
        def stop(gang: SimulatedGang) -> None:
            assert gang.process is not None
            gang.process.silent = True

        self._on_running(stop)

    def delete_by_hand(self) -> None:
        self._on_running(lambda gang: self.delete(gang.name, gang.uid, 0) if not self.cluster_down else None)

    def cut_off(self) -> None:
        """The gang vanishes from the cluster, but its trainers go on somewhere, with their claim."""

        def cut(gang: SimulatedGang) -> None:
            assert gang.process is not None
            self.free.append(gang.process)
            gang.process = None
            gang.admissions[-1] = replace(gang.admissions[-1], ended=self.now)
            self._forget(gang)

        self._on_running(cut)

    def deactivate(self) -> None:
        for gang in self.gangs.values():
            if gang.phase == "Queued":
                gang.phase = "Deactivated"

    def freeze_view(self) -> None:
        if not self.cluster_down and self.stale_view is None:
            self.stale_view = self.observe("demo")

    def _on_running(self, do: Callable[[SimulatedGang], None]) -> None:
        gang = self.running()
        if gang is not None:
            do(gang)

    def heal(self) -> None:
        """All faults stop, and capacity is back."""
        self.quota = dict(self.full)
        self.cluster_down, self.rundir.down, self.stale_view = False, False, None
        self.broken = set()
        for gang in self.gangs.values():
            if gang.process is not None:
                gang.process.silent = gang.process.silent and gang.phase == "Running"


def family_of(gang: SimulatedGang) -> str:
    return device_type(gang.spec.plan.device_type).family


def _code(code: int) -> tuple[int | None, int | None]:
    return (None, code - 128) if code > 128 else (code, None)
