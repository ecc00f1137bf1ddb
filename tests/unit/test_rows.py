"""Padding, documents and the repetition filter in the loss: against each document by itself, and against OLMo-core."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.golden import inputs
from tests.support import reference_model
from tests.support.models import cpu_plan, small_recipe
from trainer.attention import attention
from trainer.data.filter import keeps
from trainer.model import Weights, next_token_loss
from trainer.recipe import Model, Packing, Recipe, RepetitionFilter, Yarn
from trainer.rows import read_rows
from trainer.sharding import mesh_of, put_batch
from trainer.step import init_state, make_eval_step, make_train_step

SIZE = inputs.MODEL
MODEL = Model(
    vocab_size=SIZE["vocab"],
    padded_vocab_size=SIZE["vocab"],
    d_model=SIZE["d_model"],
    n_layers=SIZE["n_layers"],
    n_heads=SIZE["n_heads"],
    n_kv_heads=SIZE["n_heads"],
    head_dim=SIZE["head_dim"],
    mlp_hidden=SIZE["mlp_hidden"],
    window_pattern=(SIZE["window"],) * 3 + (-1,),
    yarn=Yarn(**inputs.YARN),
)


def packed(**changes: Any) -> Recipe:
    """A recipe over the packed rows of the golden inputs; its files do not exist."""
    recipe = small_recipe(model=MODEL, global_batch=4, sequence_length=inputs.MODEL_LENGTH)
    data = {
        "eos_id": inputs.EOS,
        "mask_documents": True,
        "packing": Packing(sources=("s",), group_size=1, pad_id=inputs.PAD),
        **changes,
    }
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=data)})


def test_a_packed_row_has_the_loss_of_its_documents_as_olmo_core_computes_it() -> None:
    """With window, YaRN and padding. OLMo-core's model saw every document by itself."""
    golden = np.load(inputs.HERE / "olmo_core_model.npz")
    tokens, _ = inputs.packed_rows()
    rows = read_rows(jnp.asarray(tokens), packed().data)
    np.testing.assert_array_equal(rows.targets, golden["documents/targets"])
    assert rows.counted.tolist() == [14, 23, 23, 13]
    params = {name: jnp.asarray(value) for name, value in inputs.model_params().items()}
    weights = Weights(jnp.dtype("float32"))
    loss = jax.jit(lambda p, t, d: next_token_loss(p, tokens, MODEL, weights, 0.0, "none", t, d)[1])
    np.testing.assert_allclose(loss(params, rows.targets, rows.documents), golden["documents/ce"].sum(1), rtol=2e-6)
    # Without masking it is another loss, in every row of several documents and in no other.
    across = np.asarray(loss(params, rows.targets, jnp.zeros_like(tokens)))
    differs = np.abs(across - golden["documents/ce"].sum(1)) > 1e-3
    assert differs.tolist() == [True, False, True, True]


@pytest.mark.parametrize(("length", "window"), [(70, -1), (150, 40)])
def test_attention_stays_within_documents(length: int, window: int) -> None:
    random = np.random.default_rng(length)
    q, k, v = (random.normal(size=(2, length, heads, 4)).astype(np.float32) for heads in (4, 2, 2))
    ends = random.random((2, length)) < 0.05
    documents = np.cumsum(ends, axis=1) - ends
    got = jax.jit(attention, static_argnums=3)(q / 2, k, v, window, jnp.asarray(documents, jnp.int32))  # √head_dim is 2
    for row in range(2):
        for number in np.unique(documents[row]):
            at = documents[row] == number
            alone = reference_model.attention(q[row, at].astype(np.float64), k[row, at], v[row, at], window)
            np.testing.assert_allclose(got[row, at], alone, atol=2e-5)


def shuffled(tokens: np.ndarray, devices: int, accumulation: int) -> dict[str, np.ndarray]:
    return {
        "tokens": tokens.reshape(accumulation, -1, tokens.shape[1]),
        "ids": np.zeros((accumulation, tokens.shape[0] // accumulation, 2), np.uint32),
    }


@pytest.mark.slow
def test_the_denominator_is_the_global_batch_s() -> None:
    """Rows of 14, 23, 23 and 13 targets: a mean of means over devices or micro-batches would be another number."""
    recipe, golden = packed(), np.load(inputs.HERE / "olmo_core_model.npz")
    tokens, _ = inputs.packed_rows()
    expected = golden["documents/ce"].sum() / golden["documents/targets"].sum()
    norms = []
    for devices, accumulation in ((1, 1), (2, 2), (4, 1)):
        mesh = mesh_of(jax.devices()[:devices])
        step = make_train_step(recipe, cpu_plan(recipe, devices, accumulation), mesh)
        state = init_state(recipe, mesh)
        params = {
            name: jax.device_put(value, state.params[name].sharding) for name, value in inputs.model_params().items()
        }
        _, metrics = step(state._replace(params=params), put_batch(shuffled(tokens, devices, accumulation), mesh))
        assert float(metrics["loss"]) == pytest.approx(expected, rel=2e-6)
        norms.append(float(metrics["grad_norm"]))
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)
    means = (golden["documents/ce"].sum(1) / golden["documents/targets"].sum(1)).mean()
    assert abs(means - expected) > 1e-3
    mesh = mesh_of(jax.devices()[:1])
    evaluated = make_eval_step(recipe, cpu_plan(recipe, 1), mesh)(
        {name: jnp.asarray(value) for name, value in inputs.model_params().items()},
        put_batch(shuffled(tokens, 1, 1), mesh),
    )
    assert evaluated["count"].tolist() == [[14, 23, 23, 13]]
    np.testing.assert_allclose(evaluated["ce_sum"][0], golden["documents/ce"].sum(1), rtol=2e-6)


# --- the repetition filter


@pytest.mark.parametrize(
    ("rule", "answers"),
    [
        (RepetitionFilter(), "keeps"),
        (RepetitionFilter(min_period=2, max_period=5, max_count=8), "keeps_2_5_8"),
    ],
)
def test_the_filter_decides_as_olmo_core_does(rule: RepetitionFilter, answers: str) -> None:
    golden = json.loads((inputs.HERE / "olmo_core_filter.json").read_text())[answers]
    rows = inputs.filter_rows()
    assert keeps(rows, rule).astype(int).tolist() == golden
    assert jax.jit(lambda t: keeps(t, rule, jnp))(rows).astype(int).tolist() == golden
    assert 100 < sum(golden) < 300


def test_a_filtered_instance_counts_in_full_but_is_no_target() -> None:
    """As OLMo-core's train_batch: its tokens stay in the denominator."""
    rule = RepetitionFilter(max_period=3, max_count=5)
    data = packed(repetition_filter=rule, packing=None, mask_documents=False).data
    tokens = np.arange(48).reshape(2, 24)
    tokens[1, 4:14] = np.resize([7, 8], 10)
    rows = read_rows(jnp.asarray(tokens), data)
    assert rows.counted.tolist() == [23, 24]
    assert rows.targets.sum(1).tolist() == [23, 0]
    assert read_rows(jnp.asarray(tokens), data, training=False).targets.sum(1).tolist() == [23, 23]
