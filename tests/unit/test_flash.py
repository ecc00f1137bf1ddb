"""Our own TPU kernels: their mathematics interpreted on the CPU, which tiles they compute, and that they lower."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, PartitionSpec

from trainer import flash_blocks, sequence
from trainer.attention import visible, whole_attention
from trainer.flash import flash_attention
from trainer.flash_sequence import divided_attention
from trainer.norm_rope import norm_rope
from trainer.rope import norm_rope as plain_norm_rope
from trainer.rope import rope_table
from trainer.splash import attention_for

pytestmark = pytest.mark.slow

LENGTH = 512


def numbers(*shape: int, dtype: str = "float32", seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def documents() -> jax.Array:
    """int32 [1, LENGTH]: some 60 tokens each, one of a single token, one over a block's border."""
    ends = np.zeros((1, LENGTH), np.int32)
    ends[0, [30, 31, 90, 120, 140, 200, 300, 410]] = 1
    return jnp.asarray(np.cumsum(ends, axis=1) - ends, jnp.int32)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two by two blocks of two by two tiles each."""
    monkeypatch.setattr(flash_blocks, "BLOCK", LENGTH // 2)
    monkeypatch.setattr(flash_blocks, "TILE", LENGTH // 4)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("head_dim", "heads", "window", "masked"), [(128, 2, 150, True), (128, 1, -1, True), (256, 1, 128, False)]
)
def test_the_kernels_compute_what_the_plain_attention_does(
    head_dim: int, heads: int, window: int, masked: bool
) -> None:
    """With two query heads there is one key head."""
    q, k, v = (numbers(1, LENGTH, n * head_dim, seed=i) for i, n in enumerate((heads, 1, 1)))
    g = numbers(*q.shape, seed=3)
    ids = documents() if masked else None

    def both(attend: Callable[..., jax.Array]) -> tuple[jax.Array, ...]:
        out, vjp = jax.vjp(lambda *x: attend(*x, ids, head_dim, window), q / head_dim**0.5, k, v)
        return out, *vjp(g)

    with pltpu.force_tpu_interpret_mode():
        got = jax.jit(lambda: both(flash_attention))()
    for mine, wanted in zip(got, both(whole_attention), strict=True):
        np.testing.assert_allclose(mine, wanted, atol=5e-5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("window", "masked"), [(150, True), (100, True)])
def test_devices_that_share_a_sequence_find_together_what_one_finds(window: int, masked: bool) -> None:
    """Chunks are of 128: the longer window needs all keys, the shorter one those of a neighbour. Gradients of keys and
    values are summed over the devices. Two query heads to a key head.
    """
    q, k, v = (numbers(1, LENGTH, n * 128, seed=i) for i, n in enumerate((2, 1, 1)))
    g = numbers(*q.shape, seed=3)
    ids = documents() if masked else None

    def both(attend: Callable[..., jax.Array]) -> tuple[jax.Array, ...]:
        out, vjp = jax.vjp(attend, q / 128**0.5, k, v)
        return out, *vjp(g)

    def shared(*x: jax.Array) -> jax.Array:
        def local(*x: jax.Array) -> jax.Array:
            mine = (sequence.part(one, 2, 1) for one in x)
            return sequence.gather(divided_attention(*mine, ids, 128, window, 2))

        everywhere = PartitionSpec()
        mesh = Mesh(jax.devices()[:2], (sequence.AXIS,))
        found = jax.shard_map(local, mesh=mesh, in_specs=(everywhere,) * 3, out_specs=everywhere, check_vma=False)(*x)
        return sequence.in_order(found, 2)

    with pltpu.force_tpu_interpret_mode():
        got = jax.jit(lambda: both(shared))()
    for mine, wanted in zip(got, both(lambda *x: whole_attention(*x, ids, 128, window)), strict=True):
        np.testing.assert_allclose(mine, wanted, atol=5e-5)


@pytest.mark.parametrize("window", [-1, 300])
@pytest.mark.parametrize("by_keys", [False, True])
def test_devices_that_share_a_sequence_compute_every_tile_once_and_as_many_each(window: int, by_keys: bool) -> None:
    chunk, count = 512, 2
    held = sequence.chunks_held(count)
    everywhere = np.tile(held.reshape(-1), (count, 1))
    steps = flash_blocks.divided_visits(held * chunk, everywhere * chunk, chunk, window, by_keys)
    tiles, per_block, per_chunk = 2 * count * chunk // steps.tile, steps.block // steps.tile, chunk // steps.block
    found = np.zeros((tiles, tiles), int)

    def first_tile(chunks: np.ndarray, block: int) -> int:
        return int(chunks[block // per_chunk] * per_chunk + block % per_chunk) * per_block

    work = []
    for device in range(count):
        before = found.sum()
        for i, j, n in zip(steps.queries[device], steps.keys[device], steps.kind[device], strict=True):
            query, key = first_tile(held[device], i), first_tile(held.reshape(-1), j)
            for strip, run in enumerate(steps.kinds[n].rows if n < len(steps.kinds) else ()):
                found[query + strip, key + run.start : key + run.stop] += 1
        work.append(found.sum() - before)
        if by_keys:
            assert set(steps.keys[device].tolist()) == set(range(2 * count * per_chunk)), "each gradient is written"
    positions = np.arange(2 * count * chunk)
    mask = visible(positions, positions, window).reshape(tiles, steps.tile, tiles, steps.tile)
    np.testing.assert_array_equal(found, mask.any(axis=(1, 3)))
    assert steps.pairs == max(work) * steps.tile**2
    if window < 0:
        assert len(set(work)) == 1


@pytest.mark.parametrize(("length", "window"), [(1024, -1), (2048, 1024), (2048, 700), (384, 1), (512, 4096)])
@pytest.mark.parametrize("by_keys", [False, True])
def test_every_tile_with_a_visible_pair_is_computed_once_and_no_other(length: int, window: int, by_keys: bool) -> None:
    steps = flash_blocks.visits(length, window, by_keys)
    tiles = length // steps.tile
    mask = visible(np.arange(length), np.arange(length), window).reshape(tiles, steps.tile, tiles, steps.tile)
    count, whole = np.zeros((tiles, tiles), int), np.zeros((tiles, tiles), bool)
    per_block = steps.block // steps.tile
    for i, j, n in zip(steps.queries, steps.keys, steps.kind, strict=True):
        kind = steps.kinds[n]
        assert kind.offset in (0, (i - j) * steps.block)
        for strip, run in enumerate(kind.columns if by_keys else kind.rows):
            mine = np.arange(run.start, run.stop)
            at = (
                (i * per_block + mine, j * per_block + strip)
                if by_keys
                else (i * per_block + strip, j * per_block + mine)
            )
            count[at] += 1
            whole[at] = not run.masked
    np.testing.assert_array_equal(count, mask.any(axis=(1, 3)))
    assert mask.all(axis=(1, 3))[whole].all(), "what is not masked is all visible"
    assert steps.pairs == count.sum() * steps.tile**2
    ordered = (
        list(zip(steps.keys, steps.queries, strict=True))
        if by_keys
        else list(zip(steps.queries, steps.keys, strict=True))
    )
    assert ordered == sorted(ordered)


@pytest.mark.parametrize(("head_dim", "dtype"), [(128, "float32"), (256, "bfloat16")])
def test_norm_and_rotation_in_one_are_the_two_one_after_the_other(head_dim: int, dtype: str) -> None:
    x, g = (numbers(2, 256, 2 * head_dim, dtype=dtype, seed=i) for i in range(2))
    weight, rope = 1 + 0.1 * numbers(2 * head_dim), rope_table(256, head_dim, 5e5)

    def both(norm_rope: Callable[..., jax.Array]) -> tuple[jax.Array, ...]:
        out, vjp = jax.vjp(lambda x, w: norm_rope(x, w, rope, head_dim, 1e-6), x, weight)
        return out, *vjp(g)

    with pltpu.force_tpu_interpret_mode():
        out, dx, dw = jax.jit(lambda: both(norm_rope))()
    wanted = both(plain_norm_rope)
    rounding = {"float32": 2e-6, "bfloat16": 2**-8}[dtype]
    for mine, theirs in zip((out, dx), wanted, strict=False):
        assert mine.dtype == theirs.dtype
        np.testing.assert_allclose(mine.astype("float32"), theirs.astype("float32"), rtol=rounding, atol=rounding)
    np.testing.assert_allclose(dw, wanted[2], rtol=1e-4, atol=5e-3 if dtype == "bfloat16" else 1e-4)


def test_a_layer_s_attention_lowers_for_a_tpu_as_four_kernels() -> None:
    tpu, rope = attention_for("tpu"), rope_table(LENGTH, 128, 5e5)
    x, weight = numbers(1, LENGTH, 128, dtype="bfloat16"), jnp.ones(128)

    def loss(x: jax.Array) -> jax.Array:
        q = tpu.norm_rope(x, weight, rope, 128, 1e-6)
        return tpu.attention(q, x, x, documents(), 128, 64).astype(jnp.float32).sum()

    ironwood = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("TPU7x", 1, "tpu"))
    with jax.sharding.use_abstract_mesh(ironwood):
        module = export.export(jax.jit(jax.grad(loss)), platforms=["tpu"])(x).mlir_module()
    assert module.count("tpu_custom_call") == 4, "one forward and one backward each"


@pytest.mark.parametrize(("length", "head_dim"), [(200, 128), (256, 64)])
def test_shapes_without_kernels_are_computed_all_the_same(length: int, head_dim: int) -> None:
    tpu, rope = attention_for("tpu"), rope_table(length, head_dim, 5e5)
    x, weight = numbers(1, length, head_dim), jnp.ones(head_dim)
    np.testing.assert_allclose(
        tpu.norm_rope(x, weight, rope, head_dim, 1e-6), plain_norm_rope(x, weight, rope, head_dim, 1e-6), atol=1e-6
    )
    np.testing.assert_allclose(
        tpu.attention(x, x, x, None, head_dim, -1), whole_attention(x, x, x, None, head_dim, -1), atol=1e-6
    )
