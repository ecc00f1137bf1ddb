"""What HEAD says and when it is not believed; submitting an attempt, whoever dies where."""

from pathlib import Path

import pytest

from tests.support import runs
from tests.support.faulty_store import Crash, Fault, FaultyStore, at_call
from trainer.errors import ConfigurationError, Fenced, TruthUnknown
from trainer.rundir.disk import DiskStore
from trainer.rundir.records import Head, Submitted
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


# -- HEAD


def test_no_head_before_the_first_submission(disk: DiskStore) -> None:
    directory = RunDirectory(disk)
    assert directory.head() is None
    directory.adopt_spec(runs.spec())
    assert directory.head() is None, "spec written, HEAD not yet: the submission goes on"


@pytest.mark.parametrize(
    "key", ["attempts/2/spec.json", "attempts/1/submitted.json", "attempts/1/1/start.json", "commits/1.1/2.json"]
)
def test_a_missing_head_is_no_new_run(disk: DiskStore, key: str) -> None:
    disk.create("attempts/1/spec.json", runs.spec().canonical())
    disk.create(key, b"{}")
    with pytest.raises(TruthUnknown, match=r"HEAD is missing.*untildone recover"):
        RunDirectory(disk).head()


def test_a_missing_head_that_was_seen_before(disk: DiskStore) -> None:
    with pytest.raises(TruthUnknown, match=r"attempt 3 was seen before.*untildone recover"):
        RunDirectory(disk).head(at_least=3)


def test_a_head_that_went_back(directory: RunDirectory) -> None:
    assert directory.head(at_least=1)
    with pytest.raises(TruthUnknown, match=r"names attempt 1, but attempt 2 was seen.*untildone recover"):
        directory.head(at_least=2)


@pytest.mark.parametrize("data", [b"", b"{", b"null", b'{"attempt": 0, "start": 0, "op_id": "x"}', b'{"new_field": 1}'])
def test_an_unreadable_head_stops_everything(directory: RunDirectory, disk: DiskStore, data: bytes) -> None:
    claim = runs.claim(directory)
    record = runs.prepare(claim, 2)
    disk.swap("HEAD", data, 2)
    before = disk.list("")
    for call in (
        directory.head,
        directory.endings,
        lambda: directory.swap_to_attempt(1),
        lambda: runs.claim(directory),
        claim.still_current,
    ):
        with pytest.raises(TruthUnknown, match=r"HEAD is unreadable.*untildone recover"):
            call()
    with pytest.raises(TruthUnknown):
        claim.commit(record)
    assert disk.get("HEAD").data == data
    assert set(disk.list("")) - set(before) <= {record.ref.key}


def test_a_head_from_the_future_asks_for_an_upgrade(directory: RunDirectory, disk: DiskStore) -> None:
    disk.swap("HEAD", b'{"version": 2, "attempt": 9}', 1)
    for call in (directory.head, lambda: directory.swap_to_attempt(2), lambda: runs.claim(directory)):
        with pytest.raises(ConfigurationError, match=r"newer untildone.*upgrade"):
            call()


# -- submission


def test_the_first_spec_counts(disk: DiskStore) -> None:
    mine, theirs = runs.spec(nonce="mine"), runs.spec(nonce="theirs")
    directory = RunDirectory(disk)
    assert directory.adopt_spec(theirs) == theirs
    assert reopened(disk).adopt_spec(mine) == theirs
    assert directory.read_spec(1) == theirs
    assert directory.read_spec(2) is None


def test_submission_is_idempotent(directory: RunDirectory, disk: DiskStore) -> None:
    before = directory.head()
    assert reopened(disk).swap_to_attempt(1) == before
    submitted = Submitted(cluster_uid="c", namespace="n", gang_uid="g1")
    assert directory.record_submitted(1, submitted) == submitted
    other = submitted.model_copy(update={"gang_uid": "g2"})
    assert reopened(disk).record_submitted(1, other) == submitted


def test_head_goes_to_the_next_attempt_and_keeps_the_commit(directory: RunDirectory, disk: DiskStore) -> None:
    commit = runs.commit(runs.claim(directory, restart=4), 5)
    runs.submit(directory, 2)
    now = head(disk)
    assert (now.attempt, now.start, now.pod_uid, now.restart_attempt, now.commit) == (2, 0, None, -1, commit.ref)
    with pytest.raises(Fenced, match="names attempt 2"):
        directory.swap_to_attempt(1)


def test_head_never_names_an_attempt_without_spec(directory: RunDirectory) -> None:
    with pytest.raises(ConfigurationError, match=r"attempts/2/spec\.json"):
        directory.swap_to_attempt(2)


def test_a_decision_made_on_an_old_head_is_dropped(directory: RunDirectory, disk: DiskStore) -> None:
    found = directory.head()
    assert found
    runs.claim(directory)  # the gang came up meanwhile
    directory.adopt_spec(runs.spec(2))
    with pytest.raises(Fenced, match="HEAD moved"):
        directory.swap_to_attempt(2, seen=found[1])
    assert head(disk).attempt == 1


@pytest.mark.parametrize("fault", [Fault.CRASH_BEFORE, Fault.CRASH_AFTER])
def test_submission_survives_a_death_at_any_call(disk: DiskStore, tmp_path: Path, fault: Fault) -> None:
    """Whatever call the orchestrator dies at, the next one ends up with one attempt, one spec and the same nonce."""

    def submit(store: FaultyStore, nonce: str) -> None:
        directory = RunDirectory(store, patience_seconds=0)
        spec = directory.adopt_spec(runs.spec(nonce=nonce))
        directory.swap_to_attempt(1)
        directory.record_submitted(1, Submitted(cluster_uid="c", namespace="n", gang_uid=spec.nonce))

    reference = FaultyStore(_fresh(tmp_path, "reference"))
    submit(reference, "reference")
    for number in range(len(reference.calls)):
        store = _fresh(tmp_path, f"{fault.name}-{number}")
        with pytest.raises(Crash):
            submit(FaultyStore(store, at_call(number, fault)), "first")
        submit(FaultyStore(store), "second")
        after = reopened(store)
        spec, submitted = after.read_spec(1), after.read_submitted(1)
        assert spec
        assert submitted
        assert submitted.gang_uid == spec.nonce
        assert head(store).attempt == 1
        assert store.list("") == reference.inner.list("")


def _fresh(tmp_path: Path, name: str) -> DiskStore:
    (tmp_path / name).mkdir()
    return DiskStore(tmp_path / name)
