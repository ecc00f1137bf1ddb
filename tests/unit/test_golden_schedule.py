"""The schedules of the recipes against OLMo-core's schedulers with the numbers of the official scripts."""

import json
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.golden import inputs
from trainer.recipe import load
from trainer.schedule import exact_rate, learning_rate

GOLDEN = json.loads((inputs.HERE / "olmo_core_schedules.json").read_text())
PIECES = {
    "stage1_part1": ("olmo3_7b_stage1", 0),
    "stage1_part2": ("olmo3_7b_stage1", 1),
    "stage1_one_cosine": ("olmo3_7b_stage1_one_cosine", 0),
    "stage2": ("olmo3_7b_stage2", 0),
    "stage3": ("olmo3_7b_stage3", 0),
}


@pytest.mark.parametrize("name", PIECES)
def test_each_piece_has_olmo_core_s_rates(name: str) -> None:
    recipe, number = PIECES[name]
    piece = load(recipe).schedule[number].model_copy(update={"until_step": None})
    theirs = {int(step): rate for step, rate in GOLDEN[name]["rates"].items()}
    assert piece.total_steps == GOLDEN[name]["t_max"]
    assert piece.warmup_steps == GOLDEN[name]["warmup"]
    assert len(theirs) >= 12
    for step, rate in theirs.items():
        assert exact_rate((piece,), step) == pytest.approx(rate, rel=1e-12, abs=1e-19), step
        assert learning_rate((piece,), step) == np.float32(rate), step
    steps = jnp.asarray(list(theirs), jnp.int32)
    on_device = jax.jit(lambda n: learning_rate((piece,), n))(steps)
    np.testing.assert_allclose(on_device, np.float32(list(theirs.values())), rtol=3e-7, atol=1e-12)


def test_the_stitch_and_the_end_of_stage_1() -> None:
    schedule = load("olmo3_7b_stage1").schedule
    first, second = (GOLDEN[name]["rates"] for name in ("stage1_part1", "stage1_part2"))
    for step, rates in ((596_047, first), (596_048, second), (597_046, second), (1_413_814, second)):
        assert exact_rate(schedule, step) == pytest.approx(rates[str(step)], rel=1e-12), step
    assert second["1413814"] == pytest.approx(3.9325e-5, rel=1e-5)
    assert first["597046"] == pytest.approx(1.65e-4, rel=2e-6), "half a step before its midpoint"


def test_the_peak_of_stages_2_and_3_is_part_1_at_2t_tokens() -> None:
    step = ceil(2e12 / (512 * 8192))
    rate = GOLDEN["stage1_part1"]["rates"][str(step)]
    assert [load(name).schedule[0].peak for name in ("olmo3_7b_stage2", "olmo3_7b_stage3")] == [rate, rate]


def test_the_compiled_rate_is_within_a_few_last_digits_at_every_step() -> None:
    schedule, steps = load("olmo3_7b_stage1").schedule, np.arange(1, 1_413_815)
    as_in_training = {"xla_backend_optimization_level": 3}  # its cosine has more right digits than that of level 0
    rate = jax.jit(lambda n: learning_rate(schedule, n), compiler_options=as_in_training)
    on_device = np.asarray(rate(jnp.asarray(steps, jnp.int32)))
    assert np.abs(on_device / exact_rate(schedule, steps) - 1).max() < 3e-7
