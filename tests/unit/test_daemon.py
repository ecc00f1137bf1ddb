"""What the daemon makes of errors: unknown freezes, overtaken looks again, only a run that never began is refused."""

from typing import Any

import pytest

from orchestrator.clusters.base import ClusterUnavailable, SubmitConflict
from orchestrator.daemon import Caretaker, Outcome
from orchestrator.decisions import Done, Freeze, Refused, Wait
from tests.support.story import World, a_world, caretaker, finish
from trainer.errors import ConfigurationError, Fenced, StorageUnavailable


def fail(error: Exception) -> Any:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


def advance(world: World, keeper: Caretaker, act: str) -> None:
    """Until the next decision is `act`."""
    while type(keeper.look().decision).__name__ != act:
        keeper.step()
        world.tick()


@pytest.mark.parametrize("error", [StorageUnavailable("503"), ClusterUnavailable("refused")])
def test_an_unknown_outcome_freezes_and_is_tried_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_world() as world:
        keeper = caretaker(world)
        advance(world, keeper, "SubmitGang")
        with monkeypatch.context() as patch:
            patch.setattr("orchestrator.daemon.carry_out", fail(error))
            look = keeper.step()
            assert isinstance(look.decision, Freeze)
            assert str(error) in look.decision.message
        assert isinstance(finish(world, keeper).decision, Done)


@pytest.mark.parametrize("error", [Fenced("HEAD went on"), SubmitConflict("taken")])
def test_overtaken_is_no_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_world() as world:
        keeper = caretaker(world)
        advance(world, keeper, "SwapHead")
        monkeypatch.setattr("orchestrator.daemon.carry_out", fail(error))
        look = keeper.step()
        assert isinstance(look.decision, Wait)
        assert str(error) in look.decision.message


def test_a_store_that_refuses_ends_a_run_that_never_began(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_world() as world:
        keeper = caretaker(world)
        monkeypatch.setattr("orchestrator.daemon.carry_out", fail(ConfigurationError("read-only")))
        look = keeper.step()
        assert look.decision == Refused("read-only")
        assert world.created == []
        assert Outcome(look.decision).word == "Refused"


def test_a_store_that_turns_read_only_freezes_a_run_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_world() as world:
        keeper = caretaker(world)
        advance(world, keeper, "AppendEnding")
        with monkeypatch.context() as patch:
            patch.setattr("orchestrator.daemon.carry_out", fail(ConfigurationError("read-only")))
            assert isinstance(keeper.step().decision, Freeze)
        assert isinstance(finish(world, keeper).decision, Done)


def test_a_look_that_shows_nothing_new_has_the_same_mark() -> None:
    with a_world() as world:
        keeper = caretaker(world)
        assert keeper.look().mark == keeper.look().mark
        advance(world, keeper, "WriteSpec")
        assert keeper.look().mark == keeper.look().mark, "the nonce of each look is fresh; that is no news"
        before = keeper.look().mark
        keeper.step()
        assert keeper.look().mark != before
