"""A damaged checkpoint is never trained on: it is set aside, and its steps are done again, bit for bit."""

import dataclasses
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.gang import Run

LAST, TARGET = 8, 12


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, corpus: Path, compile_cache: Path) -> Run:
    """Committed at 4 and 8; and, in the folder beside it, what it becomes at 12."""
    run = Run.new(tmp_path_factory.mktemp("damage") / "original", corpus, compile_cache)
    run.train("cpu-2", LAST)
    return run


@pytest.fixture(scope="module")
def expected(original: Run) -> Run:
    run = copy_of(original, original.folder.with_name("expected"))
    run.train("cpu-2", TARGET)
    return run


def copy_of(run: Run, folder: Path) -> Run:
    shutil.copytree(run.folder, folder)
    return dataclasses.replace(run, folder=folder, gangs=[])


def kinds(keys: list[str]) -> set[str]:
    """Files by kind: data files have random names."""
    return {"/".join(part if len(part) != 32 else "*" for part in key.split("/")) for key in keys}


def flip(path: Path, seed: int) -> None:
    data = bytearray(path.read_bytes())
    at = random.Random(seed).randrange(len(data) * 8)
    data[at // 8] ^= 1 << at % 8
    path.write_bytes(bytes(data))


# Every kind of file that a checkpoint of one process consists of. Should Orbax write others, the first test says so.
KINDS = (
    "_CHECKPOINT_METADATA",
    "_METADATA",
    "_sharding",
    "commit_success.txt",
    "d/*",
    "manifest.ocdbt",
    "ocdbt.process_0/d/*",
    "ocdbt.process_0/manifest.ocdbt",
)


def test_one_flipped_bit_in_any_kind_of_file_sets_its_commit_aside(new_run: Callable[..., Run]) -> None:
    """Nine commits, and in each but the first another kind of file is damaged. The next start goes back to the first."""
    run = new_run()
    last = 2 * (len(KINDS) + 1)
    run.train("cpu-2", last, commit_every=2)
    first, *damaged = sorted(run.lineage(), key=lambda record: record.ref.step)
    expected = {record.ref.step: record.digest for record in (first, *damaged)}
    numbers = run.numbers()
    victims = {}
    for record, kind in zip(damaged, KINDS, strict=True):
        files = [file.path for file in record.files]
        assert kinds(files) == set(KINDS)  # should Orbax write others, they are missing above
        seed = sum(map(ord, kind))
        victim = random.Random(seed).choice([file for file in files if kinds([file]) == {kind}])
        path = run.folder / record.checkpoint / victim
        if path.stat().st_size == 0:
            path.write_bytes(b"\1")
        else:
            flip(path, seed)
        victims[record.ref.step] = victim
    gang = run.train("cpu-2", last + 2, commit_every=2)
    notes = sorted(run.rundir().set_asides(2, 1), key=lambda note: note.commit.step)
    found = [(note.commit.step, note.parent.step if note.parent else None) for note in notes]
    assert found == [(step, step - 2) for step in sorted(victims)]
    for note in notes:
        assert victims[note.commit.step] in note.reason
    assert gang.logs().count("set aside") >= len(victims)
    assert {record.ref.step: record.digest for record in run.lineage()[1:]} == expected
    assert run.numbers()[:last] == numbers
    assert [line.step for line in run.rundir().logged_steps(2, 1)] == list(range(3, last + 3))


def done_again(run: Run, original: Run, expected: Run) -> None:
    """The redone steps are in the new start's log, equal to what was logged first; the result is as if undamaged."""
    again = [line for line in run.rundir().logged_steps(2, 1) if line.step <= LAST]
    first = {line.step: line for line in original.lines()}
    assert again
    for line in again:
        assert line.model_dump(exclude={"seconds", "loading"}) == first[line.step].model_dump(
            exclude={"seconds", "loading"}
        )
    assert run.committed().digest == expected.committed().digest  # type: ignore[union-attr]
    assert run.numbers() == expected.numbers()


def test_wrong_values_in_intact_files_are_found_by_the_digest(original: Run, expected: Run, tmp_path: Path) -> None:
    """The record is made to agree with another step's checkpoint: sizes and checksums fit, the numbers do not."""
    run = copy_of(original, tmp_path / "run")
    record = run.committed()
    assert record is not None
    assert record.parent is not None
    parent = run.rundir().read_commit(record.parent)
    shutil.rmtree(run.folder / record.checkpoint)
    shutil.copytree(run.folder / parent.checkpoint, run.folder / record.checkpoint)
    path = run.folder / record.ref.key
    body = json.loads(path.read_text())
    body["files"] = [file.model_dump() for file in parent.files]
    path.write_text(json.dumps(body))
    run.train("cpu-2", TARGET)
    (note,) = run.rundir().set_asides(2, 1)
    assert "state digest differs" in note.reason
    done_again(run, original, expected)


def test_when_every_commit_is_damaged_the_run_begins_again(original: Run, expected: Run, tmp_path: Path) -> None:
    run = copy_of(original, tmp_path / "run")
    for record in run.lineage():
        (run.folder / record.checkpoint / "manifest.ocdbt").unlink()
    run.train("cpu-2", TARGET)
    notes = run.rundir().set_asides(2, 1)
    assert [(note.commit.step, note.parent.step if note.parent else None) for note in notes] == [(4, None), (LAST, 4)]
    assert len(notes) == 2
    assert [line.step for line in run.rundir().logged_steps(2, 1)] == list(range(1, TARGET + 1))
    assert run.committed().digest == expected.committed().digest  # type: ignore[union-attr]
    assert run.numbers() == expected.numbers()


def test_a_full_disk_ends_the_start_and_the_run_goes_on_later(new_run: Callable[..., Run]) -> None:
    """No file may grow beyond 40 KB: the save fails, exit 74 says so, HEAD stays; without the limit the run goes on."""
    import resource

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))

    run = new_run()
    run.train("cpu-2", 4)
    before = run.head().commit
    spec = run.submit("cpu-2", 8)
    gang = run.launch(spec, preexec=limit)
    assert gang.wait() == [74], gang.logs()
    assert run.head().commit == before
    assert run.exit()["code"] == 74
    assert "last commit" in run.exit()["reason"]
    again = run.launch(spec, restart_attempt=1)
    assert again.wait() == [0], again.logs()
    assert run.committed_step() == 8
    assert run.rundir().lineage(run.head().commit).__next__().parent == before
