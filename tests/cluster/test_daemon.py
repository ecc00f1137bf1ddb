"""`untildone resume-until-done` in a real cluster: alone, and beside an operator that has the same run.

Of two that look after one run exactly one acts, and the run finishes whoever is left.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from orchestrator.operating.keeper import TAKE_OVER
from tests.lab.api import Api
from tests.lab.lab import Lab
from tests.lab.queues import install_queue
from tests.support.gang import ROOT
from tests.support.operated import AppliedRun, clean, install_crd, kubectl, operator, run_document
from trainer.rundir.rundir import RunDirectory

pytestmark = pytest.mark.cluster
ONE_POD = [{"deviceType": "v5p-2x2x1"}]
FOR_EVER = 100_000
EVERY = {"everySteps": 5}


@pytest.fixture(autouse=True)
def quota(lab: Lab, api: Api) -> Iterator[None]:
    install_crd(lab)
    install_queue(api, {"v5p-2x2x1": 4})
    yield
    clean(lab)


class Daemon:
    """The command as a process; what it says is in files."""

    def __init__(self, lab: Lab, folder: Path, run: AppliedRun, *arguments: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.yaml").write_text(yaml.safe_dump(run.document))
        self.out, self.log = folder / "out", folder / "operator-like.log"
        with self.out.open("w") as out, self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator", "resume-until-done", "-f", str(folder / "run.yaml"), *arguments],
                cwd=ROOT,
                env={**os.environ, **lab.environment},
                stdout=out,
                stderr=log,
                start_new_session=True,
            )

    def end(self, how: signal.Signals = signal.SIGTERM, seconds: float = 60) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(seconds)

    def told(self) -> str:
        return self.out.read_text() + self.log.read_text()


def by_hand(lab: Lab, name: str, target: int) -> AppliedRun:
    """A run that was not applied, with a run directory that nobody had before."""
    name = f"{name}-{secrets.token_hex(2)}"
    document = run_document(lab, name, target, ladder=ONE_POD, checkpoint=EVERY)
    return AppliedRun(lab, name, "default", document)


def rundir(run: AppliedRun) -> RunDirectory:
    return run.records.rundir()


def test_it_trains_a_run_without_an_operator_killed_and_started_again(lab: Lab, tmp_path: Path) -> None:
    run = by_hand(lab, "alone", 25)
    first = Daemon(lab, tmp_path, run)
    try:
        run.until_step(5)
        assert first.end(signal.SIGKILL) == -signal.SIGKILL
        second = Daemon(lab, tmp_path, run, "--json")
        assert second.process.wait(120) == 0, second.told()
    finally:
        first.end()
    assert json.loads(second.out.read_text())["status"] == "Completed"
    (jobset,) = run.jobsets
    assert "ownerReferences" not in jobset["metadata"]
    assert run.endings() == [(1, 1, "completed", False)]
    run.verified()
    found = rundir(run).owner()
    assert found is not None and found[0].owner.endswith(f"/default/{run.name}") and found[0].released


def test_beside_an_operator_exactly_one_acts_and_it_hands_over(lab: Lab, tmp_path: Path) -> None:
    run = by_hand(lab, "both", FOR_EVER)
    daemon = Daemon(lab, tmp_path / "daemon", run)
    try:
        run.until_step(5)
        with operator(lab, tmp_path / "operator", ["default"]):
            kubectl(lab, "apply", "-f", "-", stdin=yaml.safe_dump(run.document))
            run.until("somebody else is named", lambda: run.condition("Ready").get("reason") == "OwnedByOther", 60)
            ready = run.condition("Ready")
            assert ready["status"] == "False" and f"kubectl annotate trun {run.name}" in ready["message"]
            step = run.committed
            run.until_step(step + 5)
            found = rundir(run).owner()
            assert found is not None and found[0].owner.startswith("daemon/")
            kubectl(lab, "annotate", "trun", run.name, f"{TAKE_OVER}={found[0].owner}")
            run.until("the operator has it", lambda: run.condition("Ready").get("status") == "True", 60)
            run.until("the daemon says so", lambda: "looks after this run" in daemon.told(), 60)
            owner = rundir(run).owner()
            assert owner is not None and owner[0].owner == run.object["metadata"]["uid"]
            assert daemon.end() == 130
            owner = rundir(run).owner()
            assert owner is not None and not owner[0].released, "it left, but the run was not its own any more"
            run.patch(targetStep=run.committed + 40)
            run.wait_for("condition=Succeeded")
    finally:
        daemon.end()
    # The lower target is another attempt; the daemon's was stopped at a commit, by the operator.
    assert [found["metadata"]["name"] for found in run.jobsets] == [f"{run.name}-a2"]
    causes = [cause for _, _, cause, _ in run.endings()]
    assert causes == ["plan-change", "completed"]
    run.verified()


def test_an_operator_follows_at_once_on_a_daemon_that_leaves_in_order(lab: Lab, tmp_path: Path) -> None:
    run = by_hand(lab, "leaves", FOR_EVER)
    daemon = Daemon(lab, tmp_path / "daemon", run)
    try:
        with operator(lab, tmp_path / "operator", ["default"]):
            run.until_step(5)
            kubectl(lab, "apply", "-f", "-", stdin=yaml.safe_dump(run.document))
            run.until("somebody else is named", lambda: run.condition("Ready").get("reason") == "OwnedByOther", 60)
            assert daemon.end() == 130
            run.until("the operator has it", lambda: run.condition("Ready").get("status") == "True", 60)
            assert [jobset["metadata"]["name"] for jobset in run.jobsets] == [f"{run.name}-a1"]
    finally:
        daemon.end()


def test_what_cannot_run_is_one_line_and_an_exit_code(lab: Lab, tmp_path: Path) -> None:
    for change, code, message in (
        ({"queue": None}, 2, "spec.queue"),
        ({"podTemplate": {"spec": {"restartPolicy": "Always"}}}, 2, "restartPolicy"),
        ({"recipe": {"configMap": {"name": "missing"}}}, 2, "spec.recipe.configMap missing"),
    ):
        run = by_hand(lab, "wrong", 20)
        spec = {key: value for key, value in {**run.document["spec"], **change}.items() if value is not None}
        run.document["spec"] = spec
        daemon = Daemon(lab, tmp_path, run)
        assert daemon.process.wait(60) == code, daemon.told()
        said = [line for line in daemon.log.read_text().splitlines() if line.startswith("error:")]
        assert len(said) == 1 and message in said[0], daemon.told()
        assert run.jobsets == []
