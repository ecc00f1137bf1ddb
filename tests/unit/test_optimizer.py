"""SkipStepAdamW against OLMo-core's rules written out with Python lists and float64."""

import statistics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trainer.optimizer import Window, adamw, append, clip_coefficient, empty_window, is_spike
from trainer.recipe import Optimizer

OPTIMIZER = Optimizer()
NAMES = ("embedding", "head", "norm")


class Reference:
    """OLMo-core's optimizer as its source reads, one scalar array per parameter."""

    def __init__(self, params: dict[str, np.ndarray]) -> None:
        self.params = {name: value.astype(np.float64) for name, value in params.items()}
        self.mu = {name: np.zeros(3) for name in params}
        self.nu = {name: np.zeros(3) for name in params}
        self.count = 0
        self.losses: list[float] = []
        self.norms: list[float] = []

    def step(self, grads: dict[str, np.ndarray], loss: float, rate: float) -> bool:
        """Returns whether the step was skipped."""
        norm = float(np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values())))
        self.losses = [*self.losses, loss][-129:]
        self.norms = [*self.norms, norm][-129:]
        if len(self.losses) >= max(2, 128 // 2):
            for values in (self.losses, self.norms):
                *past, current = values
                if current - statistics.mean(past) > 6 * statistics.stdev(past):
                    return True
        self.count += 1
        clip = min(1.0, 1.0 / (norm + 1e-6))
        for name in self.params:
            g = grads[name].astype(np.float64) * clip
            if name != "embedding":
                self.params[name] *= 1 - rate * 0.1
            self.mu[name] = 0.9 * self.mu[name] + 0.1 * g
            self.nu[name] = 0.95 * self.nu[name] + 0.05 * g**2
            denominator = np.sqrt(self.nu[name]) / np.sqrt(1 - 0.95**self.count) + 1e-8
            self.params[name] -= rate / (1 - 0.9**self.count) * self.mu[name] / denominator
        return False


State = tuple[dict[str, jax.Array], dict[str, jax.Array], dict[str, jax.Array], jax.Array, Window]


@jax.jit
def ours(state: State, grads: dict[str, jax.Array], loss: jax.Array, rate: jax.Array) -> tuple[State, jax.Array]:
    params, mu, nu, count, window = state
    norm = optax.tree.norm(grads)
    skip = is_spike(window, loss, norm, OPTIMIZER)
    clip = clip_coefficient(norm, OPTIMIZER)
    clipped = {name: g * clip for name, g in grads.items()}
    params, mu, nu = adamw(params, mu, nu, clipped, count + 1, rate, OPTIMIZER, skip)
    return (params, mu, nu, jnp.where(skip, count, count + 1), append(window, loss, norm)), skip


def start() -> tuple[State, Reference]:
    random = np.random.default_rng(0)
    params = {name: random.normal(size=3).astype(np.float32) for name in NAMES}
    zeros = {name: jnp.zeros(3) for name in NAMES}
    device = {name: jnp.asarray(value) for name, value in params.items()}
    return (device, zeros, dict(zeros), jnp.zeros((), jnp.int32), empty_window(OPTIMIZER)), Reference(params)


def inputs(step: int) -> tuple[dict[str, np.ndarray], float]:
    """Quiet steps; a loss spike at 40 (too early for the rule) and 150, a norm spike at 90, a plateau from 285."""
    random = np.random.default_rng(step)
    size = {90: 50.0}.get(step, 0.3)
    grads = {name: (size * random.normal(size=3)).astype(np.float32) for name in NAMES}
    loss = 3.0 + 0.05 * random.normal() + {40: 9.0, 150: 9.0}.get(step, 2.0 if step >= 285 else 0.0)
    return grads, float(np.float32(loss))


def test_it_is_olmo_core_s_over_a_run_with_spikes() -> None:
    state, reference = start()
    skipped = []
    for step in range(310):
        grads, loss = inputs(step)
        state, skip = ours(state, grads, loss, 1e-2)
        assert bool(skip) == reference.step(grads, loss, 1e-2), step
        if skip:
            skipped.append(step)
        if step in (0, 62, 150, 309):
            for name in NAMES:
                np.testing.assert_allclose(state[0][name], reference.params[name], rtol=2e-5, atol=2e-6)
                np.testing.assert_allclose(state[2][name], reference.nu[name], rtol=2e-4)
    # The first steps of the plateau are spikes, until it is the normal: at 4 of 128 values.
    assert skipped == [90, 150, 285, 286, 287, 288]
    assert int(state[3]) == 310 - len(skipped) == reference.count


def test_the_window_survives_a_resume() -> None:
    """OLMo-core would train on the spike of step 150 if it had been restarted at 149; the state remembers."""
    state, _ = start()
    for step in range(150):
        state, _ = ours(state, *inputs(step), 1e-2)
    restored = jax.tree.map(lambda x: jnp.asarray(np.array(x)), state)
    forgetful = (*restored[:4], empty_window(OPTIMIZER))
    assert bool(ours(restored, *inputs(150), 1e-2)[1])
    assert not bool(ours(forgetful, *inputs(150), 1e-2)[1])


def test_the_rule_starts_with_the_64th_value() -> None:
    def window(seen: int) -> Window:
        values = jnp.where(jnp.arange(128) < seen, 1.0 + 0.01 * (jnp.arange(128) % 2), 0)
        return Window(values, values, jnp.asarray(seen, jnp.int32))

    assert not is_spike(window(62), jnp.float32(100), jnp.float32(1), OPTIMIZER)
    assert is_spike(window(63), jnp.float32(100), jnp.float32(1), OPTIMIZER)
    assert is_spike(window(63), jnp.float32(1), jnp.float32(100), OPTIMIZER)
    assert not is_spike(window(63), jnp.float32(-100), jnp.float32(0), OPTIMIZER), "one-sided: a fall is no spike"


def test_a_skipped_step_keeps_every_bit_even_from_nan() -> None:
    (params, mu, nu, _, _), _ = start()
    grads = {name: jnp.full(3, jnp.nan) for name in NAMES}
    out = adamw(params, mu, nu, grads, jnp.int32(1), jnp.float32(jnp.nan), OPTIMIZER, jnp.asarray(True))
    for new, old in zip(out, (params, mu, nu), strict=True):
        for name in NAMES:
            np.testing.assert_array_equal(np.asarray(new[name]).view(np.uint32), np.asarray(old[name]).view(np.uint32))


def test_adam_is_optax_s() -> None:
    """Without decay and clipping it is ordinary bias-corrected Adam."""
    optimizer = Optimizer(weight_decay=0)
    adam = optax.adam(1e-2, b1=0.9, b2=0.95, eps=1e-8)
    params = {name: jnp.asarray([1.0, -2.0, 3.0]) for name in NAMES}
    expected, state = params, adam.init(params)
    mu = nu = {name: jnp.zeros(3) for name in NAMES}
    for step in range(1, 6):
        grads = {name: jnp.asarray(np.random.default_rng(step).normal(size=3), jnp.float32) for name in NAMES}
        updates, state = adam.update(grads, state)
        expected = optax.apply_updates(expected, updates)
        params, mu, nu = adamw(params, mu, nu, grads, jnp.int32(step), jnp.float32(1e-2), optimizer, jnp.asarray(False))
    for name in NAMES:
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-6)


@pytest.mark.parametrize(("norm", "coefficient"), [(0.5, 1.0), (1.0, 1 / (1 + 1e-6)), (4.0, 0.25)])
def test_clipping_scales_to_the_norm(norm: float, coefficient: float) -> None:
    assert float(clip_coefficient(jnp.float32(norm), OPTIMIZER)) == pytest.approx(coefficient, rel=1e-5)
