"""decide() is a function of its three arguments: watched while it decides every look of a whole story.

The import contract in pyproject.toml names modules; this looks at what is called, however deep: whatever reads a clock,
dice, a file, a socket or the environment is written in C, and the interpreter reports each such call.
"""

import copy
import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator import lifecycle
from orchestrator.decisions import Decision, Done
from orchestrator.observation import Observation
from tests.support.story import a_world, caretaker

OUTSIDE = {"time", "posix", "io", "_io", "_socket", "_random", "_posixsubprocess", "_thread", "select", "fcntl"}
NOW = {"now", "utcnow", "today", "random", "getrandbits", "urandom"}  # methods of C types, which name no module


def outside_calls(call: Callable[[], Decision]) -> tuple[Decision, list[str]]:
    """The answer of `call`, and what it asked the world outside."""
    found: list[str] = []

    def watch(_frame: Any, event: str, function: Any) -> None:
        if event != "c_call":
            return
        module, name = str(function.__module__), function.__name__
        owner = getattr(function, "__self__", None)
        kind = type(owner).__module__ if module == "None" else module
        if kind in OUTSIDE or module in OUTSIDE or name in NOW:
            found.append(f"{module}.{function.__qualname__}")

    gc.disable()  # hypothesis times collections, and they may come at any moment
    sys.setprofile(watch)
    try:
        answer = call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return answer, found


def test_deciding_asks_nobody_and_remembers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pure, asked = lifecycle.decide, list[tuple[Any, Observation, float, Decision]]()

    def watched(run: Any, o: Observation, now: float) -> Decision:
        before = copy.deepcopy(o)
        answer, calls = outside_calls(lambda: pure(run, o, now))
        assert not calls, f"{type(answer).__name__} was decided with the help of {calls}"
        assert o == before
        asked.append((run, before, now, answer))
        return answer

    monkeypatch.setattr("orchestrator.daemon.decide", watched)
    with a_world() as world:
        world.remembers = False  # of deleted gangs: so what was seen in several looks decides, too
        keeper = caretaker(world)
        for number in range(400):
            world.silent = range(number, number + (number % 50 == 3))
            look = keeper.step()
            if isinstance(look.decision, Done):
                break
            world.tick()
        assert isinstance(look.decision, Done)
    for run, o, now, answer in reversed(asked):
        assert lifecycle.decide(run, o, now) == answer, "the same question, asked later, got another answer"
    seen = {type(answer).__name__ for _, _, _, answer in asked}
    assert {"WriteSpec", "SwapHead", "SubmitGang", "AppendEnding", "StopForPlanChange", "Wait", "Freeze"} <= seen


@pytest.mark.parametrize(
    "ask",
    [
        "__import__('time').time()",
        "__import__('datetime').datetime.now()",
        "__import__('random').random()",
        "__import__('secrets').token_hex()",
        "__import__('os').path.exists('/')",
        "open('/dev/null').close()",
        "__import__('os').listdir('/')",
    ],
)
def test_the_watch_sees(ask: str) -> None:
    asked = compile(ask, "ask", "eval")
    assert outside_calls(lambda: eval(asked))[1], ask
