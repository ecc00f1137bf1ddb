"""The other documents: recipe and init, the step log, the ledger, starts and their ends."""

import json
import math
import random
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import runs
from tests.support.faulty_store import Fault, FaultyStore, always, at_write, dice
from tests.support.memory_store import MemoryStore
from trainer import recipe as recipes
from trainer.errors import ConfigurationError, Damaged, StorageUnavailable, TrainerError
from trainer.recipe import Recipe
from trainer.rundir.disk import DiskStore
from trainer.rundir.records import (
    AttemptSpec,
    ExitRecord,
    Head,
    InitRecord,
    Owner,
    Progress,
    RecipeRecord,
    Report,
    Request,
    StepLine,
)
from trainer.rundir.rundir import RunDirectory, differences
from trainer.settings import InitFrom


@pytest.fixture
def disk(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path)


@pytest.fixture
def directory(disk: DiskStore) -> RunDirectory:
    return runs.begun(disk)


def frozen(**changes: object) -> Recipe:
    """The tiny recipe with measured files."""
    body = recipes.load("tiny").model_dump(mode="json")
    for file in (*body["data"]["files"], *body["data"]["held_out"]):
        file["bytes"] = 1_000_000
    return recipes.override(Recipe.parse(body, "test"), changes)


def test_a_document_that_cannot_be_read_is_not_absent(disk: DiskStore) -> None:
    """Everything that is read decides something; "there is none" may be said only when the store says so."""
    claim = runs.claim(runs.begun(disk))
    record = runs.commit(claim, 2)
    unanswered = FaultyStore(disk, always(Fault.BEFORE, frozenset({"get", "list", "folders", "stat", "stat_tree"})))
    directory = RunDirectory(unanswered, patience_seconds=0)
    for read in (
        directory.head,
        directory.read_recipe,
        directory.read_init,
        lambda: directory.read_spec(1),
        lambda: directory.read_submitted(1),
        lambda: directory.read_start(1, 1),
        lambda: directory.read_progress(1, 1),
        lambda: directory.read_exit(1, 1),
        lambda: directory.read_pod_exit(1, "pod"),
        lambda: directory.read_commit(record.ref),
        lambda: directory.endings(1),
        lambda: directory.last_start(1),
        lambda: directory.set_asides(1, 1),
        lambda: directory.checkpoint_files(record.ref),
        lambda: directory.read_step_log(record.step_log[0]),
        lambda: directory.logged_steps(1, 1),
    ):
        with pytest.raises(StorageUnavailable):
            read()


# -- recipe and init


def test_the_recipe_is_fixed_by_the_first_attempt(directory: RunDirectory, disk: DiskStore) -> None:
    stored = directory.create_recipe(frozen())
    assert stored.fingerprint == frozen().fingerprint()
    assert RunDirectory(disk).read_recipe() == stored
    assert directory.create_recipe(frozen(name="renamed")) == stored, "the name decides no number"


def test_another_recipe_is_refused_field_by_field(directory: RunDirectory) -> None:
    directory.create_recipe(frozen())
    other = frozen(**{"global_batch": 256, "optimizer.beta2": 0.99, "data.order.seed": 7})
    with pytest.raises(ConfigurationError) as error:
        directory.create_recipe(other)
    text = str(error.value)
    for part in ("global_batch: 512 → 256", "optimizer.beta2: 0.95 → 0.99", "data.order.seed: 0 → 7", "runDirectory"):
        assert part in text
    assert "init_seed" not in text
    stored = directory.read_recipe()
    assert stored
    assert stored.recipe == frozen()


def test_many_differences_are_cut_short(directory: RunDirectory) -> None:
    directory.create_recipe(frozen())
    model = {f"model.{name}": value for name, value in frozen().model.model_dump().items() if isinstance(value, int)}
    changes = {name: value * 2 for name, value in model.items()}
    with pytest.raises(ConfigurationError, match=r"; and \d+ more\."):
        directory.create_recipe(frozen(**changes, global_batch=256, init_seed=1))


def test_an_unmeasured_recipe_is_refused(directory: RunDirectory) -> None:
    with pytest.raises(ConfigurationError, match="freeze the recipe first"):
        directory.create_recipe(recipes.load("tiny"))


def test_init_is_fixed_too(directory: RunDirectory) -> None:
    first = InitRecord(source=InitFrom(run="gs://b/parent"), digest={"params/w": 1})
    assert directory.create_init(first) == first
    assert directory.create_init(first.model_copy(update={"digest": {"params/w": 2}})) == first
    with pytest.raises(ConfigurationError, match=r'initFrom differs.*source.run: "gs://b/parent" → "gs://b/other"'):
        directory.create_init(InitRecord(source=InitFrom(run="gs://b/other")))


def test_differences_of_lists_and_missing_fields() -> None:
    assert differences({"a": [1, 2]}, {"a": [1, 3]}) == ["a.1: 2 → 3"]
    assert differences({"a": [1]}, {"a": [1, 3]}) == ["a: [1] → [1, 3]"]
    assert differences({}, {"b": {"c": 1}}) == ['b: null → {"c": 1}']
    assert differences({"a": 1}, {"a": 1}) == []


# -- step log

FLOATS = st.floats(allow_nan=True, allow_infinity=True)


def bits(value: float) -> bytes:
    return b"nan" if math.isnan(value) else struct.pack("<d", value)


@settings(deadline=None)
@given(st.lists(st.tuples(FLOATS, FLOATS, FLOATS), min_size=1, max_size=5), st.integers(1, 10**12))
def test_floats_come_back_bit_for_bit(values: list[tuple[float, float, float]], first: int) -> None:
    directory = RunDirectory(MemoryStore())
    written = [
        StepLine(step=first + i, loss=a, grad_norm=b, lr=c, skipped=True, ids="i", data="d", seconds=0.5)
        for i, (a, b, c) in enumerate(values)
    ]
    file = directory.append_step_log(1, 1, written)
    read = directory.read_step_log(file)
    assert [line.step for line in read] == [line.step for line in written]
    for old, new in zip(written, read, strict=True):
        for field in ("loss", "grad_norm", "lr"):
            assert bits(getattr(old, field)) == bits(getattr(new, field))
    assert (file.first, file.last) == (first, first + len(values) - 1)
    assert file.key == f"steps/1.1/{file.first}-{file.last}.jsonl"


def test_step_log_is_written_once(directory: RunDirectory, disk: DiskStore) -> None:
    lines = runs.lines(3, 6)
    assert directory.append_step_log(1, 1, lines) == directory.append_step_log(1, 1, lines)
    with pytest.raises(TrainerError, match="exists with other lines"):
        directory.append_step_log(1, 1, runs.lines(3, 6, loss=2.0))
    directory.append_step_log(1, 1, runs.lines(7, 30))
    assert [line.step for line in directory.logged_steps(1, 1)] == list(range(3, 31))
    assert directory.logged_steps(1, 2) == []


@pytest.mark.parametrize("steps", [[], [1, 3], [2, 1], [1, 1]])
def test_step_log_has_no_gaps(directory: RunDirectory, steps: list[int]) -> None:
    lines = [runs.lines(step, step)[0] for step in steps]
    with pytest.raises(ValueError, match="step log"):
        directory.append_step_log(1, 1, lines)


def test_any_flipped_bit_in_the_step_log_is_noticed(directory: RunDirectory, disk: DiskStore) -> None:
    file = directory.append_step_log(1, 1, runs.lines(1, 4))
    path = disk.root / file.key
    data = bytearray(path.read_bytes())
    source = random.Random(0)
    for _ in range(50):
        place, bit = source.randrange(len(data)), source.randrange(8)
        data[place] ^= 1 << bit
        path.write_bytes(data)
        with pytest.raises(Damaged, match="crc32c"):
            directory.read_step_log(file)
        data[place] ^= 1 << bit
    path.unlink()
    with pytest.raises(Damaged, match="missing"):
        directory.read_step_log(file)


def test_damaged_checkpoint_files_are_named(directory: RunDirectory, disk: DiskStore) -> None:
    claim = runs.claim(directory)
    record = runs.commit(claim, 2)
    record = record.model_copy(update={"files": directory.checkpoint_files(record.ref)})
    assert [entry.path for entry in record.files] == ["state"]
    assert directory.damaged_files(record) == []
    path = disk.root / record.checkpoint / "state"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    assert "crc32c" in directory.damaged_files(record)[0]
    path.write_bytes(data[:-1])
    assert "bytes" in directory.damaged_files(record)[0]
    path.unlink()
    assert directory.damaged_files(record) == ["state is missing"]


# -- ledger


def test_an_ending_is_recorded_once_per_key(directory: RunDirectory, disk: DiskStore) -> None:
    first = directory.append_ending(runs.ending(key="a", cause="preempted"))
    again = RunDirectory(disk).append_ending(runs.ending(key="a", cause="hang"))
    assert again == first, "the first writer's cause counts"
    second = directory.append_ending(runs.ending(key="b"))
    assert (first.index, second.index) == (1, 2)
    assert RunDirectory(disk).endings(1) == (first, second)


def test_endings_of_all_attempts(directory: RunDirectory, disk: DiskStore) -> None:
    entries = [directory.append_ending(runs.ending(1, "a"))]
    runs.submit(directory, 2)
    runs.submit(directory, 3)
    entries += [directory.append_ending(runs.ending(3, "b")), directory.append_ending(runs.ending(3, "c"))]
    assert directory.endings() == tuple(entries) == RunDirectory(disk).endings()
    entries.insert(1, directory.append_ending(runs.ending(2, "late")))
    assert directory.endings() == tuple(entries)


@pytest.mark.parametrize("seed", range(5))
def test_many_writers_record_each_ending_once(disk: DiskStore, seed: int) -> None:
    """Eight orchestrators see the same ten endings in their own order, and some answers get lost."""
    runs.begun(disk)
    gate = threading.Barrier(8)

    def write(number: int) -> list[str]:
        store = FaultyStore(DiskStore(disk.root), dice(seed * 8 + number, 0.2))
        directory = RunDirectory(store, sleep=lambda seconds: None)
        keys = [f"key{n}" for n in range(10)]
        random.Random(number).shuffle(keys)
        gate.wait()
        return [directory.append_ending(runs.ending(key=key)).key for key in keys]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    entries = RunDirectory(disk).endings(1)
    assert sorted(entry.key for entry in entries) == sorted(f"key{n}" for n in range(10))
    assert [entry.index for entry in entries] == list(range(1, 11))


@pytest.mark.parametrize("fault", [Fault.AFTER, Fault.LATE])
def test_a_lost_answer_does_not_record_twice(directory: RunDirectory, disk: DiskStore, fault: Fault) -> None:
    faulty = RunDirectory(FaultyStore(disk, at_write(0, fault), due=1), sleep=lambda seconds: None)
    faulty.append_ending(runs.ending(key="a"))
    assert len(RunDirectory(disk).endings(1)) == 1


# -- starts


def test_progress_and_exit(directory: RunDirectory) -> None:
    assert directory.read_progress(1, 1) is None
    for beats in (1, 2):
        directory.put_progress(1, 1, Progress(phase="Training", beats=beats, loss=math.nan, time=0.0))
    progress = directory.read_progress(1, 1)
    assert progress
    assert progress.beats == 2
    directory.put_pod_progress(1, "uid", Progress(phase="Starting", beats=1, time=0.0))
    assert directory.read_pod_progress(1, "uid")
    first = ExitRecord(code=1, reason="first", time=0.0)
    assert directory.put_exit(1, 1, first)
    assert not directory.put_exit(1, 1, ExitRecord(code=77, reason="its peer", time=1.0))
    assert directory.read_exit(1, 1) == first
    assert directory.put_pod_exit(1, "uid", first)
    assert directory.read_pod_exit(1, "uid") == first
    assert directory.read_exit(1, 2) is None


def test_last_start_counts_claims_without_a_trace(directory: RunDirectory) -> None:
    assert directory.last_start(1) == 0
    runs.claim(directory)
    runs.claim(directory)
    assert directory.last_start(1) == 2
    directory.put_progress(1, 2, Progress(phase="Training", beats=1, time=0.0))
    runs.submit(directory, 2)
    assert directory.last_start(1) == 2
    assert directory.last_start(2) == 0


def test_a_bucket_that_does_not_answer_at_once_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start must not end because of one answer that failed."""
    answers = [StorageUnavailable("503"), StorageUnavailable("503"), True]

    class Bucket:
        def __init__(self, uri: str) -> None:
            self.uri = uri

        def present(self) -> bool:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    monkeypatch.setattr("trainer.rundir.gcs.GcsStore", Bucket)
    assert RunDirectory.open("gs://bucket/run", sleep=lambda seconds: None).uri == "gs://bucket/run"
    answers[:] = [StorageUnavailable("503")]
    with pytest.raises(StorageUnavailable):
        RunDirectory.open("gs://bucket/run", patience_seconds=0)


REPORTS = (*Report.__subclasses__(), StepLine)
ORDERS = (Head, RecipeRecord, AttemptSpec, Request, Owner)


def test_reports_of_a_newer_trainer_are_read_and_newer_orders_refused() -> None:
    """Trainer and orchestrator are upgraded one after the other; an order is obeyed as a whole or not at all."""
    assert {"CommitRecord", "Progress", "StartRecord", "ExitRecord"} <= {kind.__name__ for kind in REPORTS}
    ref = {"attempt": 1, "start": 1, "step": 4}
    for kind in REPORTS:
        with pytest.raises(ConfigurationError) as refused:
            kind.parse({"phase_moon": 1}, "x")
        assert "phase_moon" not in str(refused.value)
    line = {"step": 1, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "skipped": False, "ids": "", "data": "", "seconds": 1}
    assert StepLine.parse(json.dumps(line | {"later": [1]}), "x") == StepLine.parse(line, "x")
    for kind in ORDERS:
        with pytest.raises(ConfigurationError, match="phase_moon: unknown field"):
            kind.parse({"phase_moon": 1} | ref, "x")
