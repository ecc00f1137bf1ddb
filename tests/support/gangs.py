"""Gangs of fake trainers on a local cluster."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.clusters.base import Gang, GangRequest
from orchestrator.clusters.local import LocalCluster
from orchestrator.clusters.processes import kill_all_with_nonce
from trainer.plan import Plan
from trainer.rundir.records import AttemptSpec
from trainer.settings import Settings

FAKE = Path(__file__).with_name("fake_trainer.py")


def spec(attempt: int, run: str = "demo", devices: int = 8, grace: float = 5.0, nonce: str = "") -> AttemptSpec:
    plan = Plan(
        device_type=f"cpu-{devices}",
        processes=max(1, devices // 4),
        devices=devices,
        global_batch=devices,
        data_parallel=devices,
        micro_batch=1,
        accumulation=1,
    )
    settings = Settings(target_step=10, data_root="/nowhere", grace_seconds=grace)
    # The nonce marks processes machine-wide, so two tests must never share one.
    nonce = nonce or f"nonce-{run}-{attempt}-{time.monotonic_ns()}"
    return AttemptSpec(
        attempt=attempt, nonce=nonce, gang=f"{run}-a{attempt}", plan=plan, settings=settings, image="test"
    )


class Stage:
    """One local cluster and what its fake trainers are told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = LocalCluster(folder / "cluster")
        self.nonces: list[str] = []

    def request(self, attempt: AttemptSpec, run: str = "demo") -> GangRequest:
        orders = self.orders(attempt.gang)
        orders.mkdir(exist_ok=True)
        self.nonces.append(attempt.nonce)
        return GangRequest(
            run=run,
            run_directory=str(self.folder / "run"),
            spec=attempt,
            command=(sys.executable, "-I", "-S", str(FAKE), str(orders)),
            env={"FROM_REQUEST": "yes"},
        )

    def orders(self, gang: str) -> Path:
        return self.folder / f"orders-{gang}"

    def tell(self, gang: str, who: str | int, order: str) -> None:
        path = self.orders(gang) / str(who)
        path.with_suffix(".tmp").write_text(order)
        path.with_suffix(".tmp").rename(path)

    def gang(self, name: str, run: str = "demo") -> Gang | None:
        view = self.cluster.observe(run)
        return next((g for g in (*view.gangs, *view.deleted) if g.name == name), None)

    def wait(self, condition: Callable[[], object], seconds: float = 15.0, what: str = "") -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not within {seconds} s: {what}; {self.cluster.observe('demo')}"
            time.sleep(0.02)

    def wait_phase(self, name: str, *phases: str, run: str = "demo", seconds: float = 15.0) -> Gang:
        found: list[Gang] = []

        def reached() -> bool:
            gang = self.gang(name, run)
            if gang is not None and gang.phase in phases:
                found.append(gang)
            return bool(found)

        self.wait(reached, seconds, f"{name} in {phases}")
        return found[-1]

    def wait_up(self, name: str, restart: int = 0, ranks: int = 2, run: str = "demo") -> dict[int, int]:
        """Until every rank of this restart has written its start file and is alive; rank -> pid."""

        def up() -> bool:
            self.cluster.observe(run)
            files = [self.orders(name) / f"start-{restart}-{rank}.json" for rank in range(ranks)]
            if not all(f.exists() for f in files):
                return False
            pids = self.cluster.pids(name)
            return {json.loads(f.read_text())["pid"] for f in files} == set(pids.values()) and len(pids) == ranks

        self.wait(up, what=f"{name} restart {restart} up")
        return self.cluster.pids(name)

    def environment(self, name: str, restart: int, rank: int) -> dict[str, str]:
        env: dict[str, str] = json.loads((self.orders(name) / f"start-{restart}-{rank}.json").read_text())["env"]
        return env


@contextmanager
def stage(folder: Path) -> Iterator[Stage]:
    """A stage whose gangs are all gone at the end, whatever the test did."""
    built = Stage(folder)
    try:
        yield built
    finally:
        for run in {"demo", "other"}:
            for gang in built.cluster.observe(run).gangs:
                built.cluster.delete(gang.name, gang.uid, 0)
        end = time.monotonic() + 10
        while time.monotonic() < end and any(built.cluster.observe(r).gangs for r in ("demo", "other")):
            time.sleep(0.05)
        for nonce in built.nonces:
            kill_all_with_nonce(nonce)
