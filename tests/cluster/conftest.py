"""One lab for all tests of this folder: a real control plane whose pods are real processes."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.api import Api
from tests.lab.components import unshare
from tests.lab.lab import Lab
from tests.lab.queues import install_queue
from tests.support.lab_objects import wait
from tests.support.workers import common_folder


@pytest.fixture(scope="session", autouse=True)
def namespaces() -> None:
    """What containers need of this machine. Where it is refused, as inside many containers, no test here can run."""
    try:
        command = [*unshare("--mount", "--uts"), "sh", "-c", "mount -t tmpfs tmpfs /run && hostname lab"]
        tried = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        pytest.skip(f"NOT TESTED on a control plane: {error}")
    if tried.returncode:
        pytest.skip(
            f"NOT TESTED on a control plane: {' '.join(command[:4])} is not allowed here: {tried.stdout.strip()}"
        )


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what the pods of all these tests' labs have in common: compiled programs."""
    return common_folder(tmp_path_factory, "shared")


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Iterator[Lab]:
    """Slices of two generations, of two hosts and of one, and a plain node. Builds the control plane where it is missing."""
    running = os.environ.get("UNTILDONE_TEST_LAB")  # the folder of one that runs, while a test is being written
    if running:
        yield Lab(Path(running))
        return
    pools = {"tpu7x-2x2x2": 2, "v5p-2x2x1": 1, "v5p-2x2x2": 2, "tpu7x-1x1x1": 1}
    lab = Lab.start(tmp_path_factory.mktemp("lab"), pools)
    lab.share(shared)
    yield lab
    lab.stop()


@pytest.fixture(scope="session")
def api(lab: Lab) -> Api:
    """The lab's API server, with a queue `tpus` of eight tpu7x chips: one slice."""
    wait("the default service account", lambda: lab.api.find("/api/v1/namespaces/default/serviceaccounts/default"))
    install_queue(lab.api, {"tpu7x-2x2x2": 8})
    return lab.api
