"""Weights of others onto a mesh: each process keeps the slices of its own devices, one parameter at a time."""

from typing import Any

import jax
import numpy as np

from trainer.model import Params
from trainer.params import param_specs
from trainer.weights.slots import slots
from trainer.weights.sources import NamedSource

Bounds = tuple[tuple[int, int], ...]  # per dimension: from, to


def load_params(source: NamedSource, shardings: dict[str, Any]) -> Params:
    """The parameters on `shardings`, float32. Every process reads every tensor, and keeps what its devices hold.

    On the host are, beside what it returns, the local part of one parameter and two tensors.
    """
    specs = param_specs(source.description.model)
    order = sorted(slots(source.description.model), key=lambda slot: list(specs).index(slot.parameter))
    params: Params = {}
    parts: dict[Bounds, np.ndarray] = {}
    for slot, value in source.stream(order):
        shape, sharding = specs[slot.parameter].shape, shardings[slot.parameter]
        places = {
            device: tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
            for device, index in sharding.addressable_devices_indices_map(shape).items()
        }
        if not parts:
            parts = {bounds: np.empty([to - at for at, to in bounds], np.float32) for bounds in set(places.values())}
        for bounds, part in parts.items():
            if slot.layer is None:
                part[...] = value[tuple(slice(*b) for b in bounds)]
            else:
                part[slot.layer] = value[tuple(slice(*b) for b in bounds[1:])]  # layers are never divided over devices
        if slot.layer in (None, source.description.model.n_layers - 1):
            arrays = [jax.device_put(parts[bounds], device) for device, bounds in places.items()]
            params[slot.parameter] = jax.make_array_from_single_device_arrays(shape, sharding, arrays)
            parts = {}
    return params
