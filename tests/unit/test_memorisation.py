"""The memorisation rule: silent on every healthy curve we can think of, as rarely wrong as it says, loud on repeats."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.metrics.memorisation import (
    CUT,
    FEWEST,
    THRESHOLD,
    Intervals,
    evaluations_between_false_alarms,
    intervals,
    intervals_of,
    judge,
    normal_deviate,
    tolerance_for,
)
from trainer.rundir.alarms import TrendPoint

F64 = npt.NDArray[np.float64]
Noise = Callable[[np.random.Generator, int], F64]
EVALUATIONS, EVERY = 141, 10_000  # OLMo 3 7B, stage 1


def held_out(steps: F64, drop_at: float | None = None) -> F64:
    """A loss that falls as a power of the step; from `drop_at` on, faster: the learning rate is lowered."""
    loss = 2.2 + 3.0 * (steps / 1000) ** -0.3
    if drop_at is not None:
        loss = loss - 0.15 * np.clip((steps - drop_at) / (0.1 * drop_at), 0, 1)
    return loss


def pairs(gap: F64, loss: F64 | None = None) -> Intervals:
    step = np.arange(1, gap.size + 1) * float(EVERY)
    loss = held_out(step) if loss is None else loss
    return Intervals(step, loss + gap, loss, np.full(gap.size, float(EVERY)))


def white(size: float) -> Noise:
    return lambda rng, n: rng.normal(size=n) * size


def together(size: float, correlation: float) -> Noise:
    def draw(rng: np.random.Generator, n: int) -> F64:
        noise = rng.normal(size=n) * size
        for i in range(1, n):
            noise[i] = correlation * noise[i - 1] + math.sqrt(1 - correlation**2) * noise[i]
        return noise

    return draw


def heavy(size: float) -> Noise:
    return lambda rng, n: rng.standard_t(2.5, size=n) * size


# -- silence


@pytest.mark.parametrize("same_text", [True, False], ids=["same text", "other text"])
@pytest.mark.parametrize(
    "noise",
    [white(3e-4), white(0.03), together(0.02, 0.3), together(0.02, 0.5), heavy(0.02)],
    ids=["small", "large", "correlated 0.3", "correlated 0.5", "heavy tails"],
)
@pytest.mark.parametrize("drop_at", [None, 900_000.0], ids=["power law", "learning rate drops"])
def test_healthy_runs_are_silent(noise: Noise, same_text: bool, drop_at: float | None) -> None:
    rng = np.random.default_rng(5)
    loss = held_out(np.arange(1, EVALUATIONS + 1) * float(EVERY), drop_at)
    for _ in range(6):
        drift = 0.0 if same_text else 0.2 + 0.15 * loss  # text of another kind improves at its own pace
        verdict = judge(pairs(drift + noise(rng, EVALUATIONS), loss), same_text)
        assert verdict.alarm is None, np.nanmin(verdict.score)


@pytest.mark.parametrize("exponents", [(0.3, 0.25), (0.25, 0.3), (0.5, 0.2), (0.2, 0.5)])
def test_kinds_of_text_whose_losses_fall_by_other_powers(exponents: tuple[float, float]) -> None:
    step = np.arange(1, EVALUATIONS + 1) * float(EVERY)
    loss, train = (2.0 + 3.0 * (step / 1000) ** -a for a in exponents)
    scatter = np.random.default_rng(1).normal(size=EVALUATIONS) * 3e-4
    assert judge(pairs(train - loss + scatter, loss)).alarm is None


@pytest.mark.parametrize("same_text", [True, False], ids=["same text", "other text"])
@pytest.mark.parametrize("threshold", [3.0, 4.0])
def test_false_alarms_come_no_more_often_than_it_is_said(threshold: float, same_text: bool) -> None:
    rng, n = np.random.default_rng(11), 300
    judged = alarms = 0
    while judged < 40 * evaluations_between_false_alarms(threshold):
        verdict = judge(pairs(rng.normal(size=n) * 0.02), same_text, threshold, tolerance=0.0)
        alarms += verdict.alarm is not None
        judged += (n if verdict.alarm is None else verdict.alarm + 1) - FEWEST
    # 40 are due; 57 or more would come by chance once in 150 times.
    assert alarms <= 56
    assert judged / max(alarms, 1) < 5 * evaluations_between_false_alarms(threshold), "so silent that it hears nothing"


def test_the_stated_rate() -> None:
    assert evaluations_between_false_alarms() == pytest.approx(1.05e6, rel=0.02)
    assert evaluations_between_false_alarms() / 1414 > 700


def test_one_evaluation_never_raises_it() -> None:
    gap = np.random.default_rng(2).normal(size=60) * 1e-3
    gap[30] = gap[45] = -5.0
    assert judge(pairs(gap), same_text=True).alarm is None
    assert THRESHOLD > 2 * CUT


def test_training_loss_above_the_trend_is_no_alarm() -> None:
    gap = np.concatenate((np.zeros(40), np.full(40, 0.3))) + np.random.default_rng(3).normal(size=80) * 1e-3
    for same_text in (True, False):
        verdict = judge(pairs(gap), same_text)
        assert np.nanmin(verdict.score) > -3


# -- what it hears


def repeated(hosts: int, step: F64) -> F64:
    """Share of the instances read at `step` that were read before, under double sharding, in one nominal epoch."""
    passes = np.floor(step / step[-1] * hosts)
    return 1 - (1 - 1 / hosts) ** passes


@pytest.mark.parametrize("hosts", [4, 16, 64])
@pytest.mark.parametrize("gain", [0.05, 0.1], ids=lambda gain: f"{gain} nats")
def test_double_sharding_is_heard_in_the_first_half_of_the_epoch(hosts: int, gain: float) -> None:
    """A tenth or a twentieth of a nat per instance that was read before; the alarm comes at a gap of 0.025 at most."""
    n = EVALUATIONS
    step = np.arange(1, n + 1) * float(EVERY)
    gap = -gain * repeated(hosts, step)
    verdict = judge(pairs(gap + np.random.default_rng(4).normal(size=n) * 3e-4), same_text=True)
    assert verdict.alarm is not None
    assert verdict.alarm < n / 2
    assert -gap[verdict.alarm] <= 0.026


@pytest.mark.parametrize("same_text", [True, False], ids=["same text", "other text"])
def test_a_sudden_second_reading_is_heard_within_ten_evaluations(same_text: bool) -> None:
    """As after a resume that rewinds: MaxText goes back to step / H."""
    gap = np.concatenate((np.zeros(60), np.full(40, -0.1))) + np.random.default_rng(6).normal(size=100) * 2e-3
    verdict = judge(pairs(gap), same_text)
    assert verdict.alarm is not None
    assert 60 < verdict.alarm < 70
    assert verdict.standing == verdict.alarm


def test_it_is_not_learnt_that_repeats_are_normal() -> None:
    gap = np.concatenate((np.zeros(40), np.full(100, -0.1))) + np.random.default_rng(7).normal(size=140) * 2e-3
    verdict = judge(pairs(gap), same_text=True)
    assert verdict.standing is not None
    assert verdict.score[-1] < -100


def test_when_the_repeats_end_the_alarm_stands_no_more() -> None:
    gap = np.concatenate((np.zeros(40), np.full(6, -0.1), np.zeros(300)))
    verdict = judge(pairs(gap + np.random.default_rng(8).normal(size=346) * 2e-3), same_text=True)
    assert verdict.alarm is not None
    assert verdict.standing is None


# -- properties


gaps = st.lists(st.floats(-1, 1), min_size=1, max_size=40).map(np.array)


@settings(max_examples=60, deadline=None)
@given(gaps, st.booleans(), st.integers(1, 40))
def test_the_past_decides(gap: F64, same_text: bool, cut: int) -> None:
    """What is said of an evaluation never changes with what comes later."""
    whole, part = judge(pairs(gap), same_text), judge(pairs(gap[:cut]), same_text)
    np.testing.assert_array_equal(whole.score[: part.score.size], part.score)
    assert part.alarm == (whole.alarm if whole.alarm is not None and whole.alarm < cut else None)


@settings(max_examples=60, deadline=None)
@given(gaps, st.booleans(), st.floats(-2, 2))
def test_a_constant_between_the_two_kinds_of_text_does_not_matter(gap: F64, same_text: bool, constant: float) -> None:
    one, other = judge(pairs(gap), same_text), judge(pairs(gap + constant), same_text)
    np.testing.assert_allclose(other.z, one.z, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(gaps, st.booleans())
def test_the_score_is_a_number_not_above_zero_from_the_first_prediction_on(gap: F64, same_text: bool) -> None:
    score = judge(pairs(gap), same_text).score
    assert np.isnan(score[:FEWEST]).all()
    assert (score[FEWEST:][np.isfinite(score[FEWEST:])] <= 0).all()
    assert same_text is False or np.isfinite(score[FEWEST:]).all()


@pytest.mark.parametrize("same_text", [True, False])
def test_curves_without_any_scatter(same_text: bool) -> None:
    flat = np.full(40, 2.0)
    verdict = judge(Intervals(np.arange(1.0, 41), flat, flat, np.ones(40)), same_text)
    assert verdict.alarm is None
    assert judge(Intervals(*(np.empty(0) for _ in range(4))), same_text).alarm is None


def test_the_normal_deviate_of_t_is_as_likely() -> None:
    from scipy import stats

    for freedom in (4, 10, 100):
        for t in (-6.0, -2.0, -0.5, 0.0, 1.0, 3.0):
            exact = stats.norm.ppf(stats.t.cdf(t, freedom))
            assert normal_deviate(t, freedom) == pytest.approx(exact, abs=0.03 * abs(exact) + 1e-9)


# -- pairing


def test_intervals_compare_the_same_steps_on_both_sides() -> None:
    """With one loss for both kinds of text the gap is 0, however steep the curve and however rare the evaluations."""
    steps = np.arange(1, 4001, dtype=np.float64)
    loss = 2 + 3 * steps**-0.3
    at = np.arange(200, 4001, 200)
    found = intervals(steps, loss, at, loss[at - 1])
    assert found.step.tolist() == at[1:].tolist()
    assert found.steps.tolist() == [200.0] * 19
    assert np.abs(found.train - found.held_out).max() < 0.02
    assert np.abs(found.train - found.held_out)[4:].max() < 1e-3


def test_a_run_s_own_points_give_the_same_intervals() -> None:
    rng = np.random.default_rng(9)
    steps, at = np.arange(1, 101), np.arange(10, 101, 10)
    train, loss = rng.uniform(2, 3, 100), rng.uniform(2, 3, 10)
    points = [
        TrendPoint(step=int(e), held_out=float(h), first=int(e) - 9, train=float(train[e - 10 : e].mean()))
        for e, h in zip(at, loss, strict=True)
    ]
    mine, theirs = intervals_of(points), intervals(steps, train, at, loss)
    for name in ("step", "train", "held_out", "steps"):
        np.testing.assert_allclose(getattr(mine, name), getattr(theirs, name), rtol=1e-12)


def test_points_without_training_losses_are_no_intervals() -> None:
    """An evaluation that a later start caught up: what was trained before it is in another start's log."""
    points = [
        TrendPoint(step=10, held_out=3.0, first=1, train=3.0),
        TrendPoint(step=20, held_out=2.9),
        TrendPoint(step=30, held_out=2.8, first=26, train=2.85),
    ]
    found = intervals_of(points)
    assert found.step.tolist() == [30.0]
    assert found.steps.tolist() == [5.0]
    assert intervals_of([]).step.size == 0


def test_samples_of_a_curve_and_gaps_in_it() -> None:
    found = intervals(
        [5, 15, 25, 35, 1000], [3.0, math.nan, 2.0, 1.0, 9.0], [0, 10, 20, 30, 40], [4.0, 3.0, 3.0, 3.0, 3.0]
    )
    assert found.step.tolist() == [30.0, 40.0]
    assert found.train.tolist() == [2.0, 1.0]
    assert intervals([], [], [], []).step.size == 0


def test_a_small_held_out_set_is_believed_less() -> None:
    assert tolerance_for(None) == 0.005
    assert tolerance_for(1_000_000) == pytest.approx(0.0051, abs=1e-4)
    assert tolerance_for(640) == pytest.approx(0.04, abs=1e-3)
