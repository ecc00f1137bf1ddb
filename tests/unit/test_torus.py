"""Two phases, within planes and across them, are one gather and one scatter."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from trainer import sequence, xla_flags
from trainer.sharding import AXIS, mesh_of
from trainer.torus import Planes, planes


@pytest.mark.parametrize("planes", [Planes(AXIS, 2, 4), Planes(AXIS, 4, 2), Planes((AXIS, sequence.AXIS), 2, 4)])
@pytest.mark.parametrize(("dim", "rows"), [(0, 16), (0, 64), (1, 16)])
def test_two_phases_do_what_one_does(planes: Planes, dim: int, rows: int) -> None:
    mesh, axis = mesh_of(jax.devices()[:8], 1 if planes.axis == AXIS else 2), planes.axis
    # Sums are exact; parts are of 2 rows, or 3 columns, and of whole tiles of 8 rows.
    x = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (rows, 24)), jnp.float32)
    spec = PartitionSpec(*(axis if d == dim else None for d in range(2)))

    def both(part: jax.Array) -> tuple[jax.Array, ...]:
        whole = planes.all_gather(part, dim)
        mine = whole * (1 + jax.lax.axis_index(axis))
        plain = jax.lax.psum_scatter(mine, axis, scatter_dimension=dim, tiled=True)
        return whole, planes.psum_scatter(mine, dim), plain

    whole, scattered, plain = jax.jit(
        jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=(PartitionSpec(), spec, spec), check_vma=False)
    )(x)
    np.testing.assert_array_equal(whole, x)
    np.testing.assert_array_equal(scattered, plain)
    np.testing.assert_array_equal(scattered, 36 * x)


def torus(x: int, y: int, z: int, slices: int = 1) -> list[Any]:
    return [
        SimpleNamespace(platform="tpu", coords=(i, j, k), slice_index=s)
        for s in range(slices)
        for k in range(z)
        for j in range(y)
        for i in range(x)
    ]


def test_planes_are_found_where_they_lie_one_after_the_other() -> None:
    assert planes(torus(2, 4, 8), "a") == Planes("a", 8, 8)
    assert planes(torus(2, 4, 1), "a") is None, "one plane"
    assert planes(torus(2, 2, 2, slices=2), "a") is None
    assert planes(torus(2, 2, 2)[::-1], "a") == Planes("a", 2, 4)
    assert planes(sorted(torus(2, 2, 2), key=lambda d: d.coords), "a") is None, "z fastest"
    assert planes(jax.devices()[:8], "a") is None


def test_options_are_for_tpus_alone() -> None:
    assert xla_flags.options(mesh_of(jax.devices()[:1])) is None
