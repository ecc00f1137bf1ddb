"""Profiles on request: a trace of some steps as xprof opens it, and the program that ran, into the start's folder.

The steps are agreed upon by all processes (trainer.requests), so that all of them wait alike before the first and after
the last one. A profile changes no number, is never begun twice, and never ends a run: whatever goes wrong is logged and
is the answer. Its files lie in attempts/<n>/<k>/profiles/step-<first>/.
"""

import json
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trainer.distributed import Gang
from trainer.log import log
from trainer.rundir.profiles import span
from trainer.rundir.records import RequestBegun, RequestDone
from trainer.rundir.rundir import RunDirectory
from trainer.rundir.store import AlreadyExists

MARK_SECONDS = 10.0  # all processes wait for the run directory so long, once per profile
PEERS_SECONDS = 300.0  # until every process has delivered its trace
PROGRAM = "train_step.hlo.txt"


@dataclass(frozen=True)
class Wanted:
    """A profile as it was asked for: process 0 tells the others."""

    identifier: str
    at: int | None
    steps: int
    everybody: bool

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> "Wanted":
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Order:
    """A profile that all processes agreed upon, in their `number`-th agreement: `steps` steps from `first` on."""

    wanted: Wanted
    number: int
    first: int

    @property
    def last(self) -> int:
        return self.first + self.wanted.steps - 1


class Orders(Protocol):
    """Where orders come from: trainer.requests.Agreement."""

    def profile_due(self) -> Order | None:
        """The order whose first step is next; it is handed out once."""


@dataclass
class Taking:
    """A profile in the making. `session` is None on a process that takes no trace, and where it failed."""

    order: Order
    session: Any = None
    failed: str = ""


@dataclass
class Profiles:
    """One process's part. The loop calls `begin` between two steps, `step` around each, `end` after the last one."""

    gang: Gang
    rundir: RunDirectory
    attempt: int
    start: int
    program: Callable[[], str]  # the text of the train step's executable
    orders: Orders
    patient: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
    new_session: Callable[[str], Any] = field(default_factory=lambda: _session)
    _taking: Taking | None = None
    _deliveries: list[threading.Thread] = field(default_factory=list)

    # --- in the loop

    def due(self) -> Order | None:
        """The order that begins with the next step, if no other is being taken. All processes get the same one."""
        return None if self._taking is not None else self.orders.profile_due()

    def begin(self, order: Order) -> None:
        """Start tracing, on all processes or on none: nothing is running on the devices now."""
        if self._agree(order) and (self.gang.rank == 0 or order.wanted.everybody):
            assert self._taking is not None
            try:
                self._taking.session = self.new_session(order.wanted.identifier)
            except Exception as error:
                self._fail(self._taking, "the profiler did not start", error)

    def step(self, step: int) -> AbstractContextManager[Any]:
        """Around the call of the train step that completes `step`: xprof shows its number."""
        if self._taking is None or self._taking.session is None:
            return nullcontext()
        import jax

        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def ends_with(self, step: int) -> bool:
        """Whether `step` is the last of the profile that is being taken."""
        return self._taking is not None and step >= self._taking.order.last

    @property
    def taking(self) -> bool:
        return self._taking is not None

    def end(self, step: int) -> None:
        """Stop tracing: `step` is the last, and the devices have finished it. The rest is done by a thread."""
        taking, self._taking = self._taking, None
        assert taking is not None
        if taking.session is not None:
            try:
                with self.patient(f"the profile of step {step}"):
                    taking.session.stop()
            except Exception as error:
                taking.session = None
                self._fail(taking, "the profiler did not stop in order", error)
        self._in_background(lambda: self._deliver(taking, step))

    def drain(self, seconds: float) -> None:
        """Wait for what is being delivered, at most so long."""
        until = time.monotonic() + seconds
        for thread in self._deliveries:
            thread.join(max(0.0, until - time.monotonic()))

    # --- asked for without a trace

    def dump(self, identifier: str, step: int) -> None:
        """Process 0: write the program alone. `step` is the newest one."""
        taking = Taking(Order(Wanted(identifier, None, 1, False), 0, step))
        self._in_background(lambda: self._answer(taking, step, traced=False))

    # --- inside

    def _agree(self, order: Order) -> bool:
        """Whether the profile is begun: process 0 has it on record that it is, so that no later start begins it again."""
        said = None
        if self.gang.rank == 0:
            said = self._mark(order)
        said = self.gang.decide(f"profile/{order.number}", said)
        if not said:
            self._taking = Taking(order)
            return True
        if self.gang.rank == 0:
            self._in_background(lambda: self._refuse(order.wanted.identifier, said))
        return False

    def _mark(self, order: Order) -> str:
        """ "", or why the profile cannot begin. A store that does not answer must not hold the training up for long."""
        begun = RequestBegun(
            attempt=self.attempt, start=self.start, first=order.first, last=order.last, time=self.rundir.clock()
        )
        found = ["the run directory did not answer"]

        def write() -> None:
            try:
                if not self._current():
                    found[0] = "a later start has taken the run over"
                elif self.rundir.begin(order.wanted.identifier, begun):
                    found[0] = ""
                else:
                    found[0] = "another start has begun it"
            except Exception as error:
                found[0] = f"the run directory cannot be written ({error})"

        thread = threading.Thread(target=write, name="profile", daemon=True)
        thread.start()
        thread.join(MARK_SECONDS)
        return found[0] if not thread.is_alive() else f"the run directory did not answer within {MARK_SECONDS:.0f} s"

    def _current(self) -> bool:
        """Whether the run is still this start's, by HEAD; which commit it names does not matter."""
        found = self.rundir.head()
        return found is not None and (found[0].attempt, found[0].start) == (self.attempt, self.start)

    def _in_background(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:
                log().warning("a profile could not be completed", error=f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=run, name="profile", daemon=True)
        self._deliveries = [t for t in self._deliveries if t.is_alive()] + [thread]
        thread.start()

    def _deliver(self, taking: Taking, last: int) -> None:
        """Write this process's trace into the run directory; process 0 waits for the others' and answers."""
        order = taking.order
        if taking.session is not None:
            try:
                self._upload(taking, self._folder(order.first))
            except Exception as error:
                self._fail(taking, "the trace could not be written", error)
            taking.session = None  # it holds the whole trace
        if self.gang.rank and order.wanted.everybody:
            self.gang.set(f"profile/{order.number}/{self.gang.rank}", taking.failed)
        if self.gang.rank == 0:
            if order.wanted.everybody:
                taking.failed = "; ".join(filter(None, [taking.failed, *self._others(order)]))
            self._answer(taking, last, traced=True)

    def _upload(self, taking: Taking, folder: str) -> None:
        """As xprof expects it: plugins/profile/<session>/<host>.xplane.pb below the folder it is pointed at."""
        session = taking.order.wanted.identifier
        local = Path(tempfile.mkdtemp(prefix="untildone-profile-"))
        try:
            taking.session.export_profile_data(str(local), session_id=session)
            found = sorted(local.rglob("*.xplane.pb"))
            if not found:
                raise RuntimeError("the profiler wrote no trace")
            for file in found:
                name = f"{self.gang.rank:05d}-{socket.gethostname()}.xplane.pb"
                self._create(f"{folder}/plugins/profile/{session}/{name}", file)
        finally:
            shutil.rmtree(local, ignore_errors=True)

    def _others(self, order: Order) -> list[str]:
        """What went wrong on the other processes."""
        found = []
        for rank in range(1, self.gang.processes):
            try:
                said = self.gang.get(f"profile/{order.number}/{rank}", PEERS_SECONDS)
            except Exception:
                said = "its trace did not come"
            found.append(f"process {rank}: {said}" if said else "")
        return found

    def _answer(self, taking: Taking, last: int, traced: bool) -> None:
        """Process 0: the program's text, then the answer."""
        identifier, folder = taking.order.wanted.identifier, self._folder(taking.order.first)
        local = Path(tempfile.mkdtemp(prefix="untildone-program-"))
        try:
            (local / PROGRAM).write_text(self.program())
            with suppress(AlreadyExists):  # another profile from the same step: the same program
                self._create(f"{folder}/{PROGRAM}", local / PROGRAM)
        except Exception as error:
            self._fail(taking, "the program could not be written", error)
        finally:
            shutil.rmtree(local, ignore_errors=True)
        done = RequestDone(
            attempt=self.attempt,
            start=self.start,
            first=taking.order.first if traced else None,
            step=last,
            place=folder,
            failed=taking.failed,
            time=self.rundir.clock(),
        )
        self._say(identifier, done)

    def _refuse(self, identifier: str, why: str) -> None:
        self._say(identifier, refusal(self.attempt, self.start, why, self.rundir.clock()))

    def _say(self, identifier: str, done: RequestDone) -> None:
        if not self._current():
            return  # fenced: nothing of the run is ours to write
        self.rundir.answer(identifier, done)
        if done.failed:
            log().warning("no profile, or not all of it", request=identifier, reason=done.failed)
        else:
            steps = {} if done.first is None else {"steps": span(done.first, done.step)}
            log().info("profile on request", request=identifier, **steps, place=self.rundir.path(done.place))

    def _fail(self, taking: Taking, what: str, error: Exception) -> None:
        why = f"{what}: {type(error).__name__}: {error}"
        taking.failed = f"{taking.failed}; {why}" if taking.failed else why

    def _folder(self, first: int) -> str:
        return f"attempts/{self.attempt}/{self.start}/profiles/step-{first}"

    def _create(self, key: str, file: Path) -> None:
        self.rundir.patient(lambda: self.rundir.store.create_from_file(key, file))


def refusal(attempt: int, start: int, why: str, now: float) -> RequestDone:
    """The answer to a profile that was not taken."""
    return RequestDone(attempt=attempt, start=start, step=0, failed=why, time=now)


def _session(identifier: str) -> Any:
    """A running session of JAX's profiler. Python's own calls are left out: they are many, slow to trace, and say little."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 2
    options.raise_error_on_start_failure = True
    options.session_id = identifier
    return jax.profiler.ProfileSession(profiler_options=options).start()
