"""How much memory a plan will need, without compiling it: a model of few terms, fitted to what has been compiled. No JAX.

    peak = state + gradients + fixed + scale[policy] × tokens × layers × (width · d_model + mlp · mlp_hidden) × bytes

with one whole layer more where a policy recomputes.

State and gradients are divided over all devices and known exactly; tokens are those of one micro-batch on one device.
`fixed` (gathered weights, a chunk of logits, the compiler's own) and the scales are fitted by least squares to the
committed table, as are those of programs that did not fit, whose size the compiler names.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from trainer.preflight.model_flops import parameters
from trainer.preflight.policies import POLICIES, Policy
from trainer.recipe import Recipe

GIB = 2**30
STATE_BYTES = 12  # per parameter: float32 weight and two moments
GRADIENT_BYTES = 4
UNKNOWN = 0.1  # safety, as a share of the prediction, where a policy has never been compiled
KNOWN = 0.02
WHOLE = next(p for p in POLICIES if not p.recomputed)


@dataclass(frozen=True)
class Shape:
    """What of a recipe decides the memory."""

    parameters: int
    n_layers: int
    d_model: int
    mlp_hidden: int
    sequence_length: int
    bytes: int  # of an activation


def shape_of(recipe: Recipe) -> Shape:
    model = recipe.model
    width = 2 if recipe.compute_dtype == "bfloat16" else 4
    return Shape(parameters(model), model.n_layers, model.d_model, model.mlp_hidden, recipe.sequence_length, width)


@dataclass(frozen=True)
class Point:
    """One compiled program: its size and what the model takes into account."""

    policy: str
    base_gib: float
    unit_gib: float
    peak_gib: float


@dataclass(frozen=True)
class MemoryModel:
    """`scales` by policy; `error_gib` is the largest distance to a compiled program."""

    fixed_gib: float
    scales: dict[str, float]
    error_gib: float

    def predict(self, shape: Shape, devices: int, micro_batch: int, accumulation: int, remat: Policy) -> float:
        """GiB per device."""
        scale = self.scales.get(remat.name, max(self.scales.values(), default=1.0))
        return base(shape, devices, accumulation) + self.fixed_gib + scale * unit(shape, micro_batch, remat)

    def margin(self, predicted: float, remat: Policy) -> float:
        """GiB to keep free, because the model may be wrong."""
        return self.error_gib + predicted * (KNOWN if remat.name in self.scales else UNKNOWN)


def base(shape: Shape, devices: int, accumulation: int) -> float:
    """GiB per device of state and gradients; those of a micro-batch stand beside their sum."""
    gradients = GRADIENT_BYTES * (2 if accumulation > 1 else 1)
    return shape.parameters / devices * (STATE_BYTES + gradients) / GIB


def unit(shape: Shape, micro_batch: int, remat: Policy) -> float:
    """GiB that `remat` would save by its definition alone; of what is recomputed, one layer at a time is whole."""
    saved = shape.n_layers * (remat.width * shape.d_model + remat.mlp * shape.mlp_hidden)
    whole = WHOLE.width * shape.d_model + WHOLE.mlp * shape.mlp_hidden if remat.recomputed else 0
    return micro_batch * shape.sequence_length * (saved + whole) * shape.bytes / GIB


def point(shape: Shape, devices: int, micro_batch: int, accumulation: int, remat: Policy, peak_gib: float) -> Point:
    """What the fit needs of one compiled program."""
    return Point(remat.name, base(shape, devices, accumulation), unit(shape, micro_batch, remat), peak_gib)


def fit(points: Iterable[Point]) -> MemoryModel:
    """Least squares over the compiled programs; without any, the definitions of the policies and nothing fixed."""
    known = list(points)
    if not known:
        return MemoryModel(0.0, {}, 0.0)
    names = sorted({p.policy for p in known})
    matrix = np.array([[1.0, *(p.unit_gib if p.policy == n else 0.0 for n in names)] for p in known])
    rest = np.array([p.peak_gib - p.base_gib for p in known])
    solution, *_ = np.linalg.lstsq(matrix, rest, rcond=None)
    error = float(np.max(np.abs(matrix @ solution - rest)))
    return MemoryModel(float(solution[0]), {n: float(s) for n, s in zip(names, solution[1:], strict=True)}, error)
