"""Commit now: requests in the run directory, and how all processes come to commit the same step for them.

Rank 0 looks for requests in a thread of its own. The step is agreed upon through the coordination service, by threads
as well: every process promises the newest step it has handed to its devices and holds the next one until it hears the
verdict, which is one step after the highest promise. So nobody has passed that step, and everybody knows of it in
time; the training loop itself looks at a variable under a lock, and waits only while a verdict is on its way.
"""

import threading
from collections.abc import Iterable

from trainer.departure import Departure
from trainer.distributed import Gang
from trainer.errors import ConfigurationError
from trainer.log import log
from trainer.rundir.claims import Claim
from trainer.rundir.records import RequestDone
from trainer.rundir.rundir import RunDirectory

EVERY_SECONDS = 10.0  # at most, between two looks


class Agreement:
    """One process's part in agreeing on a step. The loop calls `reached` after each step, a thread the rest."""

    def __init__(self, step: int) -> None:
        self.step = step  # the newest one handed to the devices
        self.begun = -1  # the newest one whose commit was begun
        self._promised: int | None = None
        self._due: set[int] = set()  # several: process 0 may be a step or two ahead and ask again
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

    def settle(self, step: int) -> None:
        """The verdict: all processes commit `step`."""
        with self._changed:
            assert self._promised is not None and step > self._promised
            self._due.add(step)
            self._promised = None
            self._changed.notify_all()


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
    """Rank 0's: finds requests of its own attempt, sees to a commit, and answers once that is committed.

    A request outlives the start that saw it: the next start of the attempt answers with what it restored, since
    nothing that was done later exists any more.
    """

    def __init__(self, claim: Claim, rundir: RunDirectory, gang: Gang, agreement: Agreement) -> None:
        self._claim, self._rundir, self._gang, self._agreement = claim, rundir, gang, agreement
        self._waiting = Waiting()
        self._others: set[str] = set()  # requests that are not ours to answer
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
            found = [name for name in self._rundir.unanswered() if name not in self._others and self._ours(name)]
            # Only now: no step done before somebody asked may be missing.
            self._waiting.see(found, self._agreement.step)
            self._answer()

    def _ours(self, name: str) -> bool:
        """Whether a request is for this attempt. What cannot be read is nobody's; it must not hold up the others."""
        try:
            request = self._rundir.read_request(name)
        except ConfigurationError as error:
            log().warning("a request is not understood and gets no answer", request=name, error=str(error))
            request = None
        if request is not None and request.attempt == self._claim.attempt:
            return True
        self._others.add(name)
        return False

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
                self.look()
            except Exception as error:  # the next look finds them again
                log().warning("requests could not be read or answered; trying again", error=str(error))
            if self._waiting.unmet(max(self._agreement.begun, self._agreed)):
                self._calls += 1
                try:
                    self._agreed = lead(self._gang, self._agreement, self._calls)
                except Exception as error:  # the loop is held: without a verdict nothing goes on
                    departure.fail(error)
            self._wake.wait(every)
            self._wake.clear()


def lead(gang: Gang, agreement: Agreement, number: int) -> int:
    """Process 0: the step of agreement `number`, counted from 1."""
    if gang.processes > 1:
        gang.set(f"commit/{number}", "")
    promises = [agreement.promise()]
    promises += [int(gang.get(f"commit/{number}/{rank}")) for rank in range(1, gang.processes)]
    step = verdict(promises)
    if gang.processes > 1:
        gang.set(f"commit/{number}/step", str(step))
    agreement.settle(step)
    return step


def follow(gang: Gang, agreement: Agreement, departure: Departure) -> None:
    """On every other process: take part in agreements from a thread, for as long as the gang lives."""

    def run() -> None:
        number = 1
        while gang.wait_for(f"commit/{number}") is not None:
            try:
                gang.set(f"commit/{number}/{gang.rank}", str(agreement.promise()))
                agreement.settle(int(gang.get(f"commit/{number}/step")))
            except Exception as error:  # as on process 0
                departure.fail(error)
            number += 1

    threading.Thread(target=run, name="agreement", daemon=True).start()
