"""Trainer processes on this machine: started so that none outlives its supervisor, and proven gone.

A pid alone names nothing, since pids are used again. A process is known by pid and kernel start time, and the processes
of an attempt are found by the nonce in their environment, whatever they did to their process group. Linux only.
"""

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

NONCE_VARIABLE = "UNTILDONE_NONCE"
# Of an earlier gang or of the user's shell; a trainer that inherits them joins the wrong coordinator or mesh.
STALE_PREFIXES = ("UNTILDONE_", "MEGASCALE_", "JAX_", "TPU_", "XLA_", "LIBTPU_", "CLOUD_TPU_")
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without what a trainer must not inherit."""
    return {name: value for name, value in environ.items() if not name.startswith(STALE_PREFIXES)}


def free_port() -> int:
    """A port on 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def spawn(command: Sequence[str], env: Mapping[str, str], cwd: str, log: Path) -> "subprocess.Popen[bytes]":
    """Start `command` as leader of its own process group, output appended to `log`; SIGKILLed when this process dies.

    Raises OSError when it cannot be started.
    """
    parent = os.getpid()

    def die_with_parent() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call above
            os._exit(127)

    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        return subprocess.Popen(
            command,
            env=dict(env),
            cwd=cwd if os.path.isdir(cwd) else "/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=die_with_parent,
        )


def start_ticks(pid: int) -> int | None:
    """Kernel start time of a living process (clock ticks since boot); None if there is none, or only its zombie."""
    state = _stat(pid)
    return None if state is None or state[0] in ("Z", "X") else state[1]


def stopped(pid: int) -> bool:
    """Whether the process exists and is stopped (SIGSTOP)."""
    state = _stat(pid)
    return state is not None and state[0] == "T"


def _stat(pid: int) -> tuple[str, int] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may contain anything
    return fields[0], int(fields[19])


def living_with_nonce(nonce: str) -> list[int]:
    """Pids of all living processes of this user that carry the attempt's nonce in their environment."""
    mark = f"{NONCE_VARIABLE}={nonce}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environ = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:
            continue  # gone meanwhile, or another user's
        if mark in environ.split(b"\0") and start_ticks(int(entry)) is not None:
            found.append(int(entry))
    return found


def kill_all_with_nonce(nonce: str, waiting: Callable[[list[int]], None] | None = None) -> list[int]:
    """SIGKILL every process of the attempt and return once none lives; returns the pids that were found.

    A process in uninterruptible sleep keeps this waiting: it is not gone; to assume so would allow two writers.
    `waiting` is called with the survivors every 5 seconds.
    """
    seen: list[int] = []
    told = time.monotonic()
    while living := living_with_nonce(nonce):
        for pid in living:
            if pid not in seen:
                seen.append(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if waiting is not None and time.monotonic() - told > 5:
            told = time.monotonic()
            waiting(living)
        time.sleep(0.005)
    return seen
