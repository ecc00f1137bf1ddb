"""How a batch is divided over devices: exactly, or with the rows that cost least. Importable without JAX.

Where devices do not divide the batch, rows without an instance fill it up. Devices that share sequences make fewer and
shorter rows of it, and exchange keys and values for that; which of the two loses less is reckoned here: products and
links at their published peaks, with what sharing costs and how long the links are waited for as in the compiled plans.
"""

import math

from trainer.hardware import DeviceType
from trainer.plan import rows_per_device, sequence_factors
from trainer.preflight.memory import GRADIENT_BYTES, shape_of
from trainer.preflight.model_flops import model_flops
from trainer.recipe import Recipe

TILE = 128  # tokens, the least of trainer.flash_blocks
EXCHANGES = 3  # gathered in the forward pass and again in the backward pass, and their gradients scattered
WAITED = 0.2  # of what is sent; the rest is behind work. Compiled plans with whole heads: 0.04 to 0.36, half below 0.17
SHARED = 0.03  # more work for each halving of a sequence. Compiled plans: by 2 0.03 to 0.07, by 4 0.05 to 0.09
SHARED_ON_CPU = 0.2  # a full layer of a shared sequence computes the hidden half of its scores as well


def factors(recipe: Recipe, kind: DeviceType, slices: int) -> list[int]:
    """Over how many devices to divide each sequence, the best number first; 1 is not at all.

    Those that make the batch exact, fewest first; where there are none, those that fill it up, by the time of a step.
    Empty where the recipe cannot have rows without an instance. On a TPU a device's chunks are whole tiles of the
    attention kernels.
    """
    possible = _possible(recipe, kind, slices)
    exact = [n for n in possible if _is_exact(recipe, kind, slices, n)]
    if exact or recipe.reduction == "invariant":
        return exact
    return sorted(possible, key=lambda n: step_seconds(recipe, kind, slices, n))


def divides(recipe: Recipe, kind: DeviceType, slices: int) -> bool:
    """Whether the devices divide the batch exactly."""
    return any(_is_exact(recipe, kind, slices, n) for n in _possible(recipe, kind, slices))


def step_seconds(
    recipe: Recipe, kind: DeviceType, slices: int, sequence: int, recomputed: float = 0.0, passes: int = 1
) -> float:
    """Of a step, relative to the other ways for the same slices alone: seconds at the peak, on a TPU. `recomputed` is
    the share of the forward pass, a third of the products, that the backward pass does again; each of the `passes`
    gathers the weights twice and scatters their gradients."""
    rows = rows_per_device(recipe.global_batch, kind.devices * slices // sequence)
    instance = model_flops(recipe) / recipe.global_batch / (kind.peak_flops_per_device or 1.0) * (1 + recomputed / 3)
    work = rows * instance / sequence
    if kind.links_bytes_per_second is None:
        return work * (1 + SHARED_ON_CPU * (sequence > 1))
    work *= 1 + SHARED * math.log2(sequence)
    shape = shape_of(recipe)
    weights = shape.parameters * (2 * shape.bytes + GRADIENT_BYTES) / kind.links_bytes_per_second
    return work + WAITED * (passes * weights + rows * exchange_seconds(recipe, kind, sequence))


def exchange_seconds(recipe: Recipe, kind: DeviceType, sequence: int) -> float:
    """What one of the devices that share an instance receives of keys and values, alone, at the peak of its links."""
    if sequence == 1:
        return 0.0
    model, length = recipe.model, recipe.sequence_length
    chunk, most = length // (2 * sequence), length - length // sequence
    positions = 0
    for layer in range(model.n_layers):
        window = model.window(layer)
        positions += 2 * window if 0 < window <= chunk else most
    received = EXCHANGES * positions * 2 * model.n_kv_heads * model.head_dim * shape_of(recipe).bytes
    within_a_chip = kind.chips and sequence <= kind.devices // kind.chips
    rate = kind.die_link_bytes_per_second if within_a_chip else kind.links_bytes_per_second
    assert rate is not None
    return received / rate


def _possible(recipe: Recipe, kind: DeviceType, slices: int) -> list[int]:
    multiple = 1 if kind.family == "cpu" else TILE
    found = sequence_factors(recipe, kind.devices * slices, kind.processes * slices, multiple)
    # Keys and values go between slices only where no slice has enough devices for one sequence.
    return [n for n in found if kind.devices % n == 0] or found


def _is_exact(recipe: Recipe, kind: DeviceType, slices: int, sequence: int) -> bool:
    return recipe.global_batch % (kind.devices * slices // sequence) == 0
