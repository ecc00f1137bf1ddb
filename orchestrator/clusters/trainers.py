"""The trainer processes of one coming-up of a gang: start them, learn at once which died first, stop them."""

import os
import select
import signal
import subprocess
import time
from pathlib import Path

from orchestrator.clusters.gang_state import AdmissionState, Pod, Request, Signal
from orchestrator.clusters.processes import clean_environment, free_port, spawn, start_ticks

CANNOT_START = 127
# glibc reads it before Python runs. Large arrays in huge pages take a fifth off a training step on a CPU (docs/diary.md).
CPU_TUNABLES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def gang_environment(request: Request, admission: AdmissionState, pod: Pod, port: int) -> dict[str, str]:
    """The environment of one trainer: the user's without stale variables, the request's, and who it is in the gang."""
    return {
        **CPU_TUNABLES,
        **clean_environment(os.environ),
        **request.env,
        "UNTILDONE_RUN_DIRECTORY": request.run_directory,
        "UNTILDONE_ATTEMPT": str(request.attempt),
        "UNTILDONE_NONCE": request.nonce,
        "UNTILDONE_POD_UID": pod.uid,
        "UNTILDONE_RESTART_ATTEMPT": str(admission.restart_attempt),
        "UNTILDONE_PROCESS_ID": str(pod.rank),
        "UNTILDONE_PROCESS_COUNT": str(request.processes),
        "UNTILDONE_COORDINATOR": f"127.0.0.1:{port}",
    }


def cascade_order(pod: Pod) -> int:
    """Which of several processes found dead at the same moment died first, most likely: lower is earlier.

    A signal from outside or a deliberate exit code starts a cascade; exit 1 ("Socket closed") and SIGABRT (the
    coordination service giving up) are how its peers die of it.
    """
    if pod.signal is not None:
        return 3 if pod.signal == signal.SIGABRT else 0
    return {0: 4, 1: 2}.get(pod.exit_code or 0, 1)


class Trainers:
    """The processes of one admission. Writes how each ended into the admission's pods; the caller stores them."""

    def __init__(self, admission: AdmissionState) -> None:
        self._admission = admission
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._pidfds: dict[int, int] = {}
        self._poll = select.poll()

    def start(self, request: Request, folder: Path) -> None:
        """Start one process per pod. One that cannot be started counts as ended with exit code 127."""
        port = free_port()
        logs = folder / "logs" / str(self._number(folder))
        for pod in self._admission.pods:
            env = gang_environment(request, self._admission, pod, port)
            try:
                process = spawn(request.command, env, request.cwd, logs / f"{pod.rank}.log")
            except OSError as error:
                pod.exit_code, pod.ended = CANNOT_START, time.time()
                self._admission.pod_signals.append(Signal(f"pod {request.name}-{pod.rank}", "StartError", str(error)))
                continue
            pod.pid, pod.ticks = process.pid, start_ticks(process.pid)
            self._running[pod.rank] = process
            descriptor = os.pidfd_open(process.pid)
            self._pidfds[descriptor] = pod.rank
            self._poll.register(descriptor, select.POLLIN)

    @staticmethod
    def _number(folder: Path) -> int:
        try:
            return 1 + max((int(n) for n in os.listdir(folder / "logs") if n.isdigit()), default=0)
        except FileNotFoundError:
            return 1

    @property
    def alive(self) -> int:
        return len(self._running)

    def deaths(self, timeout: float) -> list[Pod]:
        """Wait up to `timeout` seconds; the pods that ended, in the order in which they died as far as can be told."""
        dead: list[Pod] = []
        for descriptor, _ in self._poll.poll(max(0.0, timeout) * 1000):
            rank = self._pidfds.pop(descriptor)
            self._poll.unregister(descriptor)
            os.close(descriptor)
            dead.append(self._reap(rank))
        dead.sort(key=cascade_order)
        now = time.time()
        for position, pod in enumerate(dead):
            pod.ended = now + position * 1e-6  # readers order the containers of a gang by this
        return dead

    def _reap(self, rank: int) -> Pod:
        process = self._running.pop(rank)
        # Its own children first: until the leader is waited for, its process group id cannot be used again.
        _kill_group(process.pid)
        code = process.wait()
        pod = next(p for p in self._admission.pods if p.rank == rank)
        if code < 0:
            pod.signal = -code
        else:
            pod.exit_code = code
        return pod

    def terminate(self) -> None:
        """SIGTERM to each process, as a node does to the first process of a container."""
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to each process and its children; works on stopped ones too."""
        for process in self._running.values():
            _kill_group(process.pid)


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
