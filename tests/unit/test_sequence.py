"""Devices that share the sequences of their instances compute what one device computes, from the same batch."""

from typing import Any

import jax
import numpy as np
import pytest

from tests.support.models import cpu_plan, small_recipe
from tests.support.same_training import assert_same_training, masked, rows_of
from trainer.errors import ConfigurationError
from trainer.hardware import device_type
from trainer.plan import Plan, sequence_factors
from trainer.preflight.dividing import factors
from trainer.recipe import Recipe
from trainer.sequence import chunks_held
from trainer.sharding import mesh_of, put_batch
from trainer.step import init_state, make_eval_step, make_train_step

pytestmark = pytest.mark.slow

LENGTH = 24  # chunks of 3 tokens with a window of 3: it crosses the borders of chunks and of devices
PLAIN = small_recipe(sequence_length=LENGTH, global_batch=4)
MASKED = masked(PLAIN)
DEVICES, SHARING, ACCUMULATION = 8, 4, 2


def plan(devices: int, sequence: int, accumulation: int) -> Plan:
    whole = cpu_plan(PLAIN, devices // sequence, accumulation).model_dump()
    return Plan(**{**whole, "device_type": f"cpu-{devices}", "devices": devices, "sequence": sequence})


def batch(t: int, mesh: Any, accumulation: int) -> dict[str, jax.Array]:
    return put_batch({n: x.reshape(accumulation, -1, x.shape[-1]) for n, x in rows_of(MASKED, t).items()}, mesh)


def trained(devices: int, sequence: int, accumulation: int) -> tuple[Any, Any, Any]:
    """First moments and metrics after three steps from the initial state, and what evaluation finds then."""
    mesh, shape = mesh_of(jax.devices()[:devices], sequence), plan(devices, sequence, accumulation)
    step, evaluate = make_train_step(MASKED, shape, mesh), make_eval_step(MASKED, shape, mesh)
    state, metrics = init_state(MASKED, mesh), []
    for t in range(3):
        state, found = step(state, batch(t, mesh, accumulation))
        metrics.append(jax.device_get(found))
    return jax.device_get(state.mu), metrics, jax.device_get(evaluate(state.params, batch(9, mesh, accumulation)))


def test_a_shared_sequence_has_the_losses_and_gradients_of_a_whole_one() -> None:
    moments, metrics, evaluated = trained(DEVICES, SHARING, ACCUMULATION)
    wanted_moments, wanted_metrics, wanted = trained(1, 1, 1)
    assert_same_training(metrics, wanted_metrics, moments, wanted_moments)
    np.testing.assert_allclose(evaluated["ce_sum"].ravel(), wanted["ce_sum"].ravel(), rtol=1e-5)
    assert evaluated["count"].ravel().tolist() == wanted["count"].ravel().tolist()


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_chunk_is_held_once_and_all_devices_see_as_many_keys(count: int) -> None:
    held = chunks_held(count)
    assert sorted(held.ravel().tolist()) == list(range(2 * count))
    assert set(held.sum(axis=1).tolist()) == {2 * count - 1}


def test_a_plan_s_devices_are_its_rows_times_those_that_share_them() -> None:
    with pytest.raises(ValueError, match="data_parallel 4 × sequence 1 must equal devices 8"):
        Plan(**{**plan(8, 2, 1).model_dump(), "sequence": 1})
    with pytest.raises(ValueError, match="sequence 2 and the 3 devices of a process do not divide"):
        Plan(**{**plan(8, 2, 1).model_dump(), "devices": 12, "global_batch": 6, "processes": 4, "data_parallel": 6})
    old = plan(4, 1, 1).model_dump()
    del old["sequence"]
    assert Plan.parse(old, "plan").sequence == 1


def test_factors_are_those_that_give_every_device_two_whole_chunks() -> None:
    def factors(length: int, devices: int, processes: int, multiple: int = 1) -> list[int]:
        return sequence_factors(PLAIN.model_copy(update={"sequence_length": length}), devices, processes, multiple)

    assert factors(8192, 1024, 256, 128) == [1, 2, 4, 8, 16, 32]
    assert factors(8192, 768, 192, 128) == [1, 2, 4, 8, 16, 32]  # 3 does not divide 8192
    assert factors(24, 8, 1) == factors(24, 8, 4) == [1, 2, 4]
    assert factors(24, 12, 4) == [1, 3, 6, 12]  # 3 devices a process: 2 or 4 would cut rows in the middle
    assert sequence_factors(PLAIN.model_copy(update={"reduction": "invariant"}), 8, 1) == [1]


def test_the_fewest_that_make_the_batch_exact_are_taken() -> None:
    def best(batch: int, length: int, name: str, slices: int = 1) -> list[int]:
        recipe = PLAIN.model_copy(update={"global_batch": batch, "sequence_length": length})
        return factors(recipe, device_type(name), slices)

    assert best(512, 8192, "tpu7x-8x8x8") == [2, 4, 8, 16, 32]
    assert best(64, 65536, "v5p-4x4x8")[0] == 2
    assert best(4, 24, "cpu-8") == [2, 4]
    assert best(8, 32, "cpu-4", 3) == [4, 1, 2]  # none is: three rows of a quarter, one of a whole, two of a half


def test_what_cannot_be_shared_is_refused_before_anything_is_compiled() -> None:
    odd = PLAIN.model_copy(update={"sequence_length": 22})
    with pytest.raises(ConfigurationError, match=r"sequence_length 22 is no multiple of 4"):
        make_train_step(odd, plan(8, 2, 1), mesh_of(jax.devices()[:8], 2))
    invariant: Recipe = PLAIN.model_copy(update={"reduction": "invariant"})
    with pytest.raises(ConfigurationError, match="reduction invariant keeps each instance on one device"):
        make_train_step(invariant, plan(8, 2, 1), mesh_of(jax.devices()[:8], 2))
