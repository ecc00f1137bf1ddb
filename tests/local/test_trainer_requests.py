"""Commit now, asked of real trainers: answered by a commit of both processes, and the run is the undisturbed one."""

import signal
import time
from collections.abc import Callable

from tests.support.gang import Run, one_layer_recipe, until
from tests.support.paced_trainer import COMMAND
from trainer.rundir.records import Request, RequestDone

TARGET = 24
RARELY = 1000  # commit_every: only what is asked for, and the target


def ask(run: Run, name: str, attempt: int = 1) -> None:
    run.rundir().request(name, Request(kind="commit", attempt=attempt, time=time.time()))


def answer(run: Run, name: str) -> RequestDone | None:
    return run.rundir().read_answer(name)


def steps(run: Run) -> list[int]:
    return [record.ref.step for record in run.lineage()][::-1]


def test_commits_on_request_change_nothing_else(new_run: Callable[..., Run]) -> None:
    """Two processes; two requests at once, then one more, then one that a crash leaves without an answer."""
    reference = new_run("reference", recipe=one_layer_recipe())
    reference.train("cpu-4", TARGET, commit_every=RARELY)

    run = new_run("run", recipe=one_layer_recipe())
    spec = run.submit("cpu-4", TARGET, commit_every=RARELY, progress_seconds=0.05)
    first = run.launch(spec, program=COMMAND[1:])  # slowly: there is much to ask before it is done
    until(lambda: (run.progress().get("step") or 0) >= 2, first)
    for name in ("a", "b"):
        ask(run, name)
    ask(run, "not-ours", attempt=2)
    until(lambda: answer(run, "a") and answer(run, "b"), first)
    one, two = answer(run, "a"), answer(run, "b")
    assert one is not None and two is not None
    assert one.step in steps(run)
    assert (one.attempt, one.start) == (1, 1)
    until(lambda: (run.progress().get("step") or 0) > two.step, first)  # else the same commit would answer it
    ask(run, "c")
    until(lambda: answer(run, "c"), first)
    three = answer(run, "c")
    assert three is not None
    assert three.step > one.step
    # One commit each; "b" may have been written just after rank 0 looked.
    assert set(steps(run)) == {one.step, two.step, three.step}
    first.signal(signal.SIGKILL)
    first.wait()
    kept = run.committed_step()
    assert kept < TARGET

    ask(run, "left")  # as if the start had died between seeing it and answering
    last = run.launch(spec, restart_attempt=1)
    assert last.wait() == [0, 0], last.logs()
    left = answer(run, "left")
    assert left is not None
    assert (left.start, left.step) == (2, kept)
    assert answer(run, "not-ours") is None
    assert steps(run)[-1] == TARGET
    assert run.numbers() == reference.numbers()
    assert run.committed().digest == reference.committed().digest  # type: ignore[union-attr]
    assert sorted(set(steps(run))) == steps(run)


def test_a_request_that_comes_with_the_last_step_is_answered_by_the_last_commit(new_run: Callable[..., Run]) -> None:
    """Also by a start that only finds the target committed."""
    run = new_run("run")
    spec = run.submit("cpu-2", 6, commit_every=RARELY, progress_seconds=1000)
    ask(run, "early")
    gang = run.launch(spec)
    assert gang.wait() == [0], gang.logs()
    early = answer(run, "early")
    assert early is not None
    assert early.step in steps(run)
    ask(run, "late")
    gang = run.launch(spec, restart_attempt=1)
    assert gang.wait() == [0], gang.logs()
    late = answer(run, "late")
    assert late is not None
    assert (late.start, late.step) == (2, 6)
