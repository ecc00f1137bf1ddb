"""One optimizer step, one evaluation step, and the state they act on, compiled for a mesh.

The loss and its gradient run per device inside a shard_map: each on its own rows, weights gathered and gradients
scattered as trainer.sharding says. Everything else is elementwise on the sharded state. The loss is normalised over the
global batch, so accumulation and device count change only the order of floating-point sums.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from trainer.digest import data_hash, ids_hash
from trainer.model import Params, init_params, next_token_loss
from trainer.optimizer import Window, adamw, append, clip_coefficient, empty_window, is_spike
from trainer.plan import Plan
from trainer.recipe import Recipe
from trainer.rows import all_are_targets, read_rows
from trainer.schedule import learning_rate
from trainer.sharding import (
    AXIS,
    BATCH_PSPECS,
    batch_shardings,
    param_pspecs,
    param_shardings,
    replicated,
    sharded_weights,
)

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


class TrainState(NamedTuple):
    """All that training carries from step to step. `step` counts completed steps, `count` those not skipped."""

    params: Params
    mu: Params
    nu: Params
    count: jax.Array  # int32 []
    step: jax.Array  # int32 []
    window: Window


def state_shardings(recipe: Recipe, mesh: Mesh) -> TrainState:
    """The NamedSharding of every leaf of the state."""
    params, same = param_shardings(recipe.model, mesh), replicated(mesh)
    return TrainState(params, dict(params), dict(params), same, same, Window(same, same, same))


def _initial(recipe: Recipe) -> TrainState:
    params = init_params(recipe.model, recipe.init_seed)
    zeros = jax.tree.map(jnp.zeros_like, params)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(params, zeros, jax.tree.map(jnp.zeros_like, params), zero, zero, empty_window(recipe.optimizer))


def abstract_state(recipe: Recipe, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state: what a checkpoint is restored into."""
    shapes = jax.eval_shape(lambda: _initial(recipe))
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        shapes,
        state_shardings(recipe, mesh),
    )


def init_state(recipe: Recipe, mesh: Mesh) -> TrainState:
    """The state at step 0: the same bits on any mesh."""
    return _compiled_init(recipe, mesh)()


def state_with(params: Params, recipe: Recipe, mesh: Mesh) -> TrainState:
    """The state at step 0 with these parameters instead of the initialiser's, which are not drawn."""
    rest = jax.jit(
        lambda: _initial(recipe)._replace(params={}), out_shardings=state_shardings(recipe, mesh)._replace(params={})
    )
    return rest()._replace(params=params)


@cache
def _compiled_init(recipe: Recipe, mesh: Mesh) -> Callable[[], TrainState]:
    return jax.jit(lambda: _initial(recipe), out_shardings=state_shardings(recipe, mesh))


def make_train_step(
    recipe: Recipe, plan: Plan, mesh: Mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Jitted `(state, batch) -> (state, metrics)`; the old state is donated, all metrics are replicated.

    Batch: {"tokens": int32 [accumulation, R, S], "ids": uint32 [accumulation, R, 2]}, R = data_parallel · micro_batch,
    axis 1 over the devices. Metrics: loss (mean CE over the global batch's targets, without z-loss), grad_norm (before
    clipping), lr, skipped (bool: the parameters were left alone), finite (bool), ids_hash and data_hash (uint32 [2], of
    the batch that arrived). A loss that is not finite leaves the whole state as it was, step included. A finite loss
    with a gradient norm that is not counts as skipped and is not remembered: it would blind the rule for 128 steps.
    """
    loss_and_grad = _loss_and_grad(recipe, plan, mesh)
    optimizer = recipe.optimizer

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        loss, grads, grad_norm, hashes = loss_and_grad(state.params, batch)
        finite, usable = jnp.isfinite(loss), jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        skip = is_spike(state.window, loss, grad_norm, optimizer) | ~usable
        rate = learning_rate(recipe.schedule, state.step + 1)
        clip = clip_coefficient(grad_norm, optimizer)
        clipped = {name: g * clip for name, g in grads.items()}
        params, mu, nu = adamw(state.params, state.mu, state.nu, clipped, state.count + 1, rate, optimizer, skip)
        appended = append(state.window, loss, grad_norm)
        window = Window(*(jnp.where(usable, new, old) for new, old in zip(appended, state.window, strict=True)))
        count = jnp.where(skip, state.count, state.count + 1)
        new = TrainState(params, mu, nu, count, jnp.where(finite, state.step + 1, state.step), window)
        metrics = {"loss": loss, "grad_norm": grad_norm, "lr": rate, "skipped": skip, "finite": finite}
        return new, metrics | {"ids_hash": hashes[:2], "data_hash": hashes[2:]}

    state_at, same = state_shardings(recipe, mesh), replicated(mesh)
    return jax.jit(
        train_step, donate_argnums=0, in_shardings=(state_at, batch_shardings(mesh)), out_shardings=(state_at, same)
    )


def _loss_and_grad(recipe: Recipe, plan: Plan, mesh: Mesh) -> Callable[[Params, Batch], tuple[Any, ...]]:
    """`(params, batch) -> (loss, gradients, their norm, hashes uint32 [4])` over the whole mesh."""
    model, pspecs = recipe.model, param_pspecs(recipe.model, mesh)
    weights = sharded_weights(model, mesh, recipe.compute_dtype)
    data, whole = recipe.data, recipe.global_batch * (recipe.sequence_length - 1)
    replicated_names = [name for name in pspecs if AXIS not in pspecs[name]]
    rows = plan.micro_batch

    def one(params: Params, tokens: jax.Array, scale: float | jax.Array) -> tuple[jax.Array, Params]:
        tokens, has_target, documents, _ = read_rows(tokens, data)

        def objective(params: Params) -> tuple[jax.Array, jax.Array]:
            total, ce = next_token_loss(
                params, tokens, model, weights, recipe.optimizer.z_loss, plan.remat, has_target, documents
            )
            return total * scale, jnp.sum(ce) * scale

        (_, ce), grads = jax.value_and_grad(objective, has_aux=True)(params)
        return ce, grads

    def accumulate(params: Params, tokens: jax.Array) -> tuple[jax.Array, Params]:
        scale = 1 / (whole if all_are_targets(data) else targets_in_batch(tokens))
        if plan.accumulation == 1:
            return one(params, tokens[0], scale)
        zero = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(lambda c, t: (jax.tree.map(jnp.add, c, one(params, t, scale)), None), zero, tokens)
        return total

    def targets_in_batch(tokens: jax.Array) -> jax.Array:
        """f32 []: the global batch's, known before the first of its rows is computed: one denominator for all."""
        counts = jax.lax.map(lambda t: jnp.sum(read_rows(t, data).counted), tokens)
        return jnp.maximum(jax.lax.psum(jnp.sum(counts), AXIS), 1).astype(jnp.float32)

    def local(params: Params, batch: Batch) -> tuple[Any, ...]:
        tokens, ids = batch["tokens"], batch["ids"]
        loss, grads = accumulate(params, tokens)
        row = jnp.arange(plan.accumulation, dtype=jnp.uint32)[:, None] * jnp.uint32(rows * mesh.size)
        row = row + jax.lax.axis_index(AXIS).astype(jnp.uint32) * jnp.uint32(rows) + jnp.arange(rows, dtype=jnp.uint32)
        hashes = jnp.concatenate([ids_hash(ids, row), data_hash(tokens, row)])
        grads, loss, hashes = _sum_over_devices(grads, loss, hashes, replicated_names, mesh.size)
        squares = {name: jnp.sum(jnp.square(g)) for name, g in grads.items()}
        whole = sum((squares[name] for name in replicated_names), jnp.zeros(()))
        parts = sum((s for name, s in squares.items() if name not in replicated_names), jnp.zeros(()))
        return loss, grads, jnp.sqrt(whole + jax.lax.psum(parts, AXIS)), hashes

    out = PartitionSpec()
    return jax.shard_map(
        local, mesh=mesh, in_specs=(pspecs, BATCH_PSPECS), out_specs=(out, pspecs, out, out), check_vma=False
    )


def _sum_over_devices(
    grads: Params, loss: jax.Array, hashes: jax.Array, names: list[str], devices: int
) -> tuple[Params, jax.Array, jax.Array]:
    """Loss, hashes and the gradients `names` of replicated parameters, summed over the mesh: one message per dtype."""
    if devices == 1:
        return grads, loss, hashes
    flat = jnp.concatenate([loss[None], *(grads[name].reshape(-1) for name in names)])
    flat, hashes = jax.lax.psum(flat, AXIS), jax.lax.psum(hashes, AXIS)
    out, at = dict(grads), 1
    for name in names:
        out[name] = flat[at : at + grads[name].size].reshape(grads[name].shape)
        at += grads[name].size
    return out, flat[0], hashes


def make_eval_step(recipe: Recipe, plan: Plan, mesh: Mesh) -> Callable[[Params, Batch], Metrics]:
    """Jitted `(params, batch) -> {"ce_sum": f32 [accumulation, R], "count": int32 [accumulation, R]}`, replicated.

    Per instance the summed cross entropy and the number of targets, so that the caller can leave padding instances out.
    The batch is laid out as for training.
    """
    model = recipe.model
    weights = sharded_weights(model, mesh, recipe.compute_dtype)

    def one(params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens, has_target, documents, count = read_rows(tokens, recipe.data, training=False)
        ce = next_token_loss(params, tokens, model, weights, 0.0, "none", has_target, documents)[1]
        return ce, count

    def local(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        return jax.lax.map(lambda tokens: one(params, tokens), batch["tokens"])

    rows = PartitionSpec(None, AXIS)
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(param_pspecs(model, mesh), BATCH_PSPECS), out_specs=(rows, rows), check_vma=False
    )

    def eval_step(params: Params, batch: Batch) -> Metrics:
        ce, count = mapped(params, batch)
        return {"ce_sum": ce, "count": count}

    shardings = (param_shardings(model, mesh), batch_shardings(mesh))
    return jax.jit(eval_step, in_shardings=shardings, out_shardings=replicated(mesh))
