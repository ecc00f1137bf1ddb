"""JobSet and Kueue for one gang of the local cluster: `python -m orchestrator.clusters.gang_supervisor DIR NAME`.

One detached process per gang. It waits for quota, starts the trainers, takes the whole gang down when one of them dies,
brings it up again in place or fails it for good (by the rules our JobSets carry), gives its quota back when capacity
shrinks and queues again at its old place, and ends the gang when told. It decides nothing about the run: budgets,
causes and plans are the orchestrator's.

Trainers die with it (PR_SET_PDEATHSIG). When it is killed, the next supervisor of the gang proves that no process of
the attempt is left, records a host failure and goes on: as on Kubernetes, where the controllers outlive any node.
"""

import os
import signal
import sys
import time
import uuid
from enum import Enum
from pathlib import Path

from orchestrator.clusters import gang_state as state
from orchestrator.clusters.capacity import Claimant, admissible, in_use, limits, to_evict
from orchestrator.clusters.gang_state import AdmissionState, Hold, Pod, Request, Signal, Status
from orchestrator.clusters.processes import kill_all_with_nonce, start_ticks
from orchestrator.clusters.trainers import Trainers

# As the pod failure policy of our JobSets: these fail the gang, whatever else (signals, 75, 77, unknown) restarts it.
FATAL_EXIT_CODES = frozenset({1, 64, 74, 76, 78, 79})
ORDERLY_EXIT_CODES = frozenset({0, 75})
TICK_SECONDS = 0.1
# Peers of a dead process hang in a collective and will not leave by themselves; this is for their last words.
CASCADE_GRACE_SECONDS = 0.3
MIN_SECONDS_BETWEEN_STARTS = 0.5  # a gang that dies at once must not spin
UNREADABLE = (OSError, ValueError, KeyError, AttributeError)


class Outcome(Enum):
    """What follows one coming-up of the gang."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    RESTART = "Restart"
    REQUEUE = "Requeue"


class GangGoneError(Exception):
    """The gang's folder was removed from under us: nobody can see, steer or end this gang any more."""


class Supervisor:
    """Owns status.json of one gang for as long as it lives."""

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.folder = root / "gangs" / name
        self.request: Request = state.read_request(self.folder)
        self.status: Status = state.read_status(self.folder)
        self.shutdown = False
        self._claims: dict[Path, tuple[tuple[int, int], Claimant | None]] = {}
        self._unwritten = False
        self._deletion_seen: float | None = None

    def run(self) -> None:
        """Until the gang has succeeded, failed or is deleted."""
        if self._came_before():
            self._finish_deletion()
            return
        self._take_over()
        while True:
            if self._deletion() is not None:
                self._finish_deletion()
                return
            if self.status.phase in state.FINAL or self.shutdown:
                return
            if self.status.reserved is None:
                if not self._take_quota():
                    time.sleep(TICK_SECONDS)
            elif (evicted := self._evicted()) is not None:  # between two starts
                self._settle(Outcome.REQUEUE, evicted.value)
            else:
                self._settle(*self._admission())

    # -- beginning and end ------------------------------------------------------------------------------------------

    def _came_before(self) -> bool:
        """Whether a gang with our nonce was deleted already: a late second submission must not bring it up again."""
        own = f"{self.request.name}.{self.request.uid}"
        for folder in state.ended_folders(self.root):
            namesake = folder.name.startswith(f"{self.request.name}.") and folder.name != own
            if namesake and state.read_request(folder).nonce == self.request.nonce:
                return True
        return False

    def _take_over(self) -> None:
        """Account for what an earlier supervisor left: its processes are killed, its admission is a host failure."""
        left = self._prove_gone()
        admission = self.status.current
        if admission is None:
            return
        now = time.time()
        admission.ended = now
        admission.node_signals.append(
            Signal(
                "local node",
                "Ready",
                f"False: supervisor of gang {self.request.name} gone, {len(left)} processes left behind were killed",
            )
        )
        self.status.restart_attempt += 1
        self._write("supervisor gone; taken over")

    def _finish_deletion(self) -> None:
        self._prove_gone()
        if (admission := self.status.current) is not None:
            admission.ended = time.time()
        self.status.phase, self.status.reserved, self.status.queued_since = "Deleted", None, None
        self._write("deleted; every process is gone")
        while self._unwritten:
            time.sleep(TICK_SECONDS)
            self._write(self.status.message)
        os.rename(self.folder, self.root / "ended" / f"{self.request.name}.{self.request.uid}")

    def _prove_gone(self) -> list[int]:
        def tell(living: list[int]) -> None:
            self._write(f"waiting for processes that SIGKILL has not ended yet: {', '.join(map(str, living))}")

        return kill_all_with_nonce(self.request.nonce, tell)

    def _deletion(self) -> state.Deletion | None:
        if not self.folder.is_dir():
            raise GangGoneError(self.folder)
        return state.read_deletion(self.folder)

    def _write(self, message: str) -> None:
        """Publish the status. On a full disk training goes on; the caller's loop writes again."""
        self.status.message = message
        try:
            state.write_json(self.folder / "status.json", self.status)
            self._unwritten = False
        except OSError:
            if not self.folder.is_dir():
                raise GangGoneError(self.folder) from None
            self._unwritten = True

    # -- quota ------------------------------------------------------------------------------------------------------

    def _claimants(self) -> list[Claimant]:
        """Every gang of the cluster that has quota or waits for it, this one from memory."""
        claimants = [self._own_claim()]
        for folder in state.gang_folders(self.root):
            if folder != self.folder and (claim := self._claim_of(folder)) is not None:
                claimants.append(claim)
        return claimants

    def _own_claim(self) -> Claimant:
        return _claim(self.request, self.status)

    def _claim_of(self, folder: Path) -> Claimant | None:
        try:
            found = os.stat(folder / "status.json")
            mark = (found.st_mtime_ns, found.st_ino)
            if folder not in self._claims or self._claims[folder][0] != mark:
                status = state.read_status(folder)
                over = status.phase in (*state.FINAL, "Deleted")
                self._claims[folder] = (mark, None if over else _claim(state.read_request(folder), status))
            return self._claims[folder][1]
        except FileNotFoundError:  # deleted meanwhile
            return None

    def _take_quota(self) -> bool:
        """Reserve the gang's devices if it is its turn. The hold makes looking and taking one act across gangs."""
        hold = Hold(self.root / "admission.lock")
        if not hold.take():
            return False
        try:
            capacity, claimants = state.read_capacity(self.root), self._claimants()
            if self.request.uid in admissible(capacity, claimants):
                self.status.reserved, self.status.phase = time.time(), "Running"
                self._write("quota reserved")
                if not self._unwritten:
                    return True
                self.status.reserved, self.status.phase = None, "Queued"  # others could not see that it is taken
                return False
            message = self._why_waiting(capacity, claimants)
        except UNREADABLE as error:
            message = f"waiting: the capacity cannot be read ({error})"
        finally:
            hold.release()
        if message != self.status.message or self._unwritten:
            self._write(message)
        return False

    def _why_waiting(self, capacity: dict[str, int] | None, claimants: list[Claimant]) -> str:
        family, need = self.request.family, self.request.devices
        quota = limits(capacity).get(family, 0)
        if need > quota:
            return f"ExceedsMaxQuota: needs {need} {family} devices, the quota is {quota}"
        used = in_use(claimants, family)
        older = sum(not c.reserved and c.created < self.request.created for c in claimants)
        return f"WaitingForQuota: needs {need} {family} devices, {used} of {quota} are in use, {older} gangs wait ahead"

    def _evicted(self) -> Signal | None:
        """The evidence that this gang has to give its quota back now, or None. Unreadable capacity evicts nobody."""
        try:
            capacity = state.read_capacity(self.root)
        except UNREADABLE:
            return None
        if capacity is None and self.request.family == "cpu":
            return None
        claimants = self._claimants()
        if self.request.uid not in to_evict(capacity, claimants):
            return None
        family = self.request.family
        return Signal(
            f"local queue, gang {self.request.name}",
            "Evicted",
            f"Preempted: quota is {limits(capacity).get(family, 0)} {family} devices, "
            f"{in_use(claimants, family)} are in use, this gang holds {self.request.devices}",
        )

    # -- one coming-up ----------------------------------------------------------------------------------------------

    def _admission(self) -> tuple[Outcome, str]:
        """Start the trainers and see them through to their end; none is alive when this returns."""
        if self.status.admissions:
            since = time.time() - self.status.admissions[-1].began
            time.sleep(min(max(0.0, MIN_SECONDS_BETWEEN_STARTS - since), MIN_SECONDS_BETWEEN_STARTS))
        admission = AdmissionState(
            key=f"{self.request.uid}/{self.status.reserved}/{self.status.restart_attempt}",
            restart_attempt=self.status.restart_attempt,
            queued_at=self.status.queued_since,
            began=time.time(),
            pods=[Pod(rank, str(uuid.uuid4())) for rank in range(self.request.processes)],
        )
        self.status.admissions.append(admission)
        self.status.queued_since = None
        self._write("starting")  # first the record, then the processes: a successor has to know that there may be some
        trainers = Trainers(admission)
        trainers.start(self.request, self.folder)
        self._write("running")
        first = self._watch(trainers, admission)
        self._prove_gone()
        admission.ended = time.time()
        return self._outcome(admission, first)

    def _watch(self, trainers: Trainers, admission: AdmissionState) -> Pod | None:
        """Until no process is left. Returns the pod whose failure took the others down, if one did.

        Everything that ends the gang can only shorten the time its processes have left, never lengthen it.
        """
        first = next((pod for pod in admission.pods if pod.ended is not None), None)  # could not be started
        deadline, terminated = float("inf"), False
        if first is not None:
            deadline = time.monotonic()
        while trainers.alive:
            left = self._seconds_left(admission, failing=first is not None)
            if left is not None:
                deadline = min(deadline, time.monotonic() + left)
            if deadline < float("inf") and not terminated:
                trainers.terminate()
                terminated = True
            if time.monotonic() >= deadline:
                trainers.kill()
            dead = trainers.deaths(min(TICK_SECONDS, deadline - time.monotonic()))
            for pod in dead:
                if pod.exit_code == 0:
                    continue
                first = first or pod
                # One that leaves in order (75) is followed by its peers, and rank 0 may have a commit to finish.
                orderly = pod.exit_code in ORDERLY_EXIT_CODES
                grace = self.request.grace_seconds if orderly else CASCADE_GRACE_SECONDS
                deadline = min(deadline, time.monotonic() + grace)
            if dead or self._unwritten:
                self._write(self.status.message)
        return first

    def _seconds_left(self, admission: AdmissionState, *, failing: bool) -> float | None:
        """How long the processes may go on because of what was asked from outside; None: nothing was asked."""
        limits_seconds: list[float] = []
        if (deletion := self._deletion()) is not None:
            if self._deletion_seen is None:
                self._deletion_seen = time.monotonic()
                admission.pod_signals.append(
                    Signal(f"gang {self.request.name}", "deletion", f"requested, grace {deletion.grace_seconds:g} s")
                )
                self._write("deleting")
            limits_seconds.append(deletion.grace_seconds - (time.monotonic() - self._deletion_seen))
        if self.shutdown and not admission.node_signals:
            admission.node_signals.append(Signal("local node", "shutdown", "maintenance: its supervisor got SIGTERM"))
            limits_seconds.append(self.request.grace_seconds)
        if not failing and not admission.queue_signals and (signal_ := self._evicted()) is not None:
            admission.queue_signals.append(signal_)
            self._write(signal_.value)
            limits_seconds.append(self.request.grace_seconds)
        return min(limits_seconds) if limits_seconds else None

    def _outcome(self, admission: AdmissionState, first: Pod | None) -> tuple[Outcome, str]:
        if all(pod.exit_code == 0 for pod in admission.pods):
            return Outcome.SUCCEEDED, "every process exited with 0"
        if admission.queue_signals:
            return Outcome.REQUEUE, admission.queue_signals[0].value
        if admission.node_signals:
            return Outcome.REQUEUE, admission.node_signals[0].value
        assert first is not None  # somebody ended, and not with 0
        how = f"signal {first.signal}" if first.signal is not None else f"exit code {first.exit_code}"
        if first.exit_code in FATAL_EXIT_CODES:
            return Outcome.FAILED, f"{self.request.name}-{first.rank} ended first, with {how}"
        return Outcome.RESTART, f"restarting in place: {self.request.name}-{first.rank} ended first, with {how}"

    def _settle(self, outcome: Outcome, message: str) -> None:
        if outcome is Outcome.RESTART:
            self.status.restart_attempt += 1
        else:
            self.status.reserved = None
            self.status.phase = "Queued" if outcome is Outcome.REQUEUE else outcome.value
            self.status.queued_since = time.time() if outcome is Outcome.REQUEUE else None
        self._write(message)
        while self._unwritten:  # a full disk: the outcome must not be lost
            time.sleep(TICK_SECONDS)
            self._write(message)


def _claim(request: Request, status: Status) -> Claimant:
    return Claimant(request.uid, request.created, request.family, request.devices, status.reserved is not None)


def main(arguments: list[str]) -> int:
    """Supervise gang `arguments[1]` of the cluster in folder `arguments[0]`, unless another process does."""
    root, name = Path(arguments[0]), arguments[1]
    folder = root / "gangs" / name
    hold = Hold(folder / "supervisor.lock")
    try:
        if not hold.take():
            return 0
        supervisor = Supervisor(root, name)
    except FileNotFoundError:  # deleted meanwhile
        return 0

    def shut_down(*_: object) -> None:
        supervisor.shutdown = True

    signal.signal(signal.SIGTERM, shut_down)
    for ignored in (signal.SIGINT, signal.SIGHUP):  # a handler, not SIG_IGN: trainers would inherit that
        signal.signal(ignored, lambda *_: None)
    state.write_json(folder / "supervisor.json", {"pid": os.getpid(), "ticks": start_ticks(os.getpid())})
    try:
        supervisor.run()
    except GangGoneError:
        kill_all_with_nonce(supervisor.request.nonce)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
