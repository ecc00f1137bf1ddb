"""Real trainers in pods: restarted in place, preempted and moved to another device type, they train the same run."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.lab import faults
from tests.lab.api import Api, Object, is_true
from tests.lab.lab import Lab
from tests.lab.queues import install_queue
from tests.support.lab_objects import started, wait
from tests.support.lab_runs import PACED, LabRun
from tests.support.operated import rival
from tests.support.paced_trainer import PACE
from trainer.rundir.records import CommitRecord, Request

pytestmark = pytest.mark.cluster

QUEUE = "trainers"
SLICE = "v5p-2x2x2"  # two hosts, one process each, 8 devices
OTHER = "tpu7x-2x2x2"  # two hosts, two processes each, 16 devices
TARGET = 12
SECONDS = 240


@dataclass
class Calm:
    """A run that nothing happened to, and what it came to."""

    run: LabRun
    numbers: list[dict[str, Any]]
    last: CommitRecord


@pytest.fixture(scope="module")
def new_run(lab: Lab, api: Api) -> Callable[[str], LabRun]:
    """Makes runs in a queue with one slice of each device type."""
    install_queue(api, {SLICE: 8, OTHER: 8}, name=QUEUE)
    return lambda name: LabRun.new(lab, name, queue=QUEUE)


@pytest.fixture(scope="module")
def calm(new_run: Callable[[str], LabRun]) -> Calm:
    run = new_run("calm")
    run.create(run.submit(SLICE, TARGET))
    ended(run)
    return Calm(run, run.numbers(), run.lineage()[0])


def ended(run: LabRun, condition: str = "Completed") -> Object:
    """The JobSet of the newest attempt, once it has ended in this way."""
    path = f"{run.jobsets}/{run.name}-a{run.attempt}"

    def over() -> Object | None:
        found = run.api.get(path)
        return found if is_true(found, "Completed") or is_true(found, "Failed") else None

    found: Object = until(run, f"{run.name} ends", over)
    assert is_true(found, condition), f"{found['status']}\n{run.logs()}"
    return found


def until(run: LabRun, what: str, look: Callable[[], Any]) -> Any:
    """What `look` gives once it is true; fails with the logs of the pods."""
    try:
        return wait(what, look, SECONDS)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{run.logs()}") from None


def proven(run: LabRun) -> None:
    verdict = run.verify()
    assert verdict["passed"], verdict["checks"]


def test_two_hosts_train_to_the_target(calm: Calm) -> None:
    run = calm.run
    record = run.rundir().read_start(1, 1)
    assert record is not None
    assert (record.processes, record.devices, record.plan.device_type) == (2, 8, SLICE)
    assert run.head().commit == calm.last.ref
    assert calm.last.ref.step == TARGET
    assert [line["step"] for line in calm.numbers] == list(range(1, TARGET + 1))
    progress = run.rundir().read_progress(1, 1)
    assert progress is not None
    assert (progress.phase, progress.mfu, len(progress.host_step_seconds)) == ("Done", None, 2)
    exit_codes = [c["state"]["terminated"]["exitCode"] for p in run.pods() for c in p["status"]["containerStatuses"]]
    assert exit_codes == [0, 0]
    proven(run)


def test_a_killed_pod_restarts_the_gang_and_it_resumes_exactly(
    lab: Lab, new_run: Callable[[str], LabRun], calm: Calm
) -> None:
    """From the commit that was asked for a moment before: there was no other."""
    run = new_run("killed")
    run.create(run.submit(SLICE, TARGET, program=PACED, commit_every=1000))
    run.rundir().request("now", Request(kind="commit", attempt=1, reason="a test", time=time.time()))
    done = until(run, "the commit that was asked for", lambda: run.rundir().read_answer("now"))
    assert done.start == 1
    victim = max(pod["metadata"]["name"] for pod in run.pods())
    assert faults.command(lab.ports["nodes"], "kill_pod", pod=victim) == 1
    jobset_after = ended(run)
    assert jobset_after["status"]["restarts"] == 1
    again = run.rundir().read_start(1, 2)
    assert again is not None
    assert again.restart_attempt == 1
    assert again.restored is not None
    assert again.restored.step == done.step
    assert [record.ref.step for record in run.lineage()] == [TARGET, done.step]
    assert run.numbers() == calm.numbers
    assert run.lineage()[0].digest == calm.last.digest
    proven(run)


def test_a_preempted_run_commits_and_resumes_exactly_when_it_is_admitted_again(
    api: Api, new_run: Callable[[str], LabRun], calm: Calm, tmp_path: Path
) -> None:
    run = new_run("preempted")
    owner = run.create(run.submit(SLICE, TARGET, program=PACED), env={PACE: "1"})
    until(run, "a commit", run.committed_step)
    above = rival("above", "high", tmp_path / "above", SLICE)
    above["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = QUEUE
    api.create(above)
    wait("the higher priority runs", lambda: len(started(tmp_path / "above")) == 2, SECONDS)
    wait("the lower one's pods are gone", lambda: not run.pods(), SECONDS)
    first = run.rundir().read_exit(1, 1)
    assert first is not None
    assert first.code == 75, run.logs()
    kept = run.committed_step()
    assert first.reason.endswith(f"step {kept} is committed")
    (tmp_path / "above" / "end").touch()
    found = ended(run)
    assert found["metadata"]["uid"] == owner["metadata"]["uid"]
    assert not found["status"].get("restarts")
    again = run.rundir().read_start(1, 2)
    assert again is not None
    assert again.restored is not None
    assert (again.restored.step, again.restart_attempt) == (kept, 0)
    assert run.numbers() == calm.numbers
    assert run.lineage()[0].digest == calm.last.digest
    proven(run)
    api.delete(f"{run.jobsets}/above")


def test_only_the_device_type_changes_and_the_run_goes_on(lab: Lab, calm: Calm) -> None:
    """Also when a host with two of the four processes loses both."""
    run = calm.run
    run.create(run.submit(OTHER, TARGET + 12, program=PACED))
    until(run, "a commit of its own", lambda: run.committed_step() > TARGET)
    victim = max(pod["metadata"]["name"] for pod in run.pods())
    assert faults.command(lab.ports["nodes"], "kill_pod", pod=victim) == 2
    assert ended(run)["status"]["restarts"] == 1
    record = run.rundir().read_start(2, 1)
    assert record is not None
    assert (record.processes, record.devices, record.plan.accumulation * record.plan.micro_batch) == (4, 16, 1)
    assert record.restored == calm.last.ref
    again = run.rundir().read_start(2, 2)
    assert again is not None
    assert again.restored is not None and again.restored.step > TARGET
    assert run.committed_step() == TARGET + 12
    assert run.numbers()[:TARGET] == calm.numbers
    proven(run)
