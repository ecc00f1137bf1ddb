"""The training step: one result on any mesh and split, exact resume, and what a bad step leaves alone."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import reference_model
from tests.support.models import cpu_plan, small_recipe
from trainer.data.hashes import data_hash, ids_hash
from trainer.digest import hash_text, state_digest
from trainer.errors import ConfigurationError
from trainer.optimizer import Window, empty_window
from trainer.params import ParamSpec
from trainer.recipe import Optimizer
from trainer.schedule import learning_rate
from trainer.sharding import make_mesh, mesh_of, put_batch, sharded_dim
from trainer.step import TrainState, abstract_state, init_state, make_eval_step, make_train_step

pytestmark = pytest.mark.slow

RECIPE = small_recipe()
B, S = RECIPE.global_batch, RECIPE.sequence_length


def rows(t: int) -> tuple[np.ndarray, np.ndarray]:
    """Global batch t: tokens int32 [B, S] and instance ids uint64 [B]."""
    random = np.random.default_rng(t)
    tokens = random.integers(0, RECIPE.model.vocab_size, (B, S)).astype(np.int32)
    return tokens, random.integers(0, 2**40, B).astype(np.uint64)


@cache
def compiled(devices: int, accumulation: int) -> tuple[Any, Any]:
    mesh = mesh_of(jax.devices()[:devices])
    return mesh, make_train_step(RECIPE, cpu_plan(RECIPE, devices, accumulation), mesh)


def batch(t: int, devices: int, accumulation: int) -> dict[str, jax.Array]:
    tokens, ids = rows(t)
    halves = np.stack([ids & np.uint64(0xFFFFFFFF), ids >> np.uint64(32)], axis=-1).astype(np.uint32)
    local = {"tokens": tokens.reshape(accumulation, -1, S), "ids": halves.reshape(accumulation, -1, 2)}
    return put_batch(local, compiled(devices, accumulation)[0])


def run(devices: int, accumulation: int, steps: int, state: TrainState | None = None, first: int = 0) -> Any:
    """State and metrics after `steps` steps from batch `first`; donates `state`."""
    mesh, step = compiled(devices, accumulation)
    state = init_state(RECIPE, mesh) if state is None else state
    metrics = []
    for t in range(first, first + steps):
        state, m = step(state, batch(t, devices, accumulation))
        metrics.append(jax.device_get(m))
    return state, metrics


SPLITS = [(1, 1), (2, 2), (8, 1)]


@pytest.mark.parametrize(("devices", "accumulation"), SPLITS)
def test_every_split_trains_on_the_same_batch(devices: int, accumulation: int) -> None:
    state, metrics = run(devices, accumulation, 3)
    for t, m in enumerate(metrics):
        tokens, ids = rows(t)
        assert hash_text(m["ids_hash"]) == ids_hash(ids)
        assert hash_text(m["data_hash"]) == data_hash(tokens)
    params = jax.device_get(init_state(RECIPE, mesh_of(jax.devices()[:1])).params)
    tokens, _ = rows(0)
    losses = [
        reference_model.cross_entropy(reference_model.logits(params, row, RECIPE.model), row)[0] for row in tokens
    ]
    assert float(metrics[0]["loss"]) == pytest.approx(sum(losses) / (B * (S - 1)), rel=1e-5)
    one, one_metrics = run(1, 1, 3)
    for mine, theirs in zip(metrics, one_metrics, strict=True):
        np.testing.assert_allclose(mine["loss"], theirs["loss"], rtol=1e-5)
        np.testing.assert_allclose(mine["grad_norm"], theirs["grad_norm"], rtol=1e-4)
        assert mine["lr"] == theirs["lr"]
    for name, value in one.params.items():
        np.testing.assert_allclose(state.params[name], value, atol=2e-4)
    assert int(state.step) == int(state.count) == 3


def test_the_first_update_uses_the_rate_of_step_one() -> None:
    _, metrics = run(1, 1, 2)
    assert [float(m["lr"]) for m in metrics] == pytest.approx([0.0025, 0.005])


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_initial_state_has_the_same_bits_on_any_mesh(devices: int) -> None:
    one = state_digest(init_state(RECIPE, mesh_of(jax.devices()[:1])))
    state = init_state(RECIPE, mesh_of(jax.devices()[:devices]))
    assert state_digest(state) == one
    assert len(state.params["wq"].sharding.device_set) == devices
    assert state.params["wq"].addressable_shards[0].data.size == state.params["wq"].size // devices


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit() -> None:
    through, metrics = run(2, 2, 4)
    half, _ = run(2, 2, 2)
    saved = jax.device_get(half)
    shardings = jax.tree.map(lambda s: s.sharding, abstract_state(RECIPE, compiled(2, 2)[0]))
    resumed, later = run(2, 2, 2, jax.device_put(saved, shardings), first=2)
    assert state_digest(resumed) == state_digest(through)
    for mine, theirs in zip(later, metrics[2:], strict=True):
        assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)


def test_the_abstract_state_is_the_state() -> None:
    mesh = compiled(2, 2)[0]
    for abstract, real in zip(
        jax.tree.leaves(abstract_state(RECIPE, mesh)), jax.tree.leaves(init_state(RECIPE, mesh)), strict=True
    ):
        assert (abstract.shape, abstract.dtype, abstract.sharding) == (real.shape, real.dtype, real.sharding)


def test_a_spike_is_skipped_but_the_step_counts() -> None:
    state, _ = run(1, 1, 1)
    quiet = jnp.full(128, 0.5) + 0.001 * (jnp.arange(128) % 2)
    state = state._replace(window=Window(quiet, quiet * 1e6, jnp.int32(200)))
    before, digest = jax.device_get(state), state_digest(state)
    after, (metrics,) = run(1, 1, 1, state, first=1)
    assert bool(metrics["skipped"])
    assert bool(metrics["finite"])
    changed = {name for name, value in state_digest(after).items() if value != digest[name]}
    assert changed == {"step", "window/losses", "window/grad_norms", "window/seen"}
    assert int(after.step) == int(before.step) + 1
    assert float(after.window.losses[200 % 128]) == float(metrics["loss"])
    # The schedule goes by steps, not by updates; Adam's bias correction goes by updates.
    assert (int(after.step), int(after.count)) == (2, 1)
    shardings = jax.tree.map(lambda s: s.sharding, abstract_state(RECIPE, compiled(1, 1)[0]))
    after = after._replace(window=empty_window(RECIPE.optimizer))
    one_more_update = jax.device_put(jax.device_get(after)._replace(count=np.int32(2)), shardings)
    second, (third,) = run(1, 1, 1, after, first=2)
    assert not third["skipped"]
    third_update, _ = run(1, 1, 1, one_more_update, first=2)
    assert state_digest(second.params) != state_digest(third_update.params)
    assert third["lr"] == learning_rate(RECIPE.schedule, 3) != learning_rate(RECIPE.schedule, 2)


def test_the_rule_and_its_window_see_the_norm_before_clipping_and_the_loss_without_z_loss() -> None:
    """A norm twice the usual one is a spike, however small it is clipped."""
    recipe = small_recipe(optimizer=Optimizer(grad_clip=1e-3, z_loss=10.0))
    mesh = mesh_of(jax.devices()[:1])
    step = make_train_step(recipe, cpu_plan(recipe, 1), mesh)
    _, first = step(init_state(recipe, mesh), batch(0, 1, 1))
    wobble = 1 + 0.001 * (jnp.arange(128) % 2)
    for loss, norm, spike in ((1.01, 0.5, True), (0.5, 1.01, True), (1.01, 1.01, False)):
        window = Window(float(first["loss"]) * loss * wobble, float(first["grad_norm"]) * norm * wobble, jnp.int32(200))
        state, metrics = step(init_state(recipe, mesh)._replace(window=window), batch(0, 1, 1))
        assert bool(metrics["skipped"]) == spike, (loss, norm)
        assert float(state.window.losses[200 % 128]) == float(first["loss"])
        assert float(state.window.grad_norms[200 % 128]) == float(first["grad_norm"]) > 1e-2


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    state, _ = run(1, 1, 1)
    state = state._replace(params={**state.params, "norm": state.params["norm"].at[0].set(jnp.nan)})
    digest = state_digest(state)
    after, (metrics,) = run(1, 1, 1, state, first=1)
    assert not bool(metrics["finite"])
    assert not np.isfinite(metrics["loss"])
    assert state_digest(after) == digest


def test_evaluation_is_the_loss_per_instance() -> None:
    for devices, accumulation in ((1, 1), (8, 1)):
        mesh, _ = compiled(devices, accumulation)
        state = init_state(RECIPE, mesh)
        step = make_eval_step(RECIPE, cpu_plan(RECIPE, devices, accumulation), mesh)
        out = jax.device_get(step(state.params, batch(0, devices, accumulation)))
        params = jax.device_get(state.params)
        expected = [
            reference_model.cross_entropy(reference_model.logits(params, row, RECIPE.model), row)[0]
            for row in rows(0)[0]
        ]
        np.testing.assert_allclose(out["ce_sum"].reshape(-1), expected, rtol=1e-5)
        assert out["count"].tolist() == np.full((accumulation, B // accumulation), S - 1).tolist()


def test_the_first_dimension_that_divides_is_sharded() -> None:
    spec = ParamSpec((2, 12, 16), ("layer", "embed", "mlp"), "ones", "", "")
    assert [sharded_dim(spec, n) for n in (1, 2, 4, 8, 16, 32)] == [-2, -2, -2, -1, -1, None]
    assert sharded_dim(ParamSpec((16,), ("norm",), "ones", "", ""), 2) is None


def test_a_mesh_that_is_not_the_plan_s_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"plan.devices is 4 .* 8 cpu devices"):
        make_mesh(cpu_plan(RECIPE, 4), RECIPE)
    assert make_mesh(cpu_plan(RECIPE, 8), RECIPE).size == 8
