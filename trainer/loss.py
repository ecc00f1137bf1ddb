"""Output head and cross entropy in one step, so that the logits of a whole batch never exist at once.

The derivative of the loss by the logits is cheap while the logits are there; keeping them, or computing them again, is
not. So the forward pass computes the gradients of hidden states and head along with the loss, chunk by chunk.
"""

from functools import partial

import jax
import jax.numpy as jnp

MAX_LOGITS = 2**28  # elements of one chunk of float32 logits: 1 GiB


def _chunks(tokens: int, vocab: int) -> int:
    """How many equal chunks of tokens keep the logits below MAX_LOGITS."""
    chunks = 1
    while tokens % (chunks * 2) == 0 and tokens // chunks * vocab > MAX_LOGITS:
        chunks *= 2
    return chunks


def _logits_loss(logits: jax.Array, targets: jax.Array, weights: jax.Array, z_loss: float) -> tuple[jax.Array, ...]:
    """Cross entropy [n], objective [n] and d objective / d logits [n, vocab] for f32 logits [n, vocab]."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    exp = jnp.exp(logits - top)
    total = jnp.sum(exp, axis=-1, keepdims=True)
    lse = top + jnp.log(total)
    target = jnp.take_along_axis(logits, targets[:, None], axis=-1)
    ce = (lse - target)[:, 0] * weights
    objective = ce + z_loss * lse[:, 0] ** 2 * weights
    grad = exp * (weights[:, None] * (1 + 2 * z_loss * lse) / total)
    is_target = targets[:, None] == jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return ce, objective, grad - jnp.where(is_target, weights[:, None], 0)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def head_loss(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array, z_loss: float
) -> tuple[jax.Array, jax.Array]:
    """(objective, ce): f32 [] Σ w·(CE + z_loss·logsumexp²) and f32 [n] w·CE. Only `objective` is differentiable.

    hidden [n, d_model] and head [d_model, vocab] in the compute dtype, targets int32 [n], weights f32 [n] (0 where
    there is no target). Logits are float32, as OLMo-core takes its loss on `logits.float()`.
    """

    def chunk(h: jax.Array, t: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        ce, objective, _ = _logits_loss(jnp.dot(h, head, preferred_element_type=jnp.float32), t, w, z_loss)
        return jnp.sum(objective), ce

    chunks = _chunks(hidden.shape[0], head.shape[1])
    if chunks == 1:
        return chunk(hidden, targets, weights)
    objective, ce = jax.lax.map(lambda a: chunk(*a), _split(chunks, hidden, targets, weights))
    return jnp.sum(objective), ce.reshape(-1)


def _split(chunks: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(a.reshape(chunks, a.shape[0] // chunks, *a.shape[1:]) for a in arrays)


def _forward(hidden, head, targets, weights, z_loss):  # type: ignore[no-untyped-def]
    def chunk(h, t, w):  # type: ignore[no-untyped-def]
        ce, objective, grad = _logits_loss(jnp.dot(h, head, preferred_element_type=jnp.float32), t, w, z_loss)
        # Both products read it: without the barrier a TPU computes it for each of them.
        grad = jax.lax.optimization_barrier(grad.astype(h.dtype))
        d_hidden = jnp.einsum("nv,dv->nd", grad, head)
        d_head = jnp.einsum("nd,nv->dv", h, grad, preferred_element_type=jnp.float32)
        return jnp.sum(objective), ce, d_hidden, d_head

    chunks = _chunks(hidden.shape[0], head.shape[1])
    if chunks == 1:
        objective, ce, d_hidden, d_head = chunk(hidden, targets, weights)
    else:

        def step(carry, part):  # type: ignore[no-untyped-def]
            objective, ce, d_hidden, d_head = chunk(*part)
            return (carry[0] + objective, carry[1] + d_head), (ce, d_hidden)

        start = (jnp.zeros((), jnp.float32), jnp.zeros(head.shape, jnp.float32))
        (objective, d_head), (ce, d_hidden) = jax.lax.scan(step, start, _split(chunks, hidden, targets, weights))
        ce, d_hidden = ce.reshape(-1), d_hidden.reshape(hidden.shape)
    return (objective, ce), (d_hidden, d_head.astype(head.dtype))


def _backward(z_loss, residuals, cotangents):  # type: ignore[no-untyped-def]
    d_hidden, d_head = residuals
    scale = cotangents[0]
    return (d_hidden * scale).astype(d_hidden.dtype), (d_head * scale).astype(d_head.dtype), None, None


head_loss.defvjp(_forward, _backward)
