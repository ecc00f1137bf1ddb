"""A cluster and its trainers in memory, moved on by hand, on a real run directory. Time is counted, not waited.

The trainers claim and commit as real ones do, through RunDirectory. What happens to them is told by `Chapter`s: how far
each attempt may train, and what befalls it there. So the story does not depend on how often the orchestrator looks.
"""

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import structlog

from orchestrator.api import TrainingRun, parse_run
from orchestrator.clusters.base import (
    Admission,
    ClusterUnavailable,
    ClusterView,
    ContainerEnd,
    Gang,
    GangRequest,
    SubmitConflict,
)
from orchestrator.daemon import Caretaker, Look
from orchestrator.decisions import Done, GiveUp, Refused
from orchestrator.memory import Memory
from tests.support.commits import commit, record_start
from trainer.errors import Fenced, StorageUnavailable
from trainer.recipe import Data, DataFile, Model, Order, Recipe, SchedulePiece
from trainer.rundir.claims import Claim
from trainer.rundir.disk import DiskStore
from trainer.rundir.records import AttemptSpec, Evidence, Program, Progress, RequestDone
from trainer.rundir.rundir import RunDirectory

SECONDS_PER_LOOK = 0.5
TARGET = 10


class Crash(BaseException):
    """The orchestrator is killed here: no handler runs."""


@dataclass(frozen=True)
class Chapter:
    """Attempt `attempt` trains up to step `until`; then `then` happens, once."""

    attempt: int
    until: int
    then: Literal["kill", "shrink", "grow", "fail", "nothing"]


STORY = (
    Chapter(1, 2, "kill"),  # a process dies, the gang restarts in place
    Chapter(1, 4, "shrink"),  # the quota falls to 2 devices: evicted, then another plan
    Chapter(2, 6, "grow"),  # the quota returns: up again
    Chapter(3, 8, "fail"),  # exit code 1: the gang is over
    Chapter(4, TARGET, "nothing"),
)


@dataclass
class Life:
    """One gang and its trainers."""

    request: GangRequest
    gang: Gang
    claim: Claim | None = None
    beats: int = 0
    doomed: bool = False  # a deletion was asked for


@dataclass
class World:
    """The Cluster protocol, and what happens behind it at each `tick`."""

    folder: Path
    story: tuple[Chapter, ...] = STORY
    uid: str = "world"
    namespace: str = "local"
    now: float = 1_000_000.0
    quota: int = 8
    remembers: bool = True  # how deleted gangs ended; Kubernetes does not
    silent: range = range(0)  # the looks, counted from 0, that get no answer
    looks: int = 0
    lives: dict[str, Life] = field(default_factory=dict)
    deleted: list[Gang] = field(default_factory=list)
    created: list[tuple[int, str]] = field(default_factory=list)  # every gang ever made: attempt, uid
    chapter: int = 0

    def __post_init__(self) -> None:
        self.trainers = RunDirectory(DiskStore(self.folder), clock=self.clock, sleep=self.sleep)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    # -- the Cluster protocol

    def check(self, run: TrainingRun) -> None:
        pass

    def program(self, run: TrainingRun) -> Program | None:
        return None

    def observe(self, run: str) -> ClusterView:
        self.looks += 1
        if self.looks - 1 in self.silent:
            raise ClusterUnavailable("connection refused")
        gangs = tuple(life.gang for life in self.lives.values())
        return ClusterView(self.uid, gangs, tuple(self.deleted), {"cpu": self.quota})

    def submit(self, request: GangRequest) -> Gang:
        spec = request.spec
        for gang in (*self.deleted, *(life.gang for life in self.lives.values())):
            if gang.name == spec.gang:
                if gang.nonce == spec.nonce:
                    return gang
                raise SubmitConflict(spec.gang)
        uid = f"uid-{len(self.created)}"
        self.created.append((spec.attempt, uid))
        gang = Gang(spec.gang, uid, spec.attempt, spec.nonce, "Queued", queued_since=self.now)
        self.lives[spec.gang] = Life(request, gang)
        return gang

    def delete(self, name: str, uid: str, grace_seconds: float) -> None:
        life = self.lives.get(name)
        if life is not None and life.gang.uid == uid:
            life.doomed = True
            life.gang = replace(life.gang, phase="Deleting")

    # -- what happens meanwhile

    def tick(self) -> None:
        self.now += SECONDS_PER_LOOK
        for name, life in list(self.lives.items()):
            if life.doomed:
                self._end(life, code=75)
                if self.remembers:
                    self.deleted.append(replace(life.gang, phase="Deleted"))
                del self.lives[name]
            elif life.gang.phase == "Running" and self._devices(life) > self._free(life):
                signal = Evidence(source=f"local queue, gang {name}", field="Evicted", value="Preempted: quota shrank")
                self._end(life, code=75, queue_signals=(signal,))
                life.gang = replace(life.gang, phase="Queued", queued_since=self.now)
            elif life.gang.phase == "Running":
                self._train(life)
            elif life.gang.phase == "Queued" and self._devices(life) <= self._free(life):
                life.gang = replace(life.gang, phase="Running", queued_since=None)
                self._begin(life, restart=0)

    def _free(self, own: Life) -> int:
        held = sum(self._devices(o) for o in self.lives.values() if o is not own and o.gang.phase == "Running")
        return self.quota - held

    @staticmethod
    def _devices(life: Life) -> int:
        return life.request.spec.plan.devices

    def _begin(self, life: Life, restart: int) -> None:
        number = len(life.gang.admissions)
        pods = tuple(f"{life.gang.uid}-{number}-{rank}" for rank in range(life.request.spec.plan.processes))
        key = f"{life.gang.uid}/{number}"
        admission = Admission(key, restart, queued_at=None, began=self.now, pod_uids=pods)
        life.gang = replace(life.gang, admissions=(*life.gang.admissions, admission))
        life.claim = None

    def _end(
        self,
        life: Life,
        code: int | None = None,
        signal: int | None = None,
        queue_signals: tuple[Evidence, ...] = (),
    ) -> None:
        if not life.gang.admissions or life.gang.admissions[-1].ended is not None:
            return
        *before, last = life.gang.admissions
        ends = tuple(
            ContainerEnd(f"{life.gang.name}-{rank}", uid, rank, code, signal, self.now + rank)
            for rank, uid in enumerate(last.pod_uids)
        )
        ended = replace(last, ended=self.now, containers=ends, queue_signals=queue_signals)
        life.gang = replace(life.gang, admissions=(*before, ended))
        life.claim = None

    def _train(self, life: Life) -> None:
        spec, admission = life.request.spec, life.gang.admissions[-1]
        try:
            if life.claim is None:
                pod, restart = admission.pod_uids[0], admission.restart_attempt
                life.claim = self.trainers.claim(spec.attempt, spec.nonce, pod, restart, deadline_seconds=0)
                record_start(self.trainers, life.claim, spec, pod, restart, self.now)
            step = life.claim.commit_ref.step if life.claim.commit_ref else 0
            chapter = self.story[self.chapter]
            if spec.attempt == chapter.attempt and step < chapter.until:
                step += 1
                commit(life.claim, step, self.now)
        except Fenced:
            self._end(life, code=76)
            life.gang = replace(life.gang, phase="Failed")
            return
        self._answer(life, spec, step)
        self._report(life, spec, step)
        if step >= TARGET:
            self._end(life, code=0)
            life.gang = replace(life.gang, phase="Succeeded")
        elif spec.attempt == chapter.attempt and step >= chapter.until:
            self.chapter += 1
            self._happen(life, chapter.then)

    def _answer(self, life: Life, spec: AttemptSpec, step: int) -> None:
        """Every step is committed already."""
        assert life.claim is not None
        done = RequestDone(attempt=spec.attempt, start=life.claim.start, step=step, time=self.now)
        for name, request in self.trainers.requests().items():
            if request.attempt == spec.attempt:
                self.trainers.answer(name, done)

    def _report(self, life: Life, spec: AttemptSpec, step: int) -> None:
        assert life.claim is not None
        life.beats += 1
        progress = Progress(phase="Training", step=step, committed_step=step, beats=life.beats, time=self.now)
        self.trainers.put_progress(spec.attempt, life.claim.start, progress)

    def _happen(self, life: Life, what: str) -> None:
        if what == "kill":
            self._end(life, signal=9)
            self._begin(life, restart=life.gang.admissions[-1].restart_attempt + 1)
        elif what == "shrink":
            self.quota = 2
        elif what == "grow":
            self.quota = 8
        elif what == "fail":
            self._end(life, code=1)
            life.gang = replace(life.gang, phase="Failed")


# -- faults

MODES = ("before", "after", "lost")


class Faults:
    """Counts the calls that change something, and spoils the one numbered `at`.

    before: killed before the call; after: killed after it; lost: it happened, and the answer says that nobody knows.
    """

    def __init__(self, at: int | None = None, mode: str = "") -> None:
        self.at, self.mode = at, mode
        self.calls: list[str] = []

    def around(self, name: str, call: Callable[[], Any], lost: type[Exception]) -> Any:
        number = len(self.calls)
        self.calls.append(name)
        if number != self.at:
            return call()
        if self.mode == "before":
            raise Crash(name)
        call()
        if self.mode == "after":
            raise Crash(name)
        raise lost(f"{name}: answer lost")


class FaultyStore:
    """A store whose changes go through `faults`."""

    def __init__(self, store: DiskStore, faults: Faults) -> None:
        self._store, self._faults = store, faults

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name not in ("create", "create_from_file", "put", "swap", "delete_tree"):
            return method
        return lambda *args, **kwargs: self._faults.around(
            f"{name} {args[0]}", lambda: method(*args, **kwargs), StorageUnavailable
        )


class FaultyCluster:
    """The world's cluster, its changes going through `faults`."""

    def __init__(self, world: World, faults: Faults) -> None:
        self._world, self._faults = world, faults
        self.uid, self.namespace = world.uid, world.namespace
        self.observe = world.observe

    def check(self, run: TrainingRun) -> None:
        pass

    def program(self, run: TrainingRun) -> Program | None:
        return None

    def submit(self, request: GangRequest) -> Gang:
        gang: Gang = self._faults.around("submit", lambda: self._world.submit(request), ClusterUnavailable)
        return gang

    def delete(self, name: str, uid: str, grace_seconds: float) -> None:
        self._faults.around("delete", lambda: self._world.delete(name, uid, grace_seconds), ClusterUnavailable)


# -- the orchestrator in this world


def a_recipe() -> Recipe:
    model = Model(
        vocab_size=256,
        padded_vocab_size=256,
        d_model=32,
        n_layers=1,
        n_heads=2,
        n_kv_heads=2,
        head_dim=16,
        mlp_hidden=64,
    )
    return Recipe(
        name="story",
        model=model,
        data=Data(
            files=(DataFile(path="a.bin", bytes=1_000_000),),
            dtype="uint8",
            eos_id=0,
            order=Order(kind="feistel", seed=1),
        ),
        schedule=(SchedulePiece(shape="constant", peak=0.1, warmup_steps=1, total_steps=TARGET, alpha_f=0),),
        global_batch=16,
        sequence_length=16,
    )


def a_run(folder: Path, **spec: Any) -> TrainingRun:
    return parse_run(
        {
            "apiVersion": "untildone.dev/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": "demo"},
            "spec": {
                "recipe": {"name": "tiny"},
                "data": {"root": "/nowhere"},
                "targetStep": TARGET,
                "runDirectory": str(folder),
                "ladder": [{"deviceType": "cpu-8", "waitInQueue": 1}, {"deviceType": "cpu-2", "waitInQueue": 1}],
                "goUp": {"after": 1, "every": 0},
                "checkpoint": {"everySteps": 1},
                "backoff": {"initial": 1, "max": 1},
                **spec,
            },
        },
        "test",
    )


def caretaker(world: World, faults: Faults | None = None, run: TrainingRun | None = None) -> Caretaker:
    """A fresh orchestrator process: it remembers nothing."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    faults = faults or Faults()
    store: Any = FaultyStore(DiskStore(world.folder), faults)
    rundir = RunDirectory(store, patience_seconds=0.0, clock=world.clock, sleep=world.sleep)
    return Caretaker(
        run or a_run(world.folder),
        a_recipe(),
        FaultyCluster(world, faults),
        rundir,
        clock=world.clock,
        memory=Memory(world.clock),
    )


def finish(world: World, keeper: Caretaker, looks: int = 400) -> Look:
    """Look and tick in turn until the end."""
    for _ in range(looks):
        look = keeper.step()
        if isinstance(look.decision, (Done, GiveUp, Refused)):
            return look
        world.tick()
    raise AssertionError(f"not done after {looks} looks: {keeper.look().decision}; chapter {world.chapter}")


def end_state(world: World) -> dict[str, Any]:
    """What must be the same whatever happened to the orchestrator."""
    found = world.trainers.head()
    assert found is not None
    endings = world.trainers.endings()
    assert len({e.key for e in endings}) == len(endings), "an ending is in the ledger twice"
    starts = [(e.attempt, e.start) for e in endings if e.start is not None]
    assert len(set(starts)) == len(starts), "a start is in the ledger twice"
    attempts = [attempt for attempt, _ in world.created]
    if world.remembers:
        assert len(set(attempts)) == len(attempts), "two gangs of one attempt"
    assert all(life.gang.phase == "Succeeded" for life in world.lives.values())
    return {
        "head": (found[0].attempt, found[0].start, found[0].commit),
        "ledger": [(e.attempt, e.start, e.cause, e.charged, e.last_committed_step) for e in endings],
        "gangs": sorted(attempts),
    }


@contextmanager
def a_world(story: tuple[Chapter, ...] = STORY) -> Iterator[World]:
    """A world in memory; its run directory too, where the machine has such a file system."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield World(Path(folder), story)
