"""A folder or gs:// prefix with files of weights, read by ranges, several at once."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from trainer.data_root import FileMissing, Wording, open_root
from trainer.errors import ConfigurationError

PART = 2**25  # bytes of one read
_WORDING = Wording(
    file="weights file",
    root="weights",
    where="give the folder that holds config.json and the weights",
    ended="it is truncated; copy or download it again",
)


class Folder:
    """Read access. Errors name the file."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self._root = open_root(self.uri, _WORDING)
        self._pool = ThreadPoolExecutor(self._root.read_threads, thread_name_prefix="weights")

    def size(self, path: str) -> int | None:
        """Bytes of a file; None when there is none."""
        try:
            return self._root.size(path)
        except FileMissing:
            return None

    def read(self, path: str, offset: int, length: int) -> np.ndarray:
        """uint8 [length] from `offset` on. Raises ConfigurationError when the file ends before."""
        buffer = np.empty(length, np.uint8)
        view = memoryview(buffer)
        starts = range(0, length, PART)
        parts = self._pool.map(lambda at: self._root.read_into(path, offset + at, view[at : at + PART]), starts)
        for _ in parts:
            pass  # raises what a thread raised
        return buffer

    def read_all(self, path: str) -> bytes | None:
        """A small file whole; None when there is none."""
        size = self.size(path)
        return None if size is None else self.read(path, 0, size).tobytes()

    def read_json(self, path: str) -> dict[str, Any] | None:
        """A JSON object; None when there is no such file. Raises ConfigurationError when it is none."""
        data = self.read_all(path)
        if data is None:
            return None
        try:
            body = json.loads(data)
        except ValueError as error:
            raise ConfigurationError(f"{self.uri}/{path} is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise ConfigurationError(f"{self.uri}/{path} is {type(body).__name__}, expected a JSON object")
        return body
