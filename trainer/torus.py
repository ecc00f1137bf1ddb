"""Gathering and scattering over a three-dimensional torus of TPUs in two phases: within its planes, and across them.

libtpu 0.0.50.1 makes no all-gather over all three dimensions at once: it fills the whole array with zeros, writes its
part and sums with an all-reduce, which moves twice the bytes and writes the array once more. On v5p a reduce-scatter
over three dimensions becomes an all-reduce too. Of two phases each is what it says (docs/diary.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax

TILE_ROWS = 8  # of float32 in memory


@dataclass(frozen=True)
class Planes:
    """`count` planes of `size` devices each, neighbours along the mesh axis `axis`, or axes."""

    axis: str | tuple[str, ...]
    count: int
    size: int

    @property
    def _within(self) -> list[list[int]]:
        return [[p * self.size + i for i in range(self.size)] for p in range(self.count)]

    @property
    def _across(self) -> list[list[int]]:
        return [[p * self.size + i for p in range(self.count)] for i in range(self.size)]

    def all_gather(self, x: jax.Array, dim: int) -> jax.Array:
        """As jax.lax.all_gather along `dim`, tiled."""
        for groups in (self._within, self._across):
            x = jax.lax.all_gather(x, self.axis, axis=dim, tiled=True, axis_index_groups=groups)
        return x

    def psum_scatter(self, x: jax.Array, dim: int) -> jax.Array:
        """As jax.lax.psum_scatter along `dim`, tiled."""
        x = jax.lax.psum_scatter(x, self.axis, scatter_dimension=dim, tiled=True, axis_index_groups=self._across)
        rows, tiled = x.shape[dim] // self.size, True
        if dim == x.ndim - 2 and rows % TILE_ROWS:
            # XLA would pad each part to whole tiles, and do so on the TensorCore. Parts of a dimension of their own are whole.
            x, tiled = x.reshape(*x.shape[:dim], self.size, rows, x.shape[-1]), False
        return jax.lax.psum_scatter(x, self.axis, scatter_dimension=dim, tiled=tiled, axis_index_groups=self._within)


def planes(devices: Sequence[jax.Device], axis: str | tuple[str, ...]) -> Planes | None:
    """The planes of one slice, in the order of `devices`; None where it has fewer dimensions or they do not lie so."""
    if devices[0].platform != "tpu" or len({getattr(d, "slice_index", 0) for d in devices}) > 1:
        return None
    extent = [len({d.coords[dim] for d in devices}) for dim in range(3)]
    if min(extent) == 1:
        return None
    size = len(devices) // extent[2]
    for start in range(0, len(devices), size):
        if len({d.coords[2] for d in devices[start : start + size]}) > 1:
            return None
    return Planes(axis, extent[2], size)
