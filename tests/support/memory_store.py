"""The store in a dictionary: for tests that make thousands of calls. Conforms like the others."""

import builtins
import os
import threading
import time
from pathlib import Path

import google_crc32c

from trainer.rundir.store import AlreadyExists, Blob, Conflict, NotFound, Stat


class MemoryStore:
    """Objects of one process, lost with it."""

    uri = "memory"

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes, int, float]] = {}
        self._lock = threading.Lock()

    def has(self, key: str) -> bool:
        """Whether there is such an object."""
        return key in self._objects

    def get(self, key: str) -> Blob:
        try:
            data, generation, _ = self._objects[key]
        except KeyError:
            raise NotFound(key) from None
        return Blob(data, generation)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self.get(key).data[offset : offset + length]

    def create(self, key: str, data: bytes) -> None:
        with self._lock:
            if key in self._objects:
                raise AlreadyExists(key)
            self._objects[key] = (data, 1, time.time())

    def create_from_file(self, key: str, path: str | os.PathLike[str]) -> None:
        self.create(key, Path(path).read_bytes())

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            self._objects[key] = (data, 1, time.time())

    def swap(self, key: str, data: bytes, expected: int) -> int:
        with self._lock:
            generation = self._objects[key][1] if key in self._objects else 0
            if generation != expected:
                raise Conflict(key)
            self._objects[key] = (data, generation + 1, time.time())
            return generation + 1

    def list(self, prefix: str) -> builtins.list[str]:
        with self._lock:
            return sorted(key for key in self._objects if key.startswith(_folder(prefix)))

    def folders(self, prefix: str) -> builtins.list[str]:
        folder = _folder(prefix)
        rest = [key.removeprefix(folder) for key in self.list(prefix)]
        return sorted({name.partition("/")[0] for name in rest if "/" in name})

    def modified(self, prefix: str) -> float | None:
        return max((self._objects[key][2] for key in self.list(prefix)), default=None)

    def stat(self, key: str) -> Stat:
        data = self.get(key).data
        return Stat(key, len(data), google_crc32c.value(data))

    def stat_tree(self, prefix: str) -> builtins.list[Stat]:
        contents = [(key, self._objects[key][0]) for key in self.list(prefix)]
        return [Stat(key, len(data), google_crc32c.value(data)) for key, data in contents]

    def sync_tree(self, prefix: str) -> None:
        """Nothing here is durable."""

    def delete_tree(self, prefix: str) -> None:
        if not prefix.strip("/"):
            raise ValueError("delete_tree: an empty prefix would delete the run")
        for key in self.list(prefix):
            del self._objects[key]

    def probe(self) -> None:
        """A dictionary can do all of it."""


def _folder(prefix: str) -> str:
    return f"{prefix.strip('/')}/" if prefix.strip("/") else ""
