"""The whole product in one picture: the chart into a lab, one TrainingRun, everything that happens to runs, and the proof.

python -m tests.lab.demo [--folder DIR] [--keep]

What it prints is what a user sees: each command is shown and really called, and waits for what it reports, never for a
time. Only `untildone` as the operator, JobSet, Kueue and the scheduler act on the run; this script acts on the cluster.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import urllib3

from tests.lab import faults
from tests.lab.api import Object
from tests.lab.lab import REPOSITORY, Lab, LabError
from tests.lab.queues import cluster_queue, cut, install_queue
from tests.lab.up import default_folder
from trainer.hardware import device_type

POOLS = {"v5p-2x2x2": 2, "tpu7x-1x1x1": 1}
UPPER, LOWER = "v5p-2x2x2", "tpu7x-1x1x1"
QUOTA = {UPPER: 8, LOWER: 1}  # chips: one slice of each generation
PATIENCE = 240.0  # seconds until something that must happen counts as broken
PATIENCE_AT_THE_END = 900.0  # the same, for a hundred steps on a slow machine
NAMESPACE, RUN = "demo", "demo"
RUNS = f"/apis/untildone.dev/v1alpha1/namespaces/{NAMESPACE}/trainingruns"
JOBSETS = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/jobsets"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


class Broken(Exception):
    """Something that must happen did not."""


class Demo:
    """One lab, one run, and the screen."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.began = time.monotonic()

    # -- the screen

    def say(self, text: str) -> None:
        print(f"\n[{time.monotonic() - self.began:4.0f} s] {text}", flush=True)

    def show(self, *command: str, lines: int = 40, check: bool = True) -> str:
        """Run a command as a user would; print it and what it says."""
        program = {"kubectl": "kubectl", "helm": "helm"}.get(command[0])
        real = [str(self.lab.binaries / program), *command[1:]] if program else self._untildone(command)
        print(f"\n$ {' '.join(command)}", flush=True)
        done = subprocess.run(
            real,
            cwd=REPOSITORY,
            env={**os.environ, **self.lab.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_AT_THE_END + 10,
        )
        shown = done.stdout.rstrip().splitlines()
        print("\n".join(shown[:lines] + (["…"] if len(shown) > lines else [])), flush=True)
        if check and done.returncode:
            raise Broken(f"{' '.join(command)} ended with {done.returncode}")
        return done.stdout

    @staticmethod
    def _untildone(command: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-m", "orchestrator", *command[1:]]

    def turn(self) -> None:
        """What the run says of itself now."""
        self.show("kubectl", "get", "trun", "-n", NAMESPACE)
        self.show("untildone", "explain", RUN, "-n", NAMESPACE, check=False)

    def until(self, what: str, look: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE
        while not (found := look()):
            if time.monotonic() > deadline:
                self.turn()
                raise Broken(f"not within {PATIENCE:.0f} s: {what}")
            time.sleep(0.3)
        return found

    # -- what is there

    def run(self) -> Object:
        found: Object = self.lab.api.get(f"{RUNS}/{RUN}")
        return found

    def status(self) -> Object:
        found: Object = self.run().get("status") or {}
        return found

    def word(self) -> str:
        conditions = self.status().get("conditions") or []
        return next((c["reason"] for c in conditions if c["type"] == "Succeeded"), "")

    def committed(self) -> int:
        return int(self.status().get("committedStep") or 0)

    def training(self, plan: str | None = None, beyond: int = 0) -> bool:
        status = self.status()
        where = plan is None or status.get("plan") == plan
        return where and self.word() == "Training" and int(status.get("step") or 0) > beyond


def play(demo: Demo) -> None:
    """The story."""
    api, lab = demo.lab.api, demo.lab
    demo.say("install: the chart, a queue, a bucket with the data")
    demo.show(
        "helm",
        "install",
        "untildone",
        "helm/untildone",
        "--namespace=untildone-system",
        "--create-namespace",
        "--set=image.repository=registry.example/untildone/operator",
        f"--set=runDirectories.{NAMESPACE}[0]=gs://demo",
        "--wait",
        "--timeout=120s",
        lines=30,
    )
    api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    install_queue(api, QUOTA, namespace=NAMESPACE)
    upload_data(lab)
    demo.show("kubectl", "apply", "-f", "examples/kubernetes/demo.yaml")
    demo.until("a commit", lambda: demo.committed() >= 10)
    demo.turn()

    demo.say("a workload of higher priority takes the slice: the run keeps its JobSet, its Workload and its place")
    uid = api.items(JOBSETS)[0]["metadata"]["uid"]
    api.create(rival())
    demo.until("preempted", lambda: demo.word() == "Preempted")
    demo.turn()
    api.delete(f"{JOBSETS}/rival")
    demo.until("it trains again", lambda: demo.training(beyond=demo.committed()))
    assert api.items(JOBSETS)[0]["metadata"]["uid"] == uid
    demo.show("kubectl", "get", "jobsets,workloads", "-n", NAMESPACE)

    demo.say(
        "the quota is cut and what it held is taken: the run goes on with a quarter of the devices, of another generation"
    )
    cut(api, {UPPER: 0, LOWER: QUOTA[LOWER]})
    demo.until(f"it trains on {LOWER}", lambda: demo.training(LOWER, demo.committed()))
    demo.turn()

    demo.say("the quota comes back: the upper rung queued ahead meanwhile; the run moves at a commit")
    api.apply(cluster_queue("tpus", QUOTA))
    demo.until(f"it trains on {UPPER}", lambda: demo.training(UPPER, demo.committed()))
    demo.turn()

    demo.say("a host dies")
    node = next(p for p in api.items(PODS) if p["status"].get("phase") == "Running")["spec"]["nodeName"]
    faults.command(lab.ports["nodes"], "kill_host", node=node)
    demo.until("its end is in the ledger", lambda: "host-failure" in {e["cause"] for e in demo.status()["endings"]})
    demo.turn()
    faults.command(lab.ports["nodes"], "heal", node=node)  # repaired, as GKE does
    demo.until("it trains again", lambda: demo.training(beyond=demo.committed()))

    demo.say("until it is done")
    at_most = f"--timeout={PATIENCE_AT_THE_END:.0f}s"
    demo.show("kubectl", "wait", "--for=condition=Succeeded", f"trun/{RUN}", "-n", NAMESPACE, at_most)
    demo.turn()
    demo.show("kubectl", "describe", "trun", RUN, "-n", NAMESPACE, lines=120)
    demo.show("untildone", "verify", "gs://demo/runs/demo", lines=60)


def rival() -> Object:
    """Two hosts of one slice, for nothing."""
    container = {
        "name": "main",
        "image": "none",
        "command": ["sleep", "3600"],
        "resources": {"limits": {"google.com/tpu": "4"}, "requests": {"google.com/tpu": "4"}},
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "tolerations": [{"key": "google.com/tpu", "operator": "Exists"}],
        "nodeSelector": {"cloud.google.com/gke-tpu-accelerator": device_type(UPPER).gke_accelerator},
    }
    job = {"parallelism": 2, "completions": 2, "completionMode": "Indexed", "template": {"spec": pod}}
    labels = {"kueue.x-k8s.io/queue-name": "tpus", "kueue.x-k8s.io/priority-class": "high"}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "rival", "namespace": NAMESPACE, "labels": labels},
        "spec": {"suspend": True, "replicatedJobs": [{"name": "slice", "replicas": 1, "template": {"spec": job}}]},
    }


def upload_data(lab: Lab) -> None:
    """The standard library's sources as tokens, in the lab's bucket."""
    urllib3.request("POST", f"{lab.gcs_url}/storage/v1/b?project=lab", json={"name": "demo"}, timeout=10.0)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "trainer", "data", "bytes", "--source", "stdlib", "--out", folder]
        subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
        for file in sorted(Path(folder).glob("*.bin")):
            url = f"{lab.gcs_url}/upload/storage/v1/b/demo/o?uploadType=media&name=data/{file.name}"
            assert urllib3.request("POST", url, body=file.read_bytes(), timeout=60.0).status == 200


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=default_folder().with_name("demo"), help="the lab's own folder")
    parser.add_argument("--keep", action="store_true", help="leave the lab running")
    options = parser.parse_args()
    try:
        lab = Lab.start(options.folder, POOLS)
    except (LabError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    try:
        play(Demo(lab))
    except Broken as error:
        print(f"\nbroken: {error}\nlogs of the pods: {lab.folder / 'pods'}", file=sys.stderr)
        return 1
    finally:
        if options.keep:
            print(f"\nexport KUBECONFIG={lab.kubeconfig}    # stop it: python -m tests.lab.down --folder {lab.folder}")
        else:
            lab.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
