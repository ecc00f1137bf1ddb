"""Real trainers in the lab's pods: a corpus and a run directory in the lab's bucket, attempts as JobSets.

    lab_run = LabRun.new(lab, "demo")             # corpus, run directory gs://runs/default/demo, recipe.json
    spec = lab_run.submit("tpu7x-2x2x2", target=20)   # spec.json and HEAD, as an orchestrator leaves them
    lab_run.create(spec, priority="low")              # the JobSet; Kueue does the rest

Nobody keeps the ledger of such attempts (AttemptSpec.submitted_by is set), so `untildone verify` accepts them without.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import urllib3

from orchestrator.clusters.base import GangRequest
from orchestrator.jobset import jobset
from orchestrator.planning import make_plan
from tests.lab.api import Api, Object
from tests.lab.containers import SHARED
from tests.lab.lab import Lab
from tests.support.gang import ROOT, one_layer_recipe, write_corpus
from tests.support.gcs_server import create_bucket
from tests.support.paced_trainer import COMMAND
from trainer.freezing import freeze
from trainer.recipe import Recipe
from trainer.rundir.records import AttemptSpec, CommitRecord, Head, Program, StepLine
from trainer.rundir.rundir import RunDirectory
from trainer.settings import Settings

BUCKET, DATA = "runs", "gs://runs/corpus"
COMPILED = f"{SHARED}/compiled"  # compile cache of all pods
PROGRAM = Program(image="lab", command=("python", "-m", "trainer", "train"))  # this machine's
PACED = PROGRAM.model_copy(update={"command": COMMAND})  # half a second a step, for who wants to interrupt it


@contextlib.contextmanager
def bucket_of(lab: Lab) -> Iterator[None]:
    """gs:// means this lab's server for the clients that are made inside."""
    names = ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: lab.environment[name] for name in names})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def upload_corpus(lab: Lab) -> str:
    """The small corpus of tests.support.gang in the lab's bucket; returns its gs:// prefix. Once is enough."""
    create_bucket(lab.gcs_url, BUCKET)
    bucket, _, prefix = DATA.removeprefix("gs://").partition("/")
    with tempfile.TemporaryDirectory() as folder:
        for file in write_corpus(Path(folder)).iterdir():
            url = f"{lab.gcs_url}/upload/storage/v1/b/{bucket}/o?uploadType=media&name={prefix}/{file.name}"
            answer = urllib3.request("POST", url, body=file.read_bytes(), timeout=10.0)
            assert answer.status == 200, answer.data
    return DATA


@dataclass
class LabRun:
    """One run of one recipe; its attempts are JobSets `<name>-a<n>` in `namespace`, queued in `queue`."""

    lab: Lab
    name: str
    recipe: Recipe
    namespace: str = "default"
    queue: str = "tpus"
    attempt: int = 0

    @classmethod
    def new(cls, lab: Lab, name: str, recipe: Recipe | None = None, **place: str) -> "LabRun":
        """Upload the corpus where it is missing and fix the recipe. `place`: namespace, queue."""
        root = upload_corpus(lab)
        with bucket_of(lab):
            run = cls(lab, name, freeze(recipe or one_layer_recipe(), root), **place)
            delete_objects(lab, run.uri)  # what another test left, or this one in a lab that is used again
            run.rundir(create=True).create_recipe(run.recipe)
        return run

    @property
    def uri(self) -> str:
        return f"gs://{BUCKET}/{self.namespace}/{self.name}"

    @property
    def api(self) -> Api:
        return self.lab.api

    def rundir(self, create: bool = False) -> RunDirectory:
        with bucket_of(self.lab):
            return RunDirectory.open(self.uri, create=create)

    def settings(self, target: int, **changes: Any) -> Settings:
        """Commits every 4 steps, progress every second, one compile cache for all pods."""
        given: dict[str, Any] = {
            "target_step": target,
            "data_root": DATA,
            "commit_every": 4,
            "compile_cache": COMPILED,
            "heartbeat_timeout_seconds": 20,
            "hang_start_seconds": 240,
            "hang_step_seconds": 60,
            "progress_seconds": 1,
            **changes,
        }
        return Settings.model_validate(given)

    def submit(
        self, device: str, target: int, slices: int = 1, program: Program = PROGRAM, **settings: Any
    ) -> AttemptSpec:
        """The next attempt: spec.json, then HEAD. Trains only once its JobSet is created."""
        self.attempt += 1
        spec = AttemptSpec(
            attempt=self.attempt,
            nonce=uuid.uuid4().hex,
            gang=f"{self.name}-a{self.attempt}",
            plan=make_plan(self.recipe, device, slices),
            settings=self.settings(target, **settings),
            image=PROGRAM.image,
            program=program,
            submitted_by="a test",
        )
        rundir = self.rundir()
        rundir.adopt_spec(spec)
        rundir.swap_to_attempt(self.attempt)
        return spec

    def create(self, spec: AttemptSpec, priority: str = "low", env: Mapping[str, str | None] | None = None) -> Object:
        """Create the JobSet of `spec`."""
        return self.api.create(self.jobset(spec, priority, env))

    def jobset(self, spec: AttemptSpec, priority: str = "low", env: Mapping[str, str | None] | None = None) -> Object:
        """The JobSet of `spec` as an orchestrator submits it; `env` changes variables, or takes them away (None)."""
        request = GangRequest(
            run=self.name, run_directory=self.uri, spec=spec, queue=self.queue, priority_class=priority
        )
        made = jobset(request, self.namespace)
        for job in made["spec"]["replicatedJobs"]:
            for container in job["template"]["spec"]["template"]["spec"]["containers"]:
                kept = [v for v in container["env"] if v["name"] not in (env or {})]
                added = [{"name": k, "value": v} for k, v in (env or {}).items() if v is not None]
                container["env"] = kept + added
        return made

    # --- what became of it

    @property
    def jobsets(self) -> str:
        """API path of the JobSets of this run's namespace."""
        return f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{self.namespace}/jobsets"

    def pods(self, attempt: int | None = None) -> list[Object]:
        """The pods of an attempt (the newest), as the API server has them."""
        selector = f"jobset.sigs.k8s.io/jobset-name={self.name}-a{attempt or self.attempt}"
        return self.api.items(f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=selector)

    def logs(self) -> str:
        """What the pods of all attempts wrote, for the message of a failing test."""
        files = sorted((self.lab.folder / "pods").glob(f"{self.namespace}_{self.name}-a*/*.log"))
        return "\n".join(f"--- {f.parent.name}/{f.name}\n{f.read_text(errors='replace')[-3000:]}" for f in files)

    def head(self) -> Head:
        found = self.rundir().head()
        assert found is not None
        return found[0]

    def committed_step(self) -> int:
        commit = self.head().commit
        return commit.step if commit else 0

    def lineage(self) -> list[CommitRecord]:
        """Newest first."""
        return list(self.rundir().lineage(self.head().commit))

    def lines(self) -> list[StepLine]:
        """The step log along the committed lineage, oldest first."""
        rundir = self.rundir()
        return [x for r in reversed(self.lineage()) for file in r.step_log for x in rundir.read_step_log(file)]

    def numbers(self) -> list[dict[str, Any]]:
        """The step log without times."""
        return [line.model_dump(exclude={"seconds", "loading"}) for line in self.lines()]

    def verify(self, against: str | None = None) -> Object:
        """`untildone verify --json` of the run directory."""
        more = ["--against", against] if against else []
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator", "verify", self.uri, "--json", *more],
            cwd=ROOT,
            env={**os.environ, **self.lab.environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.stdout, done.stderr
        verdict: Object = json.loads(done.stdout)
        return verdict

    def delete(self, attempt: int | None = None) -> None:
        """Delete the JobSet of an attempt (the newest); its pods get their grace."""
        self.api.delete(f"{self.jobsets}/{self.name}-a{attempt or self.attempt}")


def object_names(lab: Lab, uri: str) -> set[str]:
    """Names of the objects below a gs:// prefix in the lab's bucket."""
    bucket, _, prefix = uri.removeprefix("gs://").partition("/")
    answer = urllib3.request("GET", f"{lab.gcs_url}/storage/v1/b/{bucket}/o?prefix={prefix}/", timeout=10.0)
    return {item["name"] for item in answer.json().get("items", [])}


def delete_objects(lab: Lab, uri: str) -> None:
    """Delete everything below a gs:// prefix in the lab's bucket."""
    bucket = uri.removeprefix("gs://").partition("/")[0]
    for name in object_names(lab, uri):
        url = f"{lab.gcs_url}/storage/v1/b/{bucket}/o/{quote(name, safe='')}"
        urllib3.request("DELETE", url, timeout=10.0)
