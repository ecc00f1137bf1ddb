"""The parts of the trainer's loop that need no device and no second process."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint import compare_digest, compare_files, share
from trainer.departure import PEER_LOST, end_of, is_peer_loss
from trainer.distributed import Gang, Identity, compare
from trainer.errors import ConfigurationError, Fenced, MixedGang, StorageUnavailable
from trainer.progress import Monitor, PhaseClock
from trainer.rundir.records import FileEntry, Progress, StepLine, StepLogFile
from trainer.rundir.store import NotFound, Stat
from trainer.steplog import StepLog
from trainer.watchdog import Watchdog

IDENTITY = Identity(attempt=1, nonce="n", fingerprint="f", image="i", processes=2)


@pytest.mark.parametrize("field", list(Identity.__dataclass_fields__))
def test_one_odd_process_is_named(field: str) -> None:
    odd = Identity(**{**vars(IDENTITY), field: 7 if field in ("attempt", "processes") else "other"})
    compare([IDENTITY, IDENTITY])
    with pytest.raises(MixedGang, match=rf"{field} .* process 2"):
        compare([IDENTITY, IDENTITY, odd])


class KeyValue:
    """The coordination service's store, without the service."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self.changed:
            if key in self.values and not allow_overwrite:
                raise RuntimeError("ALREADY_EXISTS")
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_ms / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]


def gang_of(count: int) -> list[Gang]:
    store = KeyValue()
    return [Gang(rank, count, store, 5) for rank in range(count)]


def in_threads(gangs: list[Gang], body: Any) -> list[Any]:
    results: list[Any] = [None] * len(gangs)
    threads = [
        threading.Thread(target=lambda g=gang: results.__setitem__(g.rank, body(g)))  # type: ignore[misc]
        for gang in gangs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return results


def test_process_0_gathers_by_rank_and_decides_for_all() -> None:
    def body(gang: Gang) -> str:
        said = gang.gather("x", str(gang.rank))
        return gang.decide("y", ",".join(said) if said is not None else None)

    assert in_threads(gang_of(3), body) == ["0,1,2"] * 3


def test_the_first_to_stop_is_heard_by_the_others_only() -> None:
    gangs, heard = gang_of(3), []
    for gang in gangs:
        gang.listen(lambda code, reason, rank=gang.rank: heard.append((rank, code, reason)))  # type: ignore[misc]
    gangs[1].stop(75, "SIGTERM")
    gangs[2].stop(1, "too late")
    deadline = time.monotonic() + 5
    while not any(rank == 0 for rank, _, _ in heard) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (0, 75, "process 1: SIGTERM") in heard
    assert all(rank != 1 and code == 75 for rank, code, _ in heard)


class Jax(RuntimeError):
    pass


Jax.__name__ = "JaxRuntimeError"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Fenced("later start"), 76),
        (StorageUnavailable("full"), 74),
        (ConfigurationError("field"), 64),
        (OSError(28, "No space left on device"), 74),
        (ValueError("shapes differ"), 1),
        (Jax("UNKNOWN: Gloo AllReduce failed: Connection closed by peer [127.0.0.1]:1"), PEER_LOST),
        (Jax("RESOURCE_EXHAUSTED: out of memory"), 1),
    ],
)
def test_exit_codes(error: Exception, code: int) -> None:
    assert end_of(error).code == code
    assert is_peer_loss(error) == (code == PEER_LOST)


@given(st.lists(st.integers(0, 10**9), max_size=40), st.integers(1, 9))
def test_every_file_is_compared_by_exactly_one_process(sizes: list[int], processes: int) -> None:
    files = [FileEntry(path=f"f{i}", bytes=size, crc32c=i) for i, size in enumerate(sizes)]
    shares = [share(files, rank, processes) for rank in range(processes)]
    assert sorted(f.path for part in shares for f in part) == sorted(f.path for f in files)
    if files:
        loads = [sum(f.bytes + 4096 for f in part) for part in shares]
        assert max(loads) <= sum(loads) / processes + max(f.bytes + 4096 for f in files)


def test_what_is_wrong_with_a_file_is_said() -> None:
    files = tuple(FileEntry(path=name, bytes=3, crc32c=9) for name in ("good", "gone", "short", "changed"))

    class Files:
        def stat(self, key: str) -> Stat:
            name = key.removeprefix("c/")
            if name == "gone":
                raise NotFound(key)
            return Stat(key, 2 if name == "short" else 3, 8 if name == "changed" else 9)

    record: Any = SimpleNamespace(files=files, checkpoint="c")
    found = compare_files(Files(), record, 0, 1)  # type: ignore[arg-type]
    assert "gone is missing" in found
    assert "short has 2 bytes, 3 were committed" in found
    assert "changed has crc32c 00000008" in found
    assert "good" not in found


def test_digests_are_compared_leaf_by_leaf() -> None:
    assert compare_digest({"a": 1, "b": 2}, {"a": 1, "b": 2}) == ""
    assert "1 of 2 leaves: b" in compare_digest({"a": 1, "b": 2}, {"a": 1, "b": 3})
    assert "c" in compare_digest({"a": 1}, {"a": 1, "c": 3})


def line(step: int) -> StepLine:
    return StepLine(step=step, loss=0.5, grad_norm=1, lr=1, skipped=False, ids="", data="", seconds=1)


def make_log(fail: list[int] | None = None) -> tuple[StepLog, list[tuple[int, int]]]:
    written: list[tuple[int, int]] = []

    def append(lines: Any) -> StepLogFile:
        if fail:
            fail.pop()
            raise StorageUnavailable("no answer")
        written.append((lines[0].step, lines[-1].step))
        return StepLogFile(key=f"{lines[0].step}", first=lines[0].step, last=lines[-1].step, crc32c=0)

    return StepLog(append), written


@given(st.lists(st.sampled_from(["step", "commit", "flush"]), max_size=60))
def test_no_log_file_spans_a_commit(actions: list[str]) -> None:
    log, written = make_log()
    step, parent = 10, 10
    for action in actions:
        if action == "step":
            step += 1
            log.add(line(step))
        elif action == "flush":
            log.flush()
        elif step > parent:
            log.cut(step)
            log.flush(step)
            files = log.files(parent + 1, step)
            steps = [s for file in files for s in range(file.first, file.last + 1)]
            assert steps == list(range(parent + 1, step + 1))
            parent = step
    log.flush()
    assert [s for first, last in written for s in range(first, last + 1)] == list(range(11, step + 1))


def test_lines_survive_a_store_that_does_not_answer() -> None:
    log, written = make_log(fail=[1])
    log.add(line(1))
    with pytest.raises(StorageUnavailable):
        log.flush()
    log.add(line(2))
    log.flush()
    assert written == [(1, 2)]


def test_lines_after_a_commit_wait_for_their_own_file() -> None:
    log, written = make_log()
    for step in (1, 2, 3):
        log.add(line(step))
    log.cut(2)
    log.flush(2)
    assert written == [(1, 2)]
    log.flush()
    assert written == [(1, 2), (3, 3)]


def test_watchdog_counts_from_the_last_beat_and_shows_stacks() -> None:
    said: list[tuple[str, bytes]] = []
    dog = Watchdog(start_seconds=30, step_seconds=0.3, expired=lambda message, stacks: said.append((message, stacks)))
    dog.start()
    dog.beat("step 1", training=True)
    # It sleeps a tenth of the limit it starts with at most; beats keep it quiet for as long as they come.
    for _ in range(10):
        time.sleep(0.05)
        dog.beat("step 2")
    assert not said
    deadline = time.monotonic() + 10
    while not said and time.monotonic() < deadline:
        time.sleep(0.05)
    message, stacks = said[0]
    assert "step 2" in message
    assert "hang_step_seconds is 0.3" in message
    assert b"test_trainer_parts.py" in stacks


def test_what_compiles_gets_the_time_of_a_start() -> None:
    dog = Watchdog(start_seconds=30, step_seconds=0.3, expired=lambda message, stacks: None)
    dog.beat("step 9", training=True)
    with dog.patient("the first evaluation"):
        assert dog.limit == 30
        dog.beat("the next batch")
        assert dog.limit == 30
    assert dog.limit == 0.3


def test_a_stopped_process_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long tick (the process was stopped) counts as two, not as its length."""
    said: list[str] = []
    dog = Watchdog(start_seconds=10, step_seconds=10, expired=lambda message, stacks: said.append(message))
    now = [0.0]
    sleeps = iter([1.0, 500.0, 1.0, 1.0])

    def sleep(seconds: float) -> None:
        now[0] += next(sleeps, 0.0)
        if now[0] >= 503:
            raise SystemExit

    monkeypatch.setattr("trainer.watchdog.time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))
    with pytest.raises(SystemExit):
        dog._watch()
    assert not said
    assert dog._idle < 10


def test_phases_sum_to_the_whole_time() -> None:
    began = time.monotonic() - 1
    clock = PhaseClock(began)
    for phase in ("Restoring", "Training", "Saving", "Training"):
        time.sleep(0.01)
        clock.enter(phase)  # type: ignore[arg-type]
    total = sum(clock.seconds().values())
    assert total == pytest.approx(time.monotonic() - began, abs=0.01)
    assert clock.seconds()["Starting"] >= 1


def test_progress_beats_and_survives_a_dead_store(capsys: pytest.CaptureFixture[str]) -> None:
    written: list[Progress] = []

    def write(progress: Progress) -> None:
        if len(written) == 1:
            written.append(progress)
            raise StorageUnavailable("gone")
        written.append(progress)

    monitor = Monitor(PhaseClock(time.monotonic()), 10, write, target_step=5)
    for _ in range(3):
        monitor.write_now()
    assert [progress.beats for progress in written] == [1, 2, 3]
    assert "could not be written" in capsys.readouterr().err
