"""The store in a Google Cloud Storage bucket: `ifGenerationMatch` for what may happen once.

The library's own retries are off: it would repeat a conditional write by itself and meet the 412 of its own success.
Repeating is the business of swap.py, which can tell that apart. With STORAGE_EMULATOR_HOST set, requests go there,
without credentials.
"""

import base64
import builtins
import contextlib
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import google.auth.exceptions
import requests
from google.api_core import exceptions as api
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse

from trainer.errors import StorageUnavailable, TrainerError
from trainer.rundir.store import AlreadyExists, Blob, Conflict, NotFound, Stat, StoreRefused

CONNECTIONS = 64  # kept open; all stores of a process share them
TIMEOUT = (10.0, 60.0)  # connect, read; seconds
UNCACHED = "no-store"  # readable by all, an object would otherwise be cached for an hour
DELETING_THREADS = 16
# The library otherwise asks for the bucket's metadata in a thread, for traces that nobody collects.
os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
_UNANSWERED = (
    requests.exceptions.RequestException,
    google.auth.exceptions.GoogleAuthError,
    DataCorruption,
    InvalidResponse,
    OSError,
)


class GcsStore:
    """Objects below gs://bucket/prefix. One instance may be used by several threads."""

    def __init__(self, uri: str, timeout: tuple[float, float] = TIMEOUT) -> None:
        bucket, _, prefix = uri.removeprefix("gs://").partition("/")
        if not bucket:
            raise StoreRefused(f"run directory {uri}: no bucket; write gs://bucket/path")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.uri = f"gs://{bucket}/{self._prefix}".rstrip("/")
        self._client = _client(uri)
        self._bucket = self._client.bucket(bucket)
        self._options: dict[str, Any] = {"timeout": timeout, "retry": None}
        self._probed = False

    def present(self) -> bool:
        """Whether any object lies below the prefix. Raises StoreRefused when there is no such bucket."""
        with self._errors(""):
            listing = self._client.list_blobs(self._bucket, prefix=self._prefix, max_results=1, **self._options)
            return any(True for _ in listing)

    def get(self, key: str) -> Blob:
        with self._errors(key, object_needed=True):
            blob = self._blob(key)
            data = blob.download_as_bytes(checksum="crc32c", **self._options)
            return Blob(data, int(blob.generation))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        if length <= 0:
            return b""
        with self._errors(key, object_needed=True):
            try:
                # No checksum: the object's covers all of it.
                return bytes(
                    self._blob(key).download_as_bytes(
                        start=offset, end=offset + length - 1, checksum=None, **self._options
                    )
                )
            except api.RequestRangeNotSatisfiable:
                return b""

    def create(self, key: str, data: bytes) -> None:
        self._ready()
        self._create(key, data)

    def create_from_file(self, key: str, path: str | os.PathLike[str]) -> None:
        self._ready()
        with open(path, "rb") as file, self._errors(key):
            try:
                self._blob(key).upload_from_file(
                    file,
                    size=os.fstat(file.fileno()).st_size,
                    checksum="crc32c",
                    if_generation_match=0,
                    **self._options,
                )
            except api.PreconditionFailed:
                raise AlreadyExists(key) from None

    def put(self, key: str, data: bytes) -> None:
        self._ready()
        with self._errors(key):
            self._blob(key).upload_from_string(data, checksum="crc32c", **self._options)

    def swap(self, key: str, data: bytes, expected: int) -> int:
        if "/" in key:
            raise ValueError(f"{key}: only keys at the root of the run directory are swapped")
        self._ready()
        return self._swap(key, data, expected)

    def list(self, prefix: str) -> list[str]:
        with self._errors(prefix):
            return sorted(self._key(blob.name) for blob in self._blobs(prefix, "name"))

    def folders(self, prefix: str) -> builtins.list[str]:
        folder = self._folder(prefix)
        with self._errors(prefix):
            listing = self._client.list_blobs(self._bucket, prefix=folder, delimiter="/", **self._options)
            for _ in listing:
                pass  # `prefixes` is complete only after the last page
            return sorted(name.removeprefix(folder).rstrip("/") for name in listing.prefixes)

    def modified(self, prefix: str) -> float | None:
        with self._errors(prefix):
            return max((blob.updated.timestamp() for blob in self._blobs(prefix, "name,updated")), default=None)

    def stat(self, key: str) -> Stat:
        with self._errors(key, object_needed=True):
            blob = self._blob(key)
            blob.reload(**self._options)
            return Stat(key, int(blob.size), int.from_bytes(base64.b64decode(blob.crc32c), "big"))

    def stat_tree(self, prefix: str) -> builtins.list[Stat]:
        with self._errors(prefix):
            found = [
                Stat(self._key(blob.name), int(blob.size), int.from_bytes(base64.b64decode(blob.crc32c), "big"))
                for blob in self._blobs(prefix, "name,size,crc32c")
            ]
            return sorted(found, key=lambda stat: stat.key)

    def sync_tree(self, prefix: str) -> None:
        """Objects are durable once written."""

    def delete_tree(self, prefix: str) -> None:
        if not prefix.strip("/"):
            raise ValueError("delete_tree: an empty prefix would delete the run")
        keys = self.list(prefix)
        with ThreadPoolExecutor(min(DELETING_THREADS, max(1, len(keys)))) as pool:
            for _ in pool.map(self._delete, keys):
                pass  # raises what a thread raised

    def probe(self) -> None:
        """Try on a scratch object that a second create and a stale swap are refused."""
        key = f".probe/{uuid.uuid4().hex}"
        self._create(key, b"1")
        try:
            try:
                self._create(key, b"2")
            except AlreadyExists:
                pass
            else:
                raise self._unfit("a second create of the same object succeeded")
            old = self.get(key).generation
            self._swap(key, b"3", old)
            try:
                self._swap(key, b"4", old)
            except Conflict:
                pass
            else:
                raise self._unfit("a write with an old ifGenerationMatch succeeded")
        finally:
            self._delete(key)
        self._probed = True

    # -- inside

    def _ready(self) -> None:
        if not self._probed:
            self.probe()

    def _create(self, key: str, data: bytes) -> None:
        with self._errors(key):
            try:
                self._blob(key).upload_from_string(data, checksum="crc32c", if_generation_match=0, **self._options)
            except api.PreconditionFailed:
                raise AlreadyExists(key) from None

    def _swap(self, key: str, data: bytes, expected: int) -> int:
        with self._errors(key):
            blob = self._blob(key)
            blob.cache_control = UNCACHED
            try:
                blob.upload_from_string(data, checksum="crc32c", if_generation_match=expected, **self._options)
            except api.PreconditionFailed:
                raise Conflict(key) from None
            return int(blob.generation)

    def _delete(self, key: str) -> None:
        with self._errors(key), contextlib.suppress(api.NotFound):
            self._blob(key).delete(**self._options)

    def _blob(self, key: str) -> Any:
        return self._bucket.blob(f"{self._prefix}{key}")

    def _blobs(self, prefix: str, fields: str) -> Any:
        fields = f"items({fields}),nextPageToken"
        return self._client.list_blobs(self._bucket, prefix=self._folder(prefix), fields=fields, **self._options)

    def _folder(self, prefix: str) -> str:
        return f"{self._prefix}{prefix.strip('/')}/" if prefix.strip("/") else self._prefix

    def _key(self, name: str) -> str:
        return name.removeprefix(self._prefix)

    @contextlib.contextmanager
    def _errors(self, key: str, object_needed: bool = False) -> Iterator[None]:
        try:
            yield
        except api.NotFound as error:
            # Listing and writing need no object, so there a 404 speaks of the bucket.
            if object_needed and "specified bucket does not exist" not in str(error.message):
                raise NotFound(key) from None
            raise StoreRefused(f"run directory {self.uri}: no such bucket; create it or check its name") from error
        except api.GoogleAPICallError as error:
            raise self._translate(error, key) from error
        except _UNANSWERED as error:
            raise StorageUnavailable(f"{self._named(key)}: {type(error).__name__}: {error}") from error

    def _translate(self, error: api.GoogleAPICallError, key: str) -> TrainerError:
        if error.code == 403:
            return StoreRefused(
                f"run directory {self.uri}: not allowed ({error.message}); the service account needs "
                "roles/storage.objectUser on this bucket"
            )
        # 401 (a token being renewed), 408, 429 and 5xx: all that is known is that nothing is known.
        return StorageUnavailable(f"{self._named(key)}: HTTP {error.code}: {error.message}")

    def _named(self, key: str) -> str:
        return f"run directory {self.uri}: {key}" if key else f"run directory {self.uri}"

    def _unfit(self, what: str) -> StoreRefused:
        return StoreRefused(f"run directory {self.uri}: this server is not usable: {what}; preconditions are ignored")


def _client(uri: str) -> Any:
    """The client of this process: each has connections, certificates and tokens of its own."""
    try:
        return _shared_client(os.environ.get("STORAGE_EMULATOR_HOST") or None)
    except google.auth.exceptions.DefaultCredentialsError as error:
        raise StoreRefused(
            f"run directory {uri}: no Google Cloud credentials ({error}); use Workload Identity, "
            "or gcloud auth application-default login"
        ) from error


@cache
def _shared_client(emulator: str | None) -> Any:
    # Objects need no project.
    client = storage.Client(project=None, credentials=AnonymousCredentials() if emulator else None)
    if not client._http.is_mtls:  # then the library has put an adapter of its own there
        for scheme in ("https://", "http://"):
            client._http.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=CONNECTIONS))
    return client


os.register_at_fork(after_in_child=_shared_client.cache_clear)  # a connection belongs to one process
