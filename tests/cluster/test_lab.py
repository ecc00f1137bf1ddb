"""The lab itself: what the other tests rely on when they call something the cluster's doing."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import faults
from tests.lab.api import Api, condition, is_true
from tests.lab.lab import REPOSITORY, Lab, running
from tests.lab.queues import install_queue
from tests.support.lab_objects import (
    JOBSETS,
    PODS,
    TPU,
    WORKLOADS,
    delete_all,
    jobset,
    phase,
    plain_pod,
    pods,
    started,
    wait,
    workload,
)

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def queue(lab: Lab, api: Api) -> Iterator[None]:
    """Eight tpu7x chips, whatever other tests made of the queue; and nothing of this test for the next."""
    install_queue(api, {"tpu7x-2x2x2": 8})
    yield
    delete_all(lab)


def test_a_preempted_jobset_comes_back_with_the_same_workload(lab: Lab, api: Api, tmp_path: Path) -> None:
    low, high = tmp_path / "low", tmp_path / "high"
    owner = api.create(jobset("low", "low", low))
    first = workload(api, owner)
    wait("two processes of low", lambda: len(started(low)) == 2)
    assert is_true(api.get(f"{WORKLOADS}/{first['metadata']['name']}"), "Admitted")
    lines = sorted(file.read_text().split() for file in started(low))
    assert [line[0] for line in lines] == ["0", "1"]
    assert len(set(lines[0][1:])) == 2 and lines[0][1:] == lines[1][1:]
    before = {pod["metadata"]["uid"] for pod in pods(api, "low")}

    api.create(jobset("high", "high", high))
    evicted = wait(
        "low is preempted",
        lambda: (w := workload(api, owner)) and condition(w, "Evicted").get("reason") == "Preempted" and w,
    )
    assert is_true(evicted, "Evicted") and is_true(evicted, "Preempted")
    wait("two processes of high", lambda: len(started(high)) == 2)
    wait("low's pods are gone", lambda: not pods(api, "low"))
    (high / "end").touch()
    wait("high is done", lambda: is_true(api.get(f"{JOBSETS}/high"), "Completed"))

    wait("four processes of low", lambda: len(started(low)) == 4)
    again = workload(api, owner)
    assert again["metadata"]["uid"] == first["metadata"]["uid"]
    assert is_true(again, "Admitted")
    assert not before & {pod["metadata"]["uid"] for pod in pods(api, "low")}
    (low / "end").touch()
    wait("low is done", lambda: is_true(api.get(f"{JOBSETS}/low"), "Completed"))
    for name in ("low", "high"):
        api.delete(f"{JOBSETS}/{name}")
    wait("no pods", lambda: not pods(api, "low") and not pods(api, "high"))


def test_statuses_are_true(lab: Lab, api: Api) -> None:
    api.create(plain_pod("good", "print('hello')"))
    api.create(plain_pod("bad", "raise SystemExit(64)"))
    api.create(plain_pod("killed", "import time; time.sleep(600)"))
    wait("killed runs", lambda: phase(api, "killed") == "Running")
    assert faults.command(lab.ports["nodes"], "kill_pod", pod="killed") == 1
    codes = {}
    for name, end in (("good", "Succeeded"), ("bad", "Failed"), ("killed", "Failed")):
        wait(f"{name} {end}", lambda name=name, end=end: phase(api, name) == end)
        status = api.get(f"{PODS}/{name}")["status"]["containerStatuses"][0]
        codes[name] = status["state"]["terminated"]["exitCode"]
    assert codes == {"good": 0, "bad": 64, "killed": 137}
    logs = subprocess.run(
        [str(lab.binaries / "kubectl"), "logs", "good"],
        env={**os.environ, **lab.environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert logs.stdout == "hello\n"
    for name in codes:
        api.delete(f"{PODS}/{name}")


def test_a_deleted_pod_gets_its_grace_period(lab: Lab, api: Api, tmp_path: Path) -> None:
    script = f"""
import pathlib, signal, sys, time
def stop(*_):
    time.sleep(1)
    pathlib.Path({str(tmp_path / "said")!r}).write_text("goodbye")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
pathlib.Path({str(tmp_path / "ready")!r}).touch()
while True: time.sleep(1)
"""
    api.create(plain_pod("polite", script, terminationGracePeriodSeconds=10))
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    api.create(plain_pod("deaf", deaf, terminationGracePeriodSeconds=1))
    wait("both run", lambda: (tmp_path / "ready").exists() and phase(api, "deaf") == "Running")
    api.delete(f"{PODS}/polite")
    api.delete(f"{PODS}/deaf")
    wait("both gone", lambda: not api.find(f"{PODS}/polite") and not api.find(f"{PODS}/deaf"), 15)
    assert (tmp_path / "said").read_text() == "goodbye"


def test_a_pod_has_only_the_rights_of_its_service_account(lab: Lab, api: Api, tmp_path: Path) -> None:
    script = f"""
import os, pathlib, ssl, urllib.error, urllib.request
folder = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount")
url = f"https://{{os.environ['KUBERNETES_SERVICE_HOST']}}:{{os.environ['KUBERNETES_SERVICE_PORT']}}"
token = (folder / "token").read_text()
context = ssl.create_default_context(cafile=folder / "ca.crt")
def status(path):
    request = urllib.request.Request(url + path, headers={{"Authorization": "Bearer " + token}})
    try:
        return urllib.request.urlopen(request, context=context).status
    except urllib.error.HTTPError as error:
        return error.code
answers = [status("/version"), status("/api/v1/namespaces/default/secrets"), (folder / "namespace").read_text()]
pathlib.Path({str(tmp_path / "answers")!r}).write_text(repr(answers))
"""
    api.create(plain_pod("asks", script))
    wait("it has asked", lambda: phase(api, "asks") == "Succeeded", 20)
    assert (tmp_path / "answers").read_text() == "[200, 403, 'default']"
    api.delete(f"{PODS}/asks")


def test_containers_have_their_volumes_and_one_folder_with_all_pods(api: Api, tmp_path: Path) -> None:
    """/tmp of its own for each container, though the lab itself may lie below this machine's."""
    # The project itself is always to be seen, as if it were in the image.
    ours = {REPOSITORY.parts[2]} if REPOSITORY.is_relative_to("/tmp") else set()
    script = f"""
import os, pathlib
me = os.environ["ME"]
assert {{p.name for p in pathlib.Path("/tmp").iterdir()}} == {ours or "set()"}
assert not list(pathlib.Path("/dev/shm").glob("mine-*"))
pathlib.Path("/tmp/mine").write_text(me)
pathlib.Path(f"/dev/shm/mine-{{me}}").touch()
pathlib.Path(f"/run/lab/{tmp_path.name}-{{me}}").write_text(pathlib.Path("/run/given/word").read_text())
assert {{p.name for p in pathlib.Path("/tmp").iterdir()}} == {ours | {"mine"}}
"""
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "given", "namespace": "default"}}
    api.create({**config, "data": {"word": "hello"}})
    pod = plain_pod("volumes", script)
    (one,) = pod["spec"]["containers"]
    pod["spec"]["volumes"] = [
        *({"name": f"tmp-{n}", "emptyDir": {}} for n in "ab"),
        *({"name": f"shm-{n}", "emptyDir": {"medium": "Memory"}} for n in "ab"),
        {"name": "given", "configMap": {"name": "given"}},
    ]
    pod["spec"]["containers"] = [
        {
            **one,
            "name": n,
            "env": [{"name": "ME", "value": n}],
            "volumeMounts": [
                {"name": f"tmp-{n}", "mountPath": "/tmp"},
                {"name": f"shm-{n}", "mountPath": "/dev/shm"},
                {"name": "given", "mountPath": "/run/given"},
            ],
        }
        for n in "ab"
    ]
    api.create(pod)
    wait("it ended", lambda: phase(api, "volumes") in ("Succeeded", "Failed"), 20)
    assert phase(api, "volumes") == "Succeeded"
    script = f"import pathlib; assert len(list(pathlib.Path('/run/lab').glob('{tmp_path.name}-*'))) == 2"
    api.create(plain_pod("later", script))
    wait("it found both", lambda: phase(api, "later") == "Succeeded", 20)
    for name in ("volumes", "later"):
        api.delete(f"{PODS}/{name}")


def test_a_silent_host_is_not_ready_and_its_process_lives_on(lab: Lab, api: Api, tmp_path: Path) -> None:
    node, alive = "tpu7x-2x2x2-1-0", tmp_path / "alive"
    script = f"import pathlib, time\nwhile True: pathlib.Path({str(alive)!r}).touch(); time.sleep(0.1)"
    selector = {"kubernetes.io/hostname": node}
    api.create(plain_pod("lonely", script, nodeSelector=selector, tolerations=[TPU], terminationGracePeriodSeconds=1))
    wait("it runs", lambda: phase(api, "lonely") == "Running")
    faults.command(lab.ports["nodes"], "partition", node=node)
    try:
        wait("NotReady", lambda: condition(api.get(f"/api/v1/nodes/{node}"), "Ready")["status"] == "Unknown", 40)
        wait("deletion", lambda: api.get(f"{PODS}/lonely")["metadata"].get("deletionTimestamp"), 40)
        alive.unlink()
        wait("the process lives on", alive.exists, 5)
    finally:
        faults.command(lab.ports["nodes"], "heal", node=node)
    wait("Ready again", lambda: is_true(api.get(f"/api/v1/nodes/{node}"), "Ready"))
    wait("the pod is gone", lambda: api.find(f"{PODS}/lonely") is None)


def test_two_labs_side_by_side_and_nothing_is_left(tmp_path: Path, lab: Lab) -> None:
    other = Lab.start(tmp_path / "other", {"v6e-2x2": 1})
    try:
        names = {node["metadata"]["name"] for node in other.api.items("/api/v1/nodes")}
        assert names == {"system-0", "v6e-2x2-0-0"}
        assert not names - {"system-0"} & {node["metadata"]["name"] for node in lab.api.items("/api/v1/nodes")}
    finally:
        command = [sys.executable, "-m", "tests.lab.down", "--folder", str(other.folder)]
        subprocess.run(command, check=True, capture_output=True)
    assert running(other.folder) == {}
    assert lab.api.get("/version")["gitVersion"] == "v1.36.3"
