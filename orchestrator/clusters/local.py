"""This machine as a cluster: real trainer processes, real SIGTERM and SIGKILL, quota that shrinks and returns.

`LocalCluster` only reads and writes the state folder (gang_state.py) and sees to it that each gang has its supervisor
(gang_supervisor.py), a detached process that lives on when the orchestrator is killed. Linux only.
"""

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.api import TrainingRun
from orchestrator.clusters import gang_state as state
from orchestrator.clusters.base import (
    Admission,
    ClusterUnavailable,
    ClusterView,
    ContainerEnd,
    Gang,
    GangPhase,
    GangRequest,
    SubmitConflict,
)
from orchestrator.clusters.capacity import limits
from orchestrator.clusters.gang_state import AdmissionState, Deletion, Request, Signal, Status
from orchestrator.clusters.processes import clean_environment, start_ticks, stopped
from orchestrator.environment import plain_environment
from trainer.rundir.records import Evidence, Program

SUPERVISOR = "orchestrator.clusters.gang_supervisor"
# A supervisor that was just started has not taken its hold yet; a second one would do no harm, but would be waste.
SUPERVISOR_START_SECONDS = 10.0
# A stopped supervisor holds the gang and does nothing for it. After this long it is killed, and the next takes over.
STOPPED_SECONDS = 10.0
DEBRIS_SECONDS = 3600.0


def _unavailable[**P, R](method: Callable[P, R]) -> Callable[P, R]:
    """Whatever the file system or a damaged file answers, it is not knowledge about a gang."""

    @functools.wraps(method)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ClusterUnavailable(f"local cluster: {error}") from error

    return wrapped


class LocalCluster:
    """The Cluster protocol on this machine. Several orchestrators may use one folder at the same time."""

    namespace = "local"

    def __init__(self, folder: str | Path, command: Sequence[str] | None = None) -> None:
        """Open the cluster in `folder`, creating it at first use; `command` starts a trainer when a request names none.

        Raises ClusterUnavailable when the folder cannot be used.
        """
        self.root = Path(folder).absolute()
        self._command = tuple(command or (sys.executable, "-P", "-m", "trainer", "train"))
        self._children: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self._stopped: dict[str, float] = {}  # gang uid -> since when its supervisor has been seen stopped, monotonic
        self.uid = self._open()

    @_unavailable
    def _open(self) -> str:
        for name in ("gangs", "ended"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        (self.root / "admission.lock").touch()
        mine = self.root / f".cluster.{uuid.uuid4().hex}"
        state.write_json(mine, {"uid": str(uuid.uuid4())}, durable=True)
        try:
            os.link(mine, self.root / "cluster.json")  # create-only: two that open it first agree on one uid
        except FileExistsError:
            pass
        finally:
            mine.unlink()
        return str(state.read_json(self.root / "cluster.json")["uid"])

    # -- the Cluster protocol ---------------------------------------------------------------------------------------

    def check(self, run: TrainingRun) -> None:
        """Raises ConfigurationError for a reference to a Secret: there are none here."""
        plain_environment(run)

    def program(self, run: TrainingRun) -> Program | None:
        """None: an attempt runs this installation."""
        return None

    @_unavailable
    def observe(self, run: str) -> ClusterView:
        """The gangs of `run`, and those deleted. Any gang of the cluster without its supervisor gets a new one."""
        gangs: dict[str, Gang] = {}
        others: dict[str, int] = {}
        for folder in state.gang_folders(self.root):
            try:
                request, status, gang = self._look(folder)
            except FileNotFoundError:  # moved to ended/ meanwhile; found there below
                continue
            if request.run == run:
                gangs[gang.uid] = gang
            elif status.reserved is not None:
                others[request.family] = others.get(request.family, 0) + request.devices
        deleted = []
        for folder in state.ended_folders(self.root):
            request = state.read_request(folder)
            if request.run == run:
                gangs.pop(request.uid, None)
                deleted.append(_gang(request, state.read_status(folder), None))
        quota = {
            family: max(0, total - others.get(family, 0))
            for family, total in limits(state.read_capacity(self.root)).items()
        }
        return ClusterView(self.uid, _by_attempt(gangs.values()), _by_attempt(deleted), quota)

    @_unavailable
    def submit(self, request: GangRequest) -> Gang:
        """Create the gang and its supervisor. A gang of this nonce that exists or was deleted is returned as it is."""
        spec = request.spec
        if (gang := self._existing(spec.gang, spec.nonce)) is not None:
            return gang
        self._remove_debris()
        asked = Request(
            uid=str(uuid.uuid4()),
            name=spec.gang,
            run=request.run,
            attempt=spec.attempt,
            nonce=spec.nonce,
            run_directory=request.run_directory,
            device_type=spec.plan.device_type,
            family=spec.plan.device_type.partition("-")[0],
            devices=spec.plan.devices,
            processes=spec.plan.processes,
            grace_seconds=spec.settings.grace_seconds,
            command=list(request.command or self._command),
            env=dict(request.env),
            cwd=os.getcwd(),
            created=time.time(),
        )
        prepared = self.root / "gangs" / f".new-{asked.uid}"
        prepared.mkdir()
        state.write_json(prepared / "request.json", asked, durable=True)
        state.write_json(prepared / "status.json", Status(queued_since=asked.created, message="submitted"))
        try:
            os.rename(prepared, self.root / "gangs" / spec.gang)  # fails on a folder that is not empty: create-only
        except OSError:
            shutil.rmtree(prepared)
            if (gang := self._existing(spec.gang, spec.nonce)) is not None:
                return gang
            raise
        return self._look(self.root / "gangs" / spec.gang)[2]

    @_unavailable
    def delete(self, name: str, uid: str, grace_seconds: float) -> None:
        """End the gang `name` if its uid is `uid`. A later call may shorten the grace, never lengthen it."""
        folder = self.root / "gangs" / name
        try:
            if state.read_request(folder).uid != uid:
                return
            asked = state.read_deletion(folder)
            if asked is None or grace_seconds < asked.grace_seconds:
                state.write_json(folder / "delete.json", Deletion(uid, grace_seconds, time.time()))
            self._look(folder)  # a gang that is over has no supervisor any more: one that finishes this is started
        except FileNotFoundError:
            return

    # -- for tests, demos and people --------------------------------------------------------------------------------

    @_unavailable
    def set_capacity(self, devices: Mapping[str, int] | None) -> None:
        """The quota from now on, e.g. {"cpu": 2}; None: cpu devices without limit."""
        if devices is None:
            (self.root / "capacity.json").unlink(missing_ok=True)
        else:
            state.write_json(self.root / "capacity.json", {"devices": dict(devices)}, durable=True)

    @_unavailable
    def pids(self, gang: str) -> dict[int, int]:
        """Rank -> pid of the living processes of the gang's current start; empty when it is not running."""
        try:
            current = state.read_status(self.root / "gangs" / gang).current
        except FileNotFoundError:
            return {}
        alive = {}
        for pod in current.pods if current else []:
            if pod.pid is not None and pod.ended is None and start_ticks(pod.pid) == pod.ticks:
                alive[pod.rank] = pod.pid
        return alive

    @_unavailable
    def supervisor(self, gang: str) -> int | None:
        """Pid of the gang's living supervisor."""
        folder = self.root / "gangs" / gang
        if not state.held(folder / "supervisor.lock"):
            return None
        try:
            return int(state.read_json(folder / "supervisor.json")["pid"])
        except FileNotFoundError:
            return None

    def logs(self, gang: str) -> list[Path]:
        """Log files of the gang's trainers, oldest start first, then by rank; of a deleted gang too."""
        found = [*self.root.glob(f"gangs/{gang}/logs/*/*.log"), *self.root.glob(f"ended/{gang}.*/logs/*/*.log")]
        return sorted(found, key=lambda p: (int(p.parent.name), int(p.stem)))

    # -- inside -----------------------------------------------------------------------------------------------------

    def _existing(self, name: str, nonce: str) -> Gang | None:
        """The gang called `name`, or the deleted one with `nonce`. Raises SubmitConflict when the name is taken."""
        for folder in state.ended_folders(self.root):
            if folder.name.startswith(f"{name}."):
                request = state.read_request(folder)
                if request.name == name and request.nonce == nonce:
                    return _gang(request, state.read_status(folder), None)
        try:
            request, _, gang = self._look(self.root / "gangs" / name)
        except FileNotFoundError:
            return None
        if request.nonce != nonce:
            raise SubmitConflict(
                f"gang {name!r} exists in {self.root} and belongs to another submission (nonce {request.nonce}, "
                f"run directory {request.run_directory}); give the run another name, or delete that gang"
            )
        return gang

    def _look(self, folder: Path) -> tuple[Request, Status, Gang]:
        """One gang, after seeing to its supervisor. Raises FileNotFoundError when it was deleted."""
        request = state.read_request(folder)
        # The hold first: a supervisor writes the last phase before it lets go, never after.
        supervised = state.held(folder / "supervisor.lock")
        status, deletion = state.read_status(folder), state.read_deletion(folder)
        gang = _gang(request, status, deletion)
        if gang.phase == "Deleted":  # written down, but not yet moved to where the deleted ones are
            gang = replace(gang, phase="Deleting")
        if supervised:
            self._check_stopped(request.uid, folder)
            return request, status, gang
        if status.phase in state.FINAL and deletion is None:
            return request, status, gang
        self._start_supervisor(request)
        if status.current is not None:
            message = "the supervisor is gone; the next one will end this start as a host failure"
            gang = replace(gang, message=message)
        return request, status, gang

    def _start_supervisor(self, request: Request) -> None:
        """Start a supervisor, detached; of several that start at once, all but one see the hold and leave."""
        for uid, (child, _) in list(self._children.items()):
            if child.poll() is not None:
                del self._children[uid]
        if request.uid in self._children:
            _, began = self._children[request.uid]
            if time.monotonic() - began < SUPERVISOR_START_SECONDS:
                return
        packages = str(Path(__file__).resolve().parents[2])
        paths = [packages, *filter(None, [os.environ.get("PYTHONPATH")])]
        with open(self.root / "gangs" / request.name / "supervisor.log", "ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", SUPERVISOR, str(self.root), request.name],
                env=clean_environment(os.environ) | {"PYTHONPATH": os.pathsep.join(paths)},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # not in the terminal's process group: Ctrl-C is for the orchestrator
            )
        self._children[request.uid] = (child, time.monotonic())

    def _check_stopped(self, uid: str, folder: Path) -> None:
        """Kill a supervisor that has been stopped (SIGSTOP) for long: as good as a dead host, but it never says so."""
        try:
            entry = state.read_json(folder / "supervisor.json")
        except FileNotFoundError:
            return
        pid = int(entry["pid"])
        if not stopped(pid) or start_ticks(pid) != entry["ticks"]:
            self._stopped.pop(uid, None)
        elif time.monotonic() - self._stopped.setdefault(uid, time.monotonic()) > STOPPED_SECONDS:
            os.kill(pid, signal.SIGKILL)

    def _remove_debris(self) -> None:
        """Folders of submissions that died before they were complete."""
        for path in (self.root / "gangs").glob(".new-*"):
            try:
                if time.time() - path.stat().st_mtime > DEBRIS_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
            except FileNotFoundError:
                continue


def _by_attempt(gangs: Iterable[Gang]) -> tuple[Gang, ...]:
    return tuple(sorted(gangs, key=lambda gang: (gang.attempt, gang.uid)))


def _gang(request: Request, status: Status, deletion: Deletion | None) -> Gang:
    phase: GangPhase = "Deleting" if deletion is not None and status.phase != "Deleted" else _phase(status.phase)
    return Gang(
        name=request.name,
        uid=request.uid,
        attempt=request.attempt,
        nonce=request.nonce,
        phase=phase,
        admissions=tuple(_admission(request, entry) for entry in status.admissions),
        queued_since=status.queued_since,
        message=status.message,
    )


def _phase(word: str) -> GangPhase:
    phases: dict[str, GangPhase] = {
        "Queued": "Queued",
        "Running": "Running",
        "Succeeded": "Succeeded",
        "Failed": "Failed",
        "Deleted": "Deleted",
    }
    return phases[word]


def _admission(request: Request, entry: AdmissionState) -> Admission:
    def evidence(signals: list[Signal]) -> tuple[Evidence, ...]:
        return tuple(Evidence(source=s.source, field=s.field, value=s.value) for s in signals)

    ends = [
        ContainerEnd(f"{request.name}-{pod.rank}", pod.uid, pod.rank, pod.exit_code, pod.signal, pod.ended)
        for pod in entry.pods
        if pod.ended is not None
    ]
    return Admission(
        key=entry.key,
        restart_attempt=entry.restart_attempt,
        queued_at=entry.queued_at,
        began=entry.began,
        ended=entry.ended,
        queue_signals=evidence(entry.queue_signals),
        node_signals=evidence(entry.node_signals),
        pod_signals=evidence(entry.pod_signals),
        containers=tuple(sorted(ends, key=lambda end: end.time)),
        pod_uids=tuple(pod.uid for pod in entry.pods),
    )
