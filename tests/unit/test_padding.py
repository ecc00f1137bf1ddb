"""Devices that do not divide the batch: rows without an instance fill it up, and change nothing but the efficiency."""

from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.corpus import frozen
from tests.support.models import small_recipe
from tests.support.same_training import assert_same_training, masked, rows_of
from trainer.data.hashes import data_hash, ids_hash
from trainer.data.loader import Loader, global_ids, process_rows
from trainer.data.mix import Mix
from trainer.data.order import open_order
from trainer.digest import hash_text, state_digest
from trainer.errors import ConfigurationError
from trainer.hardware import device_type, device_types
from trainer.plan import Plan, filling, split_batch
from trainer.preflight.choice import candidates, refuse_inexact
from trainer.preflight.dividing import divides, factors, step_seconds
from trainer.preflight.plans import plan_of
from trainer.recipe import Recipe, load
from trainer.sharding import cuts, mesh_of, put_batch
from trainer.step import init_state, make_eval_step, make_train_step

SEVEN_B: Recipe = load("olmo3_7b_stage1")
LENGTH = 24
PLAIN = small_recipe(sequence_length=LENGTH)
MASKED = masked(PLAIN)
B = MASKED.global_batch


def plan(devices: int, micro_batch: int = 1, sequence: int = 1, batch: int = B, processes: int = 1) -> Plan:
    groups = devices // sequence
    return Plan(
        device_type=f"cpu-{devices}",
        processes=processes,
        devices=devices,
        global_batch=batch,
        data_parallel=groups,
        sequence=sequence,
        micro_batch=micro_batch,
        accumulation=-(-batch // groups) // micro_batch,
    )


# -- arithmetic


@settings(deadline=None)
@given(st.integers(1, 600), st.integers(1, 200), st.integers(1, 64))
def test_every_instance_has_one_row_and_no_device_one_more_than_it_needs(batch: int, devices: int, most: int) -> None:
    micro, accumulation = split_batch(batch, devices, most)
    shape = plan(devices, micro, batch=batch)
    assert shape.accumulation == accumulation
    assert micro <= max(most, 1)
    each = shape.per_device_batch
    assert all(each % larger for larger in range(micro + 1, min(most, each) + 1)), "a larger micro-batch would do"
    assert shape.rows == batch + shape.padding
    assert 0 <= shape.padding < devices
    assert (shape.padding == 0) == (batch % devices == 0) == (filling(shape) is None)
    assert shape.efficiency == batch / shape.rows
    assert "100%" not in (filling(shape) or "")


@settings(deadline=None)
@given(st.data(), st.integers(1, 300))
def test_the_processes_of_a_gang_hold_every_row_once(data: st.DataObject, batch: int) -> None:
    processes = data.draw(st.integers(1, 8))
    each = data.draw(st.integers(1, 4))
    sequence = data.draw(st.sampled_from([n for n in (1, 2, 4) if each % n == 0 or n % each == 0]))
    if processes * each % sequence:
        return
    micro, _ = split_batch(batch, processes * each // sequence, data.draw(st.integers(1, 8)))
    shape = plan(processes * each, micro, sequence, batch, processes)
    shares = [process_rows(shape, p) for p in range(processes)]
    together = max(1, sequence // each)
    rows = np.sort(np.concatenate([s.reshape(-1) for s in shares[::together]]))
    assert rows.tolist() == list(range(shape.rows))
    assert all(np.array_equal(shares[i], shares[i - i % together]) for i in range(processes))


def test_a_plan_says_which_arithmetic_is_wrong() -> None:
    with pytest.raises(ValueError, match="= 32, not the 12 rows that hold global_batch 9"):
        Plan(
            **{
                **plan(4).model_dump(),
                "devices": 6,
                "data_parallel": 4,
                "micro_batch": 4,
                "global_batch": 9,
                "sequence": 1,
            }
        )


@settings(deadline=None)
@given(
    st.sampled_from([t.name for family in ("tpu7x", "v5p", "v6e") for t in device_types(family) if t.devices < 3000]),
    st.integers(1, 6),
    st.integers(1, 700),
)
def test_every_slice_has_a_plan_and_it_is_exact_wherever_one_is(name: str, slices: int, batch: int) -> None:
    recipe, kind = SEVEN_B.model_copy(update={"global_batch": batch}), device_type(name)
    best, *others = factors(recipe, kind, slices)
    plans = [plan_of(recipe, kind, slices, 1, "none", n) for n in (best, *others)]
    assert (plans[0].padding == 0) == divides(recipe, kind, slices)
    if plans[0].padding:
        times = [step_seconds(recipe, kind, slices, n) for n in (best, *others)]
        assert times == sorted(times)
    else:
        assert not any(p.padding for p in plans)


@pytest.mark.parametrize(
    ("device", "slices", "sequence", "rows"),
    [
        ("tpu7x-4x4x12", 1, 2, 3),  # the two cores of a chip share: 89 % instead of 67 %
        ("tpu7x-4x4x4", 3, 2, 3),
        ("v5p-4x8x12", 1, 8, 11),  # 97 %
        ("tpu7x-4x8x12", 1, 4, 3),  # whole or shared by two, a third of the rows would be empty
        ("v5p-8x8x12", 1, 4, 3),
        ("tpu7x-2x2x1", 3, 1, 22),
    ],
)
def test_what_loses_least_is_taken(device: str, slices: int, sequence: int, rows: int) -> None:
    first = next(candidates(SEVEN_B, device_type(device), slices)).plan
    assert (first.sequence, first.per_device_batch) == (sequence, rows)


def test_how_many_devices_would_be_as_fast_is_said_where_rows_alone_decide() -> None:
    kind = device_type("v5p-8x8x12")
    whole, shared = (plan_of(SEVEN_B, kind, 1, rows, "none", n) for n, rows in ((1, 1), (4, 3)))
    assert "67% of the work counts, and 512 devices would be as fast" in str(filling(whole))
    assert str(filling(shared)).endswith("89% of the work counts")


def test_invariant_sums_have_no_place_for_empty_rows() -> None:
    recipe = SEVEN_B.model_copy(update={"reduction": "invariant"})
    for name, word in (
        ("tpu7x-4x4x12", "adds instances in pairs"),
        ("tpu7x-8x8x8", "keeps each instance on one device"),
    ):
        with pytest.raises(ConfigurationError, match=word):
            refuse_inexact(recipe, device_type(name), 1)
    small = PLAIN.model_copy(update={"reduction": "invariant"})
    with pytest.raises(ConfigurationError, match="must be a power of two and at most global_batch 8"):
        make_train_step(small, plan(3), mesh_of(jax.devices()[:3]))


# -- reading


@pytest.mark.parametrize("processes", [3, 2])
def test_nothing_is_read_for_rows_without_an_instance(tmp_path: Path, processes: int) -> None:
    """The last of three processes has none at all, the last of two has two of six."""
    recipe = frozen(tmp_path)
    order, asked = open_order(recipe), []

    class Watched(Mix):
        def instances(self, ids: Any) -> Any:
            asked.extend(np.asarray(ids).reshape(-1).tolist())
            return super().instances(ids)

    mix, shape = Watched(recipe, str(tmp_path)), plan(6, 2, processes=processes, batch=8)
    assert (shape.rows, shape.padding) == (12, 4)
    loaders = [Loader(mix, order, recipe, shape, p, 5, prefetch=1, threads=1) for p in range(processes)]
    shares = [next(loader)[1] for loader in loaders]
    for loader in loaders:
        loader.close()
    ahead = {instance for t in range(5, 10) for instance in order.batch_ids(t).tolist()}
    assert set(order.batch_ids(5).tolist()) <= set(asked) <= ahead
    assert np.array_equal(global_ids([b["ids"] for b in shares], shape), order.batch_ids(5))
    tokens = np.concatenate([b["tokens"] for b in shares], axis=1).reshape(12, -1)
    assert np.array_equal(tokens[:8], Mix(recipe, str(tmp_path)).instances(order.batch_ids(5)))
    assert (tokens[8:] == recipe.data.eos_id).all()
    assert (shares[-1]["ids"] == 0xFFFFFFFF).all() == (processes == 3)


# -- training


def batch(t: int, mesh: Any, shape: Plan, filled_with: int = 0) -> dict[str, jax.Array]:
    """Batch t for the mesh. What holds no instance is text of another kind, which the repetition filter would keep."""
    whole, random = rows_of(MASKED, t), np.random.default_rng(100 + filled_with)
    for name, x in whole.items():
        empty = random.integers(0, 30, (shape.padding, x.shape[1])).astype(x.dtype)
        whole[name] = np.concatenate([x, empty]).reshape(shape.accumulation, -1, x.shape[1])
    return put_batch(whole, mesh)


@cache
def steps(shape: Plan) -> tuple[Any, Any, Any]:
    mesh = mesh_of(jax.devices()[: shape.devices], shape.sequence)
    return mesh, make_train_step(MASKED, shape, mesh), make_eval_step(MASKED, shape, mesh)


def trained(shape: Plan, filled_with: int = 0) -> tuple[Any, Any]:
    """State and metrics after three steps from the initial state."""
    mesh, step, _ = steps(shape)
    state, metrics = init_state(MASKED, mesh), []
    for t in range(3):
        state, found = step(state, batch(t, mesh, shape, filled_with))
        metrics.append(jax.device_get(found))
    return jax.device_get(state), metrics


ALONE, IDLE, SHARING = plan(1, 8), plan(6, 2), plan(6, 1, 2)  # in one pass; two devices of six idle; in three passes


@pytest.mark.slow
@pytest.mark.parametrize("shape", [IDLE, SHARING], ids=["idle", "sharing"])
def test_filled_up_it_is_the_same_training(shape: Plan) -> None:
    """Loss, gradients, clipping and hashes, with documents and the repetition filter."""
    assert (shape.padding, shape.accumulation) == ((4, 1) if shape is IDLE else (1, 3))
    (state, metrics), (wanted_state, wanted_metrics) = trained(shape), trained(ALONE)
    assert_same_training(metrics, wanted_metrics, state.mu, wanted_state.mu)
    for t, found in enumerate(metrics):
        halves = rows_of(MASKED, t)["ids"].astype(np.uint64)
        assert hash_text(found["ids_hash"]) == ids_hash(halves[:, 0] | halves[:, 1] << np.uint64(32))
        assert hash_text(found["data_hash"]) == data_hash(rows_of(MASKED, t)["tokens"])


@pytest.mark.slow
def test_what_stands_in_empty_rows_changes_no_bit() -> None:
    (state, metrics), (other, other_metrics) = trained(IDLE, 0), trained(IDLE, 1)
    assert state_digest(state) == state_digest(other)
    for found, wanted in zip(metrics, other_metrics, strict=True):
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_evaluation_finds_the_same_in_every_instance() -> None:
    results = []
    for shape in (ALONE, IDLE):
        mesh, _, evaluate = steps(shape)
        results.append(jax.device_get(evaluate(init_state(MASKED, mesh).params, batch(9, mesh, shape))))
    wanted, found = results
    np.testing.assert_allclose(found["ce_sum"].ravel()[:B], wanted["ce_sum"].ravel(), rtol=1e-5)
    assert found["count"].ravel()[:B].tolist() == wanted["count"].ravel().tolist()


def test_parameters_are_cut_over_the_power_of_two_where_their_sides_do_not_divide() -> None:
    mesh = mesh_of(jax.devices()[:6])
    assert dict(mesh.shape) == {"replica": 3, "fsdp": 2}
    found = cuts(MASKED.model, mesh)
    assert found["wq"] is not None
    assert (found["wq"].axes, found["wq"].others) == ("fsdp", ("replica",))  # 16 and 32 do not divide by 6
    assert found["w_gate"] is not None
    assert found["w_gate"].axes == ("replica", "fsdp")  # 24 does
    assert found["norm"] is None
    assert mesh_of(jax.devices()[:8]).axis_names == ("fsdp",)
    assert dict(mesh_of(jax.devices()[:6], 2).shape) == {"replica": 3, "fsdp": 1, "sequence": 2}
