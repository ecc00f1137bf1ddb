"""Checkpoints: saved by Orbax in the background, restored onto any mesh, and checked twice.

Orbax does not notice damage: a flipped bit in a data file restores without an error, with wrong values. So the commit
record keeps size and crc32c of every file, compared before anything is read, and the state digest, compared after.
"""

import logging
from collections.abc import Sequence
from typing import Any

from trainer.errors import StorageUnavailable
from trainer.rundir.records import CommitRecord, FileEntry
from trainer.rundir.store import NotFound, Store

# Errors of our own code during a save; everything else that Orbax or TensorStore raise is about storage.
_BUGS = (TypeError, AttributeError, KeyError, AssertionError, NotImplementedError)
SAVE_TIMEOUT_SECONDS = 1200


class DamagedCheckpoint(Exception):
    """A committed checkpoint is not what was committed; its parent has to be used."""


class Checkpoints:
    """Orbax behind three calls. All processes call each of them, in the same order."""

    def __init__(self) -> None:
        import jax
        import orbax.checkpoint as ocp

        from trainer.in_flight import ArrayHandler

        self._ocp = ocp
        # It warns at every call where there are no Google credentials, as on a server of the API that needs none.
        logging.getLogger("gcsfs").setLevel(logging.ERROR)
        # Within a slice only scalars and norms are replicated: cutting them among replicas saves nothing and compiles a
        # program each. Of several slices the first writes.
        arrays = ocp.type_handlers.create_type_handler_registry((jax.Array, ArrayHandler(use_replica_parallel=False)))
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(type_handler_registry=arrays),
            async_options=ocp.AsyncOptions(timeout_secs=SAVE_TIMEOUT_SECONDS),
        )

    def begin_save(self, path: str, state: Any) -> None:
        """Copy `state` to the host and return; writing goes on in the background. `path` must not exist.

        The device buffers may be donated to the next step as soon as this returns.
        """
        with _storage_errors(f"saving {path}"):
            self._checkpointer.save(path, args=self._ocp.args.PyTreeSave(state))

    def wait(self, path: str) -> None:
        """Block until the save begun last is complete on all processes. Raises StorageUnavailable if it failed."""
        with _storage_errors(f"saving {path}"):
            self._checkpointer.wait_until_finished()

    def restore(self, path: str, abstract: Any, partial: bool = False) -> Any:
        """The checkpoint at `path` on the shardings of `abstract` (a pytree of jax.ShapeDtypeStruct).

        `partial` reads only the leaves named in `abstract`. Raises whatever Orbax raises for an unreadable one.
        """
        args = self._ocp.args.PyTreeRestore(
            item=abstract,
            restore_args=self._ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=partial,
        )
        import jax

        from trainer.in_flight import freed_at_once

        with freed_at_once(jax.local_devices()):
            return jax.block_until_ready(self._checkpointer.restore(path, args=args))


class _storage_errors:
    """Turns what the storage libraries raise into StorageUnavailable, and leaves bugs and lost peers as they are."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        from trainer.departure import is_peer_loss

        if not isinstance(error, Exception) or isinstance(error, _BUGS) or is_peer_loss(error):
            return
        raise StorageUnavailable(
            f"{self.what} failed: {error}. The run continues from its last commit when the storage accepts writes again"
        ) from error


def share(files: Sequence[FileEntry], rank: int, processes: int) -> list[FileEntry]:
    """The files that process `rank` compares: largest first, each to the process with the least bytes so far."""
    loads = [0] * processes
    mine = []
    for file in sorted(files, key=lambda f: (-f.bytes, f.path)):
        process = loads.index(min(loads))
        loads[process] += file.bytes + 4096
        if process == rank:
            mine.append(file)
    return mine


def compare_files(store: Store, record: CommitRecord, rank: int, processes: int) -> str:
    """What differs between the checkpoint's files and the commit record, in this process's share; empty if nothing."""
    wrong = []
    for expected in share(record.files, rank, processes):
        try:
            found = store.stat(f"{record.checkpoint}/{expected.path}")
        except NotFound:
            wrong.append(f"{expected.path} is missing")
            continue
        if found.bytes != expected.bytes:
            wrong.append(f"{expected.path} has {found.bytes} bytes, {expected.bytes} were committed")
        elif found.crc32c != expected.crc32c:
            wrong.append(f"{expected.path} has crc32c {found.crc32c:08x}, {expected.crc32c:08x} was committed")
    return "; ".join(wrong)


def compare_digest(found: dict[str, int], expected: dict[str, int]) -> str:
    """Which leaves differ between two state digests; empty if none."""
    keys = sorted(found.keys() | expected.keys())
    wrong = [key for key in keys if found.get(key) != expected.get(key)]
    if not wrong:
        return ""
    more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    return f"state digest differs in {len(wrong)} of {len(keys)} leaves: {', '.join(wrong[:5])}{more}"
