"""What observations ask a run directory for: nothing twice that cannot have changed, and nothing that is older than HEAD."""

import threading
from collections import Counter

import pytest

from orchestrator.reading import RunReading, with_shared_data
from tests.support.memory_store import MemoryStore
from tests.support.runs import begun, claim, ending, submit
from tests.support.world import tiny_recipe
from trainer.errors import StorageUnavailable
from trainer.rundir.records import Progress
from trainer.rundir.rundir import RunDirectory
from trainer.rundir.store import Blob


class CountingStore(MemoryStore):
    """Counts what is read, and fails where it is told to. `uri` decides whether reads are begun ahead."""

    def __init__(self, uri: str) -> None:
        super().__init__()
        self.uri = uri
        self.reads: Counter[str] = Counter()
        self.away: set[str] = set()
        self._counting = threading.Lock()

    def get(self, key: str) -> Blob:
        with self._counting:
            self.reads[key] += 1
        if key in self.away:
            raise StorageUnavailable(f"{key}: no answer")
        return super().get(key)


@pytest.fixture(params=["gs://bucket/run", "/runs/demo"])
def store(request: pytest.FixtureRequest) -> CountingStore:
    return CountingStore(request.param)


def look(reading: RunReading, attempt: int) -> None:
    """What one look reads while attempt `attempt` trains in its first start."""
    found = reading.head()
    assert found is not None
    assert found[0].attempt == attempt
    reading.read_recipe()
    reading.read_init()
    assert reading.read_spec(attempt)
    reading.read_submitted(attempt)
    assert reading.read_spec(attempt + 1) is None
    assert reading.read_submitted(attempt + 1) is None
    assert reading.read_spec(attempt + 2) is None
    for number in range(1, attempt + 1):
        reading.endings(number)
    reading.read_start(attempt, 1)
    reading.read_progress(attempt, 1)
    reading.read_exit(attempt, 1)


def directory_of(store: CountingStore, attempts: int = 1) -> RunDirectory:
    """Attempts 1 … `attempts`, the last of them claimed; no call is repeated."""
    directory = begun(store, patience_seconds=0.0)
    for attempt in range(2, attempts + 1):
        submit(directory, attempt)
    claim(directory, attempts)
    store.reads.clear()
    return directory


def test_what_is_written_once_is_read_once(store: CountingStore) -> None:
    reading = RunReading(directory_of(store))
    for _ in range(3):
        look(reading, 1)
    assert store.reads["attempts/1/spec.json"] == 1
    # What is not there may come, and what is overwritten may have been.
    for key in ("HEAD", "attempts/2/spec.json", "attempts/1/endings/1.json", "attempts/1/1/progress.json", "init.json"):
        assert store.reads[key] == 3, key


def test_what_comes_between_two_looks_is_seen(store: CountingStore) -> None:
    directory = directory_of(store)
    reading = RunReading(directory)
    look(reading, 1)
    directory.put_progress(1, 1, Progress(phase="Training", step=4, beats=1, time=0.0))
    directory.append_ending(ending(1))
    assert reading.head()
    assert [entry.key for entry in reading.endings(1)] == ["key"]
    progress = reading.read_progress(1, 1)
    assert progress is not None
    assert progress.step == 4
    directory.put_progress(1, 1, Progress(phase="Training", step=5, beats=2, time=0.0))
    assert reading.head()
    progress = reading.read_progress(1, 1)
    assert progress is not None
    assert progress.step == 5


def test_nothing_is_answered_from_before_head(store: CountingStore) -> None:
    """An answer that is on its way belongs to one look; what it does not ask for is not kept for the next."""
    directory = directory_of(store)
    reading = RunReading(directory)
    assert reading.head()
    assert reading.read_spec(2) is None
    directory.append_ending(ending(1))  # by another process, say, after the look had begun
    submit(directory, 2)
    found = reading.head()
    assert found is not None
    assert found[0].attempt == 2
    assert reading.read_spec(2)
    assert len(reading.endings(1)) == 1


def test_an_old_ledger_is_read_once_and_our_own_late_entry_is_seen(store: CountingStore) -> None:
    directory = directory_of(store, attempts=4)
    reading = RunReading(directory)
    for _ in range(3):
        look(reading, 4)
    counts = [store.reads[f"attempts/{attempt}/endings/1.json"] for attempt in (1, 2, 3, 4)]
    assert counts == [1, 1, 3, 3]
    directory.append_ending(ending(1, cause="fenced"))  # the gang of attempt 1 came up once more
    look(reading, 4)
    assert [entry.cause for entry in reading.endings(1)] == ["fenced"]


def test_an_entry_of_another_is_seen_once_we_meet_it(store: CountingStore) -> None:
    directory = directory_of(store, attempts=3)
    reading = RunReading(directory)
    look(reading, 3)
    RunDirectory(store).append_ending(ending(1, cause="fenced"))
    look(reading, 3)
    assert reading.endings(1) == ()
    directory.append_ending(ending(1, cause="fenced"))  # the same, as we see it: its key is there
    assert [entry.cause for entry in reading.endings(1)] == ["fenced"]


@pytest.mark.parametrize("key", ["attempts/1/endings/1.json", "attempts/2/spec.json", "attempts/1/1/progress.json"])
def test_no_answer_is_no_answer(store: CountingStore, key: str) -> None:
    """A read that fails ahead fails the look that needs it, and that one alone."""
    reading = RunReading(directory_of(store))
    store.away = {key}
    with pytest.raises(StorageUnavailable, match="no answer"):
        look(reading, 1)
    store.away = set()
    look(reading, 1)


def test_a_directory_without_head_is_kept_nothing_of(store: CountingStore) -> None:
    reading = RunReading(RunDirectory(store, patience_seconds=0.0))
    directory = RunDirectory(store)
    for _ in range(2):
        assert reading.head() is None
        assert reading.read_spec(1) is None
    submit(directory, 1)
    look(reading, 1)


def test_equal_lists_of_data_files_are_held_once(store: CountingStore) -> None:
    recipe = tiny_recipe()
    wanted = with_shared_data(recipe)
    directory = directory_of(store)
    directory.create_recipe(recipe.model_copy(update={"name": "as it was called then"}))
    reading = RunReading(directory)
    store.reads.clear()
    for attempt in (1, 2):
        assert reading.head()
        recorded = reading.read_recipe()
        assert recorded is not None
        assert recorded.recipe.data is wanted.data
        assert recorded.recipe.name == "as it was called then"
        submit(directory, attempt + 1)
    assert store.reads["recipe.json"] == 1
    assert with_shared_data(wanted) == recipe


def test_a_bucket_is_asked_many_things_at_a_time() -> None:
    """All that is read after HEAD, but for the ledger, waits for its answers together: none comes before all are asked."""
    meeting = threading.Barrier(10)

    class Slow(CountingStore):
        def get(self, key: str) -> Blob:
            if key != "HEAD" and "endings" not in key:
                meeting.wait(5)
            return super().get(key)

    store = CountingStore("gs://bucket/run")
    directory_of(store)
    slow = Slow("gs://bucket/run")
    slow._objects = store._objects
    # The recipe, where it began, three specs, two submissions, and three documents of the start.
    reading = RunReading(RunDirectory(slow, patience_seconds=0.0))
    assert reading.head()
    assert reading.read_spec(1)
