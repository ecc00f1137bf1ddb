"""Operators that die all the time, two at once, while the run is preempted, loses a process and moves: nothing is doubled.

They have no Lease, so that both act whenever they live. Rules 3 and 8 on a real control plane. What the API server says is watched from the first to the last moment.
"""

import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab import faults
from tests.lab.api import Api
from tests.lab.lab import Lab
from tests.lab.queues import install_queue
from tests.support.lab_objects import JOBSETS
from tests.support.operated import AppliedRun, OperatorProcess, clean, install_crd, rival

pytestmark = pytest.mark.cluster
KILLS = 50
UPPER, LOWER = "v5p-2x2x2", "tpu7x-1x1x1"


class Watched:
    """Every JobSet of one run that ever was, by watching: name → uids."""

    def __init__(self, api: Api, run: str) -> None:
        self.uids: dict[str, set[str]] = {}
        self._api, self._selector = api, f"untildone.dev/run={run}"
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        while True:
            try:
                listed = self._api.request("GET", JOBSETS, labelSelector=self._selector)
                for found in listed["items"]:
                    self._see("ADDED", found)
                version = listed["metadata"]["resourceVersion"]
                for kind, found in self._api.watch(JOBSETS, version, labelSelector=self._selector):
                    if kind == "ERROR":
                        break
                    if kind != "BOOKMARK":
                        self._see(kind, found)
            except Exception:
                time.sleep(0.2)

    def _see(self, kind: str, found: dict) -> None:  # type: ignore[type-arg]
        uid = found["metadata"]["uid"]
        self.uids.setdefault(found["metadata"]["name"], set()).add(uid)


@contextmanager
def mortal_operators(lab: Lab, folder: Path, count: int, seed: int) -> Iterator[list[int]]:
    """`count` operators of which one is killed again and again, at random moments; gives the list of kills so far.

    After KILLS of them more seldom: the run has to end, and on a slow machine operators that live for seconds are dead
    before they have looked.
    """
    crew = [OperatorProcess(lab, folder, ["default"], f"operator-{n}", lease=False) for n in range(count)]
    kills: list[int] = []
    ended = threading.Event()
    dice = random.Random(seed)
    for one in crew:
        one.start()

    def kill() -> None:
        while not ended.wait(dice.uniform(0.5, 3.0) * (1 if len(kills) < KILLS else 4)):
            victim = dice.randrange(count)
            crew[victim].stop(signal.SIGKILL)
            kills.append(victim)
            crew[victim].start()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    try:
        yield kills
    finally:
        ended.set()
        killer.join(30)
        for one in crew:
            one.stop()


@pytest.fixture
def queue(lab: Lab, api: Api) -> Iterator[None]:
    install_crd(lab)
    install_queue(api, {UPPER: 8, LOWER: 1})
    yield
    clean(lab)


@pytest.mark.usefixtures("queue")
def test_fifty_deaths_of_two_operators(lab: Lab, api: Api, tmp_path: Path) -> None:
    watched = Watched(api, "mortal")
    with mortal_operators(lab, tmp_path / "operators", 2, seed=20) as kills:
        run = AppliedRun.apply(
            lab,
            "mortal",
            target=100_000,
            checkpoint={"everySteps": 5},
            goUp={"after": "2s", "every": "1s"},
        )
        run.until_step(5)
        # Preempted, and back.
        api.create(rival("high", "high", tmp_path / "high"))
        run.until("preempted", lambda: not [p for p in run.pods if p["status"]["phase"] == "Running"])
        (tmp_path / "high" / "end").touch()
        step = run.committed
        run.until_step(step + 5)
        # A process is killed: the gang restarts in place.
        step = run.committed
        faults.command(lab.ports["nodes"], "kill_pod", pod=run.pods[0]["metadata"]["name"])
        run.until_step(step + 5)
        # The program fails: another attempt, on another device type at that.
        run.patch(ladder=[{"deviceType": LOWER}])
        run.until("it moved", lambda: run.records.attempt >= 2)
        step = run.committed
        run.until_step(step + 5)
        run.until(f"{KILLS} deaths", lambda: len(kills) >= KILLS)
        run.patch(targetStep=run.committed + 40)
        run.wait_for("condition=Succeeded")
    assert len(kills) >= KILLS
    doubled = {name: uids for name, uids in watched.uids.items() if len(uids) > 1}
    assert not doubled, f"one attempt was submitted twice: {doubled}"
    causes = [cause for _, _, cause, _ in run.endings()]
    # The operators may die for so long that the lowered target is passed before the attempt planned for it could begin.
    assert causes[-1] in ("completed", "plan-change")
    assert run.committed >= run.status["targetStep"]
    starts = [(attempt, start) for attempt, start, _, _ in run.endings() if start is not None]
    assert len(starts) == len(set(starts)), f"one start ended twice: {starts}"
    assert "application-error" not in causes, causes
    assert set(causes) <= {"preempted", "host-failure", "plan-change", "completed", "unknown-while-absent"}, causes
    attempts = [record.ref.attempt for record in reversed(run.records.lineage())]
    assert attempts == sorted(attempts), "an older attempt committed after a newer one"
    run.verified("--so-far")  # the run directory knows the target that the last attempt was submitted with
    names = [event["metadata"]["name"] for event in run.events]
    told = [(event["reason"], event.get("message") or event.get("note")) for event in run.events]
    assert len(names) == len(set(names))
    assert len(told) == len(set(told)), f"told twice: {told}"
