"""JAX's persistent compile cache, kept in a store like the run directory itself.

JAX decides what an entry's key is: the program, its compiler options and devices, XLA's flags, the versions of jaxlib
and of the runtime. Where the entries lie is decided here, because JAX's own cache of files

- writes an entry in place and never again: of a process killed meanwhile there stays a part, which every later start
  fails to read, and so compiles anew, for ever;
- is not there in a bucket without another package.

Here an entry appears whole or not at all, after the SHA-256 of its key and bytes: one that is torn, or lies under
another one's name, is compiled and written again, and so is one that JAX cannot load. Nothing that happens to the cache
ends a start. An entry is code: whoever may write to the cache decides what the trainers execute, as with the run
directory.
"""

import hashlib
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jax._src import cache_key, compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

from trainer.errors import ConfigurationError, StorageUnavailable
from trainer.log import log
from trainer.rundir.opening import open_store
from trainer.rundir.store import AlreadyExists, NotFound, Store

_DIGEST_BYTES = 32
PATIENCE_SECONDS = 60.0  # in which the store did not answer, all calls of a process together: then it is left alone


class ProgramCache(CacheInterface):
    """Compiled programs by JAX's key, in `store`."""

    def __init__(self, store: Store, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._path = Path(store.uri)
        self._monotonic = monotonic
        self._lost = 0.0  # seconds
        self._damaged: set[str] = set()
        self._given: set[str] = set()

    @property
    def loaded(self) -> set[str]:
        """Names of the functions whose programs were found."""
        return {name_of(key) for key in list(self._given)}

    def get(self, key: str) -> bytes | None:
        """The entry that `put` was given, or None: not there, damaged, or not to be read now."""
        if self._left_alone:
            return None
        began = self._monotonic()
        try:
            body = self._store.get(key).data
        except NotFound:
            return None
        except (ConfigurationError, StorageUnavailable) as error:
            self._failed(began, f"the compile cache cannot be read: {name_of(key)} is compiled", error)
            return None
        digest, entry = body[:_DIGEST_BYTES], body[_DIGEST_BYTES:]
        if _digest(key, entry) != digest:
            self._damaged.add(key)
            log().warning(f"the compile cache's entry of {name_of(key)} is damaged: compiled and written again")
            return None
        self._given.add(key)
        return entry

    def put(self, key: str, value: bytes) -> None:
        """Keep `value`, unless there is an entry that serves. JAX calls it on process 0 alone."""
        if key in self._given:  # and compiled all the same
            self._given.discard(key)
            self._damaged.add(key)
            log().warning(f"the compile cache's entry of {name_of(key)} cannot be loaded: written again")
        if self._left_alone:
            return
        began, body = self._monotonic(), _digest(key, value) + value
        try:
            if key in self._damaged:
                self._store.put(key, body)
                self._damaged.discard(key)
            else:
                self._store.create(key, body)
        except AlreadyExists:
            pass
        except (ConfigurationError, StorageUnavailable) as error:
            self._failed(began, f"the compile cache cannot be written: {name_of(key)} is not in it", error)

    @property
    def _left_alone(self) -> bool:
        return self._lost > PATIENCE_SECONDS

    def _failed(self, began: float, what: str, error: Exception) -> None:
        self._lost += self._monotonic() - began
        more = "; it is not asked again" if self._left_alone else ""
        log().warning(what + more, error=str(error))


def _digest(key: str, entry: bytes) -> bytes:
    found = hashlib.sha256(key.encode())
    found.update(entry)
    return found.digest()


def name_of(key: str) -> str:
    """The jitted function that an entry of this key belongs to: `jit_train_step`."""
    return key.rpartition("-")[0]


def install() -> None:
    """Have JAX keep compiled programs as this module says, where `jax_compilation_cache_dir` names a place."""
    _share_between_processes()
    compilation_cache.get_file_cache = _open


def was_loaded(name: str) -> bool:
    """Whether this process found the program of the jitted function `name` in the cache."""
    found = compilation_cache._cache
    return isinstance(found, ProgramCache) and f"jit_{name}" in found.loaded


def _open(uri: str) -> tuple[CacheInterface, str] | None:
    try:
        return ProgramCache(open_store(uri, create=True)), uri
    except (ConfigurationError, StorageUnavailable) as error:
        log().warning("there is no compile cache: every start compiles (settings.compile_cache)", error=str(error))
        return None


def _share_between_processes() -> None:
    """On the CPU: key entries by what all processes of a gang have in common, and by this kind of processor.

    JAX writes entries from process 0 only, and makes the topology's fingerprint part of the key. On the CPU that one
    differs between the processes of one gang, so that all but the first would compile everything anew at every start.
    Programs are the same in every process (SPMD); which of their devices are here is decided when one is loaded.
    """
    original = cache_key._hash_accelerator_config

    def hash_accelerators(hash_obj: Any, accelerators: np.ndarray) -> None:
        devices = list(accelerators.flat)
        if devices[0].platform != "cpu":
            original(hash_obj, accelerators)
            return
        layout = [(device.device_kind, device.process_index) for device in devices]
        hash_obj.update(repr((layout, _processor())).encode())

    cache_key._hash_accelerator_config = hash_accelerators


@cache
def _processor() -> str:
    """Digest of the instruction sets of this machine's processor: compiled programs may use any of them."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = {line for line in file if line.startswith(("flags", "Features", "model name"))}
    except OSError:
        return ""
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
