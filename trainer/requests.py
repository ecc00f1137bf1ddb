"""Requests in the run directory, and how all processes come to commit, or to trace, the same steps for them.

Rank 0 looks for requests in a thread of its own. The step is agreed upon through the coordination service, by threads
as well: every process promises the newest step it has handed to its devices and holds the next one until it hears the
verdict, which is one step after the highest promise. So nobody has passed that step, and everybody knows of it in
time; the training loop itself looks at a variable under a lock, and waits only while a verdict is on its way. A commit
is due at that step, a profile (trainer.profiles) begins after it at the earliest.
"""

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

from trainer.departure import Departure
from trainer.distributed import Gang
from trainer.errors import ConfigurationError
from trainer.log import log
from trainer.profiles import Order, Wanted, refusal
from trainer.rundir.claims import Claim
from trainer.rundir.profiles import new_identifier
from trainer.rundir.records import Request, RequestBegun, RequestDone
from trainer.rundir.rundir import RunDirectory

EVERY_SECONDS = 10.0  # at most, between two looks
Signalled = Literal["profile", "dump"]


class Agreement:
    """One process's part in agreeing on a step. The loop calls `reached` after each step, a thread the rest."""

    def __init__(self, step: int) -> None:
        self.step = step  # the newest one handed to the devices
        self.begun = -1  # the newest one whose commit was begun
        self._promised: int | None = None
        self._due: set[int] = set()  # several: process 0 may be a step or two ahead and ask again
        self._orders: list[Order] = []
        self._changed = threading.Condition()

    def reached(self, step: int) -> bool:
        """The loop has handed `step` to the devices; whether it is to be committed because somebody asked.

        Waits while this process has promised not to get that far.
        """
        with self._changed:
            while self.holds(step):
                self._changed.wait()
            self.step = step
            due = step in self._due
            self._due.discard(step)
            return due

    def holds(self, step: int) -> bool:
        """Whether the loop would have to wait for a verdict at `step`."""
        return self._promised is not None and step > self._promised

    def promise(self) -> int:
        """The newest step handed to the devices; the loop gets no further until `settle`."""
        with self._changed:
            self._promised = self.step
            return self._promised

    def settle(self, step: int, number: int = 0, wanted: Wanted | None = None) -> None:
        """The verdict of agreement `number`: all processes commit `step`; or trace what is `wanted`, after it."""
        with self._changed:
            assert self._promised is not None and step > self._promised
            if wanted is None:
                self._due.add(step)
            else:
                self._orders.append(Order(wanted, number, max(step + 1, wanted.at or 0)))
            self._promised = None
            self._changed.notify_all()

    def profile_due(self) -> Order | None:
        """The order that begins with the next step, or that had to wait for another's end; handed out once.

        An order begins after the step it was agreed at, so that every process knows of it there: all get the same one.
        """
        with self._changed:
            due = [order for order in self._orders if order.first <= self.step + 1]
            if not due:
                return None
            order = min(due, key=lambda order: (order.first, order.number))
            self._orders.remove(order)
            return replace(order, first=self.step + 1)


def verdict(promises: Iterable[int]) -> int:
    """The first step that no process has passed."""
    return max(promises) + 1


class Waiting:
    """Requests without an answer, each with the least step whose commit is one: the newest when it was seen."""

    def __init__(self) -> None:
        self._needs: dict[str, int] = {}

    def see(self, identifiers: Iterable[str], step: int) -> None:
        """These wait, at `step`. Step 0 is nobody's commit."""
        for identifier in identifiers:
            self._needs.setdefault(identifier, max(step, 1))

    def answered_by(self, committed: int) -> list[str]:
        """Whom a commit of step `committed` answers."""
        return sorted(identifier for identifier, need in self._needs.items() if need <= committed)

    def done(self, identifier: str) -> None:
        self._needs.pop(identifier, None)

    def unmet(self, begun: int) -> bool:
        """Whether somebody waits whom no commit begun or agreed upon so far will answer."""
        return any(need > begun for need in self._needs.values())


class Requests:
    """Rank 0's: finds requests, sees to a commit or a profile, and answers commits once they are there.

    A commit is asked of one attempt, and of whichever of its starts: the next one answers with what it restored, since
    nothing that was done later exists any more. Profiles are taken by whichever start gets there, of any attempt.
    """

    def __init__(
        self,
        claim: Claim,
        rundir: RunDirectory,
        gang: Gang,
        agreement: Agreement,
        signalled: "queue.SimpleQueue[Signalled] | None" = None,
    ) -> None:
        self._claim, self._rundir, self._gang, self._agreement = claim, rundir, gang, agreement
        self._signalled: queue.SimpleQueue[Signalled] = signalled or queue.SimpleQueue()
        self._waiting = Waiting()
        self._settled: set[str] = set()  # nothing is left to do here: not ours, or a profile agreed upon
        self._profiles: dict[str, Request] = {}  # seen, not agreed upon yet; dumps that wait for a program
        self.dump: Callable[[str, int], None] | None = None  # Profiles.dump, once there is a program
        self._agreed, self._calls = -1, 0
        self._lock = threading.Lock()
        self._wake = threading.Event()

    def start(self, every_seconds: float, departure: Departure) -> None:
        """Look every so often, at least every 10 s, and after each commit."""
        arguments = (min(every_seconds, EVERY_SECONDS), departure)
        threading.Thread(target=self._run, args=arguments, name="requests", daemon=True).start()

    def committed(self) -> None:
        """There is a new commit: look at once."""
        self._wake.set()

    def look(self) -> None:
        """Find new requests, and answer those that the newest commit answers. Raises what the store raises."""
        with self._lock:
            found = []
            for name in self._rundir.unanswered():
                if name in self._settled or name in self._profiles:
                    continue
                request = self._read(name)
                if request is not None and request.kind == "commit":
                    found.append(name)
                elif request is not None:
                    self._see_profile(name, request)
            # Only now: no step done before somebody asked may be missing.
            self._waiting.see(found, self._agreement.step)
            self._answer()

    def close(self) -> None:
        """The target is committed: profiles that were not begun never will be, nor is one completed that is unwritten."""
        with self._lock:
            for name in self._rundir.unanswered():
                if self._is_profile(name):
                    begun = self._rundir.read_begun(name)
                    self._refuse(name, "the run reached its target before" if begun is None else _in_the_midst(begun))

    def _read(self, name: str) -> Request | None:
        """A request for this start. What cannot be read is nobody's; it must not hold up the others."""
        try:
            request = self._rundir.read_request(name)
        except ConfigurationError as error:
            log().warning("a request is not understood and gets no answer", request=name, error=str(error))
            request = None
        if request is not None and (request.kind != "commit" or request.attempt == self._claim.attempt):
            return request
        self._settled.add(name)
        return None

    def _is_profile(self, name: str) -> bool:
        request = self._read(name)
        return request is not None and request.kind != "commit"

    def _see_profile(self, name: str, request: Request) -> None:
        try:
            begun = self._rundir.read_begun(name)
        except ConfigurationError as error:
            log().warning("somebody began a profile, and who is not understood: not begun again", error=str(error))
            self._settled.add(name)
            return
        if begun is None:
            self._profiles[name] = request
            return
        self._refuse(name, f"{_in_the_midst(begun)}; ask again")

    def _refuse(self, name: str, why: str) -> None:
        if self._claim.still_current():
            self._rundir.answer(name, refusal(self._claim.attempt, self._claim.start, why, self._rundir.clock()))
            self._settled.add(name)
            log().warning("no profile", request=name, reason=why)

    def _answer(self) -> None:
        ref = self._claim.commit_ref
        names = self._waiting.answered_by(ref.step) if ref else []
        if ref is None or not names or not self._claim.still_current():  # a later start answers for itself
            return
        for identifier in names:
            done = RequestDone(
                attempt=self._claim.attempt, start=self._claim.start, step=ref.step, time=self._rundir.clock()
            )
            self._rundir.answer(identifier, done)
            self._waiting.done(identifier)
            log().info("commit on request", request=identifier, step=ref.step)

    def _run(self, every: float, departure: Departure) -> None:
        while True:
            try:
                self._write_signalled()
                self.look()
            except Exception as error:  # the next look finds them again
                log().warning("requests could not be read or answered; trying again", error=str(error))
            try:
                if self._waiting.unmet(max(self._agreement.begun, self._agreed)):
                    self._agreed = self._lead(None)
                self._start_profiles()
            except Exception as error:  # the loop is held: without a verdict nothing goes on
                departure.fail(error)
            self._wake.wait(every)
            self._wake.clear()

    def _write_signalled(self) -> None:
        """A signal asks for what a file would ask for, and leaves the same trace."""
        while not self._signalled.empty():
            now, kind = self._rundir.clock(), self._signalled.get()
            self._rundir.request(
                new_identifier(now), Request(kind=kind, attempt=self._claim.attempt, reason="signal", time=now)
            )

    def _start_profiles(self) -> None:
        """Agree on the steps of each profile that was asked for; have programs written."""
        for name, request in list(self._profiles.items()):
            if request.kind == "profile":
                self._lead(Wanted(name, request.at, request.steps, request.everybody))
            elif self.dump is not None:
                self.dump(name, self._agreement.step)
            else:
                continue  # nothing is compiled yet
            self._settled.add(name)
            del self._profiles[name]

    def _lead(self, wanted: Wanted | None) -> int:
        self._calls += 1
        return lead(self._gang, self._agreement, self._calls, wanted)


def _in_the_midst(begun: RequestBegun) -> str:
    place = f"attempts/{begun.attempt}/{begun.start}/profiles/step-{begun.first}"
    return f"start {begun.attempt}.{begun.start} ended in the midst of it (what there is: {place})"


def lead(gang: Gang, agreement: Agreement, number: int, wanted: Wanted | None = None) -> int:
    """Process 0: the step of agreement `number`, counted from 1, on a commit or on a profile that is `wanted`."""
    if gang.processes > 1:
        gang.set(f"asked/{number}", wanted.to_text() if wanted else "")
    promises = [agreement.promise()]
    promises += [int(gang.get(f"asked/{number}/{rank}")) for rank in range(1, gang.processes)]
    step = verdict(promises)
    if gang.processes > 1:
        gang.set(f"asked/{number}/step", str(step))
    agreement.settle(step, number, wanted)
    return step


def follow(gang: Gang, agreement: Agreement, departure: Departure) -> None:
    """On every other process: take part in agreements from a thread, for as long as the gang lives."""

    def run() -> None:
        number = 1
        while (asked := gang.wait_for(f"asked/{number}")) is not None:
            try:
                wanted = Wanted.of_text(asked) if asked else None
                gang.set(f"asked/{number}/{gang.rank}", str(agreement.promise()))
                agreement.settle(int(gang.get(f"asked/{number}/step")), number, wanted)
            except Exception as error:  # as on process 0
                departure.fail(error)
            number += 1

    threading.Thread(target=run, name="agreement", daemon=True).start()
