"""Compiled programs in a store: whole or not there, damage noticed and repaired, and no trouble that ends a start."""

from pathlib import Path

import pytest

from tests.support.faulty_store import Call, Fault, FaultyStore
from trainer.compile_cache import ProgramCache
from trainer.rundir.disk import DiskStore

KEY, PROGRAM = "jit_train_step-0123abcd", bytes(range(256)) * 40


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path)


def test_what_was_put_is_found_by_another_process(store: DiskStore) -> None:
    first, second = ProgramCache(store), ProgramCache(store)
    assert first.get(KEY) is None
    first.put(KEY, PROGRAM)
    assert second.get(KEY) == PROGRAM
    assert (first.loaded, second.loaded) == (set(), {"jit_train_step"})


def test_the_first_of_two_writers_stays(store: DiskStore) -> None:
    ProgramCache(store).put(KEY, PROGRAM)
    ProgramCache(store).put(KEY, PROGRAM[::-1])
    assert ProgramCache(store).get(KEY) == PROGRAM


@pytest.mark.parametrize("damage", ["empty", "torn", "flipped"])
def test_a_damaged_entry_is_not_used_and_is_written_again(
    damage: str, store: DiskStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ProgramCache(store).put(KEY, PROGRAM)
    file = tmp_path / KEY
    body = bytearray(file.read_bytes())
    body[5000] ^= 1
    file.write_bytes({"empty": b"", "torn": bytes(body[:4000]), "flipped": bytes(body)}[damage])
    cache = ProgramCache(store)
    assert cache.get(KEY) is None
    assert "jit_train_step is damaged" in capsys.readouterr().err
    assert not cache.loaded
    cache.put(KEY, PROGRAM)
    assert ProgramCache(store).get(KEY) == PROGRAM


def test_an_entry_of_another_program_is_not_used_and_is_written_again(store: DiskStore, tmp_path: Path) -> None:
    other = "jit_train_step-4567cdef"
    ProgramCache(store).put(other, PROGRAM[::-1])
    (tmp_path / KEY).write_bytes((tmp_path / other).read_bytes())
    cache = ProgramCache(store)
    assert cache.get(KEY) is None
    cache.put(KEY, PROGRAM)
    assert ProgramCache(store).get(KEY) == PROGRAM
    assert ProgramCache(store).get(other) == PROGRAM[::-1]


def test_an_entry_that_cannot_be_loaded_is_written_again(store: DiskStore, capsys: pytest.CaptureFixture[str]) -> None:
    ProgramCache(store).put(KEY, b"of no use")
    cache = ProgramCache(store)
    assert cache.get(KEY) == b"of no use"
    cache.put(KEY, PROGRAM)  # JAX does that when it had to compile
    assert not cache.loaded
    assert ProgramCache(store).get(KEY) == PROGRAM
    assert "jit_train_step cannot be loaded" in capsys.readouterr().err


def test_a_store_that_is_slow_to_fail_is_soon_left_alone(store: DiskStore, capsys: pytest.CaptureFixture[str]) -> None:
    now, calls = [0.0], []

    def always(call: Call) -> Fault:
        calls.append(call)
        now[0] += 25.0
        return Fault.BEFORE

    cache = ProgramCache(FaultyStore(store, always), lambda: now[0])
    for number in range(10):
        assert cache.get(f"{KEY}{number}") is None
        cache.put(f"{KEY}{number}", PROGRAM)
    assert len(calls) == 3
    assert capsys.readouterr().err.count("it is not asked again") == 1


@pytest.mark.parametrize("fault", [Fault.BEFORE, Fault.FULL, Fault.READ_ONLY])
def test_a_store_that_fails_costs_a_compilation_and_no_start(
    fault: Fault, store: DiskStore, capsys: pytest.CaptureFixture[str]
) -> None:
    def always(call: Call) -> Fault:
        return fault

    cache = ProgramCache(FaultyStore(store, always))
    assert cache.get(KEY) is None
    cache.put(KEY, PROGRAM)
    said = capsys.readouterr().err
    assert "compile cache cannot be written: jit_train_step" in said
    assert ProgramCache(store).get(KEY) is None
