"""What is not known is not dead: no API server, a silent one, hosts that are cut off with their processes alive.

Rules 3 and 6 on a real control plane.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import faults
from tests.lab.api import Api
from tests.lab.lab import Lab, running
from tests.lab.queues import install_queue
from tests.support.lab_objects import wait
from tests.support.operated import AppliedRun, OperatorProcess, clean, install_crd, operator
from tests.support.paced_trainer import PACE
from trainer.errors import ExitCode

pytestmark = pytest.mark.cluster
UPPER, LOWER = "v5p-2x2x2", "tpu7x-1x1x1"
OUTAGE_SECONDS = 30.0
EVERY = {"everySteps": 3}
SLOWLY = [{"name": PACE, "value": "1"}]  # seconds a step, for minutes


@pytest.fixture
def keeper(lab: Lab, api: Api, tmp_path: Path) -> Iterator[OperatorProcess]:
    install_crd(lab)
    install_queue(api, {UPPER: 16, LOWER: 1})
    with operator(lab, tmp_path / "operator", ["default"]) as one:
        yield one
        lab.restart_controllers()
        clean(lab)
    install_queue(api, {UPPER: 8, LOWER: 1})


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_without_an_api_server_nothing_is_decided_and_training_goes_on(
    lab: Lab, keeper: OperatorProcess, how: str
) -> None:
    run = AppliedRun.apply(lab, f"outage-{how}", target=100_000, checkpoint=EVERY, env=SLOWLY)
    run.until_step(3)
    (owner,) = run.jobsets
    pods = {pod["metadata"]["uid"] for pod in run.pods}
    (server,) = (pid for pid, name in running(lab.folder).items() if name == "kube-apiserver")
    step = run.committed
    if how == "killed":
        lab.stop_processes("kube-apiserver")
    else:
        os.kill(server, signal.SIGSTOP)  # connections stay open, and nothing comes any more
    try:
        time.sleep(OUTAGE_SECONDS if how == "killed" else OUTAGE_SECONDS + 10)
        assert run.committed > step, "the trainers need no API server"
        assert "TruthUnknown" in keeper.told()
    finally:
        if how == "killed":
            lab.start_processes("kube-apiserver")
        else:
            os.kill(server, signal.SIGCONT)
    run.until("the truth is known again", lambda: run.word in ("Training", "Saving"), 60)
    step = run.committed
    run.until_step(step + 3)
    (again,) = run.jobsets
    assert again["metadata"]["uid"] == owner["metadata"]["uid"]
    assert {pod["metadata"]["uid"] for pod in run.pods} == pods
    assert run.endings() == []
    assert run.status["attempt"] == 1


def test_what_is_left_on_a_host_that_is_cut_off_can_never_commit_again(
    lab: Lab, api: Api, keeper: OperatorProcess
) -> None:
    # Their peers must not take them for dead while they are stopped: they have to wake up and go on.
    patient = {"step": "600s", "start": "600s", "heartbeat": "600s"}
    run = AppliedRun.apply(lab, "cut-off", target=100_000, checkpoint=EVERY, env=SLOWLY, gracePeriod="3s", hang=patient)
    run.until_step(3)
    nodes = sorted({pod["spec"]["nodeName"] for pod in run.pods})
    old = trainers(lab, "cut-off-a1")
    try:
        for node in nodes:
            faults.command(lab.ports["nodes"], "partition", node=node)
        wait("the nodes are not ready", lambda: not any(ready(api, node) for node in nodes))
        step = run.committed
        # Cut off from the API server alone, they train on, and are left to it.
        run.until("the processes there train on", lambda: run.committed > step)
        assert run.status["attempt"] == 1
        for pid in old:
            os.kill(pid, signal.SIGSTOP)
        run.until("another attempt has committed", lambda: (c := run.records.head().commit) and c.attempt == 2, 300)
        assert [(a, cause) for a, _, cause, _ in run.endings()] == [(1, "host-failure")]
        for pid in old:
            os.kill(pid, signal.SIGCONT)
        run.until("the old processes, awake again, find themselves fenced", lambda: exit_codes(run, 1))
        assert exit_codes(run, 1) == {ExitCode.FENCED}
    finally:
        for node in nodes:
            faults.command(lab.ports["nodes"], "heal", node=node)
    attempts = [record.ref.attempt for record in reversed(run.records.lineage())]
    assert attempts == sorted(attempts), "an older attempt committed after a newer one"
    run.patch(suspend=True)
    run.until_status("Suspended")
    run.verified("--so-far")


def trainers(lab: Lab, gang: str) -> list[int]:
    """Trainer processes of a gang."""
    found = []
    for pid, name in running(lab.folder).items():
        if name == "pod" and f"UNTILDONE_COORDINATOR={gang}-".encode() in Path(f"/proc/{pid}/environ").read_bytes():
            found.append(pid)
    assert found
    return found


def exit_codes(run: AppliedRun, attempt: int) -> set[int]:
    """Codes of the exit records of an attempt's starts."""
    rundir, found = run.records.rundir(), set()
    for start in range(1, 4):
        record = rundir.read_exit(attempt, start)
        if record is not None:
            found.add(record.code)
    return found


def ready(api: Api, node: str) -> bool:
    conditions = api.get(f"/api/v1/nodes/{node}")["status"]["conditions"]
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
