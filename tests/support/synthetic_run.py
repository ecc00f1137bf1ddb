"""A made-up run, written as real records: seven starts, six interruptions, a resize in between. No process is started.

Losses come from a fixed formula, so that every figure a report shows can be computed by hand.
"""

import builtins
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import google_crc32c

from trainer.plan import Plan
from trainer.recipe import Data, DataFile, Model, Order, Recipe, SchedulePiece
from trainer.rundir.records import (
    AttemptSpec,
    Category,
    CommitRecord,
    CommitRef,
    Ending,
    Evidence,
    FileEntry,
    Head,
    Progress,
    RecipeRecord,
    Record,
    StartRecord,
    StepLine,
    StepLogFile,
)
from trainer.rundir.store import AlreadyExists, Blob, NotFound, Stat
from trainer.settings import Settings

T0 = 1_780_000_000.0
BATCH = 512


class DictStore:
    """A store in memory: what reading and writing a run directory by key needs."""

    def __init__(self, uri: str = "memory://demo") -> None:
        self.uri = uri
        self.objects: dict[str, bytes] = {}

    def get(self, key: str) -> Blob:
        if key not in self.objects:
            raise NotFound(key)
        return Blob(self.objects[key], 1)

    def create(self, key: str, data: bytes) -> None:
        if key in self.objects:
            raise AlreadyExists(key)
        self.objects[key] = data

    def put(self, key: str, data: bytes) -> None:
        self.objects[key] = data

    def swap(self, key: str, data: bytes, expected: int) -> int:
        self.objects[key] = data
        return expected + 1

    def list(self, prefix: str) -> builtins.list[str]:
        return sorted(key for key in self.objects if key.startswith(prefix.rstrip("/") + "/" if prefix else ""))

    def folders(self, prefix: str) -> builtins.list[str]:
        below = [key.removeprefix(prefix + "/") for key in self.list(prefix + "/")]
        return sorted({key.split("/")[0] for key in below if "/" in key})

    def stat_tree(self, prefix: str) -> builtins.list[Stat]:
        return [
            Stat(key, len(self.objects[key]), google_crc32c.value(self.objects[key])) for key in self.list(prefix + "/")
        ]

    def delete_tree(self, prefix: str) -> None:
        for key in self.list(prefix + "/"):
            del self.objects[key]

    def probe(self) -> None:
        return None


@dataclass(frozen=True)
class Life:
    """One start as the story tells it."""

    attempt: int
    start: int
    plan: Plan
    first: int
    last: int
    committed: tuple[int, ...]
    cause: Category
    seconds: Mapping[str, float]
    evidence: tuple[tuple[str, str, str], ...] = field(default=())


def recipe(reduction: str = "fast") -> Recipe:
    return Recipe(
        name="tiny",
        reduction=reduction,
        model=Model(vocab_size=257, padded_vocab_size=320, d_model=32, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=16, mlp_hidden=64),
        data=Data(files=(DataFile(path="train.npy", bytes=2 * 64 * BATCH * 100),), dtype="uint16", eos_id=256, order=Order(kind="feistel", seed=1)),
        schedule=(SchedulePiece(shape="constant", peak=1e-3, warmup_steps=4, total_steps=100, alpha_f=1.0),),
        global_batch=BATCH,
        sequence_length=64,
    )  # fmt: skip


CPU_8 = Plan(
    device_type="cpu-8", processes=2, devices=8, global_batch=BATCH, data_parallel=8, micro_batch=16, accumulation=4
)
CPU_2 = Plan(
    device_type="cpu-2", processes=1, devices=2, global_batch=BATCH, data_parallel=2, micro_batch=16, accumulation=16
)
UP = {"queue": 0.4, "Starting": 4.0, "Restoring": 0.9, "Compiling": 1.6}

STORY = (
    Life(1, 1, CPU_8, 0, 11, (8, 11), "preempted", {**UP, "Compiling": 5.2, "Training": 7.1, "Saving": 0.8, "Exiting": 0.4},
         (("gang demo-a1", "Preempted", "capacity fell to 0 devices"), ("pod demo-a1-0", "exit code", "75"))),
    Life(1, 2, CPU_8, 11, 20, (16,), "host-failure", {**UP, "queue": 3.0, "Training": 6.0, "Saving": 0.4},
         (("pod demo-a1-1", "signal", "9"),)),
    Life(1, 3, CPU_8, 16, 24, (), "host-failure", {**UP, "Training": 5.0, "Saving": 0.3}, (("pod demo-a1-0", "signal", "9"),)),
    Life(1, 4, CPU_8, 16, 35, (24, 32), "hang", {**UP, "Training": 19.0, "Saving": 0.8}, (("pod demo-a1-0", "exit code", "77"),)),
    Life(1, 5, CPU_8, 32, 41, (40, 41), "preempted", {**UP, "Training": 6.0, "Saving": 0.8, "Exiting": 0.3},
         (("gang demo-a1", "Preempted", "capacity fell to 2 devices"),)),
    Life(2, 1, CPU_2, 41, 49, (48, 49), "plan-change", {**UP, "queue": 2.0, "Training": 9.0, "Saving": 0.8, "Exiting": 0.3},
         (("orchestrator", "decision", "go up to cpu-8"),)),
    Life(3, 1, CPU_8, 49, 56, (56,), "completed", {**UP, "Training": 6.0, "Evaluating": 0.9, "Saving": 0.5},
         (("pod demo-a3-0", "exit code", "0"),)),
)  # fmt: skip

REFERENCE = (Life(1, 1, CPU_8, 0, 56, tuple(range(1, 57)), "completed", {**UP, "Training": 50.0, "Saving": 3.0}),)


def loss(step: int, devices_differ: bool) -> float:
    """Falling from 5.5, with a little wiggle; the last bits depend on whether the devices ever changed."""
    return 1.6 + 3.9 * math.exp(-step / 18) + 0.03 * math.sin(step * 1.7) + (3e-7 * step if devices_differ else 0.0)


def line(step: int, devices_differ: bool) -> StepLine:
    return StepLine(
        step=step, loss=loss(step, devices_differ), grad_norm=1.0 + loss(step, devices_differ) / 10, lr=1e-3, skipped=False,
        ids=f"{step:016x}", data=f"{step * 3:016x}", seconds=0.6,
    )  # fmt: skip


def digest(step: int, devices_differ: bool) -> dict[str, int]:
    return {f"params/layer{i}": (step * 2654435761 + i + devices_differ) % 2**32 for i in range(4)}


def write(
    story: tuple[Life, ...] = STORY,
    target: int = 56,
    uri: str = "memory://demo",
    done: bool = True,
    reduction: str = "fast",
    keeps_bits: bool = False,
) -> DictStore:
    """The run directory of `story`. The last commit of the story is what HEAD names. `keeps_bits`: through a resize."""
    store, frozen = DictStore(uri), recipe(reduction)
    fingerprint = frozen.fingerprint()
    _put(store, "recipe.json", RecipeRecord(fingerprint=fingerprint, recipe=frozen))
    settings = Settings(target_step=target, data_root="data", commit_every=8)
    parent: CommitRef | None = None
    resized, clock, restart = False, T0, 0
    devices = story[0].plan.devices
    for life in story:
        resized = not keeps_bits and (resized or life.plan.devices != devices)
        key = f"attempts/{life.attempt}/spec.json"
        if key not in store.objects:
            _put(store, key, AttemptSpec(attempt=life.attempt, nonce=f"n{life.attempt}", gang=f"demo-a{life.attempt}", plan=life.plan, settings=settings, image="local"))  # fmt: skip
        began = clock + life.seconds["queue"]
        spent = sum(s for phase, s in life.seconds.items() if phase != "queue")
        claimed = began + life.seconds["Starting"]
        folder = f"attempts/{life.attempt}/{life.start}"
        _put(store, f"{folder}/start.json", StartRecord(
            attempt=life.attempt, start=life.start, pod_uid=f"pod-{life.attempt}-{life.start}", restart_attempt=restart, processes=life.plan.processes,
            devices=life.plan.devices, device_kind="cpu", restored=parent, versions={"jax": "0.12.0"}, fingerprint=fingerprint,
            settings=settings, plan=life.plan, time=claimed))  # fmt: skip
        restart += 1
        done_steps, first = range(life.first + 1, life.last + 1), life.first
        bounds = [*life.committed, *([life.last] if life.last not in life.committed else [])]
        for last in bounds:
            lines = [line(s, resized) for s in range(first + 1, last + 1)]
            log_key = f"steps/{life.attempt}.{life.start}/{first + 1}-{last}.jsonl"
            text = b"".join(x.canonical() + b"\n" for x in lines)
            if lines:
                store.create(log_key, text)
            if last in life.committed:
                ref = CommitRef(attempt=life.attempt, start=life.start, step=last)
                share = (last - life.first) / max(len(done_steps), 1)
                store.create(f"{ref.checkpoint}/arrays", b"x" * 1000)
                _put(store, ref.key, CommitRecord(
                    ref=ref, parent=parent, checkpoint=ref.checkpoint, files=(FileEntry(path="arrays", bytes=1000, crc32c=google_crc32c.value(b"x" * 1000)),),
                    digest=digest(last, resized), step_log=(StepLogFile(key=log_key, first=first + 1, last=last, crc32c=google_crc32c.value(text)),),
                    fingerprint=fingerprint, versions={}, save_seconds=0.3, time=began + (spent - life.seconds["Training"]) + share * life.seconds["Training"]))  # fmt: skip
                parent = ref
            first = last
        ended = began + spent
        phase_seconds = {phase: s for phase, s in life.seconds.items() if phase != "queue"}
        _put(store, f"{folder}/progress.json", Progress(
            phase="Done" if life.cause == "completed" else "Training", step=life.last, committed_step=parent.step if parent else 0,
            target_step=target, loss=loss(life.last, resized), tokens_per_second=54321.0, phase_seconds=phase_seconds, beats=9, time=ended))  # fmt: skip
        if done or life is not story[-1]:
            _put(store, f"attempts/{life.attempt}/endings/{life.start}.json", Ending(
                attempt=life.attempt, start=life.start, index=life.start, key=f"uid{life.attempt}/{life.start}", cause=life.cause,
                evidence=tuple(Evidence(source=a, field=b, value=c) for a, b, c in life.evidence),
                charged=life.cause in ("host-failure", "hang"), first_step=life.first, last_step=life.last,
                last_committed_step=parent.step if parent else 0, seconds=dict(life.seconds), began=began, ended=ended))  # fmt: skip
        clock = ended
    last_life = story[-1]
    _put(
        store,
        "HEAD",
        Head(
            attempt=last_life.attempt,
            start=last_life.start,
            pod_uid="x",
            restart_attempt=restart - 1,
            commit=parent,
            op_id="o",
        ),
    )
    return store


def _put(store: DictStore, key: str, record: Record) -> None:
    store.create(key, record.canonical())
