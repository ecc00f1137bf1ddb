"""Objects by key, on disk or in a bucket: the few operations that the run directory needs, and what they promise.

Keys are relative paths with forward slashes; a prefix always means a folder: "checkpoints/1.1/2" covers what is below
that folder and nothing of "checkpoints/1.1/20". Each operation either happened, or raises:
NotFound, AlreadyExists and Conflict are certain answers; StorageUnavailable is an unknown outcome.
"""

import builtins
import os
from dataclasses import dataclass
from typing import Protocol

from trainer.errors import ConfigurationError, StorageUnavailable


class NotFound(Exception):
    """There is no such object. Certain."""


class AlreadyExists(Exception):
    """The object exists and was left alone. Certain."""


class Conflict(Exception):
    """The object is at another generation and was left alone. Certain once the caller has looked for its own write."""


class StoreRefused(ConfigurationError):
    """This store can never work as it is: missing, read-only, or its file system lacks what a swap needs."""


class StoreMissing(StoreRefused):
    """There is no run directory at this place."""


class StorageFull(StorageUnavailable):
    """No space left: this call changed nothing. Waiting a few seconds does not help, so it is not sent again."""


@dataclass(frozen=True)
class Blob:
    """An object's bytes and, for a swapped key, the generation they had."""

    data: bytes
    generation: int


@dataclass(frozen=True)
class Stat:
    """An object's size and crc32c (Castagnoli), without its bytes."""

    key: str
    bytes: int
    crc32c: int


class Store(Protocol):
    """The store below one run directory. Implementations: DiskStore, GcsStore; `open_store(uri)` picks one."""

    uri: str

    def get(self, key: str) -> Blob:
        """Newest bytes of `key`. Raises NotFound, StorageUnavailable."""

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Bytes offset .. offset + length of `key`, cut short (possibly to none) by the end of the object.

        For large objects written once, such as the table of a data order. Raises NotFound, StorageUnavailable.
        """

    def create(self, key: str, data: bytes) -> None:
        """Write `key` once, durably, all or nothing. Raises AlreadyExists, StorageUnavailable."""

    def create_from_file(self, key: str, path: str | os.PathLike[str]) -> None:
        """`create` with the content of a local file, streamed: never the whole of it in memory."""

    def put(self, key: str, data: bytes) -> None:
        """Overwrite `key`, all or nothing; not durable at once. For heartbeats only."""

    def swap(self, key: str, data: bytes, expected: int) -> int:
        """Replace generation `expected` (0: no object) of `key`, a key without a slash; returns the new generation.

        Raises Conflict when another generation is there, StorageUnavailable when the outcome is unknown.
        A swapped key is never deleted, so a generation is never used again.
        """

    def list(self, prefix: str) -> list[str]:
        """Keys below `prefix`, sorted. For collecting debris and for reports; never to decide what is committed."""

    def folders(self, prefix: str) -> builtins.list[str]:
        """Names of the folders directly below `prefix` that hold an object, sorted. Same caution as `list`."""

    def modified(self, prefix: str) -> float | None:
        """UNIX time of the latest write below `prefix` by the store's clock; None when nothing is there."""

    def stat(self, key: str) -> Stat:
        """Size and crc32c of one object. On disk this reads its bytes. Raises NotFound, StorageUnavailable."""

    def stat_tree(self, prefix: str) -> builtins.list[Stat]:
        """Every object below `prefix` with size and crc32c, sorted by key. On disk this reads the bytes."""

    def sync_tree(self, prefix: str) -> None:
        """Make durable what others (a checkpoint library) wrote below `prefix`. In a bucket it is already."""

    def delete_tree(self, prefix: str) -> None:
        """Remove every object below `prefix`. Missing is fine."""

    def probe(self) -> None:
        """Check once that the store can keep the promises above. Raises StoreRefused naming what is missing."""
