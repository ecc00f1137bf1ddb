"""Killed before, killed after, or left without an answer, at every call that changes something: same end.

The story: a process dies, the quota shrinks, the plan changes, the quota returns, the gang fails for good, the target
is committed. A reference run counts the calls; then each of them is spoiled once in each way, and a fresh orchestrator
that remembers nothing goes on.
"""

import functools

import pytest

from orchestrator.decisions import Done, Freeze
from tests.support.story import MODES, TARGET, Crash, Faults, a_world, caretaker, end_state, finish


@functools.cache
def reference() -> tuple[dict[str, object], tuple[str, ...]]:
    with a_world() as world:
        faults = Faults()
        look = finish(world, caretaker(world, faults))
        assert isinstance(look.decision, Done)
        return end_state(world), tuple(faults.calls)


def test_the_reference_run_tells_the_whole_story() -> None:
    state, calls = reference()
    assert state["gangs"] == [1, 2, 3, 4]
    assert [cause for _, _, cause, _, _ in state["ledger"]] == [
        "host-failure",
        "preempted",
        "plan-change",
        "application-error",
        "completed",
    ]
    head = state["head"]
    assert head[2].step == TARGET
    for needed in ("create recipe.json", "swap HEAD", "submit", "delete", "create attempts/4/endings/1.json"):
        assert needed in calls
    assert len(calls) > 20


@pytest.mark.parametrize("mode", MODES)
def test_every_boundary(mode: str) -> None:
    expected, calls = reference()
    for at, name in enumerate(calls):
        with a_world() as world:
            keeper = caretaker(world, Faults(at, mode))
            try:
                look = finish(world, keeper)
                assert mode == "lost", f"{name}: the fault never came"
            except Crash:
                look = finish(world, caretaker(world))  # the next process
            assert isinstance(look.decision, Done)
            assert end_state(world) == expected, f"{mode} call {at}: {name}"


def test_a_cluster_that_does_not_answer_freezes_and_nothing_is_lost() -> None:
    expected, _ = reference()
    for at in range(0, 30, 2):
        with a_world() as world:
            world.silent = range(at, at + 2)
            keeper = caretaker(world)
            for number in range(400):
                before = list(world.created)
                look = keeper.step()
                if isinstance(look.decision, Done):
                    break
                if number in world.silent:
                    assert isinstance(look.decision, Freeze)
                    assert world.created == before, "something was submitted blindly"
                world.tick()
            assert end_state(world) == expected, f"silent at look {at}"


def test_a_process_per_step() -> None:
    """Nothing is carried in memory but waiting times: an orchestrator that is replaced after each act finishes too."""
    expected, _ = reference()
    with a_world() as world:
        keeper = caretaker(world)
        for _ in range(400):
            look = keeper.step()
            if isinstance(look.decision, Done):
                break
            if type(look.decision).__name__ not in ("Wait", "Freeze"):
                keeper = caretaker(world)
            world.tick()
        assert isinstance(look.decision, Done)
        assert end_state(world) == expected
