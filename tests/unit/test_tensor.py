"""Devices that divide heads and MLP among them compute what one device computes, from the same batch."""

from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.support.models import small_model, small_recipe
from tests.support.same_training import assert_same_training, masked, rows_of
from trainer.checkpoint import Checkpoints
from trainer.digest import state_digest
from trainer.errors import ConfigurationError
from trainer.plan import Plan
from trainer.recipe import Recipe
from trainer.scoring import Row, Scorer
from trainer.sharding import cuts, mesh_of, put_batch
from trainer.step import abstract_state, init_state, make_eval_step, make_train_step

LENGTH, B = 24, 4
PLAIN = small_recipe(sequence_length=LENGTH, global_batch=B)
MASKED = masked(PLAIN)


def plan(devices: int, sequence: int, tensor: int, micro_batch: int = 1) -> Plan:
    groups = devices // sequence // tensor
    return Plan(
        device_type=f"cpu-{devices}",
        processes=1,
        devices=devices,
        global_batch=B,
        data_parallel=groups,
        sequence=sequence,
        tensor=tensor,
        micro_batch=micro_batch,
        accumulation=B // groups // micro_batch,
    )


ALONE, HEADS, BOTH = plan(1, 1, 1, 4), plan(8, 1, 2), plan(8, 2, 2)


def batch(t: int, mesh: Any, shape: Plan) -> dict[str, jax.Array]:
    return put_batch({n: x.reshape(shape.accumulation, -1, x.shape[-1]) for n, x in rows_of(MASKED, t).items()}, mesh)


@cache
def steps(shape: Plan) -> tuple[Any, Any]:
    mesh = mesh_of(jax.devices()[: shape.devices], shape.sequence, shape.tensor)
    return mesh, make_train_step(MASKED, shape, mesh)


def train(shape: Plan, state: Any = None, first: int = 0, count: int = 3) -> tuple[Any, Any]:
    mesh, step = steps(shape)
    state, metrics = init_state(MASKED, mesh) if state is None else state, []
    for t in range(first, first + count):
        state, found = step(state, batch(t, mesh, shape))
        metrics.append(jax.device_get(found))
    return state, metrics


@pytest.mark.slow
@pytest.mark.parametrize("shape", [HEADS, BOTH], ids=["heads", "heads and sequences"])
def test_divided_heads_have_the_losses_and_gradients_of_whole_layers(shape: Plan) -> None:
    (state, metrics), (wanted_state, wanted_metrics) = train(shape), train(ALONE)
    assert_same_training(metrics, wanted_metrics, jax.device_get(state.mu), jax.device_get(wanted_state.mu))


@pytest.mark.slow
def test_a_checkpoint_of_divided_heads_is_one_of_whole_layers(tmp_path: Path) -> None:
    state, _ = train(HEADS, count=1)
    digest = state_digest(state)
    checkpoints = Checkpoints()
    checkpoints.begin_save(str(tmp_path / "a"), state)
    checkpoints.wait(str(tmp_path / "a"))
    restored = checkpoints.restore(str(tmp_path / "a"), abstract_state(MASKED, steps(ALONE)[0]))
    assert state_digest(restored) == digest
    _, found = train(ALONE, restored, first=1, count=2)
    _, wanted = train(ALONE)
    for one, other in zip(found, wanted[1:], strict=True):
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-5)


@pytest.mark.slow
def test_evaluation_and_scores_are_those_of_whole_layers() -> None:
    found = []
    for shape in (ALONE, HEADS):
        mesh, _ = steps(shape)
        params = init_state(MASKED, mesh).params
        ce = jax.device_get(make_eval_step(MASKED, shape, mesh)(params, batch(9, mesh, shape)))["ce_sum"]
        row = Row(np.arange(1, 9, dtype=np.int32), np.arange(8, dtype=np.int32), np.arange(2, 10, dtype=np.int32))
        found.append((ce.ravel(), Scorer(MASKED, mesh).score(params, [row])[0]))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
    np.testing.assert_array_equal(found[1][1], found[0][1])


def test_a_layer_s_parameters_are_cut_twice_and_the_others_over_all_devices() -> None:
    found = cuts(MASKED.model, steps(BOTH)[0])
    assert dict(steps(BOTH)[0].shape) == {"fsdp": 2, "sequence": 2, "tensor": 2}
    for name, dims in {"wq": (-2, -1), "wk": (-2, -1), "wo": (-1, -2), "w_up": (-2, -1), "w_down": (-1, -2)}.items():
        cut = found[name]
        assert cut is not None
        assert (cut.dim, cut.parts, cut.axes, cut.others) == (*dims, ("fsdp", "sequence"), ()), name
    assert found["embedding"] is not None
    assert (found["embedding"].axes, found["embedding"].parts) == (("fsdp", "sequence", "tensor"), None)
    assert found["q_norm"] is None


def test_what_cannot_be_divided_is_refused_before_anything_is_compiled() -> None:
    odd: Recipe = PLAIN.model_copy(update={"model": small_model(n_kv_heads=1)})
    with pytest.raises(ConfigurationError, match=r"plan.tensor 2 does not divide model.n_kv_heads 1"):
        make_train_step(odd, HEADS, steps(HEADS)[0])
    invariant: Recipe = PLAIN.model_copy(update={"reduction": "invariant"})
    with pytest.raises(ConfigurationError, match="use tensor 1, or reduction fast"):
        make_train_step(invariant, HEADS, steps(HEADS)[0])
    with pytest.raises(ValueError, match="data_parallel 4 × sequence 1 × tensor 2 must equal devices 4"):
        Plan(**{**HEADS.model_dump(), "devices": 4})
