"""Hashes and digests: the numpy twin, the same on any mesh, and no single flipped bit unseen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from trainer.digest import _digests, data_hash, hash_text, ids_hash, state_digest, state_digest_numpy
from trainer.sharding import AXIS, mesh_of

MASK = 0xFFFFFFFF


def mix32(x: int) -> int:
    """The formula, in Python's own integers."""
    x ^= x >> 16
    x = x * 0x85EBCA6B & MASK
    x ^= x >> 13
    x = x * 0xC2B2AE35 & MASK
    return x ^ (x >> 16)


def weight(position: int, lane: int = 0) -> int:
    return 2 * mix32(position + lane * 0x7F4A7C15 & MASK) + 1 & MASK


def tree() -> dict[str, object]:
    random = np.random.default_rng(0)
    return {
        "a": {
            "w": random.normal(size=(16, 8)).astype(np.float32),
            "half": jnp.asarray(random.normal(size=8), jnp.bfloat16),
        },
        "n": np.asarray(-7, np.int32),
        "stack": random.normal(size=(3, 8, 5)).astype(np.float32),
    }


def test_a_leaf_is_the_weighted_sum_of_its_bits() -> None:
    x = np.array([[1.5, -2.0], [0.0, 3e-39]], np.float32)
    expected = sum(int(bits) * weight(i) for i, bits in enumerate(x.view(np.uint32).reshape(-1))) & MASK
    assert state_digest({"x": jnp.asarray(x)}) == {"x": expected}
    assert state_digest_numpy({"x": x}) == {"x": expected}


def test_keys_are_paths_and_the_twin_agrees() -> None:
    twin = state_digest_numpy(tree())
    assert list(twin) == ["a/half", "a/w", "n", "stack"]
    assert state_digest(jax.tree.map(jnp.asarray, tree())) == twin


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_the_digest_is_the_same_on_any_mesh(devices: int) -> None:
    mesh = mesh_of(jax.devices()[:devices])
    pspecs = {
        "a": {"w": PartitionSpec(AXIS), "half": PartitionSpec(AXIS)},
        "n": PartitionSpec(),
        "stack": PartitionSpec(None, AXIS),
    }
    placed = jax.tree.map(lambda x, p: jax.device_put(x, NamedSharding(mesh, p)), tree(), pspecs)
    assert state_digest(placed) == state_digest_numpy(tree())


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 127), bit=st.integers(0, 31))
def test_any_flipped_bit_changes_the_digest(position: int, bit: int) -> None:
    x = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)
    flipped = x.copy().reshape(-1).view(np.uint32)
    flipped[position] ^= np.uint32(1 << bit)
    before, after = state_digest_numpy({"x": x}), state_digest_numpy({"x": flipped.view(np.float32).reshape(16, 8)})
    assert before != after
    # The device sees it as well, also where the flip makes a NaN or a subnormal number.
    assert state_digest({"x": jnp.asarray(flipped.view(np.float32).reshape(16, 8))}) == after


def test_swapped_values_change_the_digest() -> None:
    x = np.arange(8, dtype=np.float32)
    assert state_digest_numpy({"x": x}) != state_digest_numpy({"x": x[::-1]})


def test_wider_numbers_are_refused() -> None:
    with jax.enable_x64(True), pytest.raises(TypeError, match="float64"):
        state_digest({"x": jnp.zeros(2, jnp.float64)})


def test_batch_hashes_are_the_formulas() -> None:
    random = np.random.default_rng(2)
    rows, length = 6, 5
    ids = random.integers(0, 2**32, (rows, 2), dtype=np.uint64).astype(np.uint32)
    tokens = random.integers(0, 70_000, (rows, length)).astype(np.int32)
    expected_ids, expected_data = ["", ""]
    for lane in (0, 1):
        salt = lane * 0x9E3779B9
        by_id = sum(mix32(int(lo) ^ mix32(int(hi) + salt & MASK)) * weight(r, lane) for r, (lo, hi) in enumerate(ids))
        by_token = sum(
            mix32(int(tokens[r, s]) + salt & MASK) * weight(r * length + s, lane)
            for r in range(rows)
            for s in range(length)
        )
        expected_ids += f"{by_id & MASK:08x}"
        expected_data += f"{by_token & MASK:08x}"
    row = jnp.arange(rows, dtype=jnp.uint32)
    assert hash_text(ids_hash(jnp.asarray(ids), row)) == expected_ids
    assert hash_text(data_hash(jnp.asarray(tokens), row)) == expected_data
    # The parts of a batch add up to the whole.
    parts = ids_hash(jnp.asarray(ids[:2]), row[:2]) + ids_hash(jnp.asarray(ids[2:]), row[2:])
    assert hash_text(parts) == expected_ids


def test_a_digest_has_room_for_one_leaf_and_not_for_the_state() -> None:
    leaf = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    memory = _digests.lower([leaf] * 12).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.5 * 512 * 512 * 4
