"""The learning rate against OLMo-core's formulas and the values AI2's run had."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.recipe import SchedulePiece, load
from trainer.schedule import learning_rate

STAGE_1 = load("olmo3_7b_stage1").schedule


def cosine(step: int, peak: float, warmup: int, total: int, alpha_f: float) -> float:
    """OLMo-core's CosWithWarmup."""
    low = peak * alpha_f
    if step < warmup:
        return peak * step / warmup
    if step >= total:
        return low
    return low + (peak - low) * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (1, 1.5e-7),  # the first update
        (2000, 3e-4),
        (596_047, 1.65356e-4),  # the last one of part 1 that the final weights descend from
        (596_048, 1.64724e-4),  # part 2's warmup
        (597_046, 1.65e-4),
        (1_413_814, 3.9325e-5),  # the end of stage 1
        (1_668_931, 3e-5),  # where the schedule would have ended
        (2_000_000, 3e-5),
    ],
)
def test_stage_1_has_the_rates_of_the_run(step: int, rate: float) -> None:
    assert float(learning_rate(STAGE_1, step)) == pytest.approx(rate, rel=2e-5)


def test_part_1_at_its_hard_stop_was_at_its_midpoint() -> None:
    assert float(learning_rate(STAGE_1[:1], 597_046)) == pytest.approx(1.65e-4, rel=1e-5)


@given(
    step=st.integers(0, 3000),
    warmup=st.integers(0, 500),
    length=st.integers(1, 2000),
    alpha_f=st.floats(0, 1),
)
def test_cosine_is_olmo_core_s(step: int, warmup: int, length: int, alpha_f: float) -> None:
    total = warmup + length
    piece = SchedulePiece(shape="cosine", peak=3e-4, warmup_steps=warmup, total_steps=total, alpha_f=alpha_f)
    got = float(learning_rate((piece,), step))
    assert got == pytest.approx(cosine(step, 3e-4, warmup, total, alpha_f), rel=1e-6, abs=1e-12)


@given(step=st.integers(500, 3000), length=st.integers(1, 2000), alpha_f=st.floats(0, 1))
def test_half_cosine_is_the_second_half_of_a_cosine(step: int, length: int, alpha_f: float) -> None:
    piece = SchedulePiece(shape="half_cosine", peak=3e-4, warmup_steps=500, total_steps=500 + length, alpha_f=alpha_f)
    whole = cosine(step - 500 + length, 3e-4, 0, 2 * length, alpha_f)
    assert float(learning_rate((piece,), step)) == pytest.approx(whole, rel=1e-6, abs=1e-12)


def test_linear_and_constant() -> None:
    linear = SchedulePiece(shape="linear", peak=2.0, warmup_steps=0, total_steps=100, alpha_f=0)
    assert [float(learning_rate((linear,), n)) for n in (0, 25, 100, 200)] == [2.0, 1.5, 0.0, 0.0]
    constant = SchedulePiece(shape="constant", peak=2.0, warmup_steps=10, total_steps=100, alpha_f=1)
    assert [float(learning_rate((constant,), n)) for n in (0, 5, 10, 1000)] == [0.0, 1.0, 2.0, 2.0]


def test_under_jit_as_on_the_host_and_float32() -> None:
    steps = np.array([0, 1, 1999, 2000, 500_000, 596_047, 596_048, 597_046, 1_000_000, 1_413_814])
    host = learning_rate(STAGE_1, steps)
    device = jax.jit(lambda s: learning_rate(STAGE_1, s))(jnp.asarray(steps, jnp.int32))
    assert host.dtype == np.float32
    assert device.dtype == jnp.float32
    np.testing.assert_allclose(device, host, rtol=1e-5)
    assert learning_rate(STAGE_1, 1).dtype == np.float32
