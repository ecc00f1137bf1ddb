"""The gang: joining, agreeing, SIGTERM, and telling each other why one leaves.

Everything here goes through the coordination service's key-value store, not through the devices: it works before a
backend exists, while a collective hangs, and costs no compilation. The service starts for one process as well.
"""

import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trainer.errors import ConfigurationError, MixedGang

PREFIX = "untildone/"
_STOP = "stop"


@dataclass(frozen=True)
class Identity:
    """What every process of one gang must agree on before one of them may claim."""

    attempt: int
    nonce: str
    fingerprint: str
    image: str
    processes: int


def compare(identities: list[Identity]) -> None:
    """Raises MixedGang naming the first process that differs from process 0, and in what."""
    first = identities[0]
    for rank, other in enumerate(identities):
        for name in Identity.__dataclass_fields__:
            mine, theirs = getattr(first, name), getattr(other, name)
            if mine != theirs:
                raise MixedGang(
                    f"mixed gang: {name} is {mine!r} on process 0 and {theirs!r} on process {rank}; "
                    "these processes belong to different attempts and must not train together"
                )


@dataclass
class Gang:
    """The processes of one start, joined. Keys are used once each, except those written with `tell`."""

    rank: int
    processes: int
    client: Any
    timeout_seconds: float
    _ended: threading.Event = field(default_factory=threading.Event)

    def set(self, key: str, value: str) -> None:
        self.client.key_value_set(PREFIX + key, value)

    def get(self, key: str, seconds: float | None = None) -> str:
        """The value of `key`, waiting for it. Raises the client's DEADLINE_EXCEEDED after `seconds`."""
        value = self.client.blocking_key_value_get(PREFIX + key, int(1000 * (seconds or self.timeout_seconds)))
        assert isinstance(value, str)
        return value

    def gather(self, key: str, value: str) -> list[str] | None:
        """Every process gives `value`; process 0 gets all, by rank, the others None."""
        if self.processes == 1:
            return [value]
        if self.rank:
            self.set(f"{key}/{self.rank}", value)
            return None
        return [value, *(self.get(f"{key}/{rank}") for rank in range(1, self.processes))]

    def decide(self, key: str, value: str | None) -> str:
        """Process 0 decides `value`; all return it."""
        if self.rank == 0:
            assert value is not None
            if self.processes > 1:
                self.set(key, value)
            return value
        return self.get(key)

    def tell(self, key: str, value: str) -> None:
        """Overwrite this process's line under `key`; lossy, for heartbeats."""
        self.client.key_value_set(f"{PREFIX}{key}/{self.rank:06d}", value, allow_overwrite=True)

    def told(self, key: str) -> list[str]:
        """The newest lines under `key`, by rank; processes that said nothing yet are missing."""
        return [value for _, value in sorted(self.client.key_value_dir_get(f"{PREFIX}{key}/"))]

    # --- leaving together

    def listen(self, on_stop: Callable[[int, str], None]) -> None:
        """Call `on_stop(code, reason)` from a thread when another process says that the gang ends."""
        if self.processes > 1:
            threading.Thread(target=self._listen, args=(on_stop,), name="gang", daemon=True).start()

    def _listen(self, on_stop: Callable[[int, str], None]) -> None:
        text = self.wait_for(_STOP)
        if text is not None and (said := json.loads(text))["rank"] != self.rank:
            on_stop(said["code"], f"process {said['rank']}: {said['reason']}")

    def wait_for(self, key: str) -> str | None:
        """The value of `key`, however long that takes; None once this process is leaving. For threads that listen."""
        while not self._ended.is_set():
            try:
                return self.get(key, 3600)
            except Exception:
                if self._ended.wait(0.2):
                    break
        return None

    def stop(self, code: int, reason: str) -> None:
        """Tell the others to end with `code`; the first to say so wins."""
        self._ended.set()
        if self.processes == 1:
            return
        try:
            self.set(_STOP, json.dumps({"code": code, "reason": reason, "rank": self.rank}))
        except Exception:
            pass  # somebody else was first, or the service is gone: either way the gang is ending

    def leave(self) -> None:
        """The last call before the process ends: process 0 waits up to 2 s until the others are about to be gone.

        It holds the coordination service: when that disappears, JAX aborts whoever is still there.
        """
        if self.processes == 1:
            return
        if self.rank:
            self.set(f"left/{self.rank}", "")
            return
        for rank in range(1, self.processes):
            self.get(f"left/{rank}", 2)
        threading.Event().wait(0.05)


def join(coordinator: str, processes: int, rank: int, heartbeat_seconds: int, timeout_seconds: float) -> Gang:
    """Join the gang without letting JAX touch SIGTERM.

    Raises ConfigurationError when `coordinator` is no host:port. JAX's own preemption service is started later, by
    `Termination.hand_over`: before the claim a SIGTERM ends the process at once.
    """
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigurationError(f"coordinator {coordinator!r}: give host:port of process 0")
    import jax
    from jax._src import distributed

    jax.config.update("jax_enable_preemption_service", False)
    if processes == 1:
        # JAX takes gloo on the CPU as soon as there is a distributed client: TCP, thousands of context switches a step,
        # for devices that share their memory. None is the backend's own; the environment variable cannot say it.
        jax.config.update("jax_cpu_collectives_implementation", None)
    jax.distributed.initialize(
        coordinator_address=coordinator,
        num_processes=processes,
        process_id=rank,
        initialization_timeout=int(timeout_seconds),
        heartbeat_timeout_seconds=heartbeat_seconds,
        coordinator_bind_address=_own_address(host, port) if rank == 0 else None,
        cluster_detection_method="deactivate",
    )
    return Gang(rank, processes, distributed.global_state.client, timeout_seconds)


def _own_address(host: str, port: str) -> str | None:
    """The coordinator's name as an address of this machine to bind to; None (all addresses) when it is not one."""
    try:
        address = socket.gethostbyname(host)
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError:
        return None
    return f"{address}:{port}"


def free_port() -> int:
    """A TCP port that was free a moment ago, for a gang of one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Termination:
    """SIGTERM. Until `hand_over` it ends the process at once, nothing to save; then JAX's sync point decides the step.

    Python runs signal handlers on the main thread, between bytecodes, and that thread may sit in a compilation for
    minutes; the wake-up pipe is written by the C handler, so a thread of ours hears of it immediately.
    """

    def __init__(self, terminated: Callable[[], None]) -> None:
        self.seen = False
        self._terminated = terminated
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        signal.signal(signal.SIGTERM, self._mark)
        signal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM))  # Ctrl-C asks for the same end
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="sigterm", daemon=True).start()

    def _mark(self, *_: object) -> None:
        self.seen = True

    def _watch(self) -> None:
        while True:
            if signal.SIGTERM in os.read(self._read, 64):
                self.seen = True
                self._terminated()

    def hand_over(self) -> None:
        """From now on `reached_preemption_sync_point` answers. A SIGTERM that fell between the two is sent again."""
        import jax
        from jax._src import distributed

        signal.set_wakeup_fd(-1)
        jax.config.update("jax_enable_preemption_service", True)
        distributed.global_state.initialize_preemption_sync_manager()
        if self.seen:
            os.kill(os.getpid(), signal.SIGTERM)
