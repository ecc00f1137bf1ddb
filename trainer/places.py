"""Files and folders that a command writes where its user said: what the file system refuses is one error naming the place."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from trainer.errors import ConfigurationError, StorageUnavailable


@contextlib.contextmanager
def written(place: str) -> Iterator[None]:
    """Turns OSError into ours while `place` (an option and its value) is written: what the user can change, or a full disk."""
    try:
        yield
    except OSError as error:
        message = f"{place}: {error.strerror or error} ({error.filename or 'while writing'})"
        if error.filename is None:  # a write, not a name: the disk is full or failing
            raise StorageUnavailable(f"{message}; free space, or choose another place") from error
        raise ConfigurationError(f"{message}; choose a place you may write to") from error
    except ValueError as error:  # so TensorStore says it, below Orbax
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        raise StorageUnavailable(f"{place}: No space left on device; free space, or choose another place") from error


def check_writable(option: str, path: Path) -> None:
    """Before long work: can the file `path` be made? Raises ConfigurationError, StorageUnavailable."""
    probe = path.with_name(f".{path.name}.{os.getpid()}.probe")
    with written(f"{option} {path}"):
        if path.is_dir():
            raise ConfigurationError(f"{option} {path}: is a folder; give a file's name")
        try:
            probe.write_bytes(b"0" * 512)
        finally:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Only one process at a time makes `path`, which need not be there: by a lock on a file beside it, which goes with it.

    Raises ConfigurationError if another one does, OSError.
    """
    beside = path.with_name(f".{path.name}.lock")
    while True:
        descriptor = os.open(beside, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(beside)):
                break
        except FileNotFoundError:
            pass  # its last owner removed it between our two calls
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigurationError(f"{path}: another process is writing it; wait for it") from None
        os.close(descriptor)
    try:
        yield
    finally:
        beside.unlink(missing_ok=True)
        os.close(descriptor)
