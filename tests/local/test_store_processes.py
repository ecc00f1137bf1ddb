"""The disk store with real processes: races, stopped and killed writers, a full and a read-only file system."""

import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from tests.support import runs
from trainer.errors import Fenced
from trainer.rundir.disk import DiskStore
from trainer.rundir.rundir import RunDirectory
from trainer.rundir.store import AlreadyExists, Conflict, StoreRefused

FORK = multiprocessing.get_context("fork")
WRITERS = 16
ROUNDS = 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@contextmanager
def processes(count: int, action: Callable[[int], None]) -> Iterator[list[ForkProcess]]:
    """`action(0..count-1)`, each in a process; killed at the end, whatever happens."""
    started = [FORK.Process(target=action, args=(number,)) for number in range(count)]
    for process in started:
        process.start()
    try:
        yield started
    finally:
        for process in started:
            if process.is_alive():
                process.kill()
            process.join()


def finish(started: list[ForkProcess], seconds: float = 60) -> None:
    """Wait for all; each must have ended well."""
    deadline = time.monotonic() + seconds
    for process in started:
        process.join(max(0.0, deadline - time.monotonic()))
        assert process.exitcode == 0


def test_each_generation_has_one_winner(root: Path) -> None:
    """16 processes × 30 rounds; each round all swap from the same generation."""
    barrier, won = FORK.Barrier(WRITERS), FORK.Queue()

    def write(number: int) -> None:
        store = DiskStore(root)
        for turn in range(ROUNDS):
            barrier.wait()
            try:
                store.swap("HEAD", f"{turn}/{number}".encode(), turn)
                won.put((turn, number))
            except Conflict:
                pass

    with processes(WRITERS, write) as started:
        winners = [won.get(timeout=60) for _ in range(ROUNDS)]
        finish(started)
    assert won.empty(), "a round had two winners"
    assert sorted(turn for turn, _ in winners) == list(range(ROUNDS))
    for turn, number in winners:
        assert (root / "HEAD.d" / str(turn + 1)).read_bytes() == f"{turn}/{number}".encode()


def test_each_object_has_one_creator(root: Path) -> None:
    barrier, won = FORK.Barrier(WRITERS), FORK.Queue()

    def write(number: int) -> None:
        store = DiskStore(root)
        for turn in range(ROUNDS):
            barrier.wait()
            try:
                store.create(f"attempts/{turn}/spec.json", f"{number}".encode() * 1000)
                won.put((turn, number))
            except AlreadyExists:
                pass

    with processes(WRITERS, write) as started:
        winners = [won.get(timeout=60) for _ in range(ROUNDS)]
        finish(started)
    assert won.empty()
    for turn, number in winners:
        assert (root / f"attempts/{turn}/spec.json").read_bytes() == f"{number}".encode() * 1000


@pytest.mark.parametrize("call", ["open", "fsync", "link", "unlink"])
def test_a_stopped_writer_blocks_nobody_and_comes_too_late(root: Path, call: str) -> None:
    """Stopped inside its swap, at each of its system calls, it blocks nobody; woken, it learns what became of it."""
    store = DiskStore(root)
    store.swap("HEAD", b"start", 0)
    answers = FORK.Queue()

    def write(number: int) -> None:
        slow = DiskStore(root)
        slow.probe()
        real = getattr(os, call) if call != "open" else slow._write

        def stopping(*args: object, **options: object) -> object:
            os.kill(os.getpid(), signal.SIGSTOP)
            return real(*args, **options)

        if call == "open":
            slow._write = stopping  # type: ignore[method-assign]
        elif call == "unlink":
            Path.unlink = stopping  # type: ignore[method-assign]
        else:
            setattr(os, call, stopping)
        try:
            answers.put(slow.swap("HEAD", b"slow", 1))
        except Conflict:
            answers.put("lost")

    with processes(1, write) as (slow,):
        wait_stopped(slow)
        began = time.monotonic()
        generation = store.get("HEAD").generation
        for turn in range(5):
            generation = store.swap("HEAD", f"quick {turn}".encode(), generation)
        assert time.monotonic() - began < 5
        while slow.is_alive():
            assert slow.pid
            os.kill(slow.pid, signal.SIGCONT)
            slow.join(0.02)
        assert answers.get(timeout=5) == (2 if call == "unlink" else "lost")
    found = store.get("HEAD")
    assert (found.data, found.generation) == (b"quick 4", generation)


def wait_stopped(process: ForkProcess) -> None:
    """Until the kernel says that the process is stopped."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            return
        time.sleep(0.005)
    raise AssertionError("the process did not stop")


def test_killed_anywhere_head_is_whole(root: Path) -> None:
    """Writers killed with SIGKILL at random moments; HEAD is always a complete body and never goes back."""
    runs.begun(DiskStore(root))

    def write(number: int) -> None:
        directory = RunDirectory(DiskStore(root))
        while True:
            claim = runs.claim(directory, pod=f"pod{number}")
            try:
                while True:
                    step = (claim.commit_ref.step if claim.commit_ref else 0) + 1
                    runs.commit(claim, step)
            except Fenced:
                time.sleep(0.1 * number)  # or all do nothing but fence each other

    directory = RunDirectory(DiskStore(root))
    seen = 0
    for turn in range(8):
        before = len(runs.committed(directory))
        with processes(3, write) as started:
            deadline = time.monotonic() + 30
            while len(runs.committed(directory)) == before and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.003 * turn)
            for process in started:
                process.kill()
        found = directory.head()
        assert found
        assert found[1] > seen
        seen = found[1]
    line = runs.committed(directory)
    assert [ref.step for ref in line] == list(range(1, len(line) + 1))
    assert len(line) >= 8
    for ref in line:
        record = directory.read_commit(ref)
        assert [entry.step for file in record.step_log for entry in directory.read_step_log(file)] == [ref.step]


def test_a_full_file_system(tmp_path: Path) -> None:
    """A small file system where one can be mounted, else a limit on file sizes: either way the kernel refuses."""
    script = tmp_path / "full.py"
    script.write_text(FULL)
    mount = ["unshare", "--mount", "--map-root-user"] if os.geteuid() else ["unshare", "--mount"]
    shell = 'mount -t tmpfs -o size=4m none "$1" && exec "$2" "$3" "$1" tmpfs'
    able = subprocess.run(
        [*mount, "sh", "-c", 'mount -t tmpfs none "$1"', "sh", str(tmp_path)], capture_output=True, check=False
    )
    (tmp_path / "small").mkdir()
    arguments = [str(tmp_path / "small"), sys.executable, str(script)]
    if able.returncode == 0:
        command = [*mount, "sh", "-c", shell, "sh", *arguments]
    else:
        command = [sys.executable, str(script), arguments[0], "limit"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=_environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ("full, then on" if able.returncode == 0 else "unknown, then on")


FULL = """
import resource, sys
from tests.support import runs
from trainer.rundir.disk import DiskStore
from trainer.rundir.rundir import RunDirectory
from trainer.rundir.store import StorageFull
from trainer.errors import StorageUnavailable

root, kind = sys.argv[1:]
directory = runs.begun(DiskStore(root), patience_seconds=0)
claim = runs.claim(directory)
runs.commit(claim, 2)
record = runs.prepare(claim, 4)
ballast = []
if kind == "tmpfs":
    with open(f"{root}/ballast", "wb") as file:
        try:
            while True:
                file.write(bytes(4096)); file.flush()
        except OSError:
            pass
else:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    claim.commit(record)
except StorageFull as error:
    assert kind == "tmpfs" and "disk full" in str(error), error
    said = "full"
except StorageUnavailable:
    assert kind == "limit"
    said = "unknown"
assert [ref.step for ref in runs.committed(RunDirectory(DiskStore(root)))] == [2]
if kind == "tmpfs":
    import os
    os.unlink(f"{root}/ballast")
else:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
claim.commit(record)
assert [ref.step for ref in runs.committed(RunDirectory(DiskStore(root)))] == [2, 4]
print(said + ", then on")
"""


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def test_a_read_only_folder(root: Path) -> None:
    """Reading works, the first write is refused and names the folder. Root may write anywhere, so not as root."""
    runs.commit(runs.claim(runs.begun(DiskStore(root))), 2)
    modes = {path: path.stat().st_mode for path in (root, *root.rglob("*")) if path.is_dir()}
    for path in modes:
        path.chmod(stat.S_IRUSR | stat.S_IXUSR | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
    answers = FORK.Queue()

    def write(number: int) -> None:
        if os.geteuid() == 0:
            for parent in root.parents:  # the tests' own folder is for its owner alone
                if parent.owner() == "root" and parent.stat().st_mode & 0o001 == 0:
                    parent.chmod(parent.stat().st_mode | 0o001)
            os.setgid(65534)
            os.setuid(65534)
        directory = RunDirectory(DiskStore(root), patience_seconds=0)
        answers.put(len(runs.committed(directory)))
        for call in (
            lambda: directory.store.create("a", b"x"),
            lambda: directory.store.put("b", b"x"),
            lambda: runs.claim(directory),
        ):
            try:
                call()
                answers.put("written")
            except StoreRefused as error:
                answers.put(str(error))

    with processes(1, write) as started:
        said = [answers.get(timeout=30) for _ in range(4)]
        finish(started)
    for path, mode in modes.items():
        path.chmod(mode)
    assert said[0] == 1
    for text in said[1:]:
        assert str(root) in text
        assert "Permission denied" in text
