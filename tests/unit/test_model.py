"""The model against plain numpy, and the facts of OLMo 3 7B."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trainer.attention
import trainer.loss
from tests.support import reference_model
from tests.support.models import small_model
from trainer.attention import attention, visible
from trainer.loss import head_loss
from trainer.model import (
    Weights,
    forward,
    init_params,
    next_token_loss,
    swiglu,
    window_period,
)
from trainer.norm import rms_norm
from trainer.params import param_count, param_specs
from trainer.recipe import Model, Yarn, load
from trainer.rope import apply_rope, rope_table

TWO_LAYERS = small_model(n_layers=2, window_pattern=(3, -1))


def loud_params(model: Model) -> dict[str, jax.Array]:
    """Parameters large enough that every part of the model matters, norms included."""
    key = jax.random.key(1)
    return {
        name: jax.random.normal(jax.random.fold_in(key, i), spec.shape) * 0.4 + (spec.init == "ones")
        for i, (name, spec) in enumerate(param_specs(model).items())
    }


def loss_and_gradients(
    params: dict[str, jax.Array],
    tokens: np.ndarray,
    model: Model,
    weights: Weights,
    z_loss: float,
    remat: str = "none",
) -> tuple[tuple[jax.Array, jax.Array], dict[str, jax.Array]]:
    def both(params: dict[str, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        objective, ce = next_token_loss(params, tokens, model, weights, z_loss, remat)
        return objective, (objective, ce)

    grads, values = jax.jit(jax.grad(both, has_aux=True))(params)
    return values, grads


def tokens_for(model: Model, batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, model.vocab_size, (batch, length)).astype(np.int32)


@pytest.mark.parametrize(
    "model",
    [
        small_model(n_layers=4, window_pattern=(2, -1)),  # one copy of two layers, scanned twice
        small_model(n_layers=3, n_kv_heads=4),  # the last layer is full although the pattern says 3
        # Of the four frequencies of a head one is left alone, one is stretched in part and two in full.
        small_model(n_layers=2, window_pattern=(4, -1), rope_theta=1e4, yarn=Yarn(factor=8, old_length=300)),
    ],
    ids=["scanned", "last-full", "yarn"],
)
@pytest.mark.slow
def test_forward_is_the_reference(model: Model) -> None:
    params, tokens = loud_params(model), tokens_for(model, 2, 11)
    ours = np.asarray(jax.jit(lambda p, t: forward(p, t, model, "float32"))(params, tokens))
    for row in range(2):
        expected = reference_model.logits(params, tokens[row], model)
        np.testing.assert_allclose(ours[row], expected, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "refetch"), [("none", False), ("full", False), ("mlp", True)])
def test_loss_and_gradients_are_the_reference_s(remat: str, refetch: bool) -> None:
    """The hand-written gradients (shared products, embedding, head) against slopes of the plain numpy loss."""
    z = 1e-2
    params, tokens = loud_params(TWO_LAYERS), tokens_for(TWO_LAYERS, 2, 7)
    (objective, ce), grads = loss_and_gradients(
        params, tokens, TWO_LAYERS, Weights(jnp.dtype("float32"), refetch=refetch), z, remat
    )

    def losses(params: dict[str, np.ndarray]) -> list[tuple[float, float]]:
        logits = [reference_model.logits(params, row, TWO_LAYERS) for row in tokens]
        return [reference_model.cross_entropy(*pair) for pair in zip(logits, tokens, strict=True)]

    expected = losses(params)
    np.testing.assert_allclose(ce, [row[0] for row in expected], rtol=1e-5)
    np.testing.assert_allclose(objective, sum(row[0] + z * row[1] for row in expected), rtol=1e-5)
    random = np.random.default_rng(3)
    for name, gradient in grads.items():
        direction = random.normal(size=gradient.shape)
        there, back = (
            losses({**params, name: np.asarray(params[name], np.float64) + step * direction}) for step in (1e-5, -1e-5)
        )
        slope = sum(a[0] - b[0] + z * (a[1] - b[1]) for a, b in zip(there, back, strict=True)) / 2e-5
        assert float(np.sum(gradient * direction)) == pytest.approx(slope, rel=2e-3, abs=2e-3), name


@pytest.mark.slow
def test_bfloat16_stays_close_and_keeps_float32_gradients() -> None:
    model = small_model(n_layers=1)
    params, tokens = loud_params(model), tokens_for(model, 2, 9)
    (objective, _), grads = loss_and_gradients(params, tokens, model, Weights(jnp.dtype("bfloat16")), 0.0)
    expected = sum(reference_model.cross_entropy(reference_model.logits(params, row, model), row)[0] for row in tokens)
    assert float(objective) == pytest.approx(expected, rel=1e-2)
    assert {g.dtype for g in grads.values()} == {jnp.dtype("float32")}
    # Not merely bfloat16 numbers stored wide: these were added up, and stayed, in float32.
    for name in ("wq", "w_down", "embedding"):
        assert np.any(grads[name] != grads[name].astype(jnp.bfloat16).astype(jnp.float32)), name


@pytest.mark.parametrize(("length", "window"), [(5, -1), (64, 7), (130, -1), (130, 1), (130, 64), (130, 200)])
def test_attention_leaves_out_only_what_is_masked(length: int, window: int) -> None:
    random = np.random.default_rng(length)
    q, k, v = (random.normal(size=(1, length, heads, 4)).astype(np.float32) for heads in (4, 2, 2))
    expected = reference_model.attention(q[0].astype(np.float64), k[0], v[0], window)
    got = jax.jit(attention, static_argnums=3)(q / 2, k, v, window)  # √head_dim is 2
    np.testing.assert_allclose(got[0], expected, atol=2e-5)


def test_window_includes_the_query_itself() -> None:
    mask = visible(np.arange(6), np.arange(6), 3)
    assert mask[5].tolist() == [False, False, False, True, True, True]
    assert mask[0].tolist() == [True, False, False, False, False, False]
    assert visible(np.arange(6), np.arange(6), -1)[5].all()


def test_rope_turns_pairs_of_halves_and_stays_exact_far_out() -> None:
    x = np.random.default_rng(0).normal(size=(1, 8192, 1, 128)).astype(np.float32)
    ours = apply_rope(jnp.asarray(x), *rope_table(8192, 128, 500_000.0))
    np.testing.assert_allclose(ours[0], reference_model.rope(x[0].astype(np.float64), 500_000.0), atol=2e-6)


def test_rms_norm_is_float32_inside() -> None:
    x = jnp.asarray([[3.0, 4.0]], jnp.bfloat16) * 300  # the square of 1200 has more digits than bfloat16
    weight = jnp.asarray([1.0, 1.001], jnp.float32)
    got = rms_norm(x, weight, 1e-6)
    expected = np.asarray(x, np.float64) / np.sqrt((np.asarray(x, np.float64) ** 2).mean() + 1e-6) * np.asarray(weight)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(got, np.float32), np.asarray(jnp.asarray(expected, jnp.bfloat16), np.float32)
    )


@pytest.mark.parametrize("chunks", [1, 4])
def test_head_loss_gradients_are_autodiff_s(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n, d, vocab, z = 16, 8, 20, 1e-2
    monkeypatch.setattr(trainer.loss, "MAX_LOGITS", n * vocab // chunks)
    random = np.random.default_rng(0)
    hidden, head = random.normal(size=(n, d)).astype(np.float32), random.normal(size=(d, vocab)).astype(np.float32)
    targets, weights = random.integers(0, vocab, n), (np.arange(n) % 3 != 0).astype(np.float32)

    def plain(hidden: jax.Array, head: jax.Array) -> jax.Array:
        logp = jax.nn.log_softmax(hidden @ head)
        lse = jax.nn.logsumexp(hidden @ head, axis=-1)
        return jnp.sum(weights * (-logp[jnp.arange(n), targets] + z * lse**2))

    def ours(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return head_loss(hidden, head, targets, weights, z)[0]

    value, grads = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(hidden, head)
    expected, expected_grads = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(hidden, head)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(head_loss(hidden, head, targets, weights, z)[0], expected, rtol=1e-6)
    for got, want in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_init_is_a_truncated_normal() -> None:
    model = small_model(d_model=64, mlp_hidden=256)
    init = jax.jit(lambda seed: init_params(model, seed))
    params, other = init(0), init(1)
    for name, spec in param_specs(small_model()).items():
        values = np.asarray(params[name])
        if spec.init == "ones":
            assert (values == 1).all()
        else:
            assert np.abs(values).max() <= 0.06
            # A normal cut at ±3σ has a standard deviation of 0.9866 σ.
            assert values.std() == pytest.approx(0.02 * 0.9866, rel=0.05), name
    assert not np.array_equal(params["w_gate"], params["w_up"])
    assert not np.array_equal(params["wq"], other["wq"])


def test_olmo3_7b_has_its_parameters_layers_and_names() -> None:
    model = load("olmo3_7b_stage1").model
    assert param_count(model) == 7_298_617_344
    assert param_count(model.model_copy(update={"padded_vocab_size": 100_278})) == 7_298_011_136
    assert window_period(model) == (4096, 4096, 4096, -1)
    assert [i for i in range(32) if model.window(i) < 0] == [3, 7, 11, 15, 19, 23, 27, 31]
    names = [
        spec.hf.format(i=i)
        for spec in param_specs(model).values()
        for i in (range(model.n_layers) if spec.axes[0] == "layer" else (0,))
    ]
    assert len(set(names)) == 355
    for name in ("model.layers.31.self_attn.k_norm.weight", "model.embed_tokens.weight", "lm_head.weight"):
        assert name in names


def test_memory_of_attention_is_bounded_for_long_sequences() -> None:
    """8192 tokens in one layer: no array of length × length scores."""
    shape = jax.ShapeDtypeStruct((1, 8192, 1, 8), jnp.float32)
    text = str(jax.make_jaxpr(lambda q, k, v: attention(q, k, v, 4096))(shape, shape, shape))
    assert "8192,8192" not in text
    assert trainer.attention.MAX_BLOCK == 1024


def test_what_trains_in_bfloat16_is_what_its_export_computes() -> None:
    """Rounding all weights to bfloat16 beforehand, the norms' too, changes no bit."""
    model = small_model(n_layers=2, window_pattern=(3, -1))
    params, tokens = loud_params(model), tokens_for(model, 1, 9)
    rounded = {name: value.astype(jnp.bfloat16).astype(jnp.float32) for name, value in params.items()}
    assert not np.array_equal(params["q_norm"], rounded["q_norm"])
    predict = jax.jit(lambda p: forward(p, tokens, model, "bfloat16"))
    np.testing.assert_array_equal(predict(params), predict(rounded))


def test_swiglu_is_float32_inside_and_keeps_its_inputs_alone() -> None:
    random = np.random.default_rng(0)
    gate, up, g = (jnp.asarray(3 * random.normal(size=400), jnp.bfloat16) for _ in range(3))
    wide = [np.asarray(x, np.float64) for x in (gate, up, g)]
    sigmoid = 1 / (1 + np.exp(-wide[0]))
    expected = wide[0] * sigmoid * wide[1]
    d_gate = wide[2] * wide[1] * sigmoid * (1 + wide[0] * (1 - sigmoid))
    d_up = wide[2] * wide[0] * sigmoid
    out, back = jax.vjp(swiglu, gate, up)
    for got, want in ((out, expected), *zip(back(g), (d_gate, d_up), strict=True)):
        assert got.dtype == jnp.bfloat16
        rounded = np.asarray(jnp.asarray(want, jnp.bfloat16), np.float64)
        # Rounded once: the nearest bfloat16, but for a tie that float32 decides otherwise.
        assert np.mean(np.asarray(got, np.float64) == rounded) > 0.99
    kept = jax.tree.leaves(jax.vjp(swiglu, gate, up)[1])
    assert {(leaf.shape, leaf.dtype) for leaf in kept} == {((400,), jnp.dtype("bfloat16"))}
    numeric = jax.vjp(lambda a, b: jax.nn.silu(a) * b, *(x.astype(jnp.float32) for x in (gate, up)))
    for got, want in zip(
        jax.vjp(swiglu, gate.astype(jnp.float32), up.astype(jnp.float32))[1](g.astype(jnp.float32)),
        numeric[1](g.astype(jnp.float32)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
