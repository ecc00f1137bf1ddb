"""Parallelism, applied from outside: where parameters and batches live on a mesh, and how the model gets at them.

Fully sharded data parallelism: every device holds a slice of each matrix (and of its moments) and trains on its own
rows. A layer's weights are gathered when it runs, its gradients are summed and scattered back. Where devices share the
sequences of their rows (trainer.sequence), that is another axis of the mesh; parameters are cut over both. Matrices have
sides that are powers of two times little: where the number of devices is not one, what is odd of it is an axis of
replicas, over which a parameter is cut only if it happens to divide. Slices are replicas too (trainer.plan.replicas
says when): between them is a network tens of times slower than a slice's own, which carries sums of gradients that are
scattered already, and no weights.
"""

import math
from dataclasses import replace
from functools import cache
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer import sequence, tensor
from trainer.errors import ConfigurationError
from trainer.model import Weights
from trainer.params import ParamSpec, param_specs
from trainer.plan import Plan
from trainer.recipe import Model, Recipe
from trainer.reduction import sum_to_shards
from trainer.splash import attention_for
from trainer.torus import Planes, planes

AXIS = "fsdp"  # of the batch's rows, together with REPLICA and SLICE
REPLICA = "replica"
SLICE = "slice"
Axes = str | tuple[str, ...]  # one or several of the mesh, the outermost first
REFETCH_BYTES = 2**28  # layers whose gathered weights are together larger than this are gathered again in backward


def make_mesh(plan: Plan, recipe: Recipe) -> Mesh:
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
    return mesh_of(devices, plan.sequence, plan.tensor, plan.slices_apart(recipe))


def mesh_of(devices: list[jax.Device], sharing: int = 1, parts: int = 1, slices: int = 1) -> Mesh:
    """A mesh over these devices, those of one slice after those of another; each `sharing` neighbours share the sequences
    of their rows, or `sharing` groups of `parts`, which divide the heads among them."""
    ordered = np.array(sorted(devices, key=lambda d: (d.process_index, d.id)))
    rows = len(devices) // slices // sharing // parts
    even = rows & -rows  # the power of two in it
    shape = {SLICE: slices, REPLICA: rows // even, AXIS: even, sequence.AXIS: sharing, tensor.AXIS: parts}
    names = tuple(name for name, size in shape.items() if name == AXIS or size > 1)
    return Mesh(ordered.reshape([shape[name] for name in names]), names)


def all_axes(mesh: Mesh) -> Axes:
    """The axes that gradients are summed over: those of the mesh."""
    return _axes(mesh.axis_names)


def row_axes(mesh: Mesh) -> Axes:
    """The axes that the batch's rows are divided over."""
    return _axes(tuple(name for name in mesh.axis_names if name in (SLICE, REPLICA, AXIS)))


def _axes(names: tuple[str, ...]) -> Axes:
    return names[0] if len(names) == 1 else names


def sharing(mesh: Mesh) -> int:
    """How many devices share each sequence."""
    return int(mesh.shape.get(sequence.AXIS, 1))


def sharded_dim(spec: ParamSpec, devices: int, taken: int | None = None) -> int | None:
    """Which dimension of the parameter is cut over the devices, counted from the end (-1: the last); None: replicated.

    The first dimension that divides, never the layer axis (it is scanned over) and never a norm's: those are so small
    that gathering them costs more than keeping them. Nor the one that is `taken`, counted from the end.
    """
    for dim, (size, cut) in enumerate(zip(spec.shape, may_be_cut(spec), strict=True)):
        if cut and size % devices == 0 and dim - len(spec.shape) != taken:
            return dim - len(spec.shape)
    return None


def may_be_cut(spec: ParamSpec) -> tuple[bool, ...]:
    """Per dimension of the parameter, whether some number of devices cuts it."""
    return tuple(axis not in ("layer", "norm") for axis in spec.axes)


def heads_divided(mesh: Mesh) -> int:
    """How many devices divide the heads of a layer among them."""
    return int(mesh.shape.get(tensor.AXIS, 1))


class Cut(NamedTuple):
    """How a parameter lies on the mesh: `dim` over `axes`, `parts` over the tensor axis, where it has one that is divided
    there, and alike along the `others`. Both are dimensions counted from the end."""

    dim: int
    axes: Axes
    others: tuple[str, ...]
    parts: int | None = None

    @property
    def spread(self) -> Axes:
        """All axes along which devices have different parts of it."""
        own = (self.axes,) if isinstance(self.axes, str) else self.axes
        return _axes(own if self.parts is None else (*own, tensor.AXIS))


@cache
def cuts(model: Model, mesh: Mesh) -> dict[str, Cut | None]:
    """Of each parameter, over as many devices as its dimensions allow; None: every device has all of it."""
    names = mesh.axis_names
    without = ((SLICE,), (SLICE, REPLICA), (SLICE, sequence.AXIS))
    choices = [tuple(n for n in names if n not in left_out) for left_out in without]
    choices.append((AXIS,))

    def cut(spec: ParamSpec) -> Cut | None:
        divided = next((i - len(spec.axes) for i, a in enumerate(spec.axes) if a in tensor.CUT), None)
        parts = divided if tensor.AXIS in names else None
        for axes in choices:
            mine = tuple(name for name in axes if parts is None or name != tensor.AXIS)
            dim = sharded_dim(spec, math.prod(mesh.shape[name] for name in mine), parts)
            if dim is not None:
                others = tuple(n for n in names if n not in mine and (parts is None or n != tensor.AXIS))
                return Cut(dim, _axes(mine), others, parts)
        if parts is not None:
            raise ConfigurationError(
                f"plan.tensor: {spec.shape} of {spec.hf} does not divide by {mesh.shape[AXIS]} devices"
            )
        return None

    return {name: cut(spec) for name, spec in param_specs(model).items()}


def sharded_dims(model: Model, mesh: Mesh) -> dict[str, int | None]:
    """Per parameter the dimension that is cut over the mesh, counted from the front; None: every device has all of it."""
    found, specs = cuts(model, mesh), param_specs(model)
    return {
        name: len(specs[name].shape) + cut.dim if cut is not None and mesh.size > 1 else None
        for name, cut in found.items()
    }


def param_pspecs(model: Model, mesh: Mesh) -> dict[str, PartitionSpec]:
    """PartitionSpec of each parameter, of its moments and of its gradient."""
    pspecs, specs = {}, param_specs(model)
    for name, cut in cuts(model, mesh).items():
        axes: list[Axes | None] = [None] * len(specs[name].shape)
        if cut is not None:
            axes[cut.dim] = cut.axes
            if cut.parts is not None:
                axes[cut.parts] = tensor.AXIS
        pspecs[name] = PartitionSpec(*axes)
    return pspecs


def param_shardings(model: Model, mesh: Mesh) -> dict[str, NamedSharding]:
    """NamedSharding of each parameter."""
    return {name: NamedSharding(mesh, pspec) for name, pspec in param_pspecs(model, mesh).items()}


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_pspecs(mesh: Mesh) -> dict[str, PartitionSpec]:
    """PartitionSpecs of a batch: see `batch_shardings`."""
    return dict.fromkeys(("tokens", "ids"), PartitionSpec(None, row_axes(mesh), None))


def batch_shardings(mesh: Mesh) -> dict[str, NamedSharding]:
    """Of a batch {"tokens": int32 [accumulation, R, S], "ids": uint32 [accumulation, R, 2]}: rows over the devices.

    Devices that share sequences have the same whole rows: what a token says of its neighbours is seen without exchange.
    """
    return {name: NamedSharding(mesh, pspec) for name, pspec in batch_pspecs(mesh).items()}


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """The global batch from this process's rows, {"tokens": [accumulation, R/P, S], "ids": [accumulation, R/P, 2]}."""
    shardings = batch_shardings(mesh)
    return {name: jax.make_array_from_process_local_data(shardings[name], batch[name]) for name in shardings}


def sharded_weights(
    model: Model,
    mesh: Mesh,
    compute_dtype: str,
    reduction: Literal["fast", "invariant"] = "fast",
    whole_sequences: bool = False,
    alike: bool = True,
) -> Weights:
    """`Weights` for use inside a shard_map over the mesh: gathers parameters, sums and scatters their gradients.

    The gradient of a replicated parameter is left as this device's part; whoever asked sums it (see `step`), so that
    all the small ones travel in one message. `reduction` as in the recipe: who decides on the order of the sums.
    `whole_sequences`: each device computes its own, although the mesh has axes along which they could be shared; for
    forward passes alone. `alike`: gradients are summed over replicas too; else whoever asked does (`sum_alike`), once for
    several passes.
    """
    dtype = jnp.dtype(compute_dtype)
    parts = 1 if whole_sequences else heads_divided(mesh)
    attend = attention_for(mesh.devices.flat[0].platform, 1 if whole_sequences else sharing(mesh), parts)
    invariant = reduction == "invariant"
    if mesh.size == 1:
        return isolated(Weights(dtype, attend=attend)) if invariant else Weights(dtype, attend=attend)
    found = cuts(model, mesh)
    tori = {cut.axes: _planes(mesh, cut.axes) for cut in found.values() if cut is not None}

    def fetch(name: str, value: jax.Array) -> jax.Array:
        cut = found[name]
        if cut is None:
            return value
        dim, torus = value.ndim + cut.dim, tori[cut.axes]
        if torus is not None:
            value = torus.all_gather(value, dim)
        else:
            value = jax.lax.all_gather(value, cut.axes, axis=dim, tiled=True)
        if cut.parts is not None and parts == 1:
            value = jax.lax.all_gather(value, tensor.AXIS, axis=value.ndim + cut.parts, tiled=True)
        return value

    def reduce(name: str, gradient: jax.Array) -> jax.Array:
        cut = found[name]
        if cut is None:
            return gradient
        dim, torus = gradient.ndim + cut.dim, tori[cut.axes]
        if invariant:
            return sum_to_shards(gradient, AXIS, mesh.size, dim)
        if torus is not None:
            gradient = torus.psum_scatter(gradient, dim)
        else:
            gradient = jax.lax.psum_scatter(gradient, cut.axes, scatter_dimension=dim, tiled=True)
        return jax.lax.psum(gradient, cut.others) if cut.others and alike else gradient

    layers = [math.prod(spec.shape) for spec in param_specs(model).values() if spec.axes[0] == "layer"]
    weights = Weights(dtype, fetch, reduce, attend, parts, refetch=sum(layers) * dtype.itemsize > REFETCH_BYTES)
    return isolated(weights) if invariant else weights


def sum_alike(model: Model, mesh: Mesh, gradients: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Gradients of parameters that are cut, summed over the axes along which devices have the same part of them."""
    found = cuts(model, mesh)
    return {
        name: jax.lax.psum(g, cut.others) if (cut := found[name]) is not None and cut.others else g
        for name, g in gradients.items()
    }


def _planes(mesh: Mesh, axes: Axes) -> Planes | None:
    """The planes of the devices that lie along `axes`, in one of the groups that are alike."""
    first = mesh.devices[tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)]
    return planes(list(first.flat), axes)


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
