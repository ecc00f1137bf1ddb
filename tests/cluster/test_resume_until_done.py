"""The daemon on a real control plane: alone, killed and started again, and beside an operator that has the run already."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.lab.api import Api
from tests.lab.lab import Lab
from tests.lab.queues import install_queue
from tests.support.gang import ROOT
from tests.support.lab_objects import wait
from tests.support.operated import AppliedRun, clean, delete_objects, install_crd, operator, run_document

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]


@pytest.fixture(autouse=True)
def queue(lab: Lab, api: Api) -> Iterator[None]:
    install_crd(lab)
    install_queue(api, {"v5p-2x2x2": 8})
    yield
    clean(api)


class Daemon:
    """`untildone resume-until-done` of one file."""

    def __init__(self, lab: Lab, file: Path) -> None:
        self.log = file.with_suffix(".log")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator", "resume-until-done", "-f", str(file), "--json"],
                cwd=ROOT,
                env={**os.environ, **lab.environment},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def told(self) -> str:
        return self.log.read_text(errors="replace")

    def result(self, seconds: float = 300) -> tuple[int, str]:
        """Exit code and STATUS."""
        out, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, json.loads(out)["status"]


def written(folder: Path, document: dict) -> Path:  # type: ignore[type-arg]
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def test_the_daemon_alone_killed_and_started_again(lab: Lab, api: Api, tmp_path: Path) -> None:
    document = run_document(lab, "daemon", target=40, checkpoint={"everySteps": 10})
    run = AppliedRun(lab, "daemon", "default", document)
    delete_objects(lab, document["spec"]["runDirectory"])
    file = written(tmp_path, document)
    first = Daemon(lab, file)
    wait("a commit", lambda: run.committed >= 10, 180)
    (owner,) = run.jobsets
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    second = Daemon(lab, file)
    assert second.result() == (0, "Completed"), second.told()
    (again,) = run.jobsets
    assert again["metadata"]["uid"] == owner["metadata"]["uid"]
    assert not again["metadata"].get("ownerReferences"), "there is no TrainingRun"
    assert run.endings() == [(1, 1, "completed", False)]
    run.verified()


def test_beside_an_operator_exactly_one_acts(lab: Lab, api: Api, tmp_path: Path) -> None:
    with operator(lab, tmp_path / "operator", ["default"]):
        run = AppliedRun.apply(lab, "owned", target=40, checkpoint={"everySteps": 10})
        run.until_step(10)
        daemon = Daemon(lab, written(tmp_path, run.document))
        run.until("the daemon says whose it is", lambda: str(run.object["metadata"]["uid"]) in daemon.told())
        assert len(run.jobsets) == 1
        run.wait_for("condition=Succeeded")
        assert daemon.result() == (0, "Completed"), daemon.told()
    assert run.endings() == [(1, 1, "completed", False)]
    assert len(run.jobsets) == 1
    run.verified()
