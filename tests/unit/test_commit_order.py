"""A commit's five steps come in their order: log durable, save complete on all hosts, record, HEAD, collection."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import runs
from trainer.commits import Committer
from trainer.departure import Departure
from trainer.errors import StorageUnavailable
from trainer.rundir.disk import DiskStore
from trainer.rundir.rundir import RunDirectory
from trainer.settings import Keep
from trainer.steplog import StepLog

FOLDER = "checkpoints/1.1/4"
ORDER = ["create steps/1.1/1-4.jsonl", "saved", f"sync_tree {FOLDER}", "create commits/1.1/4.json", "swap HEAD"]


class Recording:
    """A store that tells what changed it, in order."""

    def __init__(self, store: DiskStore) -> None:
        self.store, self.happened = store, list[str]()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)
        if name not in ("create", "swap", "sync_tree", "delete_tree"):
            return method

        def call(key: str, *rest: Any) -> Any:
            self.happened.append(f"{name} {key}")
            return method(key, *rest)

        return call


class SlowSave:
    """Orbax, as far as a commit sees it: nothing is whole before `wait` returns."""

    def __init__(self, store: Recording, error: Exception | None = None) -> None:
        self.store, self.error = store, error

    def begin_save(self, path: str, state: Any) -> None:
        pass

    def wait(self, path: str) -> None:
        if self.error is not None:
            raise self.error
        folder = Path(path)
        folder.mkdir(parents=True)
        (folder / "state").write_bytes(b"all of it")
        self.store.happened.append("saved")


class Staying(Departure):
    """Keeps why the process would have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []

    def fail(self, error: BaseException) -> Any:
        self.errors.append(error)


def committed_once(folder: Path, error: Exception | None = None) -> tuple[Recording, RunDirectory, Staying]:
    store: Any = Recording(DiskStore(folder))
    rundir = runs.begun(store, patience_seconds=0)
    claim = runs.claim(rundir)
    log, departure, save = StepLog(claim.append_step_log), Staying(), SlowSave(store, error)
    for line in runs.lines(1, 4):
        log.add(line)
    committer = Committer(
        rundir,
        claim,
        save,  # type: ignore[arg-type]
        departure,
        steplog=log,
        fingerprint="f",
        versions={},
        keep=Keep(),
        committed=None,
        save_seconds=0.0,
        on_commit=lambda ref: store.happened.append("told"),
        beat=lambda what: None,
    )
    store.happened.clear()
    committer.begin(claim.ref(4), None, {"params/w": 1})
    committer.drain()
    return store, rundir, departure


def test_each_step_follows_the_one_before(tmp_path: Path) -> None:
    store, rundir, departure = committed_once(tmp_path)
    assert not departure.errors
    assert store.happened == [*ORDER, "told"]
    (record,) = rundir.lineage(rundir.head()[0].commit)  # type: ignore[index]
    assert [(file.path, file.bytes) for file in record.files] == [("state", len(b"all of it"))]
    assert [(log.first, log.last) for log in record.step_log] == [(1, 4)]


@pytest.mark.parametrize("error", [StorageUnavailable("no answer"), ValueError("a bug")])
def test_a_save_that_failed_commits_nothing(tmp_path: Path, error: Exception) -> None:
    store, rundir, departure = committed_once(tmp_path, error)
    assert departure.errors == [error]
    assert store.happened[:1] == ORDER[:1]
    assert "swap HEAD" not in store.happened
    assert rundir.head()[0].commit is None  # type: ignore[index]
    assert not rundir.store.list("commits")
