"""Answers become certain: ours or another's, whatever got lost."""

import pytest

from tests.support.faulty_store import Fault, FaultyStore, always, at_write, dice
from tests.support.store_conformance import body, patient
from trainer.errors import StorageUnavailable
from trainer.rundir.disk import DiskStore
from trainer.rundir.store import StorageFull
from trainer.rundir.swap import Patient, certain_create, certain_swap, op_id_of


@pytest.fixture
def disk(tmp_path_factory: pytest.TempPathFactory) -> DiskStore:
    return DiskStore(tmp_path_factory.mktemp("run"))


def test_a_conflict_of_our_own_making_is_a_success(disk: DiskStore) -> None:
    store = FaultyStore(disk, at_write(0, Fault.AFTER))
    data = body()
    assert certain_swap(store, patient(), "HEAD", data, 0) == 1
    assert [call.method for call in store.calls] == ["swap", "swap", "get"]


def test_read_back_may_fail_too(disk: DiskStore) -> None:
    """Answer lost, then the read-back fails: the same body goes out again until somebody answers."""
    faults = {0: Fault.AFTER, 2: Fault.BEFORE}
    store = FaultyStore(disk, lambda call: faults.get(call.number))
    data = body()
    assert certain_swap(store, patient(), "HEAD", data, 0) == 1
    assert disk.get("HEAD").data == data


def test_each_try_sends_the_same_body_and_generation(disk: DiskStore) -> None:
    sent = []

    class Recording(FaultyStore):
        def swap(self, key: str, data: bytes, expected: int) -> int:
            sent.append((data, expected))
            return super().swap(key, data, expected)

    certain_swap(Recording(disk, lambda call: Fault.BEFORE if call.number < 5 else None), patient(), "HEAD", body(), 0)
    assert len(sent) == 6
    assert len(set(sent)) == 1


@pytest.mark.parametrize("seed", range(30))
def test_two_writers_under_dice_agree_on_the_winner(disk: DiskStore, seed: int) -> None:
    faults = (Fault.BEFORE, Fault.AFTER, Fault.LATE)
    generation = 0
    for turn in range(5):
        bodies = [body(writer=number, turn=turn) for number in (0, 1)]
        answers = []
        for number, data in enumerate(bodies):
            store = FaultyStore(disk, dice(seed * 100 + turn * 2 + number, 0.5, faults), due=3)
            answers.append(certain_swap(store, Patient(60, lambda seconds: None), "HEAD", data, generation))
            store.land()
        found = disk.get("HEAD")
        assert sum(answer is not None for answer in answers) == 1
        winner = next(number for number, answer in enumerate(answers) if answer is not None)
        assert found.data == bodies[winner]
        assert found.generation == answers[winner] == generation + 1
        generation = found.generation


def test_patience_ends_and_the_outcome_stays_unknown(disk: DiskStore) -> None:
    store = FaultyStore(disk, always(Fault.BEFORE))
    waits: list[float] = []
    with pytest.raises(StorageUnavailable):
        certain_swap(store, Patient(0.05, lambda seconds: waits.append(seconds)), "HEAD", body(), 0)
    assert len(store.calls) == len(waits) + 1 > 1


def test_a_full_disk_is_not_waited_for(disk: DiskStore) -> None:
    store = FaultyStore(disk, always(Fault.FULL))
    with pytest.raises(StorageFull):
        certain_create(store, patient(), "a", b"x")
    assert len(store.calls) == 1


def test_a_body_without_op_id_is_refused(disk: DiskStore) -> None:
    with pytest.raises(ValueError, match="op_id"):
        certain_swap(disk, patient(), "HEAD", b"{}", 0)


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b'"op_id"', b'{"op_id": 3}', b"\xff"])
def test_op_id_of_what_is_no_document(data: bytes) -> None:
    assert op_id_of(data) is None
