"""What a start does at the same time: compiled programs are kept and found, and one error is reported, always the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.gang import Gang, Run, small_recipe, until

# Whole compilations, perhaps beside other tests.
PATIENT: dict[str, Any] = {"seconds": 300, "hang_start_seconds": 280}
FAILS_TO_COMPILE = """
import sys, time
import trainer.compilation

def lower(*_):
    raise RuntimeError("RESOURCE_EXHAUSTED: a program too large")

assert trainer.compilation.lower_train_step
trainer.compilation.lower_train_step = lower
from trainer.cli import main
main(time.monotonic(), ["train"])
"""


def program(gang: Gang) -> str:
    """Where rank 0 says that its train step came from."""
    text = gang.members[0].text()
    assert ('"program": "compiled"' in text) != ('"program": "from the compile cache"' in text), gang.logs()
    return "compiled" if '"program": "compiled"' in text else "cache"


def entry(run: Run) -> Path:
    (found,) = run.cache.glob("jit_train_step-*")
    return found


def test_the_next_start_finds_the_program_and_a_changed_one_does_not(
    new_run: Callable[..., Run], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    run = new_run("run", cache=cache)
    assert program(run.train("cpu-2", 4, **PATIENT)) == "compiled"
    assert program(run.train("cpu-2", 8, **PATIENT)) == "cache"
    # A kill in the midst of a write by JAX's own cache leaves this; it would be compiled at every start from now on.
    whole = entry(run).read_bytes()
    entry(run).write_bytes(whole[: len(whole) // 2])
    gang = run.train("cpu-2", 12, **PATIENT)
    assert program(gang) == "compiled"
    assert "entry of jit_train_step is damaged" in gang.members[0].text()
    assert program(run.train("cpu-2", 16, **PATIENT)) == "cache"
    optimizer = small_recipe().optimizer
    other = small_recipe(optimizer=optimizer.model_copy(update={"weight_decay": optimizer.weight_decay / 2}))
    assert program(new_run("other", cache=cache, recipe=other).train("cpu-2", 4, **PATIENT)) == "compiled"


def test_an_attempt_that_waits_for_its_turn_compiles_meanwhile(new_run: Callable[..., Run], tmp_path: Path) -> None:
    """The gang of the next rung is up before HEAD names its attempt: after the switch it has nothing to compile."""
    run = new_run("run", cache=tmp_path / "cache")
    run.train("cpu-2", 4, **PATIENT)
    before = run.head()
    gang = run.launch(run.submit("cpu-4", 8, turn=False, hang_start_seconds=280))
    until(lambda: len(list(run.cache.glob("jit_train_step-*"))) == 2, gang, 300)
    assert run.head() == before
    run.rundir().swap_to_attempt(run.attempt)
    assert gang.wait(300) == [0, 0], gang.logs()
    assert run.committed_step() == 8


def test_which_error_is_reported_does_not_depend_on_which_came_first(new_run: Callable[..., Run]) -> None:
    """A compilation that fails at once, beside a restore that fails later."""
    run = new_run()
    gang = run.launch(run.submit("cpu-2", 4, init_from={"run": str(run.folder)}), program=("-c", FAILS_TO_COMPILE))
    assert gang.wait(300) == [64], gang.logs()
    assert "initFrom.run" in run.exit()["reason"]
    gang = run.launch(run.submit("cpu-2", 4), program=("-c", FAILS_TO_COMPILE))
    assert gang.wait(300) == [1], gang.logs()
    assert "a program too large" in run.exit()["reason"]
    assert run.committed() is None
