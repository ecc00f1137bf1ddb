"""How much memory a plan will need, without compiling it: a model of few terms, fitted to what has been compiled. No JAX.

    peak = state + gradients + fixed + scale[policy] × tokens × layers × (width · d_model + mlp · mlp_hidden) × bytes

with one whole layer more where a policy recomputes.

State and gradients are divided over the devices that hold them once and known exactly; tokens are those of one micro-batch on one
device.
`fixed` (gathered weights, a chunk of logits, the compiler's own) and the scales are fitted by least squares to the
committed table, as are those of programs that did not fit, whose size the compiler names.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from trainer.params import param_count
from trainer.preflight.policies import POLICIES, Policy
from trainer.recipe import Recipe

GIB = 2**30
STATE_BYTES = 12  # per parameter: float32 weight and two moments
GRADIENT_BYTES = 4
UNKNOWN = 0.1  # safety, as a share of the prediction, where a policy has never been compiled
KNOWN = 0.02
HELD = 1e-3  # weight of the starting values, in GiB²
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
    invariant: bool = False  # reduction


def shape_of(recipe: Recipe) -> Shape:
    model = recipe.model
    width = 2 if recipe.compute_dtype == "bfloat16" else 4
    invariant = recipe.reduction == "invariant"
    return Shape(
        param_count(model), model.n_layers, model.d_model, model.mlp_hidden, recipe.sequence_length, width, invariant
    )


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
        """GiB per device, where `devices` hold the state once."""
        scale = self.scales.get(remat.name, max(self.scales.values(), default=1.0))
        return base(shape, devices, accumulation) + self.fixed_gib + scale * unit(shape, micro_batch, remat)

    def margin(self, predicted: float, remat: Policy) -> float:
        """GiB to keep free, because the model may be wrong."""
        return self.error_gib + predicted * (KNOWN if remat.name in self.scales else UNKNOWN)


def base(shape: Shape, devices: int, accumulation: int) -> float:
    """GiB per device of state and gradients.

    Parameters are cut over the power of two in the number of devices; over all of them where their sides happen to
    divide (trainer.sharding), which is not counted on.
    """
    gradients, parts = GRADIENT_BYTES * gradient_copies(shape, accumulation), devices & -devices
    return shape.parameters / parts * (STATE_BYTES + gradients) / GIB


def gradient_copies(shape: Shape, accumulation: int) -> int:
    """How often a device holds its part of the gradients: those of a micro-batch beside their sum. With
    `reduction: invariant` beside a stack of sums, one for each level of the tree (trainer.reduction.tree_sum).
    """
    if shape.invariant:
        return 1 + accumulation.bit_length()
    return 2 if accumulation > 1 else 1


def unit(shape: Shape, micro_batch: int, remat: Policy) -> float:
    """GiB that `remat` would save by its definition alone; of what is recomputed, one layer at a time is whole."""
    saved = shape.n_layers * (remat.width * shape.d_model + remat.mlp * shape.mlp_hidden)
    whole = WHOLE.width * shape.d_model + WHOLE.mlp * shape.mlp_hidden if remat.recomputed else 0
    return micro_batch * shape.sequence_length * (saved + whole) * shape.bytes / GIB


def point(shape: Shape, devices: int, micro_batch: int, accumulation: int, remat: Policy, peak_gib: float) -> Point:
    """What the fit needs of one compiled program."""
    return Point(remat.name, base(shape, devices, accumulation), unit(shape, micro_batch, remat), peak_gib)


def fit(points: Iterable[Point]) -> MemoryModel:
    """Least squares over the compiled programs, held lightly at fixed = 0 and scale = 1: few programs leave some of it
    open. Without any, the definitions of the policies and nothing fixed."""
    known = list(points)
    names = sorted({p.policy for p in known})
    rows = [[1.0, *(p.unit_gib if p.policy == n else 0.0 for n in names)] for p in known]
    rest = [p.peak_gib - p.base_gib for p in known]
    start = [0.0, *(1.0 for _ in names)]
    # The normal equations.
    left = [
        [sum(r[i] * r[j] for r in rows) + (HELD if i == j else 0.0) for j in range(len(start))]
        for i in range(len(start))
    ]
    right = [sum(r[i] * y for r, y in zip(rows, rest, strict=True)) + HELD * start[i] for i in range(len(start))]
    solution = _solve(left, right)
    errors = [sum(a * b for a, b in zip(r, solution, strict=True)) - y for r, y in zip(rows, rest, strict=True)]
    scales = dict(zip(names, solution[1:], strict=True))
    return MemoryModel(solution[0], scales, max((abs(e) for e in errors), default=0.0))


def _solve(left: list[list[float]], right: list[float]) -> list[float]:
    """x of left · x = right by elimination; `left` is positive definite, so that no pivot is zero. numpy is not imported:
    the operator does without it."""
    size = len(right)
    work = [[*row, value] for row, value in zip(left, right, strict=True)]
    for i in range(size):
        for j in range(i + 1, size):
            factor = work[j][i] / work[i][i]
            work[j] = [b - factor * a for a, b in zip(work[i], work[j], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(work[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (work[i][size] - known) / work[i][i]
    return solution
