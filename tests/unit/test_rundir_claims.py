"""Claims and commits: who may move HEAD, and what a restart finds after a death at any point."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import runs
from tests.support.faulty_store import Crash, Fault, FaultyStore, always, at_call, at_write
from trainer.errors import ConfigurationError, Fenced, StorageUnavailable, TrainerError, TruthUnknown
from trainer.rundir.claims import Claim, ClaimStopped
from trainer.rundir.disk import DiskStore
from trainer.rundir.records import Head
from trainer.rundir.rundir import RunDirectory


@pytest.fixture
def disk(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path)


@pytest.fixture
def directory(disk: DiskStore) -> RunDirectory:
    return runs.begun(disk)


def reopened(disk: DiskStore) -> RunDirectory:
    """As a process started now sees it."""
    return RunDirectory(DiskStore(disk.root), patience_seconds=0)


def head(disk: DiskStore) -> Head:
    found = reopened(disk).head()
    assert found
    return found[0]


# -- claims


def test_claims_count_up_and_carry_the_commit(directory: RunDirectory, disk: DiskStore) -> None:
    first = runs.claim(directory, pod="p1")
    assert (first.attempt, first.start, first.restore) == (1, 1, None)
    record = runs.commit(first, 2)
    second = runs.claim(directory, pod="p2", restart=1)
    assert (second.start, second.restore) == (2, record.ref)
    now = head(disk)
    assert (now.start, now.pod_uid, now.restart_attempt) == (2, "p2", 1)
    assert directory.last_start(1) == 2


def test_a_lower_attempt_is_fenced(directory: RunDirectory, disk: DiskStore) -> None:
    runs.submit(directory, 2)
    with pytest.raises(Fenced, match="names attempt 2"):
        runs.claim(directory, attempt=1)
    assert head(disk).start == 0


def test_a_lower_restart_is_fenced(directory: RunDirectory, disk: DiskStore) -> None:
    runs.claim(directory, pod="new", restart=3)
    with pytest.raises(Fenced, match="restart 2"):
        runs.claim(directory, pod="old", restart=2)
    assert head(disk).pod_uid == "new"


def test_an_equal_restart_claims_again_and_fences_the_older(directory: RunDirectory, disk: DiskStore) -> None:
    """Kueue re-admits a gang without counting a restart."""
    old = runs.claim(directory, pod="old", restart=1)
    record = runs.prepare(old, 2)
    new = runs.claim(directory, pod="new", restart=1)
    with pytest.raises(Fenced, match=r"HEAD names start 1\.2"):
        old.commit(record)
    assert head(disk).commit is None
    runs.commit(new, 2)


def test_a_start_restores_what_its_own_claim_says_and_not_what_head_says_then(disk: DiskStore) -> None:
    """Its successor claims and commits right after its swap: it must not take the successor's HEAD for its own."""
    runs.commit(runs.claim(runs.begun(disk)), 2)

    class Overtaken(DiskStore):
        def swap(self, key: str, data: bytes, expected: int) -> int:
            generation = super().swap(key, data, expected)
            runs.commit(runs.claim(reopened(disk), pod="later"), 4)
            return generation

    old = runs.claim(RunDirectory(Overtaken(disk.root)), pod="early")
    assert (old.start, old.restore and old.restore.step) == (2, 2)
    assert (head(disk).start, head(disk).pod_uid) == (3, "later")
    old.documents.store.swap = disk.swap  # type: ignore[method-assign]
    with pytest.raises(Fenced):
        runs.commit(old, 3)


def test_another_nonce_is_fenced(directory: RunDirectory) -> None:
    with pytest.raises(Fenced, match="nonce"):
        directory.claim(1, "other", "pod", 0)


def test_a_claim_without_spec_is_unknown(disk: DiskStore) -> None:
    disk.swap("HEAD", Head(attempt=1, start=0, op_id="x").canonical(), 0)
    with pytest.raises(TruthUnknown, match=r"attempts/1/spec\.json is missing"):
        runs.claim(RunDirectory(disk))


def test_a_higher_attempt_waits_for_head(disk: DiskStore) -> None:
    """The gang came up before the orchestrator swapped HEAD, or HEAD does not exist yet."""
    waits: list[float] = []
    other = RunDirectory(DiskStore(disk.root))

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            runs.submit(other, 1)
        if len(waits) == 4:
            runs.submit(other, 2)

    claim = RunDirectory(disk, sleep=sleep).claim(2, "nonce", "pod", 0, poll_seconds=0.5)
    assert (claim.attempt, claim.start) == (2, 1)
    assert waits == [0.5] * 4


def test_waiting_ends_at_the_deadline(directory: RunDirectory, disk: DiskStore) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    waiting = RunDirectory(disk, sleep=sleep, monotonic=lambda: now[0])
    with pytest.raises(ClaimStopped, match="still names attempt 1 after 10 s"):
        waiting.claim(2, "nonce", "pod", 0, deadline_seconds=10)
    assert now[0] == 10


def test_after_sigterm_nothing_is_claimed(directory: RunDirectory, disk: DiskStore) -> None:
    """Whenever the signal comes: at each place where the claim looks, saying yes leaves HEAD alone."""
    before = head(disk)
    for place in range(2):
        asked = [0]

        def stop(place: int = place, asked: list[int] = asked) -> bool:
            asked[0] += 1
            return asked[0] > place

        with pytest.raises(ClaimStopped):
            directory.claim(1, "nonce", "pod", 0, stop=stop)
    assert head(disk) == before


@pytest.mark.parametrize("fault", [Fault.BEFORE, Fault.AFTER, Fault.LATE])
def test_a_claim_with_lost_answers_is_one_claim(directory: RunDirectory, disk: DiskStore, fault: Fault) -> None:
    faulty = RunDirectory(FaultyStore(disk, at_write(0, fault), due=1), sleep=lambda seconds: None)
    claim = runs.claim(faulty)
    assert claim.start == head(disk).start == 1
    assert claim.head == head(disk)


# -- commits


def test_commit_moves_head_and_links_the_parent(directory: RunDirectory, disk: DiskStore) -> None:
    claim = runs.claim(directory)
    for step in (2, 5, 9):
        runs.commit(claim, step)
    assert [ref.step for ref in runs.committed(reopened(disk))] == [2, 5, 9]
    newest = head(disk).commit
    assert newest
    assert reopened(disk).read_commit(newest).parent == claim.ref(5)


def test_repeating_a_commit_changes_nothing(directory: RunDirectory, disk: DiskStore) -> None:
    claim = runs.claim(directory)
    record = runs.commit(claim, 2)
    before = disk.get("HEAD")
    claim.commit(record)
    assert disk.get("HEAD") == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: {"ref": r.ref.model_copy(update={"start": 7})}, "by start 1.1"),
        (lambda r: {"ref": r.ref.model_copy(update={"attempt": 7})}, "by start 1.1"),
        (lambda r: {"parent": None}, "parent is None"),
        (lambda r: {"ref": r.ref.model_copy(update={"step": 2})}, "exists with other content"),
        (lambda r: {"ref": r.ref.model_copy(update={"step": 1})}, "not after"),
        (lambda r: {"step_log": ()}, r"must cover steps 3\.\.5"),
        (lambda r: {"step_log": (r.step_log[0].model_copy(update={"first": 4}),)}, r"must cover steps 3\.\.5"),
        (lambda r: {"step_log": (r.step_log[0].model_copy(update={"last": 3}), r.step_log[0])}, "gap"),
    ],
)
def test_a_record_that_does_not_follow_is_refused(
    directory: RunDirectory, disk: DiskStore, change: Callable[..., dict[str, object]], message: str
) -> None:
    claim = runs.claim(directory)
    first = runs.commit(claim, 2)
    record = runs.prepare(claim, 5)
    before = disk.list("")
    with pytest.raises((ValueError, TrainerError), match=message):
        claim.commit(record.model_copy(update=change(record)))
    assert head(disk).commit == first.ref
    assert disk.list("") == before


def test_a_fenced_start_touches_nothing_but_its_own_record(directory: RunDirectory, disk: DiskStore) -> None:
    old = runs.claim(directory)
    record = runs.prepare(old, 4)
    runs.submit(directory, 2)
    new = runs.claim(directory, attempt=2)
    before = head(disk)
    with pytest.raises(Fenced, match=r"start 1\.1 is fenced: HEAD names start 2\.1"):
        old.commit(record)
    with pytest.raises(Fenced):
        old.commit(record)
    assert head(disk) == before
    runs.commit(new, 3)
    assert [str(ref) for ref in runs.committed(reopened(disk))] == ["step 3 of start 2.1"]


def test_head_moved_by_another_hand_with_the_same_start_is_followed(directory: RunDirectory, disk: DiskStore) -> None:
    claim = runs.claim(directory)
    found = disk.get("HEAD")
    disk.swap("HEAD", head(disk).model_copy(update={"op_id": "owner"}).canonical(), found.generation)
    record = runs.commit(claim, 2)
    assert head(disk).commit == record.ref


def test_a_commit_changed_by_another_hand_fences(directory: RunDirectory, disk: DiskStore) -> None:
    claim = runs.claim(directory)
    runs.commit(claim, 2)
    runs.commit(claim, 4)
    record = runs.prepare(claim, 6)
    turned_back = head(disk).model_copy(update={"op_id": "hand", "commit": claim.ref(2)})
    disk.swap("HEAD", turned_back.canonical(), disk.get("HEAD").generation)
    with pytest.raises(Fenced, match="by another hand"):
        claim.commit(record)
    assert head(disk) == turned_back


def test_a_rolled_back_head_claimed_by_another_pod_fences(directory: RunDirectory, disk: DiskStore) -> None:
    """The same attempt and start, yet not the same claim."""
    claim = runs.claim(directory, pod="mine")
    record = runs.prepare(claim, 2)
    theirs = head(disk).model_copy(update={"op_id": "x", "pod_uid": "theirs"})
    disk.swap("HEAD", theirs.canonical(), disk.get("HEAD").generation)
    with pytest.raises(Fenced):
        claim.commit(record)
    assert head(disk) == theirs


def test_the_same_step_with_other_content_is_an_error(directory: RunDirectory, disk: DiskStore) -> None:
    claim = runs.claim(directory)
    record = runs.prepare(claim, 2)
    with pytest.raises(Crash):
        _dying(claim, at_write(1, Fault.CRASH_BEFORE)).commit(record)  # record created, HEAD not swapped
    later = record.model_copy(update={"time": 99.0, "save_seconds": 3.0})
    with pytest.raises(TrainerError, match="exists with other content"):
        claim.commit(later.model_copy(update={"digest": {"params/w": 3}}))
    claim.commit(later)  # only the timing differs: the earlier record stands
    assert reopened(disk).read_commit(record.ref) == record


@pytest.mark.parametrize("fault", [Fault.BEFORE, Fault.AFTER, Fault.LATE])
@pytest.mark.parametrize("number", range(2))
def test_lost_answers_during_a_commit(directory: RunDirectory, disk: DiskStore, fault: Fault, number: int) -> None:
    claim = runs.claim(directory)
    record = runs.prepare(claim, 2)
    claim.documents = RunDirectory(FaultyStore(disk, at_write(number, fault), due=1), sleep=lambda seconds: None)
    claim.commit(record)
    assert head(disk).commit == record.ref
    assert claim.still_current()


@pytest.mark.parametrize("fault", [Fault.CRASH_BEFORE, Fault.CRASH_AFTER])
def test_a_death_at_any_call_of_a_commit_leaves_old_or_new(tmp_path: Path, fault: Fault) -> None:
    """From the first byte of the checkpoint to the end: a restart finds one of two commits, whole, and can go on."""

    def second_commit(store: FaultyStore) -> None:
        claim = runs.claim(RunDirectory(store, patience_seconds=0))
        runs.commit(claim, 7)

    reference = FaultyStore(_begun_with_commit(tmp_path, "reference"))
    second_commit(reference)
    swaps = [call.number for call in reference.calls if call.method == "swap"]
    for number in range(len(reference.calls)):
        store = _begun_with_commit(tmp_path, f"{fault.name}-{number}")
        with pytest.raises(Crash):
            second_commit(FaultyStore(store, at_call(number, fault)))
        after = reopened(store)
        steps = [ref.step for ref in runs.committed(after)]
        landed = number > swaps[1] or (number == swaps[1] and fault is Fault.CRASH_AFTER)
        assert steps == ([4, 7] if landed else [4]), f"died at {reference.calls[number]}"
        for ref in runs.committed(after):
            record = after.read_commit(ref)
            assert store.list(record.checkpoint)
            assert [line.step for file in record.step_log for line in after.read_step_log(file)]
        claim = runs.claim(after, pod="next", restart=1)
        assert claim.restore
        assert claim.restore.step == steps[-1]
        runs.commit(claim, 9)
        assert [ref.step for ref in runs.committed(reopened(store))] == [*steps, 9]


def test_a_full_disk_during_a_commit_leaves_the_old_one(directory: RunDirectory, disk: DiskStore) -> None:
    claim = runs.claim(directory)
    runs.commit(claim, 2)
    record = runs.prepare(claim, 4)
    for number in range(2):
        claim.documents = RunDirectory(FaultyStore(disk, at_write(number, Fault.FULL)))
        with pytest.raises(StorageUnavailable, match="disk full"):
            claim.commit(record)
        assert head(disk).commit == claim.ref(2)
    claim.documents = RunDirectory(disk)  # space is back
    claim.commit(record)
    assert head(disk).commit == record.ref


def test_a_read_only_directory_is_refused(directory: RunDirectory, disk: DiskStore) -> None:
    store = FaultyStore(disk, always(Fault.READ_ONLY))
    with pytest.raises(ConfigurationError, match="read-only"):
        runs.claim(RunDirectory(store))


# -- set aside


def test_set_aside_goes_to_the_parent(directory: RunDirectory, disk: DiskStore) -> None:
    first = runs.claim(directory)
    runs.commit(first, 2)
    runs.commit(first, 5)
    second = runs.claim(directory, restart=1)
    assert second.set_aside("digest differs") == first.ref(2)
    assert head(disk).commit == second.commit_ref == first.ref(2)
    assert second.restore == first.ref(5), "what the claim said to restore does not change"
    note = reopened(disk).set_asides(1, 2)[0]
    assert (note.commit, note.parent, note.reason) == (first.ref(5), first.ref(2), "digest differs")
    record = runs.commit(second, 5)
    assert runs.committed(reopened(disk)) == [first.ref(2), record.ref]
    third = runs.claim(directory, restart=2)
    for expected in (first.ref(2), None):
        assert third.set_aside("again") == expected
    assert head(disk).commit is None
    with pytest.raises(ValueError, match="names no commit"):
        third.set_aside("nothing left")
    assert runs.commit(third, 3).parent is None


def test_a_fenced_start_sets_nothing_aside(directory: RunDirectory, disk: DiskStore) -> None:
    first = runs.claim(directory)
    runs.commit(first, 2)
    old = runs.claim(directory, restart=1)
    runs.claim(directory, restart=2)
    with pytest.raises(Fenced):
        old.set_aside("damaged")
    assert head(disk).commit == first.ref(2)


def test_a_commit_record_that_is_gone_is_unknown(directory: RunDirectory, disk: DiskStore) -> None:
    claim = runs.claim(directory)
    record = runs.commit(claim, 2)
    (disk.root / record.ref.key).unlink()
    with pytest.raises(TruthUnknown, match=r"commits/1\.1/2\.json is missing"):
        claim.set_aside("damaged")
    with pytest.raises(TruthUnknown):
        list(directory.lineage(record.ref))


def test_a_loop_in_the_lineage_is_an_error(directory: RunDirectory, disk: DiskStore) -> None:
    claim = runs.claim(directory)
    runs.commit(claim, 2)
    record = runs.commit(claim, 4)
    path = disk.root / claim.ref(2).key
    looped = directory.read_commit(claim.ref(2)).model_copy(update={"parent": record.ref})
    path.write_bytes(looped.canonical())
    with pytest.raises(TruthUnknown, match="does not come before it"):
        list(directory.lineage(record.ref))


def _fresh(tmp_path: Path, name: str) -> DiskStore:
    (tmp_path / name).mkdir()
    return DiskStore(tmp_path / name)


def _begun_with_commit(tmp_path: Path, name: str) -> DiskStore:
    store = _fresh(tmp_path, name)
    runs.commit(runs.claim(runs.begun(store)), 4)
    return store


def _dying(claim: Claim, plan: Callable[..., Fault | None]) -> Claim:
    """The same claim in a process that dies as planned."""
    return Claim(RunDirectory(FaultyStore(claim.documents.store, plan)), claim.head, claim.generation)
