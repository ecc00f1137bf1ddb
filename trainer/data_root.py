"""Where token files lie: a folder or a gs:// prefix. Names, sizes and ranges of bytes, nothing else.

The root is not part of the recipe: the same files under another root are the same data. Importable without JAX and
without numpy, because the orchestrator measures files with it too.
"""

import os
import stat
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from trainer.errors import ConfigurationError, StorageUnavailable

MAX_OPEN_FILES = 512  # the usual soft limit is 1,024 descriptors, and OLMo 3's mix has 1,016 files
GCS_RETRY_SECONDS = 300
READ_PIECE = 32 << 20  # bytes of a large file read at a time


class Wording(NamedTuple):
    """How messages call what lies below a root, and what they advise."""

    file: str = "data file"
    root: str = "data root"
    where: str = "set data.root to the folder of the token files"
    ended: str = "it was changed after the recipe was frozen; put the original file back"


OF_DATA = Wording()


class FileMissing(ConfigurationError):
    """There is no such file below the root. Certain."""


class ShortRead(Exception):
    """A store answered with another number of bytes than it was asked for, and has."""


class DataRoot(Protocol):
    """Read access to the files of one root. Thread-safe."""

    uri: str
    read_threads: int

    def files(self) -> dict[str, int]:
        """Every file below the root and its bytes, by name; hidden ones left out. Raises StorageUnavailable."""

    def size(self, path: str) -> int:
        """Bytes of a file. Raises FileMissing, ConfigurationError when it may not be read, StorageUnavailable."""

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on. Raises ConfigurationError when the file ends before, StorageUnavailable."""


def open_root(uri: str, wording: Wording = OF_DATA) -> DataRoot:
    """The root at `uri`. Raises ConfigurationError when a folder is missing or the scheme is unknown."""
    if uri.startswith("gs://"):
        return GcsRoot(uri, wording=wording)
    if "://" in uri:
        raise ConfigurationError(f"{wording.root} {uri}: unknown scheme; give a folder or a gs:// prefix")
    return DiskRoot(uri, wording)


def read_whole(root: DataRoot, path: str, buffer: memoryview) -> None:
    """Fill `buffer` from the begin of a file, in pieces and by as many threads as the root can use."""
    starts = range(0, len(buffer), READ_PIECE)
    with ThreadPoolExecutor(max(1, min(root.read_threads, len(starts)))) as pool:
        list(pool.map(lambda at: root.read_into(path, at, buffer[at : at + READ_PIECE]), starts))


class DiskRoot:
    """A folder. Reads are pread(2): unlike a memory map, a file that shrinks gives an error and not a SIGBUS."""

    read_threads = 2  # page cache or local disk: the copy is the work

    def __init__(self, uri: str, wording: Wording = OF_DATA) -> None:
        self.uri = uri
        self._words = wording
        self._folder = Path(uri)
        self._lock = threading.Lock()
        self._descriptors: dict[str, int] = {}
        if not self._folder.is_dir():
            what = "is a file, not a folder" if self._folder.exists() else "does not exist"
            raise ConfigurationError(f"{wording.root} {uri} {what}; {wording.where}")

    def files(self) -> dict[str, int]:
        found = {}
        for folder, folders, names in os.walk(self._folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                full = Path(folder, name)
                if not name.startswith(".") and full.is_file():
                    found[full.relative_to(self._folder).as_posix()] = full.stat().st_size
        return dict(sorted(found.items()))

    def size(self, path: str) -> int:
        full = self._folder / path
        try:
            status = full.stat()
        except FileNotFoundError:
            raise FileMissing(f"{self._words.file} {path} is missing below {self.uri}") from None
        except OSError as error:
            raise ConfigurationError(f"{self._words.file} {path} below {self.uri}: {error.strerror}") from None
        if not stat.S_ISREG(status.st_mode):
            raise ConfigurationError(f"{self._words.file} {path} below {self.uri} is not a regular file")
        if not os.access(full, os.R_OK):
            raise ConfigurationError(
                f"{self._words.file} {path} below {self.uri} may not be read by this user; change its mode"
            )
        return status.st_size

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        descriptor, keep = self._open(path)
        try:
            done = 0
            while done < len(buffer):
                got = os.preadv(descriptor, [buffer[done:]], offset + done)
                if not got:
                    raise _ended(self._words, path, self.uri, offset + len(buffer))
                done += got
        except OSError as error:
            raise StorageUnavailable(f"{self._words.file} {path} below {self.uri}: {error.strerror}") from error
        finally:
            if not keep:
                os.close(descriptor)

    def _open(self, path: str) -> tuple[int, bool]:
        """A descriptor of `path`, and whether it stays open: the first ones do, for good, so no reader loses one."""
        descriptor = self._descriptors.get(path)
        if descriptor is not None:
            return descriptor, True
        try:
            descriptor = os.open(self._folder / path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise FileMissing(f"{self._words.file} {path} is missing below {self.uri}") from None
        except OSError as error:
            raise StorageUnavailable(f"{self._words.file} {path} below {self.uri}: {error.strerror}") from error
        with self._lock:
            if path in self._descriptors or len(self._descriptors) >= MAX_OPEN_FILES:
                return descriptor, False
            self._descriptors[path] = descriptor
            return descriptor, True

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at the end of Python, os is empty already
        for descriptor in getattr(self, "_descriptors", {}).values():
            close(descriptor)


class GcsRoot:
    """A prefix in a bucket. Reads are range reads; calls that may help are repeated for up to five minutes."""

    read_threads = 32  # a range read waits tens of milliseconds: many at once

    def __init__(self, uri: str, client: Any = None, wording: Wording = OF_DATA) -> None:
        """`client` is a google.cloud.storage.Client, made at first use when None."""
        bucket, _, prefix = uri.removeprefix("gs://").partition("/")
        if not bucket:
            raise ConfigurationError(f"{wording.root} {uri}: names no bucket; write gs://BUCKET/FOLDER")
        self.uri = uri
        self._words = wording
        self._bucket_name, self._prefix = bucket, prefix.rstrip("/")
        self._given_client = client

    def files(self) -> dict[str, int]:
        return {name: size for name, size in self.objects().items() if "/." not in f"/{name}"}

    def objects(self, folder: str = "") -> dict[str, int]:
        """Every object below `folder`, hidden ones too: its name from the root, and its bytes."""
        start = f"{self._prefix}/" if self._prefix else ""
        prefix = f"{start}{folder}/" if folder else start
        blobs = self.retried(lambda: list(self._bucket.list_blobs(prefix=prefix)), folder)
        found = {blob.name.removeprefix(start): int(blob.size) for blob in blobs if not blob.name.endswith("/")}
        return dict(sorted(found.items()))

    def size(self, path: str) -> int:
        size = self.size_or_none(path)
        if size is None:
            raise FileMissing(f"{self._words.file} {path} is missing below {self.uri}")
        return size

    def size_or_none(self, path: str) -> int | None:
        """Bytes of a file, None if there is none."""
        blob = self.retried(lambda: self._bucket.get_blob(self._name(path)), path)
        return None if blob is None else int(blob.size)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        end = offset + len(buffer)
        blob = self.blob(path)

        def read() -> None:
            data = blob.download_as_bytes(start=offset, end=end - 1, retry=None)
            if len(data) == len(buffer):
                buffer[:] = data
                return
            # Either the file ends here, or what it has got lost on the way (a proxy, a connection that was closed).
            found = self._bucket.get_blob(self._name(path))
            if found is not None and int(found.size) < end:
                raise _ended(self._words, path, self.uri, end)
            raise ShortRead(f"{len(data)} bytes came instead of {len(buffer)}")

        self.retried(read, path, end)

    def blob(self, path: str) -> Any:
        """The client's handle of a file, for writing it."""
        return self._bucket.blob(self._name(path))

    def _name(self, path: str) -> str:
        return f"{self._prefix}/{path}".lstrip("/")

    @cached_property
    def _bucket(self) -> Any:
        client = self._given_client
        if client is None:
            try:
                from google.auth.credentials import AnonymousCredentials
                from google.auth.exceptions import DefaultCredentialsError
                from google.cloud import storage
                from requests.adapters import HTTPAdapter
            except ImportError:
                raise ConfigurationError(
                    f"{self._words.root} {self.uri} needs google-cloud-storage; install untildone[gcs]"
                ) from None
            try:
                emulated = bool(os.environ.get("STORAGE_EMULATOR_HOST"))
                anonymous = {"project": "none", "credentials": AnonymousCredentials()} if emulated else {}
                client = storage.Client(**anonymous)
                # The default pool keeps 10 connections, and throws away those of the other threads after each read.
                adapter = HTTPAdapter(pool_maxsize=self.read_threads)
                for scheme in ("https://", "http://"):
                    client._http.mount(scheme, adapter)
            except DefaultCredentialsError as error:
                raise ConfigurationError(f"{self._words.root} {self.uri}: {error}") from None
        return client.bucket(self._bucket_name)

    def retried(self, call: Callable[[], Any], path: str, end: int = 0) -> Any:
        """`call()`, repeated while repeating can help: for calls that may be repeated when their outcome is unknown."""
        import requests
        import tenacity
        from google.api_core import exceptions as api
        from google.auth.exceptions import TransportError

        passing = (
            api.TooManyRequests,
            api.ServerError,
            requests.exceptions.RequestException,
            TransportError,
            ConnectionError,
            TimeoutError,
            ShortRead,
        )

        def may_pass(error: BaseException) -> bool:
            return isinstance(error, passing) or getattr(error, "code", None) == HTTPStatus.REQUEST_TIMEOUT

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(may_pass),
            wait=tenacity.wait_random_exponential(multiplier=0.5, max=30),
            stop=tenacity.stop_after_delay(GCS_RETRY_SECONDS),
            reraise=True,
        )
        try:
            return retrying(call)
        except api.RequestRangeNotSatisfiable:
            raise _ended(self._words, path, self.uri, end) from None
        except api.NotFound:
            raise FileMissing(f"{self._words.file} {path} is missing below {self.uri}") from None
        except (api.Forbidden, api.Unauthorized) as error:
            raise ConfigurationError(
                f"{self._words.file} {path} below {self.uri} may not be read: {error.message}"
            ) from None
        except (*passing, api.GoogleAPICallError) as error:
            raise StorageUnavailable(f"{self._words.file} {path} below {self.uri}: {error}") from error


class KeptFiles:
    """Files of a root, each read whole when something of it is first wanted, and kept. Thread-safe.

    For small files in a bucket: a range read costs a millisecond of CPU, whatever its length.
    """

    read_threads = 2  # memory

    def __init__(self, root: DataRoot, sizes: Mapping[str, int]) -> None:
        """`sizes`: bytes of each file that may be read."""
        self._root, self._sizes = root, sizes
        self._lock = threading.Lock()
        self._kept: dict[str, memoryview] = {}

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on. Raises as `DataRoot.read_into` does for a whole file."""
        with self._lock:  # whoever comes meanwhile wants the same file, or the next of them
            if path not in self._kept:
                body = memoryview(bytearray(self._sizes[path]))
                read_whole(self._root, path, body)
                self._kept[path] = body
        buffer[:] = self._kept[path][offset : offset + len(buffer)]


def _ended(words: Wording, path: str, uri: str, end: int) -> ConfigurationError:
    """The error for a file that is shorter than what has to be in it."""
    return ConfigurationError(f"{words.file} {path} below {uri} ends before byte {end}: {words.ended}")
