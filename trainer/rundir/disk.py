"""The store on a local file system: hard links for what may happen once, no locks.

A swap to generation g+1 writes a temporary file, fsyncs it, and links it to `KEY.d/<g+1>`: the link either is the first
(won) or meets EEXIST (lost), and a process stopped at any point holds nothing that others wait for. Generations are
kept, so none is ever used twice (of a heartbeat, the newest thousand). Every folder entry is fsynced before a call returns. NFS is untested.
"""

import builtins
import contextlib
import errno
import io
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import google_crc32c

from trainer.errors import StorageUnavailable, TrainerError
from trainer.rundir.files import ABSENT, exists, file_system, identity, remove, sync
from trainer.rundir.store import AlreadyExists, Blob, Conflict, NotFound, Stat, StorageFull, StoreMissing, StoreRefused

TEMPORARY = ".tmp"  # at the root, so that link and rename stay inside one file system
SWEEP_SECONDS = 24 * 3600.0
# Swapped every 30 s for weeks, and no fence: of it only the newest generations stay. A swapper would have to sleep for
# hours between its look and its link to be misled.
BEATING, KEPT_BEATS = "owner.json", 1024


class DiskStore:
    """Objects as files below `root`, which must exist (`make` creates it). Safe for any number of processes."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()
        self.uri = str(self.root)
        try:
            if not self.root.is_dir():
                raise StoreMissing(
                    f"run directory {self.root}: no such folder; check the path, or that its disk is mounted"
                )
            self._identity = identity(self.root)
        except OSError as error:
            raise self._translate(error, "") from error
        self._probed = False
        self._durable: set[Path] = set()  # folders whose own entry this process has fsynced
        self._newest: dict[str, int] = {}  # swapped key -> a generation known to exist

    @staticmethod
    def make(root: Path) -> None:
        """Create the folder `root` and its parents. Raises StoreRefused when that is not allowed."""
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreRefused(
                f"run directory {root}: cannot be created ({os.strerror(error.errno or 0)}); "
                "choose a folder you may write to"
            ) from error

    def get(self, key: str) -> Blob:
        with self._errors(key):
            for _ in range(3):
                generation = self._highest(key) if "/" not in key else 0
                path = self._path(f"{key}.d/{generation}") if generation else self._path(key)
                try:
                    return Blob(path.read_bytes(), generation)
                except ABSENT:
                    self._check_root()
                    if not generation:
                        raise NotFound(key) from None
                    self._newest.pop(key, None)  # the folder was replaced below us: look again
            raise StorageUnavailable(f"{self.uri}: {key} changes while it is read")

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        with self._errors(key):
            try:
                with self._path(key).open("rb") as file:
                    return os.pread(file.fileno(), length, offset)
            except ABSENT:
                self._check_root()
                raise NotFound(key) from None

    def create(self, key: str, data: bytes) -> None:
        with self._errors(key):
            self._link(io.BytesIO(data), self._path(key))

    def create_from_file(self, key: str, path: str | os.PathLike[str]) -> None:
        with open(path, "rb") as source, self._errors(key):
            self._link(source, self._path(key))

    def put(self, key: str, data: bytes) -> None:
        with self._errors(key):
            self._ready()
            target = self._path(key)
            temporary = self._write(io.BytesIO(data), durable=False)
            try:
                try:
                    os.replace(temporary, target)
                except FileNotFoundError:
                    self._make_folder(target.parent)
                    os.replace(temporary, target)
            except BaseException:
                remove(temporary)
                raise

    def swap(self, key: str, data: bytes, expected: int) -> int:
        if "/" in key:
            raise ValueError(f"{key}: only keys at the root of the run directory are swapped")
        folder = self._path(f"{key}.d")
        with self._errors(key):
            # Generations have no gaps and are never removed: if `expected` exists and its successor does not,
            # `expected` is the newest.
            if expected and not exists(folder / str(expected)):
                self._check_root()
                raise Conflict(key)
            try:
                self._link(io.BytesIO(data), folder / str(expected + 1))
            except AlreadyExists:
                raise Conflict(key) from None
            self._newest[key] = expected + 1
            if key == BEATING:
                remove(folder / str(expected + 1 - KEPT_BEATS))
            return expected + 1

    def list(self, prefix: str) -> list[str]:
        with self._errors(prefix):
            keys = set()
            for path in self._files(prefix):
                key = path.relative_to(self.root).as_posix()
                parent, _, name = key.rpartition("/")
                swapped = parent.endswith(".d") and "/" not in parent and name.isdigit()
                keys.add(parent.removesuffix(".d") if swapped else key)
            return sorted(keys)

    def folders(self, prefix: str) -> builtins.list[str]:
        with self._errors(prefix):
            folder = self._path(prefix)
            try:
                names = [entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name != TEMPORARY]
            except ABSENT:
                self._check_root()
                return []
            base = prefix.strip("/")
            return sorted(name for name in names if next(self._files(f"{base}/{name}" if base else name), None))

    def modified(self, prefix: str) -> float | None:
        with self._errors(prefix):
            times = []
            for path in self._files(prefix):
                with contextlib.suppress(*ABSENT):
                    times.append(path.stat().st_mtime)
            return max(times, default=None)

    def stat(self, key: str) -> Stat:
        with self._errors(key):
            try:
                return self._stat(self._path(key))
            except ABSENT:
                self._check_root()
                raise NotFound(key) from None

    def stat_tree(self, prefix: str) -> builtins.list[Stat]:
        with self._errors(prefix):
            return sorted((self._stat(path) for path in self._files(prefix)), key=lambda stat: stat.key)

    def _stat(self, path: Path) -> Stat:
        with path.open("rb") as file:
            checksum, size = google_crc32c.Checksum(), 0
            while chunk := file.read(1 << 20):
                checksum.update(chunk)
                size += len(chunk)
        return Stat(path.relative_to(self.root).as_posix(), size, int.from_bytes(checksum.digest(), "big"))

    def sync_tree(self, prefix: str) -> None:
        with self._errors(prefix):
            self._check_root()
            folders = {self._path(prefix)}
            for path in self._files(prefix):
                sync(path)
                folders.update(parent for parent in path.parents if parent.is_relative_to(self.root))
            for folder in sorted(folders, reverse=True):  # a folder's content before its own entry
                if exists(folder):
                    sync(folder)

    def delete_tree(self, prefix: str) -> None:
        if not prefix.strip("/"):
            raise ValueError("delete_tree: an empty prefix would delete the run")
        with self._errors(prefix):
            self._ready()
            folder = self._path(prefix)
            doomed = self.root / TEMPORARY / uuid.uuid4().hex
            try:
                os.rename(folder, doomed)  # at once for readers, whatever happens to us while the files go
            except ABSENT:
                self._check_root()
                return
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                doomed = folder
            self._durable = {known for known in self._durable if known != folder and folder not in known.parents}
            shutil.rmtree(doomed, ignore_errors=doomed != folder)

    def probe(self) -> None:
        """Try what a swap needs: a link, EEXIST on the second one, fsync of a file and of a folder."""
        temporary = self.root / TEMPORARY
        source = temporary / f"probe-{uuid.uuid4().hex}"
        link = source.with_suffix(".link")
        with self._errors("probe"):
            self._check_root()
            temporary.mkdir(exist_ok=True)
            self._sweep(temporary)
            try:
                self._write(io.BytesIO(b"probe"), durable=True, path=source)
                try:
                    os.link(source, link)
                    sync(temporary)
                except OSError as error:
                    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
                        raise
                    raise self._unfit(
                        f"hard links or fsync of a folder fail ({os.strerror(error.errno or 0)})"
                    ) from error
                try:
                    os.link(source, link)
                except FileExistsError:
                    pass
                else:
                    raise self._unfit("a second hard link to the same name does not fail")
                if link.read_bytes() != b"probe":
                    raise self._unfit("a hard link does not show the bytes of its file")
            finally:
                remove(link)
                remove(source)
        self._probed = True

    # -- writing

    def _ready(self) -> None:
        """Before every write: the root is the folder that was opened, and its file system has been probed once."""
        self._check_root()
        if not self._probed:
            self.probe()

    def _link(self, data: IO[bytes], target: Path) -> None:
        """Make `target` exist with `data`, durably. Raises AlreadyExists, and then its entry is durable too."""
        self._ready()
        if exists(target):
            sync(target.parent)  # its writer may have stopped before it did so
            raise AlreadyExists(self._key(target))
        temporary = self._write(data, durable=True)
        try:
            self._make_folder(target.parent)
            try:
                try:
                    os.link(temporary, target)
                except FileNotFoundError:  # the folder was deleted since we made it
                    self._durable.discard(target.parent)
                    self._make_folder(target.parent)
                    os.link(temporary, target)
            except FileExistsError:
                sync(target.parent)
                raise AlreadyExists(self._key(target)) from None
            sync(target.parent)
        finally:
            remove(temporary)

    def _write(self, data: IO[bytes], durable: bool, path: Path | None = None) -> Path:
        path = path or self.root / TEMPORARY / f"{os.getpid()}-{uuid.uuid4().hex}"
        try:
            with open(path, "xb") as file:
                shutil.copyfileobj(data, file, 1 << 20)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
        except BaseException:
            remove(path)
            raise
        return path

    def _make_folder(self, folder: Path) -> None:
        """Make `folder` below the root, every new entry durable. The root itself is never made here: a vanished
        root is an unmounted disk, and an empty folder in its place would look like a new run."""
        if folder in self._durable:
            return
        path = self.root
        for part in folder.relative_to(self.root).parts:
            parent, path = path, path / part
            path.mkdir(exist_ok=True)
            if path not in self._durable:
                sync(parent)
                self._durable.add(path)

    def _sweep(self, temporary: Path) -> None:
        """Remove what killed processes left behind."""
        for entry in os.scandir(temporary):
            with contextlib.suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > SWEEP_SECONDS:
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path, ignore_errors=True)
                    else:
                        os.unlink(entry.path)

    # -- reading

    def _highest(self, key: str) -> int:
        """The newest generation of a swapped key, 0 when there is none."""
        folder = self._path(f"{key}.d")
        generation = self._newest.get(key)
        if generation is None:
            try:
                generation = max((int(name) for name in os.listdir(folder) if name.isdigit()), default=0)
            except ABSENT:
                return 0
        while exists(folder / str(generation + 1)):
            generation += 1
        if generation:
            self._newest[key] = generation
        return generation

    def _files(self, prefix: str) -> Iterator[Path]:
        """Every file below `prefix`; what vanishes meanwhile is left out."""
        stack = [self._path(prefix)]
        while stack:
            folder = stack.pop()
            try:
                entries = list(os.scandir(folder))
            except ABSENT:
                self._check_root()
                continue
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if folder != self.root or entry.name != TEMPORARY:
                        stack.append(Path(entry.path))
                else:
                    yield Path(entry.path)

    def _path(self, key: str) -> Path:
        parts = key.strip("/").split("/")
        if ".." in parts or parts[0] == TEMPORARY:
            raise ValueError(f"{key!r} is not a key of the run directory")
        return self.root.joinpath(*parts)

    def _key(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    # -- errors

    def _check_root(self) -> None:
        """The folder we opened is still there; otherwise "no such object" would be a guess."""
        try:
            same = identity(self.root) == self._identity
        except ABSENT:
            same = False
        if not same:
            raise StorageUnavailable(
                f"run directory {self.uri}: the folder vanished or was replaced; is its disk still mounted?"
            )

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._translate(error, key) from error

    def _translate(self, error: OSError, key: str) -> TrainerError:
        why = os.strerror(error.errno or 0)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StorageFull(
                f"run directory {self.uri}: disk full while writing {key} ({why}); "
                "free space, the run goes on from its last commit"
            )
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return StoreRefused(
                f"run directory {self.uri}: {why} ({error.filename or key}); "
                "the trainer and the orchestrator must be able to write there"
            )
        return StorageUnavailable(f"run directory {self.uri}: {key}: {why}")

    def _unfit(self, what: str) -> StoreRefused:
        return StoreRefused(
            f"run directory {self.uri}: file system {file_system(self.root)!r} is not usable: {what}; "
            "use a local disk or gs://"
        )
