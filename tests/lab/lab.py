"""A lab: one control plane with its nodes, in a folder of its own, on free ports of 127.0.0.1.

Every process of a lab carries its folder in the environment variable UNTILDONE_LAB. That is how they are found again,
by whatever process comes to stop them, and after whatever end the one that started them came to.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import urllib3
import yaml

from tests.lab.api import Api
from tests.lab.build import control_plane
from tests.lab.certificates import write_certificates
from tests.lab.components import PORTS, Process, processes
from tests.lab.manifests import install_apis, install_visibility, install_webhooks

REPOSITORY = Path(__file__).resolve().parents[2]
MARK = "UNTILDONE_LAB"
SHARED_FOLDER = "shared"  # within a lab's
READY_SECONDS = 90.0
EXEC_SECONDS = 1.0  # while a program is being loaded, its environment, and so its mark, reads empty
STOP_SECONDS = 5.0
AGENT = "nodes"
_children: list["subprocess.Popen[bytes]"] = []  # those this process started itself


class LabError(RuntimeError):
    """The lab does not come up; the message has the end of the log that says why."""


class Lab:
    """A lab in `folder`. `start` makes it, `open` finds it again, `stop` ends it and leaves the logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        state = json.loads((self.folder / "lab.json").read_text())
        self.ports: dict[str, int] = state["ports"]
        self.token: str = state["token"]
        self.binaries = Path(state["binaries"])
        self._processes = processes(self.binaries, self.folder, self.ports)
        self._processes[AGENT] = _agent(self.folder, self.ports["nodes"])
        self.api = Api(self.server, self.folder / "pki" / "ca.crt", self.token)

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self.ports['kube-apiserver']}"

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    @property
    def gcs_url(self) -> str:
        return f"http://127.0.0.1:{self.ports['gcs']}"

    @property
    def environment(self) -> dict[str, str]:
        """For kubectl, and for clients of the GCS API."""
        gcs = {"STORAGE_EMULATOR_HOST": self.gcs_url, "TENSORSTORE_GCS_HTTP_URL": self.gcs_url}
        return {"KUBECONFIG": str(self.kubeconfig), "KUBECACHEDIR": str(self.folder / "kubectl"), **gcs}

    @classmethod
    def start(cls, folder: Path, pools: dict[str, int]) -> "Lab":
        """Start a lab with `pools` slices of each device type. Raises LabError, with nothing left running."""
        folder = folder.resolve()
        if running(folder):
            raise LabError(f"a lab is already running in {folder}: stop it with python -m tests.lab.down")
        if folder.exists() and any(folder.iterdir()) and not (folder / "lab.json").exists():
            raise LabError(f"{folder} holds something else than a lab: name an empty folder")
        for attempt in range(3):
            lab = cls._prepare(folder, pools)
            try:
                lab._start()
                return lab
            except BaseException as error:
                lab.stop()
                # Between finding a free port and using it, somebody else may have taken it.
                if attempt == 2 or "address already in use" not in str(error):
                    raise
        raise AssertionError("unreachable")

    @classmethod
    def _prepare(cls, folder: Path, pools: dict[str, int]) -> "Lab":
        """A fresh folder: ports, certificates, credentials."""
        binaries = control_plane()
        for name in ("etcd", "pki", "kueue-root", "logs", "pods"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / "logs").mkdir(parents=True)
        write_certificates(folder / "pki")
        ports, token = _free_ports(), secrets.token_hex(16)
        (folder / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
        _write_kubeconfig(folder, ports["kube-apiserver"], token)
        (folder / "pools.json").write_text(json.dumps(pools))
        state = {"ports": ports, "token": token, "binaries": str(binaries)}
        (folder / "lab.json").write_text(json.dumps(state))
        return cls(folder)

    def _start(self) -> None:
        self.start_processes("etcd")
        self.start_processes("kube-apiserver")
        self.start_processes("kube-scheduler", "gcs", wait=False)
        install_apis(self.api, self.binaries)
        # Not before the CRDs: its garbage collector looks for new kinds only every 30 s.
        self.start_processes("kube-controller-manager", wait=False)
        install_webhooks(self.api, self.binaries, self.ports, (self.folder / "pki" / "ca.crt").read_bytes())
        self.start_processes("jobset", "kueue", AGENT)
        self.wait_ready("kube-controller-manager", "kube-scheduler", "gcs")
        install_visibility(self.api, self.ports["kueue-visibility"])

    def share(self, folder: Path) -> None:
        """Pods started from now on have `folder` in common, with those of other labs too. Without: a folder of this lab's."""
        (self.folder / SHARED_FOLDER).symlink_to(folder)

    def start_processes(self, *names: str, wait: bool = True) -> None:
        """Start these programs, with logs in logs/<name>.log."""
        for name in names:
            process = self._processes[name]
            with (self.folder / "logs" / f"{name}.log").open("ab") as log:
                child = subprocess.Popen(
                    process.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                    start_new_session=True,
                    env={**os.environ, **process.environment, MARK: str(self.folder), f"{MARK}_PROCESS": name},
                )
            _children.append(child)
        if wait:
            self.wait_ready(*names)

    def stop_processes(self, *names: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Stop these programs and wait until they are gone."""
        _kill([pid for pid, name in running(self.folder).items() if name in names], how)

    def restart_controllers(self) -> None:
        """Kubernetes' controllers, JobSet and Kueue anew, for whoever comes after a test that killed the API server.

        Once it is back their informers wait before they ask again, after several outages in a row for up to a minute.
        Meanwhile nodes are called unreachable, pods refused and deletions overlooked.
        """
        names = ("kube-controller-manager", "jobset", "kueue")
        self.stop_processes(*names)
        self.start_processes(*names)

    def wait_ready(self, *names: str) -> None:
        """Until each answers. LabError when one dies or takes too long."""
        for name in names:
            self._wait_ready(self._processes[name])

    def _wait_ready(self, process: Process) -> None:
        deadline = time.monotonic() + READY_SECONDS
        pool = urllib3.PoolManager(ca_certs=str(self.folder / "pki" / "ca.crt"), retries=False, timeout=2.0)
        headers = {"Authorization": f"Bearer {self.token}"} if process.name == "kube-apiserver" else {}
        seen = time.monotonic()
        while time.monotonic() < deadline:
            with contextlib.suppress(urllib3.exceptions.HTTPError):
                if pool.request("GET", process.ready, headers=headers).status == 200:
                    return
            if process.name in running(self.folder).values():
                seen = time.monotonic()
            elif time.monotonic() - seen > EXEC_SECONDS:
                raise LabError(f"{process.name} ended:\n{self.log(process.name)}")
            time.sleep(0.05)
        raise LabError(f"{process.name} is not ready after {READY_SECONDS:.0f} s:\n{self.log(process.name)}")

    def log(self, name: str, size: int = 3000) -> str:
        """The end of a program's log."""
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text(errors="replace")[-size:] if path.exists() else "(no log)"

    def stop(self) -> None:
        """End every process of this lab, pods included."""
        stop_folder(self.folder)


def stop_folder(folder: Path) -> int:
    """End what runs for the lab in `folder`; how many processes that were."""
    pids = running(folder)
    agents = [pid for pid, name in pids.items() if name == AGENT]
    _kill(agents, signal.SIGKILL)  # first, so that it starts nothing more
    rest = list(running(folder))
    _kill(rest, signal.SIGKILL)
    if (folder / "lab.json").exists():
        for name in ("etcd", "kueue-root"):  # large, and of no use to anybody who looks why something failed
            shutil.rmtree(folder / name, ignore_errors=True)
    return len(agents) + len(rest)


def running(folder: Path) -> dict[int, str]:
    """Processes of the lab in `folder`: pid → name (a pod's processes: 'pod')."""
    return {pid: name for pid, (where, name) in _marked().items() if where == str(folder.resolve())}


def labs() -> dict[Path, int]:
    """Folders of the labs of this user that have processes, with how many."""
    counts: dict[Path, int] = {}
    for where, _ in _marked().values():
        counts[Path(where)] = counts.get(Path(where), 0) + 1
    return counts


def _marked() -> dict[int, tuple[str, str]]:
    """pid → (lab folder, name) of every process that carries the mark."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue
        except OSError:  # gone, or another user's
            continue
        values = dict(v.split(b"=", 1) for v in variables if v.startswith(MARK.encode()) and b"=" in v)
        if MARK.encode() in values:
            found[int(entry.name)] = (
                values[MARK.encode()].decode(),
                values.get(f"{MARK}_PROCESS".encode(), b"").decode(),
            )
    return found


def _kill(pids: Iterable[int], how: signal.Signals) -> None:
    """Signal, and SIGKILL what is left after a while; returns when all are gone."""
    waiting = set(pids)
    for pid in waiting:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)
    deadline = time.monotonic() + STOP_SECONDS
    while waiting and time.monotonic() < deadline + STOP_SECONDS:
        waiting &= set(_marked())
        _children[:] = [child for child in _children if child.poll() is None]  # reaps those that are gone
        if time.monotonic() > deadline:
            for pid in waiting:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _agent(folder: Path, port: int) -> Process:
    command = [sys.executable, "-m", "tests.lab.agent", str(folder)]
    return Process(AGENT, command, f"http://127.0.0.1:{port}/ready", {"PYTHONPATH": str(REPOSITORY)})


def _free_ports() -> dict[str, int]:
    """A free port for each name, all held until all are found."""
    with contextlib.ExitStack() as stack:
        ports = {}
        for name in PORTS:
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ports[name] = int(probe.getsockname()[1])
        return ports


def _write_kubeconfig(folder: Path, port: int, token: str) -> None:
    cluster = {"server": f"https://127.0.0.1:{port}", "certificate-authority": str(folder / "pki" / "ca.crt")}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "lab", "cluster": cluster}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "admin", "namespace": "default"}}],
        "current-context": "lab",
    }
    path = folder / "kubeconfig"
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(content))
