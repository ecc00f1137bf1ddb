"""Runs under an operator on the lab: operators as processes of this machine, TrainingRuns by kubectl.

with operator(lab, folder, namespaces=["default"]) as one:
    run = AppliedRun.apply(lab, "demo", target=20)
    run.wait_for("condition=Succeeded")
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.lab.api import Object
from tests.lab.lab import Lab
from tests.support.gang import ROOT, one_layer_recipe
from tests.support.lab_objects import delete_all, jobset, wait
from tests.support.lab_runs import BUCKET, COMPILED, LabRun, delete_objects, upload_corpus
from tests.support.paced_trainer import COMMAND
from trainer.hardware import device_type

CRD = ROOT / "manifests" / "crd" / "untildone.dev_trainingruns.yaml"
KIND = "/apis/untildone.dev/v1alpha1/namespaces/{}/trainingruns"
BASE = one_layer_recipe()


def kubectl(lab: Lab, *arguments: str, stdin: str = "", check: bool = True) -> str:
    """What kubectl prints. Fails the test with its error when `check` and it fails."""
    done = subprocess.run(
        [str(lab.binaries / "kubectl"), *arguments],
        env={**os.environ, **lab.environment},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not check or done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
    return done.stdout if check else done.stdout + done.stderr


def install_crd(lab: Lab) -> None:
    """The CRD, as a user installs it."""
    kubectl(lab, "apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    kubectl(lab, "wait", "--for=condition=Established", "crd/trainingruns.untildone.dev", "--timeout=30s")


@dataclass
class OperatorProcess:
    """`untildone operator` as a process of this machine, with the lab's administrator's rights."""

    lab: Lab
    folder: Path
    namespaces: list[str]
    name: str = "operator"
    lease: bool = True
    arguments: list[str] = field(default_factory=list)
    process: "subprocess.Popen[bytes] | None" = None
    starts: int = 0

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / f"{self.name}.yaml"
        allowed = {namespace: [f"gs://{BUCKET}/"] for namespace in self.namespaces}
        lease = {"enabled": self.lease, "name": "untildone", "namespace": self.namespaces[0]}
        content = {"runDirectories": allowed, "watchNamespaces": self.namespaces, "health": {"port": 0}, "lease": lease}
        config.write_text(yaml.safe_dump(content))
        self.starts += 1
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator", "operator", "--config", str(config), *self.arguments],
                cwd=ROOT,
                env={**os.environ, **self.lab.environment, "POD_NAME": f"{self.name}-{self.starts}"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def stop(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End it and wait for its end."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, how)
            self.process.wait(30)
            self.process = None

    def told(self) -> str:
        return self.log.read_text(errors="replace")[-6000:] if self.log.exists() else "(no log)"


@contextlib.contextmanager
def operator(lab: Lab, folder: Path, namespaces: list[str], name: str = "operator") -> Iterator[OperatorProcess]:
    """An operator, running inside."""
    one = OperatorProcess(lab, folder, namespaces, name)
    one.start()
    try:
        yield one
    finally:
        one.stop()


@dataclass
class AppliedRun:
    """A TrainingRun that was applied, and ways to look at what became of it."""

    lab: Lab
    name: str
    namespace: str
    document: Object

    @classmethod
    def apply(
        cls,
        lab: Lab,
        name: str,
        target: int = 12,
        namespace: str = "default",
        fresh: bool = True,
        **spec: Any,
    ) -> "AppliedRun":
        """Apply a run of the small recipe on two hosts of v5p, at a slow pace; `spec` replaces fields of the YAML."""
        document = run_document(lab, name, target, namespace, **spec)
        run = cls(lab, name, namespace, document)
        if fresh:  # a lab that is used again still has the run directory of the last time
            delete_objects(lab, document["spec"]["runDirectory"])
        kubectl(lab, "apply", "-f", "-", stdin=yaml.safe_dump(document))
        return run

    def patch(self, **spec: Any) -> None:
        kubectl(self.lab, *self._at, "patch", "trun", self.name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def wait_for(self, what: str, seconds: float = 300.0) -> None:
        """`kubectl wait --for=…`; the test fails with everything there is to know when it does not come."""
        done = kubectl(
            self.lab, *self._at, "wait", f"--for={what}", f"trun/{self.name}", f"--timeout={seconds:.0f}s", check=False
        )
        assert "condition met" in done, f"{done}\n{self.story()}"

    def until(self, what: str, look: Callable[[], Any], seconds: float = 300.0) -> Any:
        """What `look` gives once it is true; else the test fails with the run's story."""
        try:
            return wait(what, look, seconds, every=0.4)  # each look asks the API server, and perhaps the bucket
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def until_step(self, step: int, seconds: float = 300.0) -> None:
        """Until a commit at or beyond `step` is in HEAD."""
        self.until(f"{self.name} commits step {step}", lambda: self.committed >= step, seconds)

    def until_status(self, word: str, seconds: float = 300.0) -> None:
        self.until(f"{self.name} is {word}", lambda: self.word == word, seconds)

    @property
    def object(self) -> Object:
        found: Object = self.lab.api.get(f"{KIND.format(self.namespace)}/{self.name}")
        return found

    @property
    def status(self) -> Object:
        found: Object = self.object.get("status") or {}
        return found

    def condition(self, kind: str) -> Object:
        found = [c for c in self.status.get("conditions") or [] if c["type"] == kind]
        return found[0] if found else {}

    @property
    def word(self) -> str:
        return str(self.condition("Succeeded").get("reason", ""))

    @property
    def records(self) -> LabRun:
        """Its run directory, and what can be asked of it."""
        run = LabRun(lab=self.lab, name=self.name, recipe=BASE, namespace=self.namespace)
        head = run.rundir().head()
        run.attempt = head[0].attempt if head else 0
        return run

    @property
    def committed(self) -> int:
        try:
            found = self.records.rundir().head()
        except Exception:  # not there yet
            return 0
        return found[0].commit.step if found and found[0].commit else 0

    @property
    def jobsets(self) -> list[Object]:
        path = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{self.namespace}/jobsets"
        return self.lab.api.items(path, labelSelector=f"untildone.dev/run={self.name}")

    def workload(self, jobset: Object) -> Object:
        path = f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{self.namespace}/workloads"
        selector = f"kueue.x-k8s.io/job-uid={jobset['metadata']['uid']}"
        found: Object = wait("a Workload", lambda: self.lab.api.items(path, labelSelector=selector))[0]
        return found

    @property
    def pods(self) -> list[Object]:
        return self.lab.api.items(
            f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=f"untildone.dev/run={self.name}"
        )

    @property
    def events(self) -> list[Object]:
        return [
            event
            for event in self.lab.api.items(f"/api/v1/namespaces/{self.namespace}/events")
            if event["involvedObject"].get("name") == self.name and event["involvedObject"]["kind"] == "TrainingRun"
        ]

    def endings(self) -> list[tuple[int, int | None, str, bool]]:
        """(attempt, start, cause, charged) of each entry of the ledger."""
        return [(e.attempt, e.start, e.cause, e.charged) for e in self.records.rundir().endings()]

    def verified(self, *options: str) -> Object:
        """The verdict of `untildone verify`, which must find nothing wrong (`--so-far`: of a run that is not done)."""
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator", "verify", self.records.uri, "--json", *options],
            cwd=ROOT,
            env={**os.environ, **self.lab.environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.stdout, done.stderr
        verdict: Object = json.loads(done.stdout)
        assert verdict["passed"], json.dumps(verdict, indent=1)
        return verdict

    def delete(self) -> None:
        kubectl(self.lab, *self._at, "delete", "trun", self.name, "--ignore-not-found", "--wait=true")
        wait(f"no pods of {self.name}", lambda: not self.pods, 60)

    def story(self) -> str:
        """Everything there is to know, for the message of a failing test."""
        parts = [f"status: {json.dumps(self.status, indent=1)}"]
        for owner in self.jobsets:
            parts.append(f"jobset {owner['metadata']['name']}: {json.dumps(owner.get('status'))}")
        for pod in self.pods:
            parts.append(f"pod {pod['metadata']['name']}: {json.dumps(pod.get('status', {}).get('phase'))}")
        with contextlib.suppress(Exception):
            parts.append(f"ledger: {self.endings()}")
        parts += [log.read_text(errors="replace")[-3000:] for log in self.lab.folder.parent.glob("**/operator*.log")]
        with contextlib.suppress(Exception):  # there may be no run directory yet
            parts.append(self.records.logs()[-4000:])
        return "\n".join(parts)

    @property
    def _at(self) -> tuple[str, str]:
        return "-n", self.namespace


def clean(lab: Lab) -> None:
    """Nothing of a test is left: no TrainingRun, no JobSet, no pod."""
    runs = KIND.format("default")
    for run in lab.api.items(runs):
        lab.api.delete(f"{runs}/{run['metadata']['name']}")
    delete_all(lab)


def rival(name: str, priority: str, folder: Path, device: str = "v5p-2x2x2") -> Object:
    """A JobSet of somebody else that wants a whole slice of two hosts, until FOLDER/end exists."""
    made = jobset(name, priority, folder)
    kind = device_type(device)
    selector = {
        "cloud.google.com/gke-tpu-accelerator": kind.gke_accelerator,
        "cloud.google.com/gke-tpu-topology": kind.gke_topology,
    }
    made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["nodeSelector"] = selector
    return made


def run_document(lab: Lab, name: str, target: int, namespace: str = "default", **spec: Any) -> Object:
    """The TrainingRun of `AppliedRun.apply`; None leaves a field to its default. The corpus is put into the lab's bucket."""
    recipe = one_layer_recipe()
    config_map = f"recipe-{name}"
    body = recipe.model_dump(mode="json")
    content = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": config_map, "namespace": namespace}}
    kubectl(lab, "apply", "-f", "-", stdin=yaml.safe_dump({**content, "data": {"recipe.yaml": yaml.safe_dump(body)}}))
    document: Object = {
        "apiVersion": "untildone.dev/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "recipe": {"configMap": {"name": config_map}},
            "data": {"root": upload_corpus(lab)},
            "targetStep": target,
            "runDirectory": f"gs://{BUCKET}/{namespace}/{name}",
            "image": "lab.example/trainer@sha256:0000",
            "queue": "tpus",
            "priorityClass": "low",
            "ladder": [{"deviceType": "v5p-2x2x2"}],  # two processes × four devices
            "checkpoint": {"everySteps": 4},
            "command": list(COMMAND),
            "progressEvery": "1s",
            "logEvery": "5s",
            "gracePeriod": "20s",
            "hang": {"step": "60s", "start": "120s", "heartbeat": "20s"},
            "backoff": {"initial": "1s", "max": "5s"},
            "compileCache": COMPILED,
            **spec,
        },
    }
    document["spec"] = {field: value for field, value in document["spec"].items() if value is not None}
    return document
