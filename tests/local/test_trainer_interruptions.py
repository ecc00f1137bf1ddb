"""A run that is interrupted ends bit for bit as one that never was. Real processes, real signals."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.support.gang import Run, one_layer_recipe, until
from tests.support.paced_trainer import COMMAND, PACE

TARGET = 28
MISSED = "PERSISTENT COMPILATION CACHE MISS for 'jit_train_step'"


def newest_save(run: Run) -> list[Path]:
    """Folders of saves that Orbax has not finished."""
    return list((run.folder / "checkpoints").glob("*/*orbax-checkpoint-tmp*"))


def test_interrupted_equals_uninterrupted(new_run: Callable[..., Run], tmp_path: Path) -> None:
    """SIGTERM, SIGKILL of one process, SIGKILL of all during a save: two processes, four starts, one result."""
    # The reference compiles everything itself; the interrupted run starts from what the reference left in the cache.
    cache = tmp_path / "cache"
    explain = {rank: {"JAX_EXPLAIN_CACHE_MISSES": "1"} for rank in (0, 1)}
    reference = new_run("reference", cache=cache, recipe=one_layer_recipe())
    cold = reference.launch(reference.submit("cpu-4", TARGET), changes=explain)
    assert cold.wait() == [0, 0], cold.logs()

    run = new_run("run", cache=cache, recipe=one_layer_recipe())
    spec = run.submit("cpu-4", TARGET, log_seconds=0.1)
    slowly = {rank: {**explain[rank], PACE: "0.1"} for rank in (0, 1)}  # that it cannot run ahead of who looks
    paced = partial(run.launch, spec, program=COMMAND[1:], changes=slowly)
    first = paced()
    until(lambda: run.committed_step() >= 8, first)
    first.signal(signal.SIGTERM, 1)
    assert first.wait() == [75, 75], first.logs()
    for rank in (0, 1):
        assert MISSED in cold.members[rank].text()
        assert MISSED not in first.members[rank].text(), f"process {rank} compiled again what the cache has"
    preempted_at = run.committed_step()
    assert 8 <= preempted_at < TARGET
    assert run.exit(1, 1)["code"] == 75
    assert f"step {preempted_at} is committed" in run.exit(1, 1)["reason"]

    second = paced()
    until(lambda: run.committed_step() >= preempted_at + 4, second)
    second.signal(signal.SIGKILL, 1)
    codes = second.wait()
    assert codes[1] == -signal.SIGKILL
    assert codes[0] == -signal.SIGABRT, f"the peer of a killed process must end by itself: {codes}\n{second.logs()}"
    assert run.head().start == 2

    third = paced(restart_attempt=1)
    saved = run.committed_step()
    until(lambda: run.committed_step() > saved and newest_save(run), third, every=0.001)
    third.signal(signal.SIGKILL)
    third.wait()
    torn = newest_save(run)
    committed = run.committed_step()
    assert committed < TARGET

    last = run.launch(spec, restart_attempt=2)
    assert last.wait() == [0, 0], last.logs()
    assert run.committed_step() == TARGET
    assert run.committed().digest == reference.committed().digest  # type: ignore[union-attr]
    assert run.numbers() == reference.numbers()
    assert [line.step for line in run.lines()] == list(range(1, TARGET + 1))
    # Steps that were logged but not committed have been done again, with the same numbers.
    rundir, known = run.rundir(), {line.step: line.model_dump(exclude={"seconds", "loading"}) for line in run.lines()}
    logged = [line for start in (1, 2, 3, 4) for line in rundir.logged_steps(1, start)]
    assert len(logged) >= TARGET
    assert all(line.model_dump(exclude={"seconds", "loading"}) == known[line.step] for line in logged)
    for folder in torn:  # what the kill left is in nobody's lineage
        assert str(folder.relative_to(run.folder)) not in [record.checkpoint for record in run.lineage()]
    # Phases account for all of the time.
    progress = run.progress()
    assert progress["phase"] == "Done"
    assert set(progress["phase_seconds"]) >= {"Starting", "Restoring", "Compiling", "Training", "Saving"}


def test_a_finished_run_trains_nothing(new_run: Callable[..., Run]) -> None:
    run = new_run()
    run.train("cpu-1", 4)
    before = run.head().commit
    gang = run.train("cpu-1", 4)
    assert run.head().commit == before
    assert "committed already" in gang.logs()
    assert run.exit()["code"] == 0
    assert not (run.folder / "steps" / "2.1").exists()


def test_sigterm_before_the_claim_claims_nothing(new_run: Callable[..., Run]) -> None:
    run = new_run()
    spec = run.submit("cpu-1", 4)
    gang = run.launch(spec)
    until(lambda: list(run.folder.glob("attempts/1/pods/*/progress.json")), gang, every=0.005)
    gang.signal(signal.SIGTERM)
    assert gang.wait() == [75], gang.logs()
    assert run.head().start == 0
    assert list(run.folder.glob("attempts/1/pods/*/exit.json"))
    assert not (run.folder / "attempts" / "1" / "1").exists()


def test_no_save_is_begun_that_cannot_end_within_the_grace(new_run: Callable[..., Run]) -> None:
    run = new_run()
    gang = run.launch(run.submit("cpu-1", 100_000, commit_every=7, grace_seconds=1e-6))
    until(lambda: run.committed_step() >= 7, gang)
    gang.signal(signal.SIGTERM)
    assert gang.wait() == [75], gang.logs()
    assert run.committed_step() % 7 == 0
    reason = run.exit()["reason"]
    assert "no save begun" in reason or ("is committed" in reason and run.committed_step() == run.exit()["step"])


def test_an_old_start_that_wakes_up_is_fenced(new_run: Callable[..., Run]) -> None:
    """A stopped process is no dead process: what it commits after its successor's claim must change nothing."""
    run = new_run()
    spec = run.submit("cpu-1", 100_000, heartbeat_timeout_seconds=600)
    old = run.launch(spec)
    until(lambda: run.committed_step() >= 4, old)
    old.signal(signal.SIGSTOP)
    stopped_at = run.committed_step()
    new = run.launch(spec)
    until(lambda: run.head().start == 2 and run.committed_step() > stopped_at + 4, new)
    new.signal(signal.SIGTERM)
    assert new.wait() == [75], new.logs()
    head = run.head()
    steps = sorted(os.listdir(run.folder / "HEAD.d"))
    old.signal(signal.SIGCONT)
    assert old.wait() == [76], old.logs()
    assert run.head() == head
    assert sorted(os.listdir(run.folder / "HEAD.d")) == steps
    assert run.exit(1, 1)["code"] == 76


def test_a_mixed_gang_trains_nothing(new_run: Callable[..., Run]) -> None:
    run = new_run()
    spec = run.submit("cpu-4", 4)
    gang = run.launch(spec, changes={1: {"UNTILDONE_NONCE": "of-another-attempt"}})
    assert gang.wait() == [79, 79], gang.logs()
    assert run.head().start == 0
    assert "nonce" in gang.members[0].text()


def test_the_watchdog_ends_a_hang_with_stacks(new_run: Callable[..., Run]) -> None:
    """One of two processes is stopped; the other sits in a collective, says where, and ends."""
    run = new_run()
    gang = run.launch(run.submit("cpu-4", 100_000, hang_step_seconds=4, heartbeat_timeout_seconds=100))
    until(lambda: run.committed_step() >= 4, gang)
    gang.signal(signal.SIGSTOP, 1)
    assert gang.members[0].process.wait(40) == 77, gang.logs()
    assert run.exit()["code"] == 77
    stacks = (run.folder / "attempts/1/1/stacks/rank0.txt").read_text()
    assert "trainer/loop.py" in stacks
