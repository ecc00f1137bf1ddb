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

from trainer import sequence, tensor, xla_flags
from trainer.digest import data_hash, ids_hash
from trainer.model import Params, Weights, init_params, next_token_loss
from trainer.optimizer import Window, adamw, append, clip_coefficient, empty_window, is_spike
from trainer.params import param_specs
from trainer.plan import Plan, require_fit
from trainer.recipe import Recipe
from trainer.reduction import block_grid, one_by_one, pick, squared_norm, sum_everywhere, tree_sum
from trainer.rows import all_are_targets, read_rows
from trainer.schedule import learning_rate
from trainer.sharding import (
    AXIS,
    all_axes,
    batch_pspecs,
    batch_shardings,
    cuts,
    isolated,
    may_be_cut,
    param_pspecs,
    param_shardings,
    replicated,
    row_axes,
    sharded_dims,
    sharded_weights,
    sum_alike,
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
    axis 1 over the devices; what stands in the plan's padding adds exactly zero to everything. Metrics: loss (mean CE over the global batch's targets, without z-loss), grad_norm (before
    clipping), lr, skipped (bool: the parameters were left alone), finite (bool), ids_hash and data_hash (uint32 [2], of
    the batch that arrived). A loss that is not finite leaves the whole state as it was, step included. A finite loss
    with a gradient norm that is not counts as skipped and is not remembered: it would blind the rule for 128 steps.
    """
    require_fit(plan, recipe)
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
        train_step,
        donate_argnums=0,
        in_shardings=(state_at, batch_shardings(mesh)),
        out_shardings=(state_at, same),
        compiler_options=xla_flags.options(mesh),
    )


def lower_train_step(recipe: Recipe, plan: Plan, mesh: Mesh) -> Any:
    """The `jax.stages.Lowered` of the train step, from shapes alone: no state, no batch and none of the devices is needed."""
    shapes = {
        "tokens": ((plan.accumulation, plan.rows_per_pass, recipe.sequence_length), jnp.int32),
        "ids": ((plan.accumulation, plan.rows_per_pass, 2), jnp.uint32),
    }
    at = batch_shardings(mesh)
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=at[name]) for name, (shape, dtype) in shapes.items()}
    step: Any = make_train_step(recipe, plan, mesh)
    return step.lower(abstract_state(recipe, mesh), batch)


def _loss_and_grad(recipe: Recipe, plan: Plan, mesh: Mesh) -> Callable[[Params, Batch], tuple[Any, ...]]:
    """`(params, batch) -> (loss, gradients, their norm, hashes uint32 [4])` over the whole mesh."""
    pspecs = param_pspecs(recipe.model, mesh)
    data, whole = recipe.data, recipe.global_batch * (recipe.sequence_length - 1)
    gradients, norm = (_invariant if recipe.reduction == "invariant" else _fast)(recipe, plan, mesh)
    rows, over = plan.micro_batch, row_axes(mesh)

    def targets_in_batch(tokens: jax.Array, real: Real) -> jax.Array:
        """f32 []: the global batch's, known before the first of its rows is computed: one denominator for all."""
        counts = jax.lax.map(lambda t: jnp.sum(read_rows(t[0], data, real=t[1]).counted), (tokens, real))
        return jnp.maximum(jax.lax.psum(jnp.sum(counts), over), 1).astype(jnp.float32)

    def numbers() -> jax.Array:
        """uint32 [accumulation, rows]: of this device's rows in the global batch."""
        row = jnp.arange(plan.accumulation, dtype=jnp.uint32)[:, None] * jnp.uint32(rows * plan.data_parallel)
        here = jax.lax.axis_index(over).astype(jnp.uint32)
        return row + here * jnp.uint32(rows) + jnp.arange(rows, dtype=jnp.uint32)

    def local(params: Params, batch: Batch) -> tuple[Any, ...]:
        tokens, ids = batch["tokens"], batch["ids"]
        real = numbers() < plan.global_batch if plan.padding else None
        scale = 1 / (whole if all_are_targets(data) else targets_in_batch(tokens, real))
        loss, grads = gradients(params, (tokens, real), scale)
        row = numbers()
        hashes = jnp.concatenate([ids_hash(ids, row, real), data_hash(tokens, row, real)])
        return loss, grads, norm(grads), jax.lax.psum(hashes, over)

    out = PartitionSpec()
    return jax.shard_map(
        local, mesh=mesh, in_specs=(pspecs, batch_pspecs(mesh)), out_specs=(out, pspecs, out, out), check_vma=False
    )


Scale = float | jax.Array  # what every loss is multiplied with: 1 / targets of the global batch
Real = jax.Array | None  # bool, of rows: whether they hold an instance; None: they all do
Instances = tuple[jax.Array, Real]  # tokens int32 [..., rows, S] and which of the rows are real, [..., rows]
Gradients = Callable[[Params, Instances, Scale], tuple[jax.Array, Params]]
Norm = Callable[[Params], jax.Array]


def _gradient(recipe: Recipe, plan: Plan, weights: Weights) -> Gradients:
    """`(params, instances [rows, S], scale) -> (loss, gradients)` of these rows, as far as `weights` sums them."""

    def of_rows(params: Params, instances: Instances, scale: Scale) -> tuple[jax.Array, Params]:
        tokens, has_target, documents, _ = read_rows(instances[0], recipe.data, real=instances[1])

        def objective(params: Params) -> tuple[jax.Array, jax.Array]:
            total, ce = next_token_loss(
                params, tokens, recipe.model, weights, recipe.optimizer.z_loss, plan.remat, has_target, documents
            )
            return total * scale, jnp.sum(ce) * scale

        (_, ce), grads = jax.value_and_grad(objective, has_aux=True)(params)
        return ce, grads

    return of_rows


def _fast(recipe: Recipe, plan: Plan, mesh: Mesh) -> tuple[Gradients, Norm]:
    """Of the global batch, from this device's rows [accumulation, rows, S]; the order of the sums is left to XLA.

    Replicas are summed over once a step: in the backward pass beside the work, or after the last of several passes.
    """
    once = plan.accumulation == 1
    weights = sharded_weights(recipe.model, mesh, recipe.compute_dtype, alike=once)
    one, axes = _gradient(recipe, plan, weights), all_axes(mesh)
    found = cuts(recipe.model, mesh)
    replicated_names = [name for name, cut in found.items() if cut is None]

    def gradients(params: Params, instances: Instances, scale: Scale) -> tuple[jax.Array, Params]:
        if once:
            loss, grads = one(params, jax.tree.map(lambda x: x[0], instances), scale)
        else:
            zero = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params))
            (loss, grads), _ = jax.lax.scan(
                lambda c, t: (jax.tree.map(jnp.add, c, one(params, t, scale)), None), zero, instances
            )
        if mesh.size == 1:
            return loss, grads
        if not once:
            grads = sum_alike(recipe.model, mesh, grads)
        return _sum_small(loss, grads, replicated_names, lambda flat: jax.lax.psum(flat, axes))

    def norm(grads: Params) -> jax.Array:
        squares = {name: jnp.sum(jnp.square(g)) for name, g in grads.items()}
        whole = sum((squares[name] for name in replicated_names), jnp.zeros(()))
        for over in dict.fromkeys(cut.spread for cut in found.values() if cut is not None):
            alike = (s for name, s in squares.items() if (cut := found[name]) is not None and cut.spread == over)
            whole = whole + jax.lax.psum(sum(alike, jnp.zeros(())), over)
        return jnp.sqrt(whole)

    return gradients, norm


def _invariant(recipe: Recipe, plan: Plan, mesh: Mesh) -> tuple[Gradients, Norm]:
    """As `_fast`, with the same bits on any mesh and split: one instance at a time, all sums as trainer.reduction has them.
    All rows are instances (plan.require_fit).

    With a micro-batch of one the weights of a layer are gathered, and its gradients scattered, for each instance. With
    a larger one all weights are gathered once per step and the gradients of a micro-batch are summed before they are
    scattered: one exchange instead of many, for the price of whole weights and log2(micro_batch) + 2 whole gradients.
    """
    specs, devices = param_specs(recipe.model), mesh.size
    sharded = sharded_dims(recipe.model, mesh)
    replicated_names = [name for name, dim in sharded.items() if dim is None]
    weights = sharded_weights(recipe.model, mesh, recipe.compute_dtype, "invariant")
    whole_weights = isolated(Weights(weights.compute_dtype, attend=weights.attend))
    grids = {name: block_grid(spec.shape, may_be_cut(spec), recipe.global_batch) for name, spec in specs.items()}

    def finish(loss: jax.Array, grads: Params) -> tuple[jax.Array, Params]:
        loss, grads = jax.lax.optimization_barrier((loss, grads))
        return _sum_small(loss, grads, replicated_names, lambda flat: sum_everywhere(flat, AXIS, devices))

    def instance_by_instance(params: Params, instances: Instances, scale: Scale) -> tuple[jax.Array, Params]:
        one, (tokens, _) = _gradient(recipe, plan, weights), instances
        return tree_sum(plan.accumulation, lambda j: finish(*one(params, (pick(tokens, j), None), scale)))

    def gathered(params: Params, instances: Instances, scale: Scale) -> tuple[jax.Array, Params]:
        one = _gradient(recipe, plan, whole_weights)
        whole = {
            name: weights.fetch(name, value.astype(weights.compute_dtype)).astype(value.dtype)
            for name, value in params.items()
        }
        whole = jax.lax.optimization_barrier(whole)

        def micro_batch(j: jax.Array) -> tuple[jax.Array, Params]:
            rows = pick(instances[0], j)
            loss, grads = tree_sum(plan.micro_batch, lambda m: one(whole, (pick(rows, m)[None], None), scale))
            return finish(loss, {name: weights.reduce(name, g) for name, g in grads.items()})

        return tree_sum(plan.accumulation, micro_batch)

    def norm(grads: Params) -> jax.Array:
        return jnp.sqrt(squared_norm(grads, grids, sharded, AXIS, devices))

    return instance_by_instance if plan.micro_batch == 1 else gathered, norm


def _sum_small(
    loss: jax.Array, grads: Params, names: list[str], add: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, Params]:
    """Loss and the gradients `names` of replicated parameters, summed over the mesh by `add`: one message."""
    flat = add(jnp.concatenate([loss[None], *(grads[name].reshape(-1) for name in names)]))
    out, at = dict(grads), 1
    for name in names:
        out[name] = flat[at : at + grads[name].size].reshape(grads[name].shape)
        at += grads[name].size
    return flat[0], out


def make_eval_step(recipe: Recipe, plan: Plan, mesh: Mesh) -> Callable[[Params, Batch], Metrics]:
    """Jitted `(params, batch) -> {"ce_sum": f32 [accumulation, R], "count": int32 [accumulation, R]}`, replicated.

    Per instance the summed cross entropy and the number of targets, so that the caller can leave padding instances out.
    The batch is laid out as for training. With `reduction: invariant` one instance at a time, as in training.
    """
    model = recipe.model
    weights = sharded_weights(model, mesh, recipe.compute_dtype, recipe.reduction)
    invariant = recipe.reduction == "invariant"

    def one(params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens, has_target, documents, count = read_rows(tokens, recipe.data, training=False)
        ce = next_token_loss(params, tokens, model, weights, 0.0, "none", has_target, documents)[1]
        over = tuple(name for name in mesh.axis_names if name in (sequence.AXIS, tensor.AXIS))
        return jax.lax.psum(ce, over) if over else ce, count

    def local(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        tokens = batch["tokens"]
        if not invariant:
            return jax.lax.map(lambda rows: one(params, rows), tokens)
        rows = tokens.reshape(-1, 1, tokens.shape[-1])
        found = one_by_one(rows.shape[0], lambda i: one(params, pick(rows, i)))
        return jax.tree.map(lambda x: x.reshape(tokens.shape[:2]), found)

    rows = PartitionSpec(None, row_axes(mesh))
    specs = (param_pspecs(model, mesh), batch_pspecs(mesh))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(rows, rows), check_vma=False)

    def eval_step(params: Params, batch: Batch) -> Metrics:
        ce, count = mapped(params, batch)
        return {"ce_sum": ce, "count": count}

    shardings = (param_shardings(model, mesh), batch_shardings(mesh))
    options = xla_flags.options(mesh)
    return jax.jit(eval_step, in_shardings=shardings, out_shardings=replicated(mesh), compiler_options=options)
