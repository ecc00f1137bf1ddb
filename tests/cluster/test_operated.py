"""TrainingRuns on a real control plane, with real trainers in the pods: applied with kubectl, looked after by an operator.

Every test ends with `untildone verify`: whatever was done to the run, nothing was read twice, skipped or changed.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import faults
from tests.lab.api import Api
from tests.lab.lab import Lab
from tests.lab.queues import cluster_queue, cut, install_queue
from tests.support.lab_objects import JOBSETS, wait
from tests.support.lab_runs import object_names
from tests.support.operated import (
    AppliedRun,
    OperatorProcess,
    clean,
    install_crd,
    kubectl,
    operator,
    rival,
)

pytestmark = pytest.mark.cluster
EVERY = {"everySteps": 5}
# Eight devices in two processes on two hosts, and a quarter of that on another generation.
UPPER, LOWER = "v5p-2x2x2", "tpu7x-1x1x1"
QUOTA = {UPPER: 8, LOWER: 1, "tpu7x-2x2x2": 8}  # chips


@pytest.fixture(scope="module")
def keeper(lab: Lab, api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """One operator for the namespace default, and the CRD."""
    install_crd(lab)
    with operator(lab, tmp_path_factory.mktemp("operator"), ["default"]) as one:
        yield one


@pytest.fixture(autouse=True)
def quota(lab: Lab, api: Api) -> Iterator[None]:
    """One slice of each generation; afterwards nothing of the test is left."""
    install_queue(api, QUOTA)
    yield
    clean(lab)


def test_apply_train_done(lab: Lab, keeper: OperatorProcess) -> None:
    ladder = [{"deviceType": "tpu7x-2x2x2"}]  # two processes on each of two hosts
    # The command that a run has by default, and at its own pace.
    run = AppliedRun.apply(lab, "plain", target=10, checkpoint=EVERY, ladder=ladder, command=None)
    run.wait_for("condition=Succeeded")
    run.wait_for("condition=Finished", 5)
    run.wait_for("condition=Ready", 5)
    assert run.word == "Completed"
    assert run.status["committedStep"] == run.status["step"] == 10
    assert run.status["observedGeneration"] == run.object["metadata"]["generation"]
    listed = kubectl(lab, "get", "trun", "plain").splitlines()
    assert listed[0].split() == ["NAME", "STATUS", "STEP", "TARGET", "PLAN", "ATTEMPT", "AGE"]
    assert listed[1].split()[:6] == ["plain", "Completed", "10", "10", "tpu7x-2x2x2", "1"]
    assert run.endings() == [(1, 1, "completed", False)]
    run.verified()
    reasons = [event["reason"] for event in run.events]
    assert len(reasons) == len(set(reasons)), f"told twice: {reasons}"
    assert "Completed" in reasons


def test_preempted_and_admitted_again_in_its_place(lab: Lab, api: Api, keeper: OperatorProcess, tmp_path: Path) -> None:
    run = AppliedRun.apply(lab, "preempted", target=40, checkpoint=EVERY)
    run.until_step(5)
    (owner,) = run.jobsets
    place = run.workload(owner)
    api.create(rival("high", "high", tmp_path / "high"))
    run.until_status("Preempted")
    committed = run.committed
    # One that came later, of the same priority, must not be served first.
    later = rival("later", "low", tmp_path / "later")
    api.create(later)
    (tmp_path / "high" / "end").touch()
    run.until("the run trains again", lambda: run.condition("Training").get("status") == "True")
    assert not api.items("/api/v1/namespaces/default/pods", labelSelector="jobset.sigs.k8s.io/jobset-name=later")
    (again,) = run.jobsets
    assert again["metadata"]["uid"] == owner["metadata"]["uid"]
    now = run.workload(again)["metadata"]
    assert (now["uid"], now["creationTimestamp"]) == (place["metadata"]["uid"], place["metadata"]["creationTimestamp"])
    api.delete(f"{JOBSETS}/later")
    run.wait_for("condition=Succeeded")
    endings = run.endings()
    assert endings == [(1, 1, "preempted", False), (1, 2, "completed", False)]
    assert committed >= 5
    assert run.status["preemptions"] == 1
    run.verified()


def test_capacity_shrinks_and_comes_back(lab: Lab, api: Api, keeper: OperatorProcess) -> None:
    ladder = [{"deviceType": UPPER, "waitInQueue": "3s"}, {"deviceType": LOWER, "waitInQueue": "3s"}]
    run = AppliedRun.apply(
        lab, "shrinking", target=100_000, checkpoint=EVERY, ladder=ladder, goUp={"after": "3s", "every": "1s"}
    )
    run.until_step(5)
    cut(api, {**QUOTA, UPPER: 0})
    run.until("it trains on the other generation", lambda: run.status.get("plan") == LOWER and run.word == "Training")
    assert run.condition("Degraded")["status"] == "True"
    before = run.committed
    run.until_step(before + 10)
    steps = run.committed
    waiting = run.until("the upper rung queues ahead", lambda: [j for j in run.jobsets if j["spec"]["suspend"]])
    assert len(waiting) == 1
    run.until_step(steps + 10)  # a rung that is not admitted costs no step
    assert [cause for _, _, cause, _ in run.endings()].count("plan-change") <= 1
    api.apply(cluster_queue("tpus", QUOTA))
    run.until("it is back", lambda: run.status.get("plan") == UPPER and run.word == "Training")
    head = run.committed
    run.until_step(head + 5)
    run.patch(suspend=True, suspendReason="enough for this test")
    run.until_status("Suspended")
    assert "enough for this test" in run.condition("Suspended")["message"]
    assert not any(charged for *_, charged in run.endings())
    run.verified("--so-far")


def test_another_generation_by_changing_only_the_device_type(lab: Lab, keeper: OperatorProcess) -> None:
    run = AppliedRun.apply(lab, "moved", target=60, checkpoint=EVERY, ladder=[{"deviceType": LOWER}])
    run.until_step(5)
    run.patch(ladder=[{"deviceType": UPPER}])
    run.wait_for("condition=Succeeded")
    assert run.status["plan"] == UPPER
    assert [cause for _, _, cause, _ in run.endings()] == ["plan-change", "completed"]
    assert {name.rpartition("/")[2] for name in object_names(lab, f"{run.records.uri}/requests")} >= {
        "stop-1.1.json",
        "stop-1.1.done.json",
    }, "it was asked for a commit before it was stopped"
    run.verified()


def test_a_killed_host_costs_no_place_in_the_queue(lab: Lab, api: Api, keeper: OperatorProcess) -> None:
    run = AppliedRun.apply(lab, "hosts", target=24, checkpoint=EVERY)
    run.until_step(5)
    (owner,) = run.jobsets
    place = run.workload(owner)
    node = run.pods[0]["spec"]["nodeName"]
    faults.command(lab.ports["nodes"], "kill_host", node=node)
    try:
        wait("the host is called not ready", lambda: not ready(api, node))
        faults.command(lab.ports["nodes"], "heal", node=node)  # repaired, as GKE does
        run.wait_for("condition=Succeeded")
    finally:
        faults.command(lab.ports["nodes"], "heal", node=node)
    endings = run.endings()
    assert [(attempt, cause) for attempt, _, cause, _ in endings] == [(1, "host-failure"), (1, "completed")], endings
    (again,) = run.jobsets
    assert again["metadata"]["uid"] == owner["metadata"]["uid"]
    assert run.workload(again)["metadata"]["uid"] == place["metadata"]["uid"]
    run.verified()


def test_a_changed_image_that_fails_is_taken_back(lab: Lab, keeper: OperatorProcess) -> None:
    run = AppliedRun.apply(lab, "images", target=100_000, checkpoint=EVERY)
    run.until_step(5)
    run.patch(command=["python", "-c", "raise SystemExit(1)"])
    run.until(
        "the new command failed and the old one is back", lambda: len(run.endings()) == 2 and run.word == "Training"
    )
    assert [(cause, charged) for *_, cause, charged in run.endings()] == [
        ("plan-change", False),
        ("application-error", False),
    ]
    step = run.committed
    run.until_step(step + 5)
    assert run.status["attempt"] == 3
    run.verified("--so-far")


def test_a_deleted_run_leaves_no_jobset_and_keeps_its_directory(lab: Lab, api: Api, keeper: OperatorProcess) -> None:
    run = AppliedRun.apply(lab, "deleted", target=4000, checkpoint=EVERY)
    run.until_step(5)
    run.delete()
    wait("its JobSets are gone", lambda: not run.jobsets)
    assert run.committed >= 5
    again = AppliedRun.apply(lab, "deleted", fresh=False, target=run.committed + 10, checkpoint=EVERY)
    again.wait_for("condition=Succeeded")
    again.verified()


def ready(api: Api, node: str) -> bool:
    conditions = api.get(f"/api/v1/nodes/{node}")["status"]["conditions"]
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
