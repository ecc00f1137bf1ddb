"""The few things about files that pathlib does not do with the care a store needs."""

import contextlib
import os
from pathlib import Path

ABSENT = (FileNotFoundError, NotADirectoryError)


def identity(path: Path) -> tuple[int, int]:
    """What stays the same as long as it is the same file or folder."""
    status = path.stat()
    return status.st_dev, status.st_ino


def exists(path: Path) -> bool:
    """Whether `path` exists; unlike Path.exists, an error is an error and not a no."""
    try:
        path.stat()
    except ABSENT:
        return False
    return True


def sync(path: Path) -> None:
    """Make the content of a file, or the entries of a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a temporary file; what cannot be removed is swept later."""
    with contextlib.suppress(OSError):
        path.unlink()


def file_system(path: Path) -> str:
    """Type of the file system that holds `path`, for the message only."""
    best = ("", "unknown")
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, kind, *_ = line.split()
            inside = path == Path(mount) or Path(mount) in path.parents
            if inside and len(mount) >= len(best[0]):
                best = (mount, kind)
    return best[1]
