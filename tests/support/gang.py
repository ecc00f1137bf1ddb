"""Real trainer processes for tests: a small recipe, a submitted attempt, a gang of one or two processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer.freezing import freeze
from trainer.plan import Plan, rows_per_device
from trainer.recipe import Data, DataFile, Model, Order, Recipe, SchedulePiece
from trainer.rundir.records import AttemptSpec, CommitRecord, Head, StepLine
from trainer.rundir.rundir import RunDirectory
from trainer.settings import Settings

BATCH, LENGTH, HELD_OUT = 16, 16, 40
ROOT = Path(__file__).parents[2]
MODEL = Model(
    vocab_size=257,
    padded_vocab_size=320,
    d_model=32,
    n_layers=2,
    n_heads=2,
    n_kv_heads=2,
    head_dim=16,
    mlp_hidden=64,
    window_pattern=(8, -1),
)


def small_recipe(**changes: Any) -> Recipe:
    """Two layers, batches of 16 × 16 tokens: a step takes milliseconds, a start about four seconds."""
    recipe = Recipe(
        name="small",
        model=MODEL,
        data=Data(
            files=(DataFile(path="a.bin"), DataFile(path="b.bin")),
            held_out=(DataFile(path="held-out.bin"),),
            dtype="uint16",
            eos_id=256,
            order=Order(kind="feistel", seed=3),
        ),
        schedule=(SchedulePiece(shape="cosine", peak=1e-2, warmup_steps=4, total_steps=100, alpha_f=0.1),),
        global_batch=BATCH,
        sequence_length=LENGTH,
        compute_dtype="float32",
    )
    return recipe.model_copy(update=changes)


def one_layer_recipe(**changes: Any) -> Recipe:
    """The small recipe for tests of what is around a trainer: a step exchanges half as much, which is most of its cost."""
    model = MODEL.model_copy(update={"n_layers": 1, "window_pattern": (-1,)})
    return small_recipe(model=model, **changes)


def write_corpus(folder: Path) -> Path:
    """A corpus with some structure to learn: runs of nearby tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(7)
    for name, instances in (("a.bin", 120), ("b.bin", 61), ("held-out.bin", HELD_OUT)):
        walk = np.cumsum(random.integers(-3, 4, instances * LENGTH)) % 256
        walk.astype("<u2").tofile(folder / name)
    return folder


def plan(device: str, processes: int | None = None, micro_batch: int = 2, sequence: int = 1) -> Plan:
    """cpu-4 = 2 processes × 2 devices, unless `processes` says otherwise; fewer devices accumulate more. `sequence` of
    them share each instance. Devices of two processes exchange through TCP, each with each: 8 cost thrice what 4 do.
    """
    devices = int(device.removeprefix("cpu-"))
    return Plan(
        device_type=device,
        processes=processes or max(1, devices // 2),
        devices=devices,
        global_batch=BATCH,
        data_parallel=devices // sequence,
        sequence=sequence,
        micro_batch=micro_batch,
        accumulation=rows_per_device(BATCH, devices // sequence) // micro_batch,
    )


@dataclass
class Member:
    """One process of a gang."""

    process: subprocess.Popen[bytes]
    output: Path

    def text(self) -> str:
        return self.output.read_text(errors="replace")


@dataclass
class Gang:
    """The processes of one start."""

    members: list[Member]

    def wait(self, seconds: float = 300) -> list[int]:
        """Exit codes by rank; on a timeout everything is killed and the test fails with the logs."""
        end = time.monotonic() + seconds
        try:
            return [m.process.wait(max(0.1, end - time.monotonic())) for m in self.members]
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the gang did not end within {seconds} s:\n{self.logs()}") from None

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks or range(len(self.members)):
            if self.members[rank].process.poll() is None:
                self.members[rank].process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        for member in self.members:
            member.process.wait()

    def logs(self) -> str:
        return "\n".join(f"--- rank {rank}\n{m.text()}" for rank, m in enumerate(self.members))

    @property
    def alive(self) -> bool:
        return any(m.process.poll() is None for m in self.members)


@dataclass
class Run:
    """A run directory with its corpus, and the attempts submitted to it.

    Its programs are compiled without LLVM's optimisations, in half the time, unless `optimised`.
    """

    folder: Path
    corpus: Path
    cache: Path
    recipe: Recipe
    optimised: bool = False
    attempt: int = 0
    gangs: list[Gang] = field(default_factory=list)

    @classmethod
    def new(
        cls, folder: Path, corpus: Path, cache: Path, recipe: Recipe | None = None, optimised: bool = False
    ) -> "Run":
        frozen = freeze(recipe or small_recipe(), str(corpus))
        run = cls(folder, corpus, cache, frozen, optimised)
        run.rundir(create=True).create_recipe(frozen)
        return run

    def rundir(self, create: bool = False) -> RunDirectory:
        return RunDirectory.open(str(self.folder), create=create)

    def submit(
        self,
        device: str,
        target: int,
        processes: int | None = None,
        micro_batch: int = 2,
        sequence: int = 1,
        turn: bool = True,
        **settings: Any,
    ) -> AttemptSpec:
        """The next attempt: its spec, and, if it is its `turn`, HEAD."""
        self.attempt += 1
        given: dict[str, Any] = {
            "target_step": target,
            "data_root": str(self.corpus),
            "commit_every": 4,
            "compile_cache": str(self.cache),
            "heartbeat_timeout_seconds": 20,
            "hang_start_seconds": 240,
            "hang_step_seconds": 60,
            "progress_seconds": 0.2,
            **settings,
        }
        spec = AttemptSpec(
            attempt=self.attempt,
            nonce=uuid.uuid4().hex,
            gang=f"test-a{self.attempt}",
            plan=plan(device, processes, micro_batch, sequence),
            settings=Settings.model_validate(given),
            image="test",
        )
        rundir = self.rundir()
        rundir.adopt_spec(spec)
        if turn:
            rundir.swap_to_attempt(self.attempt)
        return spec

    def launch(
        self,
        spec: AttemptSpec,
        restart_attempt: int = 0,
        changes: Mapping[int, Mapping[str, str]] | None = None,
        preexec: Callable[[], None] | None = None,
        program: tuple[str, ...] = ("-m", "trainer", "train"),
    ) -> Gang:
        """Start the gang of `spec`; `changes` alters the environment of single ranks."""
        coordinator = f"127.0.0.1:{_free_port()}"
        members = []
        for rank in range(spec.plan.processes):
            environment = {
                **{k: v for k, v in os.environ.items() if not k.startswith(("UNTILDONE_", "XLA_", "JAX_"))},
                "XLA_FLAGS": "" if self.optimised else "--xla_backend_optimization_level=0",
                "UNTILDONE_RUN_DIRECTORY": str(self.folder),
                "UNTILDONE_ATTEMPT": str(spec.attempt),
                "UNTILDONE_NONCE": spec.nonce,
                "UNTILDONE_POD_UID": uuid.uuid4().hex,
                "UNTILDONE_RESTART_ATTEMPT": str(restart_attempt),
                "UNTILDONE_PROCESS_ID": str(rank),
                "UNTILDONE_PROCESS_COUNT": str(spec.plan.processes),
                "UNTILDONE_COORDINATOR": coordinator,
                **((changes or {}).get(rank, {})),
            }
            output = self.folder.parent / f"{self.folder.name}-{spec.attempt}-{len(self.gangs)}-rank{rank}.log"
            with output.open("wb") as file:
                process = subprocess.Popen(
                    [sys.executable, *program],
                    cwd=ROOT,
                    env=environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=preexec,
                )
            members.append(Member(process, output))
        gang = Gang(members)
        self.gangs.append(gang)
        return gang

    def train(self, device: str, target: int, expect: int = 0, seconds: float = 300, **settings: Any) -> Gang:
        """One attempt from submission to the end of its gang; every process must end with `expect`."""
        gang = self.launch(self.submit(device, target, **settings))
        codes = gang.wait(seconds)
        assert codes == [expect] * len(codes), f"exit codes {codes}, expected {expect}\n{gang.logs()}"
        return gang

    # --- what is there

    def head(self) -> Head:
        found = self.rundir().head()
        assert found is not None
        return found[0]

    def committed(self) -> CommitRecord | None:
        commit = self.head().commit
        return self.rundir().read_commit(commit) if commit else None

    def committed_step(self) -> int:
        commit = self.head().commit
        return commit.step if commit else 0

    def lineage(self) -> list[CommitRecord]:
        return list(self.rundir().lineage(self.head().commit))

    def lines(self) -> list[StepLine]:
        """The step log along the committed lineage, oldest first."""
        rundir = self.rundir()
        return [
            line
            for record in reversed(self.lineage())
            for file in record.step_log
            for line in rundir.read_step_log(file)
        ]

    def numbers(self) -> list[dict[str, Any]]:
        """The step log without times."""
        return [line.model_dump(exclude={"seconds", "loading"}) for line in self.lines()]

    def progress(self) -> dict[str, Any]:
        head = self.head()
        path = self.folder / "attempts" / str(head.attempt) / str(head.start) / "progress.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def exit(self, attempt: int | None = None, start: int | None = None) -> dict[str, Any]:
        head = self.head()
        folder = self.folder / "attempts" / str(attempt or head.attempt) / str(start or head.start)
        return json.loads((folder / "exit.json").read_text())

    def kill_all(self) -> None:
        for gang in self.gangs:
            gang.signal(signal.SIGCONT)
            gang.kill()


def until(condition: Callable[[], Any], gang: Gang | None = None, seconds: float = 240, every: float = 0.02) -> None:
    """Wait until `condition()`; fails with the gang's logs when the gang ends first or time runs out."""
    end = time.monotonic() + seconds
    while not condition():
        late = time.monotonic() > end
        if late or (gang is not None and not gang.alive and not condition()):
            raise AssertionError(f"{'timeout' if late else 'the gang ended'}\n{gang.logs() if gang else ''}")
        time.sleep(every)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
