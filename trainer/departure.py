"""The one way out of the trainer.

Interpreter exit would run JAX's atexit barrier, which waits for peers that may never come, and join Orbax's threads.
So every end goes through `Departure.leave`: hooks with a deadline each (a dead store cannot hold the process), then
`os._exit`.
"""

import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from trainer.errors import ExitCode, TrainerError

HOOK_SECONDS = 5.0

# What the runtime says when another process of the gang is gone. The cause is that process's, not ours.
_PEER_LOSS = (
    "gloo",
    "connection closed by peer",
    "connection reset by peer",
    "socket closed",
    "coordination service",
    "coordinationservice",
    "heartbeat",
    "another task",
    "barrier failed",
    "peer task",
    "preemption_sync",
)


@dataclass(frozen=True)
class End:
    """How this process ends. `code` is an ExitCode, or PEER_LOST: SIGABRT, which is how JAX itself dies of it."""

    code: int
    reason: str
    error: str = ""
    traceback: str = ""
    cascade: bool = False  # another process of the gang said so first


PEER_LOST = 128 + signal.SIGABRT


def end_of(error: BaseException) -> End:
    """The End that `error` calls for."""
    text = f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, TrainerError):
        return End(int(error.exit_code), str(error), text, trace)
    if is_peer_loss(error):
        return End(PEER_LOST, "lost another process of the gang", text, trace, cascade=True)
    if isinstance(error, OSError):
        return End(int(ExitCode.STORAGE_UNAVAILABLE), f"storage: {error}", text, trace)
    return End(int(ExitCode.APPLICATION_ERROR), text.splitlines()[0], text, trace)


def is_peer_loss(error: BaseException) -> bool:
    """Whether the runtime reports that another process died; TrainerErrors and ordinary Python errors never are."""
    if type(error).__name__ not in ("XlaRuntimeError", "JaxRuntimeError", "ValueError", "RuntimeError"):
        return False
    text = str(error).lower()
    return any(sign in text for sign in _PEER_LOSS)


@dataclass
class Departure:
    """Ends the process once, from whichever thread comes first."""

    hooks: list[tuple[str, Callable[[End], None]]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _leaving: int | None = None

    def before_leaving(self, name: str, hook: Callable[[End], None]) -> None:
        """Run `hook(end)` on the way out, in the order of registration; it may fail or hang without harm."""
        self.hooks.append((name, hook))

    def leave(self, end: End) -> NoReturn:
        """Run the hooks and end the process with `end.code`. A second caller waits for the first to end it."""
        with self._lock:
            first = self._leaving is None
            if first:
                self._leaving = threading.get_ident()
        if not first and self._leaving != threading.get_ident():
            time.sleep(HOOK_SECONDS * (len(self.hooks) + 1))
            os._exit(end.code)
        if first:
            for name, hook in self.hooks:
                _with_deadline(name, hook, end)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass
        if end.code == PEER_LOST:
            _abort()
        os._exit(end.code)

    def fail(self, error: BaseException) -> NoReturn:
        """Leave because of `error`."""
        self.leave(end_of(error))


def _with_deadline(name: str, hook: Callable[[End], None], end: End) -> None:
    def run() -> None:
        try:
            hook(end)
        except Exception as error:
            print(f"while leaving: {name}: {type(error).__name__}: {error}", file=sys.stderr)

    thread = threading.Thread(target=run, name=f"leave-{name}", daemon=True)
    thread.start()
    thread.join(HOOK_SECONDS)
    if thread.is_alive():
        print(f"while leaving: {name} took longer than {HOOK_SECONDS:.0f} s; going on without it", file=sys.stderr)


def _abort() -> NoReturn:
    """Die of SIGABRT without a core file: a gang that lost a peer ends the same way whether JAX or we noticed first."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGABRT})
    import faulthandler

    faulthandler.disable()
    # From a thread signal.signal() is refused; the default disposition is in place unless faulthandler took it.
    os.kill(os.getpid(), signal.SIGABRT)
    time.sleep(1)
    os._exit(PEER_LOST)
