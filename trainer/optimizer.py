"""SkipStepAdamW as OLMo-core runs it (src/olmo_core/optim/{adamw,skip_step_optimizer}.py), pure and NaN-safe.

One global gradient clip; the skip rule looks at the cross entropy and at the norm before clipping, one-sided, against
the last 128 of each. A skipped step leaves parameters, moments and Adam's own count alone; the global step advances.
OLMo-core forgets the 128 values at every restart; here they are part of the state.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trainer.model import Params
from trainer.recipe import Optimizer

NOT_DECAYED = ("embedding",)  # norms and head are decayed


class Window(NamedTuple):
    """The last `skip_window` losses and gradient norms, a ring: value number n lies at n % skip_window."""

    losses: jax.Array  # f32 [skip_window]
    grad_norms: jax.Array  # f32 [skip_window]
    seen: jax.Array  # int32 []: how many values were ever appended


def empty_window(optimizer: Optimizer) -> Window:
    """No values seen yet."""
    size = optimizer.skip_window
    return Window(jnp.zeros(size, jnp.float32), jnp.zeros(size, jnp.float32), jnp.zeros((), jnp.int32))


def is_spike(window: Window, loss: jax.Array, grad_norm: jax.Array, optimizer: Optimizer) -> jax.Array:
    """bool []: whether the rule says to skip. In force once half a window of values, this one included, was seen.

    With the default window of 128 that is from the 64th step on. Mean and unbiased deviation are of the past values.
    """
    count = jnp.minimum(window.seen, optimizer.skip_window)
    held = jnp.arange(optimizer.skip_window) < count
    n = jnp.maximum(count, 2).astype(jnp.float32)  # below 2 the rule is not in force

    def far(values: jax.Array, value: jax.Array) -> jax.Array:
        mean = jnp.sum(jnp.where(held, values, 0)) / n
        variance = jnp.sum(jnp.where(held, jnp.square(values - mean), 0)) / (n - 1)
        return value - mean > optimizer.skip_sigma * jnp.sqrt(variance)

    active = count + 1 >= max(2, optimizer.skip_window // 2)
    return active & (count >= 2) & (far(window.losses, loss) | far(window.grad_norms, grad_norm))


def append(window: Window, loss: jax.Array, grad_norm: jax.Array) -> Window:
    """The window with one more value. A spike is appended too, so that a new level becomes the normal one."""
    slot = window.seen % window.losses.shape[0]
    return Window(window.losses.at[slot].set(loss), window.grad_norms.at[slot].set(grad_norm), window.seen + 1)


def global_norm(grads: Params) -> jax.Array:
    """f32 []: the norm of all gradients together, as is_spike and clip_coefficient take it."""
    return jnp.sqrt(sum((jnp.sum(jnp.square(g)) for g in grads.values()), jnp.zeros((), jnp.float32)))


def clip_coefficient(grad_norm: jax.Array, optimizer: Optimizer) -> jax.Array:
    """What the gradients are multiplied with: torch's clip_grad_norm_."""
    return jnp.minimum(optimizer.grad_clip / (grad_norm + 1e-6), 1.0)


def adamw(
    params: Params,
    mu: Params,
    nu: Params,
    grads: Params,
    count: jax.Array,
    rate: jax.Array,
    optimizer: Optimizer,
    skip: jax.Array,
) -> tuple[Params, Params, Params]:
    """Parameters and moments after update number `count` (from 1) with clipped `grads`, or unchanged where `skip`.

    eps is added after the bias correction, outside the root (torch's order). Decay and Adam step are summed before they
    touch the parameter: the same as one after the other, rounded once instead of twice.
    `skip` selects, it does not multiply: what a skipped step computed may be NaN.
    """
    t = count.astype(jnp.float32)
    first = 1 - jnp.float32(optimizer.beta1) ** t
    second = jnp.sqrt(1 - jnp.float32(optimizer.beta2) ** t)

    def update(name: str, p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        decay = 0.0 if name in NOT_DECAYED else optimizer.weight_decay
        new_m = optimizer.beta1 * m + (1 - optimizer.beta1) * g
        new_v = optimizer.beta2 * v + (1 - optimizer.beta2) * jnp.square(g)
        new_p = p - rate * (decay * p + new_m / first / (jnp.sqrt(new_v) / second + optimizer.eps))
        return tuple(jnp.where(skip, old, new) for old, new in ((p, new_p), (m, new_m), (v, new_v)))

    out = {name: update(name, params[name], mu[name], nu[name], grads[name]) for name in params}
    return ({k: o[0] for k, o in out.items()}, {k: o[1] for k, o in out.items()}, {k: o[2] for k, o in out.items()})
