"""`reduction: invariant`: sums over instances, devices and elements whose bits do not depend on who holds what.

Floating-point addition is commutative, not associative: a sum has fixed bits only if its tree is fixed. Here it is the
tree over the bits of an index, lowest first: neighbours are added, then neighbouring pairs, and so on. The instances of
a global batch lie on micro-batch row, device, micro-batch in this order from the lowest bit (see `Plan`), so wherever a
power of two cuts the index, each part is a subtree: one device sums its own, recursive halving continues over the bits
of the device's number, accumulation over those of the micro-batch. No part is ever summed in another order.

Sums over the elements of a parameter (the gradient's norm) go the same way over a grid of blocks that is fixed by the
parameter's shape. Nothing here multiplies, and operands come through an optimization_barrier: a product that is fused
with an addition would be rounded once instead of twice (fma), and fusion may depend on shapes.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp


def tree_sum[Tree](count: int, term: Callable[[jax.Array], Tree]) -> Tree:
    """Σ term(i) for i in 0..count-1, a power of two, as the tree over the bits of i. `term` gives a pytree of arrays.

    A stack holds one sum per level, as a binary counter holds digits: log2(count) + 1 times the memory of a term, one
    addition per term. The terms are computed one after the other by one loop body, so that all are the same program.
    """
    levels = count.bit_length()
    stack = jax.tree.map(lambda s: jnp.zeros((levels, *s.shape), s.dtype), jax.eval_shape(term, jnp.int32(0)))

    def add(i: jax.Array, stack: Tree) -> Tree:
        part = jax.lax.optimization_barrier(term(i))

        def carry(digit: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
            level, part = digit
            return level + 1, jax.tree.map(
                lambda s, p: jax.lax.dynamic_index_in_dim(s, level, 0, False) + p, stack, part
            )

        def is_set(digit: tuple[jax.Array, Tree]) -> jax.Array:
            return (i >> digit[0]) & 1 == 1

        level, part = jax.lax.while_loop(is_set, carry, (jnp.int32(0), part))
        return jax.tree.map(lambda s, p: jax.lax.dynamic_update_index_in_dim(s, p, level, 0), stack, part)

    stack = jax.lax.fori_loop(0, _turns(count), add, stack)
    return jax.tree.map(lambda s: s[-1], stack)


def one_by_one[Tree](count: int, f: Callable[[jax.Array], Tree]) -> Tree:
    """f(0), f(1), … f(count - 1), stacked, computed by one loop body as in `tree_sum`."""
    out = jax.tree.map(lambda s: jnp.zeros((count, *s.shape), s.dtype), jax.eval_shape(f, jnp.int32(0)))

    def put(i: jax.Array, out: Tree) -> Tree:
        found = jax.lax.optimization_barrier(f(i))
        return jax.tree.map(lambda o, x: jax.lax.dynamic_update_index_in_dim(o, x, i, 0), out, found)

    return jax.lax.fori_loop(0, _turns(count), put, out)


def pick(x: jax.Array, i: jax.Array) -> jax.Array:
    """x[i], i the index of one of these loops. XLA sees that there is no choice where x has but one element, and moves
    what was the loop's body out of the loop; behind the barrier it does not.
    """
    x, i = jax.lax.optimization_barrier((x, i))
    return x[i]


def _turns(count: int) -> int | jax.Array:
    """The end of a loop. XLA dissolves a loop that it knows to turn once, and then fuses what was its body otherwise."""
    return count if count > 1 else jax.lax.optimization_barrier(jnp.int32(1))


def sum_everywhere(x: jax.Array, axis: str, devices: int) -> jax.Array:
    """The sum of every device's x, on every device: log2(devices) exchanges of all of x. Inside a shard_map."""
    for bit in _bits(devices):
        x = jax.lax.optimization_barrier(x)
        x = x + jax.lax.ppermute(x, axis, [(d, d ^ bit) for d in range(devices)])
    return x


def sum_to_shards(x: jax.Array, axis: str, devices: int, dim: int) -> jax.Array:
    """The sum of every device's x, cut along `dim`: device d gets the d-th part, as psum_scatter(tiled=True) gives it.

    Recursive halving from the lowest bit of the device's number: in each round a device sends the parts that its
    partner is to keep. It sends 1 - 1/devices of x in all, as much as a ring does. Inside a shard_map.
    """
    parts = jnp.moveaxis(x, dim, 0)
    parts = parts.reshape(devices, parts.shape[0] // devices, *parts.shape[1:])
    me = jax.lax.axis_index(axis)
    for bit in _bits(devices):
        pairs = jax.lax.optimization_barrier(parts.reshape(-1, 2, *parts.shape[1:]))
        mine = (me // bit) % 2
        keep, give = (jax.lax.dynamic_index_in_dim(pairs, side, 1, False) for side in (mine, 1 - mine))
        parts = keep + jax.lax.ppermute(give, axis, [(d, d ^ bit) for d in range(devices)])
    return jnp.moveaxis(parts[0], 0, dim)


def squared_norm(
    parts: Mapping[str, jax.Array],
    blocks: Mapping[str, Sequence[int]],
    sharded: Mapping[str, int | None],
    axis: str,
    devices: int,
) -> jax.Array:
    """f32 []: Σ x² over all elements of all parameters. Inside a shard_map.

    `parts` are what this device holds of each, cut along dimension `sharded[name]` (None: not at all); `blocks[name]`
    is the grid of blocks of the whole parameter, one power of two per dimension, a multiple of the devices where it is
    cut (`block_grid`).
    """
    sums, held = {}, {}
    for name, x in parts.items():
        grid = list(blocks[name])
        if (dim := sharded[name]) is not None:
            grid[dim] //= devices
        sums[name] = _block_sums(jax.lax.optimization_barrier(jnp.square(x)), grid)
    # Grids shrink from the last dimension to the first; where one is cut over the devices, all wait for the exchange.
    for name, x in sums.items():
        while x.ndim and (sharded[name] is None or x.ndim > sharded[name]):
            x = _pairwise(x)
        held[name] = x
    cut = [name for name in held if sharded[name] is not None]
    if devices > 1 and cut:
        flat = sum_everywhere(jnp.concatenate([held[name].reshape(-1) for name in cut]), axis, devices)
        at = 0
        for name in cut:
            size = held[name].size
            held[name], at = flat[at : at + size].reshape(held[name].shape), at + size
    total = jnp.zeros((), jnp.float32)
    for x in held.values():
        while x.ndim:
            x = _pairwise(x)
        total = total + x
    return total


def block_grid(shape: Sequence[int], may_be_cut: Sequence[bool], most: int) -> tuple[int, ...]:
    """Blocks per dimension for `squared_norm`: the largest power of two that divides it, at most `most` (a power of
    two); 1 where the dimension is never cut.
    """
    return tuple(min(size & -size, most) if cut else 1 for size, cut in zip(shape, may_be_cut, strict=True))


def _block_sums(x: jax.Array, grid: Sequence[int]) -> jax.Array:
    """x summed within each block of the grid: an array of the grid's shape."""
    shape = [n for size, blocks in zip(x.shape, grid, strict=True) for n in (blocks, size // blocks)]
    x = x.reshape(shape)
    for dim in range(len(grid)):
        while (n := x.shape[2 * dim + 1]) > 1:
            low, high, rest = (
                jax.lax.slice_in_dim(x, a, b, axis=2 * dim + 1)
                for a, b in ((0, n // 2), (n // 2, n // 2 * 2), (n // 2 * 2, n))
            )
            x = low + high
            x = jnp.concatenate([x, rest], axis=2 * dim + 1) if n % 2 else x
    return x.reshape(tuple(grid))


def _pairwise(x: jax.Array) -> jax.Array:
    """The last dimension, a power of two, summed away: neighbours first."""
    while x.shape[-1] > 1:
        x = x.reshape(*x.shape[:-1], -1, 2)
        x = x[..., 0] + x[..., 1]
    return x[..., 0]


def _bits(count: int) -> list[int]:
    """1, 2, 4, … below count, a power of two."""
    return [1 << i for i in range(count.bit_length() - 1)]
