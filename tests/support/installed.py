"""untildone installed into a lab with Helm: the operator is a pod, with its own service account and the chart's rights.

with cluster(folder) as lab:                # a lab of its own: the chart has objects outside namespaces
    release = Release(lab, cache)
    release.install()                       # waits until the Deployment is available
    release.test()                          # `helm test`: what it printed
"""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.lab.api import Api, Object
from tests.lab.lab import Lab
from tests.lab.queues import install_queue
from tests.support.gang import ROOT
from tests.support.lab_objects import wait
from tests.support.lab_runs import BUCKET, COMPILED

CHART = ROOT / "helm" / "untildone"
HOME, TEAM = "machines", "team"  # namespaces of the operator and of the runs
NAME = "untildone"
DEVICE = "v5p-2x2x1"  # one host, one process
RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Lab]:
    """A lab with one slice; both namespaces accept only pods that Pod Security calls restricted."""
    lab = Lab.start(folder, {DEVICE: 1})
    try:
        for name in (HOME, TEAM):
            lab.api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}})
            wait("accounts", lambda name=name: lab.api.find(f"/api/v1/namespaces/{name}/serviceaccounts/default"))
        install_queue(lab.api, {DEVICE: 4}, namespace=TEAM)
        install_queue(lab.api, {DEVICE: 0}, name="never", namespace=TEAM)
        yield lab
    finally:
        lab.stop()


@dataclass
class Release:
    """The chart in namespace HOME; runs in TEAM may use the lab's bucket, and the pods' cache of compiled programs."""

    lab: Lab

    @property
    def api(self) -> Api:
        return self.lab.api

    def helm(self, *arguments: str, values: Object | None = None, check: bool = True) -> str:
        """What Helm prints. Fails the test with its error when `check` and it fails."""
        done = subprocess.run(
            [str(self.lab.binaries / "helm"), *arguments, "--namespace", HOME],
            env={**os.environ, **self.lab.environment},
            input=None if values is None else yaml.safe_dump(values),
            capture_output=True,
            text=True,
            timeout=200,
        )
        text = done.stdout + done.stderr
        assert not check or done.returncode == 0, f"helm {' '.join(arguments)}: {text}\n{self.log()}"
        return text

    def install(self, chart: Path = CHART, **values: Any) -> str:
        """`helm upgrade --install` until the Deployment is available."""
        given = {
            "image": {"repository": "lab.example/untildone/operator"},
            "runDirectories": {TEAM: [f"gs://{BUCKET}", COMPILED]},
            **values,
        }
        wanted = ("--values", "-", "--wait", "--timeout", "60s")
        return self.helm("upgrade", "--install", NAME, str(chart), *wanted, values=given)

    def test(self, check: bool = True) -> str:
        """`helm test`, and what its pod says."""
        return self.helm("test", NAME, "--logs", check=check)

    def pods(self) -> list[Object]:
        """Of the operator."""
        selector = "app.kubernetes.io/component=operator"
        return self.api.items(f"/api/v1/namespaces/{HOME}/pods", labelSelector=selector)

    def log(self) -> str:
        """Of the operator pods there are, from the node's files."""
        names = [f"{HOME}_{pod['metadata']['name']}_{pod['metadata']['uid'][:8]}" for pod in self.pods()]
        files = [file for name in names for file in self.lab.folder.glob(f"pods/{name}/operator.log")]
        return "".join(file.read_text(errors="replace") for file in files)

    def restart(self) -> None:
        """Another operator pod in place of the one there is; returns when it has begun."""
        before = {pod["metadata"]["uid"] for pod in self.pods()}
        for pod in self.pods():
            self.api.delete(f"/api/v1/namespaces/{HOME}/pods/{pod['metadata']['name']}")
        wait("another operator pod", lambda: not before & {pod["metadata"]["uid"] for pod in self.pods()})
        wait("it answers probes", lambda: "answering probes" in self.log())

    def calls(self) -> set[tuple[str, str, str, int]]:
        """(verb, resource, namespace, status) of every call that the operator's pods made, discovery aside."""
        found = set()
        account = f"system:serviceaccount:{HOME}:{NAME}"
        for line in (self.lab.folder / "logs" / "audit.log").read_text().splitlines():
            event = json.loads(line)
            what = event.get("objectRef")
            pod = event["user"].get("extra", {}).get("authentication.kubernetes.io/pod-name", [""])[0]
            if event["user"]["username"] != account or what is None or pod == f"{NAME}-test":
                continue
            resource = "/".join(filter(None, (what["resource"], what.get("subresource"))))
            full = f"{resource}.{what['apiGroup']}" if what.get("apiGroup") else resource
            found.add((event["verb"], full, what.get("namespace", ""), int(event["responseStatus"]["code"])))
        return found
