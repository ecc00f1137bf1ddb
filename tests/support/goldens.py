"""The committed answers of other implementations (tests/golden/) and weights to try formats with."""

from pathlib import Path

import numpy as np

from trainer.params import param_specs
from trainer.recipe import Model
from trainer.weights.slots import own_shape, slots
from trainer.weights.sources import Source

TRANSFORMERS = Path(__file__).parents[1] / "golden" / "transformers"
MODELS = ("mha", "gqa", "yarn")


def reference(name: str) -> dict[str, np.ndarray]:
    """What make_transformers.py stored for one model."""
    with np.load(TRANSFORMERS / name / "reference.npz") as arrays:
        return dict(arrays)


def whole(source: Source) -> dict[str, np.ndarray]:
    """The params pytree in memory, by way of `read`."""
    model = source.description.model
    params = {name: np.full(spec.shape, np.nan, np.float32) for name, spec in param_specs(model).items()}
    for slot in slots(model):
        params[slot.parameter][... if slot.layer is None else slot.layer] = source.read(slot)
    return params


def streamed(source: Source) -> dict[str, np.ndarray]:
    """The params pytree in memory, by way of `stream`."""
    model = source.description.model
    params = {name: np.full(spec.shape, np.nan, np.float32) for name, spec in param_specs(model).items()}
    for slot, value in source.stream():
        assert value.shape == own_shape(slot, model)
        params[slot.parameter][... if slot.layer is None else slot.layer] = value
    return params


def random_params(model: Model, seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 values that bfloat16 cannot hold."""
    random = np.random.default_rng(seed)
    return {name: random.normal(size=spec.shape).astype(np.float32) for name, spec in param_specs(model).items()}


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    """Bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name].view(np.uint32), b[name].view(np.uint32), err_msg=name)
