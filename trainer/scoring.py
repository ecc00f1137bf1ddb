"""Log-likelihoods of tokens in sequences of all lengths, on the sharded weights of training: what evaluation is made of.

Sequences go through the model in a few shapes only, so that little is compiled: by length (`length_buckets`) and by
whether few or many of their tokens are asked for. A device always gets as many rows of a shape (`rows_per_device`),
however many devices there are: each row's numbers come from the same program on any mesh, and all sums over rows are
made on the host. So a result does not depend on mesh, batches, order or padding; tests/unit/test_scoring.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.loss import head_loss
from trainer.model import Params, Weights, hidden_states
from trainer.recipe import Recipe
from trainer.sharding import all_axes, param_pspecs, param_shardings, replicated, sharded_weights

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]

SHORTEST = 128  # the TPU attention kernel works in multiples of it
TOKENS_PER_DEVICE = 8192  # in one forward pass: enough to keep a chip's matrix units busy
FEW = 8  # rows with at most a length / FEW tokens asked for have a shape of their own: the head is not cheap


class Row(NamedTuple):
    """One sequence, and which tokens are asked for: `targets[i]` as the token after `tokens[: positions[i] + 1]`."""

    tokens: I32  # [n]
    positions: I32  # [k], each below n
    targets: I32  # [k]


class Shape(NamedTuple):
    """A compiled shape: tokens per row, and tokens asked for per row."""

    length: int
    asked: int


def length_buckets(longest: int) -> list[int]:
    """The lengths that sequences of up to `longest` tokens are padded to: doubling from SHORTEST, `longest` last."""
    lengths = [longest]
    below = SHORTEST
    while below < longest:
        lengths.insert(-1, below)
        below *= 2
    return lengths


def shape_of(row: Row, longest: int) -> Shape:
    """The smallest shape that the row fits into."""
    length = next(bucket for bucket in length_buckets(longest) if len(row.tokens) <= bucket)
    few = max(1, length // FEW)
    return Shape(length, few if len(row.targets) <= few else length)


def rows_per_device(length: int) -> int:
    """How many rows of `length` a device gets at once. A function of the length alone: see the module's text."""
    return max(1, TOKENS_PER_DEVICE // length)


class Scorer:
    """Scores rows with any parameters of one recipe on one mesh. All processes of the gang call it alike."""

    def __init__(self, recipe: Recipe, mesh: Mesh, longest: int | None = None) -> None:
        """`longest` tokens in a row at most; by default what the recipe trains with."""
        self.longest = longest or recipe.sequence_length
        self._recipe, self._mesh = recipe, mesh
        self._compiled: set[Shape] = set()

    def score(
        self, params: Params, rows: Sequence[Row], beat: Callable[[int, bool], None] = lambda done, compiles: None
    ) -> list[F32]:
        """For each row f32[k]: the log-likelihood, in nats, of each token asked for. In the order of `rows`.

        `beat(rows done, whether what comes next compiles)` is called before each batch and at the end.
        """
        found: list[F32 | None] = [None] * len(rows)
        step = _score_step(self._recipe, self._mesh)
        done, pending = 0, None
        for shape, numbers in self._batches(rows):
            beat(done, shape not in self._compiled)
            self._compiled.add(shape)
            result = step(params, *self._put(shape, [rows[i] for i in numbers]))
            done += self._collect(pending, rows, found)  # while the devices compute the next ones
            pending = (numbers, result)
        done += self._collect(pending, rows, found)
        beat(done, False)
        return [one for one in found if one is not None]

    def _batches(self, rows: Sequence[Row]) -> Iterator[tuple[Shape, list[int]]]:
        """Numbers of rows of one shape, as many as go through at once, shape by shape."""
        by_shape: dict[Shape, list[int]] = {}
        for number, row in enumerate(rows):
            by_shape.setdefault(shape_of(row, self.longest), []).append(number)
        for shape in sorted(by_shape):
            numbers, size = by_shape[shape], rows_per_device(shape.length) * self._mesh.size
            for first in range(0, len(numbers), size):
                yield shape, numbers[first : first + size]

    def _put(self, shape: Shape, rows: list[Row]) -> tuple[jax.Array, ...]:
        """Tokens [R, length], positions and targets [R, asked] on the mesh. Empty rows fill it up: token 0 throughout."""
        count = rows_per_device(shape.length) * self._mesh.size
        share = count // jax.process_count()
        first = share * jax.process_index()
        arrays = [np.zeros((share, width), np.int32) for width in (shape.length, shape.asked, shape.asked)]
        for at, row in enumerate(rows[first : first + share]):
            for array, values in zip(arrays, row, strict=True):
                array[at, : len(values)] = values
        sharding = NamedSharding(self._mesh, PartitionSpec(all_axes(self._mesh), None))
        return tuple(jax.make_array_from_process_local_data(sharding, array) for array in arrays)

    def _collect(self, pending: tuple[list[int], Any] | None, rows: Sequence[Row], found: list[F32 | None]) -> int:
        if pending is None:
            return 0
        numbers, result = pending
        scores = np.asarray(result)
        for at, number in enumerate(numbers):
            found[number] = scores[at, : len(rows[number].targets)].copy()
        return len(numbers)


def _fenced(weights: Weights) -> Weights:
    """The same, but the compiler sees a weight that was gathered and one that was there as the same thing.

    Otherwise it fuses what follows differently, and one device's last bits are not those of two.
    """

    def fetch(name: str, value: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(weights.fetch(name, jax.lax.optimization_barrier(value)))

    return replace(weights, fetch=fetch)


@cache
def _score_step(recipe: Recipe, mesh: Mesh) -> Callable[..., jax.Array]:
    """Jitted `(params, tokens, positions, targets) -> f32 [R, asked]`, replicated: log-likelihoods."""
    model = recipe.model
    weights = _fenced(sharded_weights(model, mesh, recipe.compute_dtype, whole_sequences=True))

    def local(params: Params, tokens: jax.Array, positions: jax.Array, targets: jax.Array) -> jax.Array:
        hidden = hidden_states(params, tokens, model, weights)
        asked = jnp.take_along_axis(hidden, positions[..., None], axis=1)
        flat = asked.reshape(-1, asked.shape[-1])
        head = weights.get("head", params["head"])
        _, ce = head_loss(flat, head, targets.reshape(-1), jnp.ones(flat.shape[0], jnp.float32), 0.0)
        return jax.lax.optimization_barrier(-ce.reshape(targets.shape))

    rows = PartitionSpec(all_axes(mesh), None)
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(param_pspecs(model, mesh), rows, rows, rows), out_specs=rows, check_vma=False
    )
    at = NamedSharding(mesh, rows)
    return jax.jit(mapped, in_shardings=(param_shardings(model, mesh), at, at, at), out_shardings=replicated(mesh))
