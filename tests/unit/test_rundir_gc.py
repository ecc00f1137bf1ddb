"""What garbage collection removes, and above all what it leaves."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import runs
from tests.support.faulty_store import Fault, FaultyStore, always
from trainer.errors import ConfigurationError, StorageUnavailable
from trainer.rundir.claims import Ancestor, Claim
from trainer.rundir.disk import DiskStore
from trainer.rundir.gc import DEBRIS_SECONDS, SWEEP_SECONDS, Collected, collect, to_collect
from trainer.rundir.records import CommitRef, Pin
from trainer.rundir.rundir import RunDirectory
from trainer.settings import Keep

HOUR = 3600.0
NOW = 1_000_000.0
LAST_ONLY = Keep(last=1, min_age_seconds=0)


class Clock:
    """UNIX and monotonic seconds that tests turn."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def disk(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path)


@pytest.fixture
def directory(disk: DiskStore, clock: Clock) -> RunDirectory:
    return runs.begun(disk, clock=clock, monotonic=clock)


def trained(directory: RunDirectory, steps: range, restart: int = 0) -> Claim:
    """A claim that committed `steps`, long ago."""
    claim = runs.claim(directory, restart=restart)
    for step in steps:
        runs.commit(claim, step)
    return claim


def there(store: DiskStore) -> list[str]:
    """Checkpoint folders that exist, by start and step."""
    return [
        f"{start}/{step}" for start in store.folders("checkpoints") for step in store.folders(f"checkpoints/{start}")
    ]


@settings(deadline=None)
@given(
    steps=st.lists(st.integers(1, 40), min_size=1, max_size=12, unique=True),
    keep=st.builds(
        Keep, last=st.integers(1, 6), every=st.none() | st.integers(1, 10), min_age_seconds=st.floats(0, 50)
    ),
    pinned=st.sets(st.integers(1, 40)),
    ages=st.lists(st.floats(-10, 60), min_size=12, max_size=12),
)
def test_what_must_stay_stays_and_nothing_else(
    steps: list[int], keep: Keep, pinned: set[int], ages: list[float]
) -> None:
    newest_first = sorted(steps, reverse=True)
    lineage = [
        Ancestor(CommitRef(attempt=1, start=1, step=step), NOW - age)
        for step, age in zip(newest_first, ages, strict=False)
    ]
    pins = [CommitRef(attempt=1, start=1, step=step) for step in pinned]
    gone = {ref.step for ref in to_collect(lineage, keep, pins, NOW)}
    for place, (step, old) in enumerate(zip(newest_first, lineage, strict=True)):
        must_stay = (
            place < 3
            or place < keep.last
            or (keep.every is not None and step % keep.every == 0)
            or step in pinned
            or NOW - old.time < keep.min_age_seconds
        )
        assert (step in gone) == (not must_stay)


def test_collecting_removes_folders_and_keeps_history(directory: RunDirectory, disk: DiskStore) -> None:
    claim = trained(directory, range(1, 8))
    history = [key for key in disk.list("") if not key.startswith("checkpoints/")]
    done = collect(claim, LAST_ONLY)
    assert done.expired == tuple(f"checkpoints/1.1/{step}" for step in (1, 2, 3, 4))
    assert there(disk) == ["1.1/5", "1.1/6", "1.1/7"]
    assert [key for key in disk.list("") if not key.startswith("checkpoints/")] == history
    assert len(runs.committed(directory)) == 7
    assert collect(claim, LAST_ONLY) == Collected()
    runs.commit(claim, 8)
    assert collect(claim, LAST_ONLY).expired == ("checkpoints/1.1/5",)


def test_young_commits_stay(directory: RunDirectory, disk: DiskStore, clock: Clock) -> None:
    claim = runs.claim(directory)
    for step in range(1, 6):
        runs.commit(claim, step, time=clock.now)
    assert collect(claim, Keep(last=1)) == Collected()
    clock.now += HOUR
    assert len(collect(claim, Keep(last=1)).expired) == 2


def test_pins_hold_until_they_expire(directory: RunDirectory, disk: DiskStore, clock: Clock) -> None:
    claim = trained(directory, range(1, 6))
    pin = Pin(commit=claim.ref(1), expires=clock.now + 10)
    disk.create("pins/child.json", pin.canonical())
    assert collect(claim, LAST_ONLY).expired == ("checkpoints/1.1/2",)
    clock.now += 11
    assert collect(claim, LAST_ONLY).expired == ("checkpoints/1.1/1",)


def test_a_reader_extends_its_pin_and_lets_go(directory: RunDirectory, clock: Clock) -> None:
    claim = trained(directory, range(1, 7))
    for reader, step in (("/runs/child", 1), ("gs://runs/other", 2)):
        directory.pin(reader, claim.ref(step), 10)
    clock.now += 9
    directory.pin("/runs/child", claim.ref(1), 10)
    clock.now += 9
    assert collect(claim, LAST_ONLY).expired == ("checkpoints/1.1/2", "checkpoints/1.1/3")
    directory.pin("/runs/child", claim.ref(1), 0)
    assert collect(claim, LAST_ONLY).expired == ("checkpoints/1.1/1",)


def test_an_unreadable_pin_stops_collection(directory: RunDirectory, disk: DiskStore) -> None:
    claim = trained(directory, range(1, 6))
    disk.create("pins/odd.json", b'{"commit": "all of them"}')
    with pytest.raises(ConfigurationError, match=r"pins/odd\.json"):
        collect(claim, LAST_ONLY)
    assert len(there(disk)) == 5


def test_only_the_start_that_last_swapped_head_collects(directory: RunDirectory, disk: DiskStore) -> None:
    old = trained(directory, range(1, 6))
    runs.claim(directory, restart=1)
    store = FaultyStore(disk)
    old.documents = RunDirectory(store)
    assert collect(old, LAST_ONLY) == Collected()
    assert [call.method for call in store.calls] == ["get"], "it looks at HEAD, and at nothing more"
    assert len(there(disk)) == 5


def test_fenced_in_the_middle_it_stops(directory: RunDirectory, disk: DiskStore) -> None:
    """Before each folder HEAD is looked at again."""
    claim = trained(directory, range(1, 8))
    store = FaultyStore(disk)
    real = store.delete_tree

    def delete_then_lose(prefix: str) -> None:
        real(prefix)
        runs.claim(directory, restart=1)

    store.delete_tree = delete_then_lose  # type: ignore[method-assign]
    claim.documents = RunDirectory(store)
    assert collect(claim, LAST_ONLY).expired == ("checkpoints/1.1/1",)
    assert len(there(disk)) == 6


def test_the_next_start_collects_what_is_left(directory: RunDirectory, disk: DiskStore) -> None:
    first = trained(directory, range(1, 5))
    collect(first, LAST_ONLY)
    second = runs.claim(directory, restart=1)
    for step in (5, 6, 7):
        runs.commit(second, step)
    assert collect(second, LAST_ONLY).expired == tuple(f"checkpoints/1.1/{step}" for step in (2, 3, 4))
    assert there(disk) == ["1.2/5", "1.2/6", "1.2/7"]


def test_debris_of_ended_starts_goes_after_a_day(directory: RunDirectory, disk: DiskStore, clock: Clock) -> None:
    first = trained(directory, range(1, 3))
    runs.prepare(first, 3)  # saved, never committed
    disk.create("checkpoints/1.1/4.orbax-checkpoint-tmp/file", b"half")
    second = runs.claim(directory, restart=1)
    runs.prepare(second, 9)  # of the running start: a save under way
    disk.create("checkpoints/2.1/9/file", b"of a later attempt")
    runs.commit(second, 3)
    for folder in ("1.1/1", "1.1/2", "1.1/3", "1.1/4.orbax-checkpoint-tmp", "1.2/9", "2.1/9"):
        for path in (disk.root / "checkpoints" / folder).iterdir():
            os.utime(path, (clock.now, clock.now))
    before = there(disk)
    clock.now += DEBRIS_SECONDS - 1
    assert collect(second, LAST_ONLY) == Collected()
    assert there(disk) == before
    clock.now += SWEEP_SECONDS
    assert collect(second, LAST_ONLY).debris == ("checkpoints/1.1/3", "checkpoints/1.1/4.orbax-checkpoint-tmp")
    assert there(disk) == ["1.1/1", "1.1/2", "1.2/3", "1.2/9", "2.1/9"]


def test_a_commit_set_aside_is_debris_and_its_parent_is_not(
    directory: RunDirectory, disk: DiskStore, clock: Clock
) -> None:
    trained(directory, range(1, 3))
    second = runs.claim(directory, restart=1)
    second.set_aside("damaged")
    runs.commit(second, 2)
    clock.now = os.stat(disk.root / "checkpoints/1.1/2/state").st_mtime + DEBRIS_SECONDS + 1
    assert collect(second, LAST_ONLY).debris == ("checkpoints/1.1/2",)
    assert there(disk) == ["1.1/1", "1.2/2"]


def test_a_store_that_does_not_answer_removes_nothing(directory: RunDirectory, disk: DiskStore) -> None:
    claim = trained(directory, range(1, 6))
    for methods in ({"get"}, {"list"}, {"folders"}):
        broken = FaultyStore(disk, always(Fault.BEFORE, frozenset(methods)))
        claim.documents = RunDirectory(broken, patience_seconds=0)
        with pytest.raises(StorageUnavailable):
            collect(claim, LAST_ONLY)
    assert len(there(disk)) == 5


def test_a_commit_needs_no_listing(directory: RunDirectory, disk: DiskStore) -> None:
    claim = trained(directory, range(1, 3))
    store = FaultyStore(disk)
    claim.documents = RunDirectory(store)
    record = runs.prepare(claim, 5)
    store.calls.clear()
    claim.append_step_log(runs.lines(6, 7))
    claim.commit(record)
    assert [call.method for call in store.calls] == ["create", "sync_tree", "create", "swap"]
