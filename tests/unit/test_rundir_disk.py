"""The disk store refuses what it cannot work with, by name, and takes no silence for an answer."""

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

from tests.support import runs
from trainer.errors import ConfigurationError, StorageUnavailable
from trainer.rundir.disk import SWEEP_SECONDS, DiskStore
from trainer.rundir.opening import open_store
from trainer.rundir.rundir import RunDirectory
from trainer.rundir.store import AlreadyExists, Conflict, StorageFull, StoreRefused


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def test_missing_folder_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no-such: no such folder"):
        RunDirectory.open(str(tmp_path / "no-such"))
    assert not (tmp_path / "no-such").exists()
    RunDirectory.open(str(tmp_path / "no-such"), create=True)
    assert open_store(f"file://{tmp_path}/no-such").list("") == []


def test_a_file_is_no_run_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreRefused, match="no such folder"):
        RunDirectory.open(str(tmp_path / "file"))


def test_unknown_scheme() -> None:
    with pytest.raises(StoreRefused, match="gs://bucket/path or a folder"):
        open_store("s3://bucket/run")


def test_opening_and_reading_writes_nothing(root: Path) -> None:
    directory = RunDirectory.open(str(root))
    assert directory.head() is None
    assert directory.endings() == ()
    assert list(root.iterdir()) == []


def _failing(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, fail)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_file_system_without_links_is_refused(root: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _failing("link", number, monkeypatch)
    with pytest.raises(StoreRefused, match=r"file system '\w+' is not usable: hard links"):
        DiskStore(root).swap("HEAD", b"x", 0)


def test_file_system_whose_links_replace_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", lambda source, target: shutil.copyfile(source, target))
    with pytest.raises(StoreRefused, match="second hard link"):
        DiskStore(root).create("a", b"x")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_says_so(root: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(root)
    store.create("a", b"x")
    first = store.swap("HEAD", b"old", 0)
    with monkeypatch.context() as patch:
        _failing("fsync", number, patch)
        for write in (lambda: store.create("b", b"x"), lambda: store.swap("HEAD", b"new", first)):
            with pytest.raises(StorageFull, match="disk full"):
                write()
    assert store.get("HEAD").data == b"old"
    assert store.list("") == ["HEAD", "a"]
    assert list((root / ".tmp").iterdir()) == []
    store.swap("HEAD", b"new", first)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE])
def test_other_errors_mean_unknown(root: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(root)
    store.create("a", b"x")
    _failing("link", number, monkeypatch)
    with pytest.raises(StorageUnavailable):
        store.create("b", b"x")


def test_a_stat_that_fails_is_not_absence(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(root)
    store.swap("HEAD", b"x", 0)

    def fail(path: Path, **options: object) -> None:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(Path, "stat", fail)
    with pytest.raises(StorageUnavailable):
        DiskStore.get(store, "HEAD")


def test_vanished_root_is_unknown_and_never_made_again(root: Path) -> None:
    store = DiskStore(root)
    directory = runs.begun(store, patience_seconds=0)
    shutil.move(root, root.parent / "elsewhere")
    for call in (
        directory.head,
        lambda: store.list(""),
        lambda: store.create("b", b"x"),
        lambda: store.put("c", b"x"),
        lambda: store.swap("HEAD", b"x", 1),
        lambda: store.delete_tree("checkpoints"),
        lambda: store.stat_tree("checkpoints"),
    ):
        with pytest.raises(StorageUnavailable, match="vanished"):
            call()
    assert not root.exists()
    root.mkdir()  # an empty mount point is not the run either
    with pytest.raises(StorageUnavailable, match="replaced"):
        directory.head()
    with pytest.raises(StorageUnavailable, match="replaced"):
        store.create("b", b"x")


def test_generations_are_files_that_stay(root: Path) -> None:
    store = DiskStore(root)
    generation = 0
    for turn in range(5):
        generation = store.swap("HEAD", f"{turn}".encode(), generation)
    assert sorted(path.name for path in (root / "HEAD.d").iterdir()) == ["1", "2", "3", "4", "5"]
    assert (root / "HEAD.d" / "3").read_bytes() == b"2"


def test_swap_from_a_generation_that_never_was(root: Path) -> None:
    store = DiskStore(root)
    store.swap("HEAD", b"x", 0)
    with pytest.raises(Conflict):
        store.swap("HEAD", b"y", 7)


def test_head_folder_replaced_below_us(root: Path) -> None:
    store = DiskStore(root)
    for generation in range(4):
        store.swap("HEAD", f"{generation}".encode(), generation)
    assert store.get("HEAD").generation == 4
    shutil.rmtree(root / "HEAD.d")
    DiskStore(root).swap("HEAD", b"restored", 0)
    found = store.get("HEAD")
    assert (found.data, found.generation) == (b"restored", 1)


def test_folder_deleted_below_us_is_made_again(root: Path) -> None:
    store = DiskStore(root)
    store.create("steps/1.1/1-2.jsonl", b"x")
    shutil.rmtree(root / "steps")
    store.create("steps/1.1/3-4.jsonl", b"y")
    assert store.list("steps") == ["steps/1.1/3-4.jsonl"]


def test_readers_never_see_a_half_written_object(root: Path) -> None:
    store = DiskStore(root)
    value = bytes(1 << 20)
    seen: set[int] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            for key in store.list("attempts"):
                seen.add(len(store.get(key).data))

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(20):
        store.put("attempts/1/1/progress.json", value)
        store.create(f"attempts/1/1/{turn}.json", value)
    done.set()
    reader.join()
    assert seen == {len(value)}


def test_leftovers_of_killed_writers_are_swept_after_a_day(root: Path) -> None:
    store = DiskStore(root)
    store.create("a", b"x")
    old, fresh = root / ".tmp" / "old", root / ".tmp" / "fresh"
    for path in (old, fresh):
        path.mkdir()
        (path / "file").write_bytes(b"x")
    os.utime(old, (0, os.stat(root).st_mtime - SWEEP_SECONDS - 1))
    DiskStore(root).create("b", b"x")
    assert [path.name for path in (root / ".tmp").iterdir()] == ["fresh"]


def test_temporary_files_are_no_objects(root: Path) -> None:
    store = DiskStore(root)
    store.create("a", b"x")
    (root / ".tmp" / "half").write_bytes(b"x")
    assert store.list("") == ["a"]
    for key in (".tmp/half", "../a", "a/../../b"):
        with pytest.raises(ValueError, match="not a key"):
            store.get(key)


def test_create_after_a_lost_folder_sync_is_made_durable(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer died between link and fsync of the folder; whoever meets the object syncs it before relying on it."""
    store = DiskStore(root)
    store.create("c/1", b"x")
    synced: list[Path] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(Path(os.readlink(f"/proc/self/fd/{fd}"))), real(fd)))
    with pytest.raises(AlreadyExists):
        store.create("c/1", b"x")
    assert root / "c" in synced


def test_a_checkpoint_is_durable_before_its_record(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file and folder down to the checkpoint's last is synced before the commit record has a name."""
    directory = runs.begun(DiskStore(root))
    claim = runs.claim(directory)
    record = runs.prepare(claim, 2)
    (root / record.checkpoint / "d").mkdir()
    (root / record.checkpoint / "d" / "0").write_bytes(b"written by another library")
    events: list[str] = []
    fsync, link = os.fsync, os.link

    def noting_fsync(handle: int) -> None:
        events.append(os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), root))
        fsync(handle)

    def noting_link(source: Path, target: Path) -> None:
        events.append(f"link {os.path.relpath(target, root)}")
        link(source, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "link", noting_link)
    claim.commit(record)
    before = events[: events.index("link commits/1.1/2.json")]
    checkpoint = "checkpoints/1.1/2"
    for path in (f"{checkpoint}/state", f"{checkpoint}/d/0", f"{checkpoint}/d", checkpoint, "checkpoints/1.1", "."):
        assert path in before
    assert before.index(f"{checkpoint}/d/0") < before.index(f"{checkpoint}/d") < before.index(checkpoint)
