"""Parallelism, applied from outside: where parameters and batches live on a mesh, and how the model gets at them.

Fully sharded data parallelism: every device holds a slice of each matrix (and of its moments) and trains on its own
rows. A layer's weights are gathered when it runs, its gradients are summed and scattered back. Where devices share the
sequences of their rows (trainer.sequence), that is a second axis of the mesh; parameters are cut over both.
"""

import math
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer import sequence
from trainer.errors import ConfigurationError
from trainer.model import Weights
from trainer.params import ParamSpec, param_specs
from trainer.plan import Plan
from trainer.recipe import Model
from trainer.reduction import sum_to_shards
from trainer.splash import attention_for
from trainer.torus import planes

AXIS = "fsdp"  # of the batch's rows
REFETCH_BYTES = 2**28  # layers whose gathered weights are together larger than this are gathered again in backward


def make_mesh(plan: Plan) -> Mesh:
    """The mesh of this gang: its devices in the order of processes, so that each owns contiguous rows.

    Raises ConfigurationError when the devices present are not those of the plan.
    """
    devices = jax.devices()
    if len(devices) != plan.devices:
        raise ConfigurationError(
            f"plan.devices is {plan.devices} ({plan.device_type}), but these {jax.process_count()} processes have "
            f"{len(devices)} {devices[0].platform} devices; start it on {plan.device_type}, or plan for what is there"
        )
    if jax.process_count() != plan.processes:
        raise ConfigurationError(f"plan.processes is {plan.processes}, but {jax.process_count()} processes joined")
    return mesh_of(devices, plan.sequence)


def mesh_of(devices: list[jax.Device], sharing: int = 1) -> Mesh:
    """A mesh over these devices; each `sharing` neighbours share the sequences of their rows."""
    ordered = np.array(sorted(devices, key=lambda d: (d.process_index, d.id)))
    if sharing == 1:
        return Mesh(ordered, (AXIS,))
    return Mesh(ordered.reshape(-1, sharing), (AXIS, sequence.AXIS))


def all_axes(mesh: Mesh) -> str | tuple[str, ...]:
    """The axes that parameters are cut over, and that gradients are summed over: those of the mesh."""
    return AXIS if mesh.axis_names == (AXIS,) else mesh.axis_names


def sharing(mesh: Mesh) -> int:
    """How many devices share each sequence."""
    return int(mesh.shape.get(sequence.AXIS, 1))


def sharded_dim(spec: ParamSpec, devices: int) -> int | None:
    """Which dimension of the parameter is cut over the devices, counted from the end (-1: the last); None: replicated.

    The first dimension that divides, never the layer axis (it is scanned over) and never a norm's: those are so small
    that gathering them costs more than keeping them.
    """
    for dim, (size, cut) in enumerate(zip(spec.shape, may_be_cut(spec), strict=True)):
        if cut and size % devices == 0:
            return dim - len(spec.shape)
    return None


def may_be_cut(spec: ParamSpec) -> tuple[bool, ...]:
    """Per dimension of the parameter, whether some number of devices cuts it."""
    return tuple(axis not in ("layer", "norm") for axis in spec.axes)


def sharded_dims(model: Model, mesh: Mesh) -> dict[str, int | None]:
    """Per parameter the dimension that is cut over the mesh, counted from the front; None: every device has all of it."""
    dims = {}
    for name, spec in param_specs(model).items():
        dim = sharded_dim(spec, mesh.size) if mesh.size > 1 else None
        dims[name] = None if dim is None else len(spec.shape) + dim
    return dims


def param_pspecs(model: Model, mesh: Mesh) -> dict[str, PartitionSpec]:
    """PartitionSpec of each parameter, of its moments and of its gradient."""
    pspecs = {}
    for name, spec in param_specs(model).items():
        dim = sharded_dim(spec, mesh.size)
        axes = [all_axes(mesh) if i - len(spec.shape) == dim else None for i in range(len(spec.shape))]
        pspecs[name] = PartitionSpec(*axes)
    return pspecs


def param_shardings(model: Model, mesh: Mesh) -> dict[str, NamedSharding]:
    """NamedSharding of each parameter."""
    return {name: NamedSharding(mesh, pspec) for name, pspec in param_pspecs(model, mesh).items()}


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, PartitionSpec())


BATCH_PSPECS = {"tokens": PartitionSpec(None, AXIS, None), "ids": PartitionSpec(None, AXIS, None)}


def batch_shardings(mesh: Mesh) -> dict[str, NamedSharding]:
    """Of a batch {"tokens": int32 [accumulation, R, S], "ids": uint32 [accumulation, R, 2]}: rows over the devices.

    Devices that share sequences have the same whole rows: what a token says of its neighbours is seen without exchange.
    """
    return {name: NamedSharding(mesh, pspec) for name, pspec in BATCH_PSPECS.items()}


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """The global batch from this process's rows, {"tokens": [accumulation, R/P, S], "ids": [accumulation, R/P, 2]}."""
    shardings = batch_shardings(mesh)
    return {name: jax.make_array_from_process_local_data(shardings[name], batch[name]) for name in BATCH_PSPECS}


def sharded_weights(
    model: Model,
    mesh: Mesh,
    compute_dtype: str,
    reduction: Literal["fast", "invariant"] = "fast",
    whole_sequences: bool = False,
) -> Weights:
    """`Weights` for use inside a shard_map over the mesh: gathers parameters, sums and scatters their gradients.

    The gradient of a replicated parameter is left as this device's part; whoever asked sums it (see `step`), so that
    all the small ones travel in one message. `reduction` as in the recipe: who decides on the order of the sums.
    `whole_sequences`: each device computes its own, although the mesh has an axis along which they could be shared.
    """
    dtype, axes = jnp.dtype(compute_dtype), all_axes(mesh)
    attend = attention_for(mesh.devices.flat[0].platform, 1 if whole_sequences else sharing(mesh))
    invariant = reduction == "invariant"
    if mesh.size == 1:
        return isolated(Weights(dtype, attend=attend)) if invariant else Weights(dtype, attend=attend)
    dims = {name: sharded_dim(spec, mesh.size) for name, spec in param_specs(model).items()}
    torus = planes(list(mesh.devices.flat), axes)

    def fetch(name: str, value: jax.Array) -> jax.Array:
        dim = dims[name]
        if dim is None:
            return value
        if torus is not None:
            return torus.all_gather(value, value.ndim + dim)
        return jax.lax.all_gather(value, axes, axis=value.ndim + dim, tiled=True)

    def reduce(name: str, gradient: jax.Array) -> jax.Array:
        dim = dims[name]
        if dim is None:
            return gradient
        if invariant:
            return sum_to_shards(gradient, AXIS, mesh.size, gradient.ndim + dim)
        if torus is not None:
            return torus.psum_scatter(gradient, gradient.ndim + dim)
        return jax.lax.psum_scatter(gradient, axes, scatter_dimension=gradient.ndim + dim, tiled=True)

    layers = [math.prod(spec.shape) for spec in param_specs(model).values() if spec.axes[0] == "layer"]
    weights = Weights(dtype, fetch, reduce, attend, refetch=sum(layers) * dtype.itemsize > REFETCH_BYTES)
    return isolated(weights) if invariant else weights


def isolated(weights: Weights) -> Weights:
    """The same, with a barrier around all that the model computes with a parameter.

    XLA then fuses within the model alone, and alike whether parameters are gathered, lie there whole, or where their
    gradients go: what one instance computes has the same bits on any mesh.
    """
    barrier = jax.lax.optimization_barrier
    return replace(
        weights,
        fetch=lambda name, value: barrier(weights.fetch(name, value)),
        reduce=lambda name, gradient: weights.reduce(name, barrier(gradient)),
    )
