"""Many TrainingRuns in a lab of their own under one operator process, for the benchmarks of the operator.

Real are the control plane with JobSet and Kueue, `untildone operator` with the rights of the chart and a token of its own,
and the run directories, on a server of the GCS API. Some of the runs are admitted, one slice of one host each; the others
wait in a queue without quota. Their programs only wait: stand-ins claim, commit and report for them as a trainer does, so
that two cores suffice. Between the operator and the API server there is nothing, between it and the store only a delay of
each request, since a bucket in the same region takes that long. What the operator did is in the audit log of the API
server, and in the log and the objects of the store's server.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

import psutil
import urllib3
import yaml

from benchmarks.slow_store import slowly
from orchestrator.operating.rights import LEASE, RIGHTS
from tests.lab.api import Object, condition
from tests.lab.lab import Lab
from tests.lab.queues import install_queue
from tests.support.commits import commit, record_start
from tests.support.gang import ROOT
from tests.support.gcs_server import GcsServer
from tests.support.lab_objects import wait
from tests.support.operated import install_crd
from trainer.errors import Fenced, TrainerError
from trainer.recipe import load as load_recipe
from trainer.rundir.claims import Claim, ClaimStopped
from trainer.rundir.records import Progress
from trainer.rundir.rundir import RunDirectory

DEVICE, CHIPS = "v5p-2x2x1", 4  # one host, one process
RECIPE = "olmo3_7b_stage1"  # a thousand data files: recipe.json has 136 kB
QUEUES = {"admitted": "tpus", "queued": "never"}
RUNS = "/apis/untildone.dev/v1alpha1/namespaces/default/trainingruns"
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets"
WORKLOADS = "/apis/kueue.x-k8s.io/v1beta2/namespaces/default/workloads"
PODS = "/api/v1/namespaces/default/pods"
BUCKET, ACCOUNT = "runs", "untildone"
FAIL = 10  # SIGUSR1
PROGRAM = "trap 'kill $!; exit 1' USR1; trap 'kill $!; exit 75' TERM; sleep 1000000 & wait"
REPORT_SECONDS = 10.0
BEGIN_SECONDS = 300.0


@dataclass(frozen=True)
class Call:
    """One call of the operator, from the audit log. `received` is UNIX seconds."""

    verb: str
    resource: str  # trainingruns/status, workloads, …
    name: str
    received: float


@dataclass(frozen=True)
class StoreRequest:
    """One request to the store's server, whoever made it, from its log. `answered` is UNIX seconds."""

    method: str
    run: str
    answered: float


@dataclass(frozen=True)
class Usage:
    """What the operator process has used so far."""

    cpu_seconds: float
    resident_mb: float
    peak_mb: float
    threads: int


class StandIns(threading.Thread):
    """The trainers of all pods: claims, commits one step, and reports one step more every ten seconds."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(daemon=True, name="trainers")
        self.claimed: dict[tuple[str, int], Object] = {}  # (run, attempt) → its pod
        self._lab = lab
        self._claims: dict[str, tuple[RunDirectory, Claim, int]] = {}  # by pod uid; what it reports, and its step
        self._over: set[str] = set()
        self._stopping = threading.Event()

    def run(self) -> None:
        reported = 0.0
        while not self._stopping.wait(1.0):
            try:
                found = self._lab.api.items(PODS)
            except urllib3.exceptions.HTTPError:
                continue
            pods = {pod["metadata"]["uid"]: pod for pod in found if pod["status"].get("phase") == "Running"}
            for uid, pod in pods.items():
                if uid not in self._claims and uid not in self._over:
                    self._claim(uid, pod)
            for uid in self._claims.keys() - pods.keys():
                del self._claims[uid]
                self.claimed = {key: pod for key, pod in self.claimed.items() if pod["metadata"]["uid"] != uid}
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                for uid, (rundir, claim, step) in list(self._claims.items()):
                    self._claims[uid] = (rundir, claim, step + 1)
                    self._report(rundir, claim, step + 1)

    def stop(self) -> None:
        self._stopping.set()
        self.join()

    def _claim(self, uid: str, pod: Object) -> None:
        labels = pod["metadata"]["labels"]
        run, attempt = labels["untildone.dev/run"], int(labels["untildone.dev/attempt"])
        restart = int(labels["jobset.sigs.k8s.io/restart-attempt"])
        rundir = RunDirectory.open(uri(run))
        spec = rundir.read_spec(attempt)
        assert spec is not None
        try:
            claim = rundir.claim(attempt, spec.nonce, uid, restart, deadline_seconds=0.0)
        except ClaimStopped:
            return  # HEAD does not name the attempt yet
        except Fenced:
            self._over.add(uid)
            return
        record_start(rundir, claim, spec, uid, restart, time.time())
        step = claim.restore.step + 1 if claim.restore else 1
        commit(claim, step, time.time())
        self._claims[uid] = (rundir, claim, step)
        self._report(rundir, claim, step)
        self.claimed[run, attempt] = pod

    def _report(self, rundir: RunDirectory, claim: Claim, step: int) -> None:
        committed = claim.commit_ref
        with contextlib.suppress(TrainerError):
            progress = Progress(
                phase="Training",
                step=step,
                committed_step=committed.step if committed else 0,
                beats=step,
                time=time.time(),
            )
            rundir.put_progress(claim.attempt, claim.start, progress)


@dataclass
class Fleet:
    """The runs, by kind: those that are admitted and those that stay queued; and what looks after them."""

    lab: Lab
    store: GcsServer
    slow_store: str  # where the operator finds it
    folder: Path
    admitted: list[str]
    queued: list[str]
    trainers: StandIns
    _process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    @property
    def runs(self) -> list[str]:
        return [*self.admitted, *self.queued]

    # -- what the operator did

    def calls(self, since: float, until: float) -> list[Call]:
        """Every call that the operator made in this time."""
        found: dict[str, Call] = {}  # a watch has a line when it begins and one when it ends
        with (self.lab.folder / "logs" / "audit.log").open() as log:
            for line in log:
                event = json.loads(line)
                received = datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp()
                if (
                    event["user"]["username"] == f"system:serviceaccount:default:{ACCOUNT}"
                    and since <= received < until
                ):
                    what = event.get("objectRef") or {}
                    resource = "/".join(filter(None, (what.get("resource"), what.get("subresource"))))
                    found[event["auditID"]] = Call(event["verb"], resource, what.get("name", ""), received)
        return list(found.values())

    def store_requests(self, since: float, until: float) -> list[StoreRequest]:
        """Every request to the store about one of the runs in this time. Only the operator reads, once all have begun."""
        found = []
        for line in self.store.log.read_text().splitlines():
            moment, request = re.match(r"time=(\S+)", line), re.search(r'\\"([A-Z]+) (\S+) HTTP', line)
            run = re.search(r"default(?:%2F|/)(run-\d+)(?:%2F|/)", line)
            if moment and request and run:
                answered = datetime.fromisoformat(moment[1]).timestamp()
                if since <= answered < until:
                    found.append(StoreRequest(request[1], run[1], answered))
        return found

    def events(self, since: float, until: float) -> Counter[str]:
        """Reasons of the Events that the operator wrote about runs in this time, which begins and ends at full seconds."""
        found: Counter[str] = Counter()
        for event in self.lab.api.items("/api/v1/namespaces/default/events"):
            if event["involvedObject"]["kind"] == "TrainingRun":
                written = datetime.fromisoformat(event["firstTimestamp"]).timestamp()
                found[event["reason"]] += int(since) <= written < int(until)
        return +found

    def written(self, run: str) -> dict[str, float]:
        """When each object of the run directory was first written (UNIX seconds, by the store's server), by key."""
        prefix = f"default/{run}/"
        url = f"{self.store.url}/storage/v1/b/{BUCKET}/o?prefix={quote(prefix, safe='')}&maxResults=5000"
        items = urllib3.request("GET", url, timeout=10.0).json().get("items") or []
        return {i["name"].removeprefix(prefix): datetime.fromisoformat(i["timeCreated"]).timestamp() for i in items}

    def usage(self) -> Usage:
        """Of the operator process, now."""
        assert self._process is not None
        process = psutil.Process(self._process.pid)
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024
        times = process.cpu_times()
        return Usage(times.user + times.system, process.memory_info().rss / 2**20, peak, process.num_threads())

    def log(self) -> str:
        """The end of what the operator said."""
        return (self.folder / "operator.log").read_text(errors="replace")[-4000:]

    # -- the beginning

    def begin(self) -> None:
        """Start the operator, and apply all runs; returns when each waits in its queue or trains, and says so."""
        self._begin_operator()
        for run in self.runs:
            self.lab.api.create(self._document(run))
        wanted = dict.fromkeys(self.admitted, "Training") | dict.fromkeys(self.queued, "Queued")

        def all_there() -> bool:
            try:
                runs = self.lab.api.items(RUNS)
            except urllib3.exceptions.HTTPError:  # the API server is busy with all this
                return False
            return {r["metadata"]["name"]: condition(r, "Succeeded").get("reason") for r in runs} == wanted

        try:
            wait("all runs are queued or train", all_there, BEGIN_SECONDS)
        except AssertionError as error:
            raise SystemExit(f"{error}\n{self.log()}") from None

    def end(self) -> None:
        """Stop the operator, so that nothing is left that asks the lab."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _begin_operator(self) -> None:
        config, kubeconfig = self.folder / "operator.yaml", self.folder / "kubeconfig"
        content = {"runDirectories": {"default": [f"gs://{BUCKET}/"]}, "lease": {"namespace": "default"}}
        config.write_text(yaml.safe_dump(content))
        kubeconfig.write_text(self.lab.kubeconfig.read_text().replace(self.lab.token, self._token()))
        with (self.folder / "operator.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator", "operator", "--config", str(config)],
                cwd=ROOT,
                env={
                    **os.environ,
                    "STORAGE_EMULATOR_HOST": self.slow_store,
                    "KUBECONFIG": str(kubeconfig),
                    "POD_NAME": "operator",
                },
                stdout=log,
                stderr=log,
            )

    def _token(self) -> str:
        """Of a service account with exactly the rights that the operator needs: its calls are in the audit log."""
        api, role = self.lab.api, "rbac.authorization.k8s.io/v1"
        account = {"name": ACCOUNT, "namespace": "default"}
        api.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
        rules = [
            {"apiGroups": [right.group], "resources": [right.resource], "verbs": list(right.verbs)}
            | ({"resourceNames": ["untildone" if right.name == LEASE else right.name]} if right.name else {})
            for right in RIGHTS
        ]
        metadata = {"name": ACCOUNT}
        api.apply({"apiVersion": role, "kind": "ClusterRole", "metadata": metadata, "rules": rules})
        api.apply(
            {
                "apiVersion": role,
                "kind": "ClusterRoleBinding",
                "metadata": metadata,
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": ACCOUNT},
                "subjects": [{"kind": "ServiceAccount", **account}],
            }
        )
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
        path = f"/api/v1/namespaces/default/serviceaccounts/{ACCOUNT}/token"
        return str(api.request("POST", path, body)["status"]["token"])

    def _document(self, run: str) -> Object:
        return {
            "apiVersion": "untildone.dev/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": run, "namespace": "default"},
            "spec": {
                "recipe": {"name": RECIPE},
                "data": {"root": f"gs://{BUCKET}/corpus"},
                "targetStep": 1_000_000,
                "runDirectory": uri(run),
                "image": "lab.example/trainer@sha256:0000",
                "command": ["sh", "-c", PROGRAM],
                "queue": QUEUES["admitted" if run in self.admitted else "queued"],
                "ladder": [{"deviceType": DEVICE}],
                "gracePeriod": "5s",
                "backoff": {"initial": "1s", "max": "1s"},
                "budgets": {"applicationError": "unlimited", "deactivated": "unlimited", "noNewCommit": 1000},
            },
        }


@contextlib.contextmanager
def fleet(runs: int, admitted: int) -> Iterator[Fleet]:
    """`runs` runs in a new lab, `admitted` of them with a host of their own, all begun. Everything ends with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # in order, or the lab would be left
    names = [f"run-{number:02}" for number in range(runs)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="untildone-fleet-")))
        store = stack.enter_context(GcsServer(log_level="info"))
        os.environ.update(store.environment)  # for the stand-ins
        store.create_bucket(BUCKET)
        slow_store = stack.enter_context(slowly(store.url))
        lab = Lab.start(folder / "lab", {DEVICE: admitted})
        stack.callback(lab.stop)
        install_crd(lab)
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        wait("the default service account", lambda: lab.api.find(account))
        install_queue(lab.api, {DEVICE: CHIPS * admitted}, name=QUEUES["admitted"])
        install_queue(lab.api, {DEVICE: 0}, name=QUEUES["queued"])
        _write_recipes(names)
        trainers = StandIns(lab)
        trainers.start()
        stack.callback(trainers.stop)
        made = Fleet(lab, store, slow_store, folder, names[:admitted], names[admitted:], trainers)
        stack.callback(made.end)
        made.begin()
        yield made


def _write_recipes(names: list[str]) -> None:
    """Fix the recipe of each run: the data of one that has not begun is looked at, and there is none."""
    recipe = load_recipe(RECIPE)
    files = {
        part: tuple(file.model_copy(update={"bytes": 1 << 30}) for file in getattr(recipe.data, part))
        for part in ("files", "held_out")
    }
    frozen = recipe.model_copy(update={"data": recipe.data.model_copy(update=files)})
    for name in names:
        RunDirectory.open(uri(name), create=True).create_recipe(frozen)


def uri(run: str) -> str:
    return f"gs://{BUCKET}/default/{run}"


def load_average() -> list[float]:
    """Of this machine, over 1, 5 and 15 minutes."""
    return [round(value, 1) for value in os.getloadavg()]
