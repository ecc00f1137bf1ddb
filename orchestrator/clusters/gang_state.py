"""What the local cluster keeps on disk, and how its parts hold on to it. Standard library only: supervisors start fast.

    DIR/cluster.json             the cluster's uid, written once
    DIR/capacity.json            {"devices": {"cpu": 8}}; no file: cpu devices without limit
    DIR/admission.lock           held for the moment in which a gang takes quota
    DIR/gangs/<name>/            one folder per gang, created whole by one rename, so that a second submission collides
        request.json             what was asked for; never changed
        status.json              phase and admissions; written by the gang's supervisor alone
        delete.json              somebody wants it gone
        supervisor.lock          held by the one supervisor for as long as it lives
        supervisor.json          its pid, for people
        logs/<admission>/<rank>.log
    DIR/ended/<name>.<uid>/      the same folder once the gang was deleted and every process is proven gone

Every file is replaced whole, by rename. Nothing is fsynced but the request: no process outlives the machine, so that
after a power cut the truth is the run directory, and here only that the gang existed.
"""

import fcntl
import json
import os
import struct
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FINAL = ("Succeeded", "Failed")
_FLOCK = "hhqqi"  # l_type, l_whence, l_start, l_len, l_pid of struct flock on 64-bit Linux


@dataclass(frozen=True)
class Request:
    """request.json: what one gang is. `devices` of `family` are its quota while it is admitted."""

    uid: str
    name: str
    run: str
    attempt: int
    nonce: str
    run_directory: str
    device_type: str
    family: str
    devices: int
    processes: int
    grace_seconds: float
    command: list[str]
    env: dict[str, str]
    cwd: str
    created: float


@dataclass(frozen=True)
class Signal:
    """One fact about why an admission ended, verbatim."""

    source: str
    field: str
    value: str


@dataclass
class Pod:
    """One trainer process. `ticks` is its start time in the kernel's clock: it and the pid name a process for good."""

    rank: int
    uid: str
    pid: int | None = None
    ticks: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    ended: float | None = None


@dataclass
class AdmissionState:
    """One coming-up of the gang."""

    key: str
    restart_attempt: int
    queued_at: float | None
    began: float
    pods: list[Pod]
    ended: float | None = None
    queue_signals: list[Signal] = field(default_factory=list)
    node_signals: list[Signal] = field(default_factory=list)
    pod_signals: list[Signal] = field(default_factory=list)


@dataclass
class Status:
    """status.json. `reserved` is when the gang took its quota, None while it has none."""

    phase: str = "Queued"
    restart_attempt: int = 0
    reserved: float | None = None
    queued_since: float | None = None
    message: str = ""
    admissions: list[AdmissionState] = field(default_factory=list)

    @property
    def current(self) -> AdmissionState | None:
        """The admission that has not ended."""
        return self.admissions[-1] if self.admissions and self.admissions[-1].ended is None else None


@dataclass(frozen=True)
class Deletion:
    """delete.json."""

    uid: str
    grace_seconds: float
    time: float


def write_json(path: Path, document: Any, *, durable: bool = False) -> None:
    """Replace `path` whole by the JSON of `document` (a dataclass instance or plain data)."""
    body = asdict(document) if hasattr(document, "__dataclass_fields__") else document
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with open(temporary, "w") as file:
        json.dump(body, file)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    """The document at `path`. Raises FileNotFoundError, and ValueError naming the file when it is damaged."""
    data = path.read_bytes()
    try:
        return json.loads(data)
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None


def read_request(folder: Path) -> Request:
    return Request(**read_json(folder / "request.json"))


def read_status(folder: Path) -> Status:
    body = read_json(folder / "status.json")
    admissions = [
        AdmissionState(
            **{
                **entry,
                "pods": [Pod(**pod) for pod in entry["pods"]],
                **{
                    kind: [Signal(**s) for s in entry[kind]]
                    for kind in ("queue_signals", "node_signals", "pod_signals")
                },
            }
        )
        for entry in body["admissions"]
    ]
    return Status(**{**body, "admissions": admissions})


def read_deletion(folder: Path) -> Deletion | None:
    try:
        return Deletion(**read_json(folder / "delete.json"))
    except FileNotFoundError:
        return None


def read_capacity(root: Path) -> dict[str, int] | None:
    """Devices per family, or None for no limit on cpu devices. A family that is not listed has none."""
    try:
        body = read_json(root / "capacity.json")
    except FileNotFoundError:
        return None
    return {str(family): int(count) for family, count in body["devices"].items()}


def gang_folders(root: Path) -> Iterable[Path]:
    """Folders of the gangs that are not deleted, by name."""
    with os.scandir(root / "gangs") as entries:
        names = sorted(e.name for e in entries if not e.name.startswith("."))
    return [root / "gangs" / name for name in names]


def ended_folders(root: Path) -> Iterable[Path]:
    """Folders of deleted gangs, by name and uid."""
    with os.scandir(root / "ended") as entries:
        names = sorted(e.name for e in entries)
    return [root / "ended" / name for name in names]


class Hold:
    """An exclusive hold on a file that the kernel releases when the holder dies (an open-file-description lock).

    Unlike a pid file it cannot go stale, and unlike flock(2) it can be tested without taking it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> bool:
        """True if the hold is ours now; False if another process has it."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def held(path: Path) -> bool:
    """Whether some process has the hold on `path`."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        os.close(descriptor)
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
