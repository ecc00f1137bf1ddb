"""A trainer that cannot start says why in one line of its pod's log, and its exit code says whether to try again."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.lab.api import Api, Object, condition, is_true
from tests.lab.lab import Lab
from tests.lab.queues import install_queue
from tests.support.lab_objects import wait
from tests.support.lab_runs import LabRun

pytestmark = pytest.mark.cluster

QUEUE = "failing"
ONE_HOST = "v5p-2x2x1"


@pytest.fixture(scope="module")
def new_run(lab: Lab, api: Api) -> Callable[[str], LabRun]:
    install_queue(api, {ONE_HOST: 4}, name=QUEUE)
    return lambda name: LabRun.new(lab, name, queue=QUEUE)


@contextmanager
def storage_that_answers(status: int) -> Iterator[str]:
    """A storage API that answers every request alike."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_PUT = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def as_pod(run: LabRun, name: str, **env: str | None) -> str:
    """The first pod of the newest attempt's JobSet, alone and without chips; `env` as in LabRun.create. Its name."""
    spec = run.rundir().read_spec(run.attempt)
    assert spec is not None
    # What the node tells whoever has chips: without it JAX looks for some with libtpu, which may end the process.
    devices = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={spec.plan.devices}"}
    template = run.jobset(spec, env={**devices, **env})["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    labels = {
        "jobset.sigs.k8s.io/restart-attempt": "0",
        "jobset.sigs.k8s.io/job-index": "0",
        "batch.kubernetes.io/job-completion-index": "0",
    }
    pod = template["spec"]
    del pod["nodeSelector"]
    for container in pod["containers"]:
        del container["resources"]
    metadata = {**template["metadata"], "name": name, "namespace": run.namespace}
    metadata["labels"] = {**metadata["labels"], **labels}
    run.api.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod})
    return name


def end_of(run: LabRun, name: str) -> tuple[int, str]:
    """Exit code of a pod, and the one line of its log that says why."""
    path = f"/api/v1/namespaces/{run.namespace}/pods/{name}"
    pod: Object = wait(
        f"{name} ends", lambda: (p := run.api.get(path))["status"].get("phase") in ("Succeeded", "Failed") and p, 120
    )
    log = next((run.lab.folder / "pods").glob(f"{run.namespace}_{name}_*/trainer.log"))
    said = [line for line in log.read_text().splitlines() if line.startswith("error: ") or '"leaving"' in line]
    assert len(said) == 1, log.read_text()
    run.api.delete(path)
    code = pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"]
    return code, said[0].removeprefix("error: ") if said[0].startswith("error: ") else json.loads(said[0])["reason"]


def test_each_failure_to_start_is_one_line_and_an_exit_code(lab: Lab, new_run: Callable[[str], LabRun]) -> None:
    run = new_run("failing")
    run.submit(ONE_HOST, 4)
    with storage_that_answers(403) as forbidden, storage_that_answers(401) as unknown:
        expected = {
            as_pod(run, "no-place", UNTILDONE_HOST=None): (64, "UNTILDONE_HOST is not set"),
            as_pod(run, "wrong-place", UNTILDONE_SLICE="3"): (64, "UNTILDONE_SLICE 3 is not below"),
            as_pod(run, "no-attempt", UNTILDONE_ATTEMPT="7"): (64, "has no attempts/7/spec.json"),
            as_pod(run, "other-plan", UNTILDONE_PROCESS_COUNT="2", UNTILDONE_HOSTS="2"): (
                64,
                "UNTILDONE_PROCESS_COUNT is 2, but the plan",
            ),
            as_pod(run, "no-bucket", UNTILDONE_RUN_DIRECTORY="gs://nowhere/run"): (64, "no such bucket"),
            as_pod(run, "no-run", UNTILDONE_RUN_DIRECTORY="gs://runs/nowhere"): (64, "no object below this prefix"),
            as_pod(run, "forbidden", STORAGE_EMULATOR_HOST=forbidden): (64, "roles/storage.objectUser"),
            # Credentials that are being renewed look like this too: it is waited for, and then left to others.
            as_pod(run, "unknown", STORAGE_EMULATOR_HOST=unknown): (74, "redentials cannot be refreshed"),
            as_pod(run, "away", STORAGE_EMULATOR_HOST="http://127.0.0.1:9"): (74, "ConnectionError"),
            as_pod(run, "fenced", UNTILDONE_NONCE="another", UNTILDONE_COORDINATOR="fenced:8482"): (
                76,
                "another nonce",
            ),
        }
        for name, (code, text) in expected.items():
            ended, said = end_of(run, name)
            assert (name, ended) == (name, code), said
            assert text in said


def test_a_failure_before_the_claim_is_in_the_run_directory(
    lab: Lab, api: Api, new_run: Callable[[str], LabRun]
) -> None:
    """The gang fails for good, at once, and its record says why."""
    run = new_run("misplaced")
    spec = run.submit(ONE_HOST, 4, data_root="gs://runs/nowhere")
    run.create(spec)
    path = f"{run.jobsets}/{spec.gang}"
    found = wait("the JobSet ends", lambda: is_true(f := api.get(path), "Failed") and f, 240)
    assert condition(found, "Failed")["reason"] == "FailJobSetFailurePolicyAction"
    assert not found["status"].get("restarts")
    keys = run.rundir().store.list(f"attempts/{run.attempt}/pods")
    uid = next(key.split("/")[3] for key in keys if key.endswith("/exit.json"))
    record = run.rundir().read_pod_exit(run.attempt, uid)
    assert record is not None
    assert record.code == 64
    assert "data root gs://runs/nowhere: data file a.bin is missing" in record.reason
    assert run.head().start == 0
    run.delete()
