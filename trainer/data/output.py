"""Where token files are written: a folder or a gs:// prefix. A file is there whole, or not at all.

Whoever is killed leaves nothing under a file's name; on disk a temporary file beside it, which the next one removes.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from trainer.data_root import GcsRoot, Wording
from trainer.errors import ConfigurationError, StorageUnavailable
from trainer.places import written

OUTPUT = Wording("output file", "--out", "give a folder or a gs:// prefix", "it was changed since")
TEMPORARY = ".tmp"
UPLOAD_CHUNK = 64 << 20
COMPOSED_AT_ONCE = 32  # the most that a bucket joins in one call


class Output(Protocol):
    """Write access below one root, by name. Opened by `open_output`."""

    uri: str

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if there is none."""

    def read(self, name: str) -> bytes:
        """A small file. Raises ConfigurationError when there is none."""

    def names(self, folder: str) -> list[str]:
        """The files below `folder` ("" is the root), sorted, as paths from the root; no temporary ones."""

    def file(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A file to write; it is there when the block ends, replacing another. An exception leaves nothing."""

    def join(self, name: str, parts: Sequence[str]) -> None:
        """Make `name` of these files, one after the other, and remove them. Repeating it after a kill is right."""

    def remove(self, folder: str) -> None:
        """Remove everything below `folder`. Missing is fine."""

    def alone(self) -> AbstractContextManager[None]:
        """Nobody else writes here until the block ends; for those who wait as long as we do. On disk only."""


def open_output(uri: str) -> Output:
    """The output at `uri`. Raises ConfigurationError when a folder cannot be made, or the scheme is unknown."""
    if uri.startswith("gs://"):
        return GcsOutput(uri)
    if "://" in uri:
        raise ConfigurationError(f"--out {uri}: unknown scheme; give a folder or a gs:// prefix")
    return DiskOutput(uri)


def write(output: Output, name: str, data: bytes | memoryview) -> None:
    """A whole file from memory."""
    with output.file(name) as file:
        file.write(data)


class DiskOutput:
    """A folder, made if it is not there."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._folder = Path(uri)
        with self._said():
            self._folder.mkdir(parents=True, exist_ok=True)

    def size(self, name: str) -> int | None:
        with self._said():
            try:
                return (self._folder / name).stat().st_size
            except FileNotFoundError:
                return None

    def read(self, name: str) -> bytes:
        with self._said():
            return (self._folder / name).read_bytes()

    def names(self, folder: str) -> list[str]:
        with self._said():
            found = [path for path in (self._folder / folder).rglob("*") if path.is_file()]
        return sorted(path.relative_to(self._folder).as_posix() for path in found if path.suffix != TEMPORARY)

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        target = self._folder / name
        beside = target.with_name(f"{target.name}.{os.getpid()}{TEMPORARY}")
        with self._said():
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with beside.open("wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(beside, target)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise
            _sync_folder(target.parent)

    def join(self, name: str, parts: Sequence[str]) -> None:
        with self._said():
            if len(parts) == 1:
                os.replace(self._folder / parts[0], self._folder / name)
                _sync_folder(self._folder)
                return
            with self.file(name) as whole:
                for part in parts:
                    with (self._folder / part).open("rb") as file:
                        shutil.copyfileobj(file, whole, 1 << 20)
            for part in parts:
                (self._folder / part).unlink()

    def remove(self, folder: str) -> None:
        with self._said(), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._folder / folder)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigurationError(f"--out {self.uri}: another process is writing here; wait for it") from None
            for left in self._folder.rglob(f"*{TEMPORARY}"):
                left.unlink(missing_ok=True)
            yield
        finally:
            os.close(descriptor)

    def _said(self) -> AbstractContextManager[None]:
        return written(f"--out {self.uri}")


class GcsOutput:
    """A prefix in a bucket. What is written passes through TMPDIR, and appears when its upload ends."""

    def __init__(self, uri: str, root: GcsRoot | None = None) -> None:
        self.uri = uri
        self._root = root or GcsRoot(uri, wording=OUTPUT)

    def size(self, name: str) -> int | None:
        return self._root.size_or_none(name)

    def read(self, name: str) -> bytes:
        content = bytearray(self._root.size(name))
        if content:
            self._root.read_into(name, 0, memoryview(content))
        return bytes(content)

    def names(self, folder: str) -> list[str]:
        return list(self._root.objects(folder))

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        try:
            with tempfile.TemporaryFile() as file:  # has no name: gone with the process
                yield file
                self._root.retried(lambda: self._upload(name, file), name)
        except OSError as error:
            raise StorageUnavailable(
                f"--out {self.uri}: {error.strerror or error} in {tempfile.gettempdir()}, through which {name} passes; set "
                "TMPDIR to a larger folder"
            ) from error

    def _upload(self, name: str, file: BinaryIO) -> None:
        blob = self._root.blob(name)
        blob.chunk_size = UPLOAD_CHUNK
        blob.upload_from_file(file, rewind=True, checksum="crc32c")

    def join(self, name: str, parts: Sequence[str]) -> None:
        """Joined by the bucket itself, at most 32 at a time; the first of them stands for those joined already."""
        left = list(parts)
        while len(left) > COMPOSED_AT_ONCE:
            first, *rest = left[:COMPOSED_AT_ONCE]
            joined = f"{first}+{len(rest)}"
            self._compose(joined, [first, *rest])
            left = [joined, *left[COMPOSED_AT_ONCE:]]
        self._compose(name, left)
        for part in {*parts, *left}:
            self._delete(part)

    def _compose(self, name: str, parts: Sequence[str]) -> None:
        self._root.retried(lambda: self._root.blob(name).compose([self._root.blob(part) for part in parts]), name)

    def _delete(self, name: str) -> None:
        from google.api_core.exceptions import NotFound

        def delete() -> None:
            with contextlib.suppress(NotFound):
                self._root.blob(name).delete(retry=None)

        self._root.retried(delete, name)

    def remove(self, folder: str) -> None:
        for name in self.names(folder):
            self._delete(name)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        yield  # two of them write the same bytes under the same names


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
