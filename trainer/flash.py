"""Attention on a TPU by our own Pallas kernels, one forward and one backward (FlashAttention-2, arXiv 2307.08691).

They read queries, keys and values as the projections leave them, [batch, length, heads · head_dim], and write what the
output projection reads: no head is ever moved. Tiles that the mask empties are not computed (trainer.flash_blocks). The
backward kernel goes along the queries of each block of keys and keeps the whole dq of one head in VMEM, so that there
are five matrix products per tile and no partial sums in HBM.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trainer.attention import KEPT_BY_ATTENTION
from trainer.flash_blocks import Kind, Run, Visits, divided_visits, sizes, visits

LANES, SUBLANES = 128, 8
MASKED = -0.7 * float(np.finfo(np.float32).max)  # finite, so that a difference of two is 0 and not nan
VMEM_BYTES = 56 * 2**20  # of at least 64 MiB on v5p and tpu7x
MAX_ELEMENTS = 2**21  # length · head_dim of the backward kernel: 20 bytes each stay in VMEM with all else
NT, NN, TN = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ())), (((0,), (0,)), ((), ()))


class Division(NamedTuple):
    """Where queries and keys are in their sequence, when devices along the mesh's `axis` share it: per device the positions
    at which stretches of `unit` tokens begin, as trainer.flash_blocks.divided_visits takes them.
    """

    axis: str
    unit: int
    queries: tuple[tuple[int, ...], ...]
    keys: tuple[tuple[int, ...], ...]


Documents = tuple[jax.Array, jax.Array] | None  # int32 [batch, length] of the queries and of the keys


def fits(length: int, head_dim: int) -> bool:
    """Whether the kernels exist for this shape."""
    return sizes(length) is not None and head_dim % LANES == 0 and length * head_dim <= MAX_ELEMENTS


def flash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array | None, head_dim: int, window: int
) -> jax.Array:
    """softmax(q kᵀ) v as trainer.attention computes it; q [batch, length, heads · head_dim], scaled already.

    k, v [batch, length, kv_heads · head_dim]; documents int32 [batch, length] or None. Returns q's shape and dtype.
    """
    return flash(q, k, v, None if documents is None else (documents, documents), head_dim, window, None)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def flash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    documents: Documents,
    head_dim: int,
    window: int,
    division: Division | None,
) -> jax.Array:
    """`flash_attention` of some queries with all keys of their sequence, inside a shard_map where it is divided."""
    return _forward(q, k, v, documents, head_dim, window, division)[0]


def _steps(q: jax.Array, window: int, by_keys: bool, division: Division | None) -> Visits:
    if division is None:
        return visits(q.shape[1], window, by_keys)
    return divided_visits(np.asarray(division.queries), np.asarray(division.keys), division.unit, window, by_keys)


def _mine(tables: list[np.ndarray], division: Division | None) -> list[Any]:
    """Of each table what this device goes by."""
    if division is None:
        return list(tables)
    return [jnp.asarray(table)[jax.lax.axis_index(division.axis)] for table in tables]


def _dot(a: jax.Array, b: jax.Array, dims: Any) -> jax.Array:
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _visible(kind: Kind, tile: int, window: int, strip: int, run: Run, keys_first: bool) -> jax.Array:
    """bool: of strip `strip` with its run of tiles; queries × keys, or keys × queries."""
    shape = (tile, (run.stop - run.start) * tile)
    along = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + run.start * tile
    across = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + strip * tile
    distance = kind.offset + (along - across if keys_first else across - along)
    return (distance >= 0) & (distance < window) if window > 0 else distance >= 0


def _forward_kernel(steps: Visits, window: int, *refs: Any) -> None:
    queries, _, kinds, q_ref, k_ref, v_ref, *rest = refs
    *document_refs, out_ref, lse_ref, max_ref, sum_ref, acc_ref = rest
    t, last, tile = pl.program_id(2), pl.num_programs(2) - 1, steps.tile
    new_row = (t == 0) | (queries[t] != queries[jnp.maximum(t - 1, 0)])
    row_ends = (t == last) | (queries[t] != queries[jnp.minimum(t + 1, last)])

    @pl.when(new_row)
    def _() -> None:
        max_ref[...] = jnp.full_like(max_ref, MASKED)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def block(kind: Kind) -> None:
        for strip, run in enumerate(kind.rows):
            if run.start == run.stop:
                continue
            rows, columns = pl.ds(strip * tile, tile), pl.ds(run.start * tile, (run.stop - run.start) * tile)
            scores = _dot(q_ref[rows, :], k_ref[columns, :], NT)
            if run.masked:
                scores = jnp.where(_visible(kind, tile, window, strip, run, False), scores, MASKED)
            if document_refs:
                of_query, of_key = document_refs
                scores = jnp.where(of_query[rows, :1] == of_key[:1, columns], scores, MASKED)
            before = max_ref[rows, :]
            top = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
            exp = jnp.exp(scores - top[:, :1])
            fade = jnp.exp(before - top)
            max_ref[rows, :] = top
            sum_ref[rows, :] = fade * sum_ref[rows, :] + jnp.sum(exp, axis=1, keepdims=True)
            acc_ref[rows, :] = fade[:, :1] * acc_ref[rows, :] + _dot(exp.astype(v_ref.dtype), v_ref[columns, :], NN)

    for n, kind in enumerate(steps.kinds):
        pl.when(kinds[t] == n)(partial(block, kind))

    @pl.when(row_ends)
    def _() -> None:
        total = sum_ref[...]
        out_ref[...] = (acc_ref[...] * (1 / total[:, :1])).astype(out_ref.dtype)
        lse_ref[...] = (max_ref[...] + jnp.log(total)).T[:1]


def _backward_kernel(steps: Visits, window: int, *refs: Any) -> None:
    queries, keys, kinds, firsts, _, q_ref, k_ref, v_ref, lse_ref, out_ref, g_ref, *rest = refs
    *document_refs, dq_ref, dk_ref, dv_ref, dq_acc, dk_acc, dv_acc, along_ref = rest
    t, last, tile = pl.program_id(2), pl.num_programs(2) - 1, steps.tile
    i = queries[t]
    new_column = (t == 0) | (keys[t] != keys[jnp.maximum(t - 1, 0)])
    column_ends = (t == last) | (keys[t] != keys[jnp.minimum(t + 1, last)])

    @pl.when(t == 0)
    def _() -> None:
        dq_acc[...] = jnp.zeros_like(dq_acc)

    @pl.when(new_column)
    def _() -> None:
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)

    @pl.when(firsts[t] == 1)
    def _() -> None:
        """Σ g·out of each query, once per head: what the softmax's derivative takes off dP."""
        products = g_ref[...].astype(jnp.float32) * out_ref[...].astype(jnp.float32)
        along = jnp.broadcast_to(jnp.sum(products, axis=1, keepdims=True), (products.shape[0], LANES))
        along_ref[i] = along.T[:SUBLANES]

    def block(kind: Kind) -> None:
        for strip, run in enumerate(kind.columns):
            if run.start == run.stop:
                continue
            count = (run.stop - run.start) * tile
            mine, others = pl.ds(strip * tile, tile), pl.ds(run.start * tile, count)
            k, v, q, g = k_ref[mine, :], v_ref[mine, :], q_ref[others, :], g_ref[others, :]
            scores = _dot(k, q, NT)
            if run.masked:
                scores = jnp.where(_visible(kind, tile, window, strip, run, True), scores, MASKED)
            if document_refs:
                of_query, of_key = document_refs
                scores = jnp.where(of_key[mine, :1] == of_query[:1, others], scores, MASKED)
            p = jnp.exp(scores - lse_ref[:1, others])
            dv_acc[mine, :] += _dot(p.astype(g.dtype), g, NN)
            ds = (p * (_dot(v, g, NT) - along_ref[i, :1, others])).astype(q.dtype)
            dk_acc[mine, :] += _dot(ds, q, NN)
            at = pl.ds(pl.multiple_of(i * steps.block + run.start * tile, tile), count)
            dq_acc[at, :] += _dot(ds, k, TN)

    for n, kind in enumerate(steps.kinds):
        pl.when(kinds[t] == n)(partial(block, kind))

    @pl.when(column_ends)
    def _() -> None:
        dk_ref[...] = dk_acc[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_acc[...].astype(dv_ref.dtype)

    @pl.when(t == last)
    def _() -> None:
        dq_ref[...] = dq_acc[...].astype(dq_ref.dtype)


def _parameters() -> pltpu.CompilerParams:
    """The two TensorCores of a v5p device share batch and heads; the steps of one head follow each other."""
    return pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES)


def _cost(products: int, steps: Visits, batch: int, heads: int, head_dim: int, arrays: list[Any]) -> pl.CostEstimate:
    pairs = batch * heads * steps.pairs
    return pl.CostEstimate(
        flops=products * 2 * head_dim * pairs,
        transcendentals=pairs,
        bytes_accessed=sum(a.size * a.dtype.itemsize for a in arrays),
    )


def _document_operands(down: jax.Array, along: jax.Array) -> list[jax.Array]:
    """`down` along the sublanes [batch, length, LANES], `along` along the lanes [batch, SUBLANES, length]."""
    return [
        jnp.broadcast_to(down[:, :, None], (*down.shape, LANES)),
        jnp.broadcast_to(along[:, None, :], (along.shape[0], SUBLANES, along.shape[1])),
    ]


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    documents: Documents,
    head_dim: int,
    window: int,
    division: Division | None,
) -> tuple[jax.Array, jax.Array]:
    """The attention, and the log of each query's sum of exponentials, f32 [batch, heads, 1, length]."""
    batch, length, width = q.shape
    heads, group = width // head_dim, width // k.shape[2]
    steps = _steps(q, window, False, division)
    block = steps.block
    of_query = pl.BlockSpec((None, block, head_dim), lambda b, h, t, i, j, n: (b, i[t], h))
    of_key = pl.BlockSpec((None, block, head_dim), lambda b, h, t, i, j, n: (b, j[t], h // group))
    in_specs, operands = [of_query, of_key, of_key], [q, k, v]
    if documents is not None:
        in_specs += [
            pl.BlockSpec((None, block, LANES), lambda b, h, t, i, j, n: (b, i[t], 0)),
            pl.BlockSpec((None, SUBLANES, block), lambda b, h, t, i, j, n: (b, 0, j[t])),
        ]
        operands += _document_operands(*documents)
    out = [
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((batch, heads, 1, length), jnp.float32),
    ]
    kernel = pl.pallas_call(
        partial(_forward_kernel, steps, window),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, heads, steps.kind.shape[-1]),
            in_specs=in_specs,
            out_specs=[
                of_query,
                pl.BlockSpec((None, None, 1, block), lambda b, h, t, i, j, n: (b, h, 0, i[t])),
            ],
            scratch_shapes=[
                pltpu.VMEM((block, LANES), jnp.float32),
                pltpu.VMEM((block, LANES), jnp.float32),
                pltpu.VMEM((block, head_dim), jnp.float32),
            ],
        ),
        out_shape=out,
        compiler_params=_parameters(),
        cost_estimate=_cost(2, steps, batch, heads, head_dim, [*operands, *out]),
        name="attention_forward",
    )
    attended, lse = kernel(*_mine([steps.queries, steps.keys, steps.kind], division), *operands)
    return attended, lse


def _forward_rule(q, k, v, documents, head_dim, window, division):  # type: ignore[no-untyped-def]
    made = _forward(q, k, v, documents, head_dim, window, division)
    out, lse = (checkpoint_name(x, name) for x, name in zip(made, KEPT_BY_ATTENTION, strict=True))
    return out, (q, k, v, documents, out, lse)


def _backward(head_dim, window, division, kept, g):  # type: ignore[no-untyped-def]
    q, k, v, documents, out, lse = kept
    batch, length, width = q.shape
    heads, kv_heads = width // head_dim, k.shape[2] // head_dim
    group = heads // kv_heads
    steps = _steps(q, window, True, division)
    block = steps.block
    firsts, needed = _first_visits(steps.queries)
    of_query = pl.BlockSpec((None, block, head_dim), lambda b, h, t, i, j, n, f, o: (b, i[t], h))
    of_key = pl.BlockSpec((None, block, head_dim), lambda b, h, t, i, j, n, f, o: (b, j[t], h // group))
    to_key = pl.BlockSpec((None, block, head_dim), lambda b, h, t, i, j, n, f, o: (b, j[t], h))
    of_out = pl.BlockSpec((None, block, head_dim), lambda b, h, t, i, j, n, f, o: (b, o[t], h))
    row = pl.BlockSpec((None, None, 1, block), lambda b, h, t, i, j, n, f, o: (b, h, 0, i[t]))
    whole = pl.BlockSpec((None, length, head_dim), lambda b, h, t, i, j, n, f, o: (b, 0, h))
    in_specs, operands = [of_query, of_key, of_key, row, of_out, of_query], [q, k, v, lse, out, g]
    if documents is not None:
        in_specs += [
            pl.BlockSpec((None, SUBLANES, block), lambda b, h, t, i, j, n, f, o: (b, 0, i[t])),
            pl.BlockSpec((None, block, LANES), lambda b, h, t, i, j, n, f, o: (b, j[t], 0)),
        ]
        operands += reversed(_document_operands(*reversed(documents)))
    made = [jax.ShapeDtypeStruct((batch, x.shape[1], width), x.dtype) for x in (q, k, v)]
    kernel = pl.pallas_call(
        partial(_backward_kernel, steps, window),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(batch, heads, steps.kind.shape[-1]),
            in_specs=in_specs,
            out_specs=[whole, to_key, to_key],
            scratch_shapes=[
                pltpu.VMEM((length, head_dim), jnp.float32),
                pltpu.VMEM((block, head_dim), jnp.float32),
                pltpu.VMEM((block, head_dim), jnp.float32),
                pltpu.VMEM((length // block, SUBLANES, block), jnp.float32),
            ],
        ),
        out_shape=made,
        compiler_params=_parameters(),
        cost_estimate=_cost(5, steps, batch, heads, head_dim, [*operands, *made]),
        name="attention_backward",
    )
    tables = _mine([steps.queries, steps.keys, steps.kind, firsts, needed], division)
    dq, dk, dv = kernel(*tables, *operands)
    if group > 1:  # the query heads that read one key head
        dk, dv = (
            jnp.sum(d.reshape(*k.shape[:2], kv_heads, group, head_dim), axis=3, dtype=jnp.float32)
            .astype(d.dtype)
            .reshape(k.shape)
            for d in (dk, dv)
        )
    return dq, dk, dv, None


def _first_visits(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int32, of the shape of `blocks` [(devices,) steps]: whether a block comes for the first time; and the block that
    did so last, which need not be read again.
    """
    firsts, needed = np.zeros_like(blocks), np.zeros_like(blocks)
    for device in np.ndindex(blocks.shape[:-1]):
        seen: set[int] = set()
        for step, block in enumerate(blocks[device].tolist()):
            firsts[*device, step] = block not in seen
            needed[*device, step] = needed[*device, step - 1] if block in seen else block
            seen.add(block)
    return firsts, needed


flash.defvjp(_forward_rule, _backward)
