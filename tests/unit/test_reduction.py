"""`reduction: invariant`: the tree of a sum does not depend on who holds which part."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tests.support.models import small_recipe
from trainer.errors import ConfigurationError
from trainer.hardware import device_type
from trainer.preflight.choice import candidates, refuse_inexact
from trainer.preflight.memory import GIB, base, gradient_copies, shape_of
from trainer.recipe import Recipe
from trainer.reduction import block_grid, squared_norm, sum_everywhere, sum_to_shards, tree_sum
from trainer.sharding import mesh_of

pytestmark = pytest.mark.slow

AXIS = "fsdp"
SPLITS = [(1, 32, 1), (1, 1, 32), (2, 4, 4), (4, 8, 1), (8, 1, 4), (8, 4, 1)]  # devices, micro-batch, accumulation


def mesh(devices: int) -> Mesh:
    return mesh_of(jax.devices()[:devices])


def wide(*shape: int) -> np.ndarray:
    """Numbers of very different sizes: nearly every order of adding them gives other bits."""
    random = np.random.default_rng(sum(shape))
    return (random.standard_normal(shape) * 10.0 ** random.uniform(-4, 4, shape)).astype(np.float32)


def neighbours_first(x: np.ndarray) -> np.ndarray:
    """The definition, in float32: the first axis, a power of two, summed away."""
    while len(x) > 1:
        x = x[0::2] + x[1::2]
    return x[0]


def bits(x: np.ndarray | jax.Array) -> list[int]:
    return np.atleast_1d(np.asarray(x)).view(np.uint32).ravel().tolist()


def sharded(
    devices: int, f: Callable[..., jax.Array], ins: PartitionSpec, outs: PartitionSpec
) -> Callable[..., jax.Array]:
    return jax.jit(jax.shard_map(f, mesh=mesh(devices), in_specs=ins, out_specs=outs, check_vma=False))


@pytest.mark.parametrize(("devices", "micro_batch", "accumulation"), SPLITS)
def test_any_split_of_a_batch_has_the_bits_of_the_tree(devices: int, micro_batch: int, accumulation: int) -> None:
    """The instances lie as a batch is laid out: [accumulation, devices · micro_batch]."""
    terms = wide(32, 16)

    def local(x: jax.Array) -> jax.Array:
        def of_micro_batch(j: jax.Array) -> jax.Array:
            own = tree_sum(micro_batch, lambda m: x[j, m])
            return sum_to_shards(own, AXIS, devices, 0)

        return tree_sum(accumulation, of_micro_batch)

    total = sharded(devices, local, PartitionSpec(None, AXIS), PartitionSpec(AXIS))
    laid_out = terms.reshape(accumulation, devices * micro_batch, 16)
    assert bits(total(laid_out)) == bits(neighbours_first(terms))


def test_the_order_matters_to_these_numbers() -> None:
    """Otherwise the test above could not fail."""
    terms = wide(32, 16)
    other_orders = [terms.sum(axis=0), neighbours_first(terms[::-1].reshape(2, 16, 16).swapaxes(0, 1).reshape(32, 16))]
    for other in other_orders:
        assert bits(other) != bits(neighbours_first(terms))


@pytest.mark.parametrize("devices", [2, 8])
def test_every_device_has_the_same_sum(devices: int) -> None:
    terms = wide(devices, 5)
    f = sharded(devices, lambda x: sum_everywhere(x, AXIS, devices), PartitionSpec(AXIS), PartitionSpec(AXIS))
    assert bits(f(terms)) == bits(np.tile(neighbours_first(terms), (devices, 1)))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_shards_are_where_psum_scatter_leaves_them(dim: int) -> None:
    whole = np.arange(8 * 8 * 16 * 8, dtype=np.float32).reshape(8, 8, 16, 8)  # sums are exact
    out = PartitionSpec(*(AXIS if i == dim else None for i in range(3)))
    ours = sharded(8, lambda x: sum_to_shards(x[0], AXIS, 8, dim), PartitionSpec(AXIS), out)
    theirs = partial(jax.lax.psum_scatter, axis_name=AXIS, scatter_dimension=dim, tiled=True)
    assert bits(ours(whole)) == bits(sharded(8, lambda x: theirs(x[0]), PartitionSpec(AXIS), out)(whole))


def test_the_norm_has_the_same_bits_wherever_a_parameter_is_cut() -> None:
    """Cut along one dimension on few devices, along another on many, or not at all; odd block sizes."""
    shapes = {"w": (3, 12, 16), "e": (40, 6), "n": (3, 7), "h": (6, 56)}
    cut = {"w": (False, True, True), "e": (True, True), "n": (False, False), "h": (True, True)}
    values = {name: wide(*shape) for name, shape in shapes.items()}
    grids = {name: block_grid(shape, cut[name], 16) for name, shape in shapes.items()}
    assert grids == {"w": (1, 4, 16), "e": (8, 2), "n": (1, 1), "h": (2, 8)}
    found = []
    for devices in (1, 2, 4, 8):
        dims = {
            name: next((i for i, n in enumerate(s) if devices > 1 and cut[name][i] and n % devices == 0), None)
            for name, s in shapes.items()
        }
        specs = {
            name: PartitionSpec(*(AXIS if i == dims[name] else None for i in range(len(shape))))
            for name, shape in shapes.items()
        }

        def norm(x: dict[str, jax.Array], dims: dict[str, int | None] = dims, devices: int = devices) -> jax.Array:
            return squared_norm(x, grids, dims, AXIS, devices)

        found += bits(sharded(devices, norm, (specs,), PartitionSpec())(values))
    assert len(set(found)) == 1, found
    exact = sum(float(np.sum(np.square(v, dtype=np.float64))) for v in values.values())
    assert np.array(found[:1], np.uint32).view(np.float32)[0] == pytest.approx(exact, rel=1e-6)


def test_a_batch_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match=r"global_batch must be a power of two: not 24, but 16 or 32"):
        Recipe.model_validate(small_recipe().model_dump() | {"global_batch": 24, "reduction": "invariant"})
    # Then every device count that divides the batch is a power of two; the others are refused for any recipe.
    with pytest.raises(ConfigurationError, match=r"384 devices.*these fit: "):
        refuse_inexact(small_recipe(global_batch=512, reduction="invariant"), device_type("tpu7x-2x2x1"), 48)


def test_accelerators_get_one_instance_per_pass() -> None:
    """Whole gradients, which a larger micro-batch needs, would not fit."""
    kind = device_type("tpu7x-2x2x1")
    recipe = small_recipe(global_batch=64)
    assert {c.plan.micro_batch for c in candidates(recipe, kind, 1)} == {1, 2, 4, 8}
    invariant = recipe.model_copy(update={"reduction": "invariant"})
    assert {c.plan.micro_batch for c in candidates(invariant, kind, 1)} == {1}


def test_nothing_is_multiplied_inside_a_sum() -> None:
    """A term that is a product enters the sum rounded: XLA must not fuse the two into one fma."""
    a, b = wide(16, 64), wide(16, 64)
    total = jax.jit(lambda a, b: tree_sum(16, lambda i: a[i] * b[i]))
    assert bits(total(a, b)) == bits(neighbours_first(a * b))
    assert jnp.isfinite(total(a, b)).all()


@pytest.mark.parametrize("accumulation", [1, 2, 8])
def test_the_memory_model_knows_the_stack_of_sums(accumulation: int) -> None:
    """It counts the levels that the tree has, and what is added to them."""
    term = jnp.zeros((3, 5))
    program = jax.make_jaxpr(lambda: tree_sum(accumulation, lambda i: term + i))()
    levels = max(out.aval.shape[0] for e in program.eqns for out in e.outvars if out.aval.shape[1:] == term.shape)
    recipe = small_recipe().model_copy(update={"reduction": "invariant"})
    shape = shape_of(recipe)
    assert gradient_copies(shape, accumulation) == levels + 1
    more = gradient_copies(shape, accumulation) - gradient_copies(shape_of(small_recipe()), accumulation)
    kept = base(shape, 8, accumulation) - base(shape_of(small_recipe()), 8, accumulation)
    assert kept * GIB == pytest.approx(more * 4 * shape.parameters / 8)
