"""The batch hashes: known answers that the device side must give too, and what they must notice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data import hashes

M = 0xFFFFFFFF


def slow_mix(x: int) -> int:
    """The formula in Python integers, written apart from the one under test."""
    x ^= x >> 16
    x = x * 0x85EBCA6B & M
    x ^= x >> 13
    x = x * 0xC2B2AE35 & M
    return x ^ x >> 16


def slow_weight(p: int, lane: int) -> int:
    return 2 * slow_mix((p + lane * 0x7F4A7C15) & M) + 1


def slow_ids_hash(ids: list[int]) -> str:
    text = ""
    for lane in (0, 1):
        total = 0
        for r, i in enumerate(ids):
            low, high = i & M, i >> 32
            total += slow_mix(low ^ slow_mix((high + lane * 0x9E3779B9) & M)) * slow_weight(r, lane)
        text += f"{total & M:08x}"
    return text


def slow_data_hash(rows: list[list[int]]) -> str:
    text = ""
    for lane in (0, 1):
        total = 0
        for q, token in enumerate(t for row in rows for t in row):
            total += slow_mix((token + lane * 0x9E3779B9) & M) * slow_weight(q, lane)
        text += f"{total & M:08x}"
    return text


@given(st.lists(st.integers(0, 2**42), min_size=1, max_size=40))
def test_ids_hash_is_the_formula(ids: list[int]) -> None:
    assert hashes.ids_hash(np.array(ids, np.uint64)) == slow_ids_hash(ids)


@given(st.integers(1, 6), st.integers(1, 9), st.randoms(use_true_random=False))
def test_data_hash_is_the_formula(rows: int, length: int, random: object) -> None:
    tokens = [[random.randrange(2**31) for _ in range(length)] for _ in range(rows)]  # type: ignore[attr-defined]
    assert hashes.data_hash(np.array(tokens, np.int32)) == slow_data_hash(tokens)


def test_known_answers() -> None:
    assert hashes.mix32(np.array([0, 1, 0xFFFFFFFF], np.uint32)).tolist() == [0, 0x514E28B7, 0x81F16F39]
    assert hashes.ids_hash(np.arange(512, dtype=np.uint64)) == slow_ids_hash(list(range(512)))


def test_a_hash_of_many_batches_is_that_of_each() -> None:
    ids = np.random.default_rng(0).integers(0, 2**40, (5, 16)).astype(np.uint64)
    assert [hashes.hash_text(h) for h in hashes.ids_hashes(ids)] == [hashes.ids_hash(row) for row in ids]


@given(st.lists(st.integers(0, 2**40), min_size=2, max_size=64, unique=True), st.data())
def test_swapped_rows_and_changed_ids_are_noticed(ids: list[int], data: st.DataObject) -> None:
    a, b = data.draw(st.lists(st.integers(0, len(ids) - 1), min_size=2, max_size=2, unique=True))
    before = hashes.ids_hash(np.array(ids, np.uint64))
    swapped = list(ids)
    swapped[a], swapped[b] = ids[b], ids[a]
    assert hashes.ids_hash(np.array(swapped, np.uint64)) != before
    changed = list(ids)
    changed[a] += 1
    assert hashes.ids_hash(np.array(changed, np.uint64)) != before


def test_a_hash_is_a_sum_over_parts() -> None:
    """What lets each device add up its own rows: row weights depend on the global row only."""
    ids = np.random.default_rng(1).integers(0, 2**33, 64).astype(np.uint64)
    whole = hashes.ids_hashes(ids[None])[0]
    total = np.zeros(2, np.uint32)
    for lane in hashes.LANES:
        for rows in np.arange(64).reshape(4, 16):
            low, high = hashes.split_ids(ids[rows]).T
            values = hashes.mix32(low ^ hashes.mix32(high + np.uint32(lane * 0x9E3779B9)))
            total[lane : lane + 1] += (values * hashes.position_weights(64, lane)[rows]).sum(dtype=np.uint32)
    assert total.tolist() == whole.tolist()


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20))
def test_split_and_join(ids: list[int]) -> None:
    array = np.array(ids, np.uint64)
    assert np.array_equal(hashes.join_ids(hashes.split_ids(array)), array)


def test_weights_may_not_be_changed_by_a_caller() -> None:
    with pytest.raises(ValueError, match="read-only"):
        hashes.position_weights(8, 0)[0] = 1
