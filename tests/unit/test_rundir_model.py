"""Trainers and orchestrators at random on one run directory, with faults, against a model of what may be true.

Every swap of HEAD that took effect is observed below the faults, in order. The invariants are those of
docs/run-directory.md: one line of commits; only the current attempt and start moves it; what was committed is left only
by setting it aside.
"""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from tests.support import runs
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.memory_store import MemoryStore
from trainer.errors import Fenced, StorageUnavailable, TrainerError
from trainer.rundir.claims import Claim, ClaimStopped
from trainer.rundir.gc import collect
from trainer.rundir.records import CommitRecord, CommitRef, Head
from trainer.rundir.rundir import RunDirectory
from trainer.settings import Keep

FAULTS = st.lists(st.sampled_from([None, None, None, Fault.BEFORE, Fault.AFTER, Fault.LATE]), min_size=0, max_size=6)


class Watched(MemoryStore):
    """Notes each generation of HEAD; what it names must be there at that moment."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[Head] = []

    def swap(self, key: str, data: bytes, expected: int) -> int:
        generation = super().swap(key, data, expected)
        head = Head.read(data, "HEAD")
        if head.commit is not None:
            record = CommitRecord.read(self.get(head.commit.key).data, "record")
            moved_on = bool(self.heads) and record.parent == self.heads[-1].commit
            assert not moved_on or self.list(head.commit.checkpoint), "committed without a checkpoint"
        self.heads.append(head)
        return generation


class Runs(RuleBasedStateMachine):
    claims = Bundle("claims")
    prepared = Bundle("prepared")

    @initialize()
    def begin(self) -> None:
        self.store = Watched()
        self.late: list[FaultyStore] = []
        self.aside: set[CommitRef] = set()
        self.promised: set[CommitRef] = set()  # commits whose caller was told that they are committed
        self.checked = 0
        self.rounds = 0

    def directory(self, faults: list[Fault | None]) -> RunDirectory:
        """A process of its own: each of its next calls meets the next fault."""
        left = list(faults)
        store = FaultyStore(self.store, lambda call: left.pop(0) if left else None, due=3)
        self.late.append(store)
        return RunDirectory(store, patience_seconds=0 if len(faults) % 2 else 60, sleep=lambda seconds: None)

    @rule(faults=FAULTS, ahead=st.sampled_from([0, 1, 1, 1]))
    def orchestrator_submits(self, faults: list[Fault | None], ahead: int) -> None:
        """Any step of a submission may be the last one this orchestrator makes; a later one goes on."""
        directory = self.directory(faults)
        try:
            found = directory.head()
            attempt = (found[0].attempt if found else 0) + ahead or 1
            directory.adopt_spec(runs.spec(attempt))
            directory.swap_to_attempt(attempt)
        except (StorageUnavailable, Fenced):
            pass

    @rule(target=claims, faults=FAULTS, behind=st.sampled_from([0, 0, 0, 1]), restart=st.integers(0, 3))
    def gang_claims(self, faults: list[Fault | None], behind: int, restart: int) -> Any:
        """A gang of the current attempt, or a leftover of the one before."""
        attempt = max(1, (self.store.heads[-1].attempt if self.store.heads else 1) - behind)
        self.rounds += 1
        try:
            return runs.claim(self.directory(faults), attempt, f"pod{self.rounds}", restart)
        except (StorageUnavailable, Fenced, ClaimStopped):
            return multiple()

    @rule(claim=claims, faults=FAULTS, keep=st.sampled_from([None, 1, 2]), commits=st.integers(1, 4))
    def gang_trains_on(self, claim: Claim, faults: list[Fault | None], keep: int | None, commits: int) -> None:
        """Some commits in a row, then perhaps a collection, as a healthy trainer does."""
        for _ in range(commits):
            work = self.gang_prepares(claim, 1)
            if isinstance(work, tuple):
                self.gang_commits(faults, work, 1)
        if keep is not None:
            self.gang_collects(claim, keep)

    @rule(target=prepared, claim=claims, stride=st.integers(1, 3))
    def gang_prepares(self, claim: Claim, stride: int) -> Any:
        """Checkpoint and step log are durable; the commit may come any time later, or never."""
        claim.documents = self.directory([])
        step = (claim.commit_ref.step if claim.commit_ref else 0) + stride
        if self.store.has(claim.ref(step).key):
            return multiple()
        return claim, runs.prepare(claim, step)

    @rule(faults=FAULTS, work=prepared, tries=st.integers(1, 2))
    def gang_commits(self, faults: list[Fault | None], work: tuple[Claim, CommitRecord], tries: int) -> None:
        """A trainer that tries again after an error, whatever it was, is no danger either."""
        claim, record = work
        claim.documents = self.directory(faults)
        for _ in range(tries):
            try:
                claim.commit(record)
            except (TrainerError, ValueError):  # ValueError: it has committed something else since
                continue
            self.promised.add(record.ref)
            return

    @rule(faults=FAULTS, claim=claims)
    def gang_sets_aside(self, faults: list[Fault | None], claim: Claim) -> None:
        if claim.commit_ref is None or (claim.commit_ref.attempt, claim.commit_ref.start) == (
            claim.attempt,
            claim.start,
        ):
            return
        self.aside.add(claim.commit_ref)
        claim.documents = self.directory(faults)
        try:
            claim.set_aside("damaged")
        except (StorageUnavailable, Fenced):
            pass

    @rule(claim=claims, keep=st.integers(1, 2))
    def gang_collects(self, claim: Claim, keep: int) -> None:
        claim.documents = self.directory([])
        kept = [ref.checkpoint for ref in runs.committed(RunDirectory(self.store))[-3:]]
        there = [folder for folder in kept if self.store.list(folder)]
        collect(claim, Keep(last=keep, min_age_seconds=0))
        assert [folder for folder in kept if self.store.list(folder)] == there, "HEAD or an ancestor was collected"

    @rule(claim=consumes(claims))
    def gang_dies(self, claim: Claim) -> None:
        """Nothing more is heard of it, except what is under way."""

    @rule()
    def late_writes_land(self) -> None:
        for store in self.late:
            store.land()
        self.late.clear()

    @invariant()
    def head_moved_by_the_rules(self) -> None:
        heads = self.store.heads
        for before, after in zip([None, *heads][self.checked :], heads[self.checked :], strict=False):
            self._check_move(before, after)
        self.checked = len(heads)

    def _check_move(self, before: Head | None, after: Head) -> None:
        if before is None:
            assert (after.attempt, after.start, after.commit) == (1, 0, None)
            return
        old, new = (before.attempt, before.start), (after.attempt, after.start)
        if new != old:  # a submission or a claim: the next number, the commit untouched
            assert new in ((before.attempt + 1, 0), (before.attempt, before.start + 1)), f"{old} → {new}"
            assert after.commit == before.commit
            assert after.attempt > before.attempt or after.restart_attempt >= before.restart_attempt
            return
        assert after.start > 0, "only a claimed start moves the commit"
        assert (after.pod_uid, after.restart_attempt) == (before.pod_uid, before.restart_attempt)
        if after.commit is not None and self.record(after.commit).parent == before.commit:
            assert (after.commit.attempt, after.commit.start) == new, "a start committed another's work"
            return
        assert before.commit in self.aside, f"{before.commit} was left without being set aside"
        assert after.commit == self.record(before.commit).parent

    @invariant()
    def nothing_committed_is_lost(self) -> None:
        """HEAD's line is whole and in order, and holds all that was promised but what was set aside and its line."""
        if not self.store.heads:
            return
        line = runs.committed(RunDirectory(self.store))
        assert [ref.step for ref in line] == sorted({ref.step for ref in line})
        starts = [(ref.attempt, ref.start) for ref in line]
        assert starts == sorted(starts)
        for ref in self.promised - set(line):
            assert self.ancestry(ref) & self.aside, f"{ref} is lost"

    def ancestry(self, ref: CommitRef | None) -> set[CommitRef]:
        found = set()
        while ref is not None:
            found.add(ref)
            ref = self.record(ref).parent
        return found

    def record(self, ref: CommitRef) -> CommitRecord:
        return CommitRecord.read(self.store.get(ref.key).data, ref.key)


Runs.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestRuns = Runs.TestCase
