"""The TPU's attention kernel: its mathematics interpreted on the CPU, and that it lowers for a TPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu

from trainer.attention import attention
from trainer.splash import splash_attention

pytestmark = pytest.mark.slow

LENGTH, HEADS, HEAD_DIM = 256, 1, 128


def inputs(dtype: str) -> tuple[list[jax.Array], jax.Array]:
    """q, k and v, and documents of about 40 tokens, one of a single token, one over a block's border."""
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(1, LENGTH, HEADS, HEAD_DIM)) for _ in range(3))
    qkv = [jnp.asarray(x, dtype) for x in (q / HEAD_DIM**0.5, k, v)]
    ends = np.zeros((1, LENGTH), np.int32)
    ends[0, [30, 31, 90, 120, 140, 200]] = 1
    return qkv, jnp.asarray(np.cumsum(ends, axis=1) - ends, jnp.int32)


@pytest.mark.parametrize("window", [-1, 64])
def test_the_kernel_computes_what_the_plain_attention_does(window: int) -> None:
    qkv, documents = inputs("float32")

    def loss(attend, *qkv: jax.Array) -> jax.Array:  # type: ignore[no-untyped-def]
        out = attend(*qkv, window, documents)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32).reshape(out.shape)))

    with pltpu.force_tpu_interpret_mode():
        value, grads = jax.jit(jax.value_and_grad(lambda *x: loss(splash_attention, *x), argnums=(0, 1, 2)))(*qkv)
    expected, wanted = jax.value_and_grad(lambda *x: loss(attention, *x), argnums=(0, 1, 2))(*qkv)
    assert float(value) == pytest.approx(float(expected), abs=2e-3)
    for got, want in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-4)


def test_it_lowers_for_a_tpu_with_documents() -> None:
    qkv, documents = inputs("bfloat16")

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, d: jax.Array) -> jax.Array:
        return splash_attention(q, k, v, 64, d).astype(jnp.float32).sum()

    exported = export.export(jax.jit(jax.grad(loss, argnums=(0, 1, 2))), platforms=["tpu"])(*qkv, documents)
    assert exported.mlir_module().count("tpu_custom_call") == 2, "one kernel forward, one fused backward"
