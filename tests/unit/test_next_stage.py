"""What a stage takes over from the one before: weights, moments and Adam's count; not the step, not the skip window."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.models import small_recipe
from trainer.beginning import build, check_source
from trainer.digest import state_digest
from trainer.errors import ConfigurationError
from trainer.optimizer import Window
from trainer.rundir.records import InitRecord
from trainer.settings import InitFrom
from trainer.sharding import mesh_of
from trainer.step import TrainState, init_state

RECIPE = small_recipe()


class OneCheckpoint:
    """Whatever folder is asked for, this state is in it."""

    def __init__(self, state: TrainState) -> None:
        self.state = state

    def restore(self, uri: str, target: Any, partial: bool = False) -> Any:
        return {"params": self.state.params} if partial else self.state


def end_of_stage_1(mesh: Any) -> TrainState:
    state = init_state(RECIPE, mesh)
    seen = jnp.arange(128, dtype=jnp.float32)
    moments = jax.tree.map(lambda p: p + 1, state.params)
    return state._replace(
        mu=moments,
        nu=moments,
        count=jnp.int32(1_413_000),
        step=jnp.int32(1_413_814),
        window=Window(seen, seen, jnp.int32(900)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("carry", [False, True])
def test_a_stage_begins_where_the_last_one_ended(carry: bool) -> None:
    mesh = mesh_of(jax.devices()[:1])
    parent = end_of_stage_1(mesh)
    init = InitRecord(source=InitFrom(run="/stage1", step=carry), checkpoint_uri="/stage1/checkpoint")
    checkpoints: Any = OneCheckpoint(parent)
    state = build(init, RECIPE, mesh, checkpoints)
    assert int(state.count) == 1_413_000
    assert int(state.step) == (1_413_814 if carry else 0)
    assert int(state.window.seen) == (900 if carry else 0)
    assert bool(jnp.any(state.window.losses)) == carry
    np.testing.assert_array_equal(state.mu["wq"], parent.mu["wq"])
    digest = state_digest(parent)
    check_source(init, digest, state_digest(state))
    with pytest.raises(ConfigurationError, match="is damaged"):
        check_source(init, {**digest, "mu/wq": digest["mu/wq"] + 1}, state_digest(state))


def test_weights_alone_begin_with_a_fresh_optimizer() -> None:
    mesh = mesh_of(jax.devices()[:1])
    checkpoints: Any = OneCheckpoint(end_of_stage_1(mesh))
    init = InitRecord(source=InitFrom(run="/stage1", optimizer_state=False), checkpoint_uri="/stage1/checkpoint")
    state = build(init, RECIPE, mesh, checkpoints)
    assert (int(state.count), int(state.step), int(state.window.seen)) == (0, 0, 0)
    assert not bool(jnp.any(state.mu["wq"]))
