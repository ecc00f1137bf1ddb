"""Several slices train as one; between them goes nothing but sums of what is small."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from tests.support.models import small_recipe
from tests.support.same_training import assert_same_training, masked, rows_of
from trainer.digest import state_digest
from trainer.plan import Plan
from trainer.sharding import cuts, make_mesh, mesh_of, put_batch
from trainer.step import abstract_state, init_state, make_eval_step, make_train_step, state_shardings

B = 8
MASKED = masked(small_recipe(sequence_length=24, global_batch=B))


def plan(slices: int, each: int, sequence: int = 1, tensor: int = 1, micro_batch: int = 1) -> Plan:
    groups = slices * each // sequence // tensor
    return Plan(
        device_type=f"cpu-{each}",
        slices=slices,
        processes=1,
        devices=slices * each,
        global_batch=B,
        data_parallel=groups,
        sequence=sequence,
        tensor=tensor,
        micro_batch=micro_batch,
        accumulation=-(-B // groups) // micro_batch,
    )


ALONE = plan(1, 1, micro_batch=8)
SEVERAL = {
    "two": plan(2, 4),
    "two, accumulating": plan(2, 2),
    "of one device": plan(4, 1, micro_batch=2),
    "three of two": plan(3, 2),
    "two of three": plan(2, 3),
    "sharing sequences": plan(2, 4, sequence=2),
    "dividing heads": plan(2, 4, tensor=2),
}


def batch(t: int, mesh: Any, shape: Plan) -> dict[str, jax.Array]:
    rows = {}
    for name, x in rows_of(MASKED, t).items():
        empty = np.zeros((shape.padding, x.shape[-1]), x.dtype)
        rows[name] = np.concatenate([x, empty]).reshape(shape.accumulation, -1, x.shape[-1])
    return put_batch(rows, mesh)


def mesh_for(shape: Plan) -> Any:
    return mesh_of(jax.devices()[: shape.devices], shape.sequence, shape.tensor, shape.slices_apart(MASKED))


@cache
def trained(shape: Plan) -> tuple[Any, Any, Any]:
    """Summed losses of one evaluation, metrics of three steps, and the first moments after them."""
    mesh = mesh_for(shape)
    step, state, metrics = make_train_step(MASKED, shape, mesh), init_state(MASKED, mesh), []
    evaluated = make_eval_step(MASKED, shape, mesh)(state.params, batch(9, mesh, shape))["ce_sum"]
    for t in range(3):
        state, found = step(state, batch(t, mesh, shape))
        metrics.append(jax.device_get(found))
    return np.asarray(evaluated).ravel()[:B], metrics, jax.device_get(state.mu)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["three of two", "sharing sequences"])
def test_slices_train_as_one_device_does(name: str) -> None:
    (evaluated, metrics, mu), (wanted, wanted_metrics, wanted_mu) = trained(SEVERAL[name]), trained(ALONE)
    assert_same_training(metrics, wanted_metrics, mu, wanted_mu)
    np.testing.assert_allclose(evaluated, wanted, rtol=1e-5)


@pytest.mark.parametrize("name", SEVERAL)
def test_between_slices_go_only_sums_of_a_device_s_own_part_once_a_step(name: str) -> None:
    """No weight is gathered across the slow network, nothing scattered, and no pass of several sends its gradients there."""
    shape = SEVERAL[name]
    mesh = mesh_for(shape)
    assert mesh.shape["slice"] == shape.slices
    state, rows = abstract_state(MASKED, mesh), batch(0, mesh, shape)
    kinds, across = set(), 0
    for times, equation in equations(jax.make_jaxpr(make_train_step(MASKED, shape, mesh))(state, rows).jaxpr):
        over = equation.params.get("axis_name", equation.params.get("axes", ()))
        if "slice" in (over if isinstance(over, tuple) else (over,)):
            kinds.add(equation.primitive.name)
            across += times * sum(x.aval.size * x.aval.dtype.itemsize for x in equation.invars)
    assert kinds - {"axis_index"} == {"psum"}
    sharding = state_shardings(MASKED, mesh).params
    own = {n: np.prod(sharding[n].shard_shape(x.shape)) for n, x in state.params.items()}
    assert 4 * sum(own.values()) <= across <= 4 * sum(own.values()) + 200


def test_no_parameter_is_cut_over_slices() -> None:
    for shape in SEVERAL.values():
        for cut in cuts(MASKED.model, mesh_for(shape)).values():
            assert cut is None or ("slice" not in cut.axes and "slice" in cut.others)
    assert cuts(MASKED.model, mesh_for(SEVERAL["two"]))["wq"] is not None


def test_the_state_is_the_same_bits() -> None:
    one, two = (state_digest(init_state(MASKED, mesh_for(shape))) for shape in (ALONE, SEVERAL["two"]))
    assert one == two


def test_where_slices_cannot_be_replicas_their_devices_are_one_row() -> None:
    """The invariant order of sums goes by the devices' numbers; and a sequence may be longer than a slice."""
    invariant = MASKED.model_copy(update={"reduction": "invariant"})
    assert make_mesh(plan(2, 4), invariant).axis_names == ("fsdp",)
    assert make_mesh(plan(2, 4), MASKED).axis_names == ("slice", "fsdp")
    assert dict(make_mesh(plan(2, 4, sequence=8), MASKED).shape) == {"fsdp": 1, "sequence": 8}


def equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[int, Any]]:
    """All of a program, also those of the programs within, and how often each is executed."""
    for equation in jaxpr.eqns:
        yield times, equation
        inside = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner, inside)
