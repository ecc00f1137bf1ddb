"""The data order: every batch a function of (recipe, t), the same from any start and for any number of hosts."""

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.corpus import FakeStore, plan, sized
from trainer.data.loader import process_rows
from trainer.data.order import BatchOrder, olmo_core_permutation, open_order, table_key
from trainer.errors import ConfigurationError

KINDS = ("olmo_core", "feistel")
both_kinds = pytest.mark.parametrize("kind", KINDS)
edges = [8, 9, 15, 16, 17, 63, 64, 65, 255, 256, 257]


@both_kinds
@pytest.mark.parametrize("instances", edges)
def test_an_epoch_is_every_instance_once_less_the_tail(kind: str, instances: int) -> None:
    order = open_order(sized(instances, kind=kind))
    for epoch in (0, 1, 5):
        first = epoch * order.batches_per_epoch
        read = order.block(first, first + order.batches_per_epoch).reshape(-1)
        assert np.array_equal(np.sort(np.concatenate([read, order.tail(epoch)])), np.arange(instances))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 40), st.integers(0, 300), st.integers(0, 200), st.integers(1, 60))
def test_the_same_from_any_start(kind: str, batch: int, more: int, first: int, count: int) -> None:
    """Batch by batch, in one block over borders of epochs, or by an order opened at that very step: all equal."""
    recipe = sized(batch + more, kind=kind, batch=batch)
    from_zero = open_order(recipe).block(0, first + count)
    assert np.array_equal(from_zero[first:], open_order(recipe).block(first, first + count))
    fresh = open_order(recipe)
    assert np.array_equal(from_zero[first:], [fresh.batch_ids(t) for t in range(first, first + count)])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 50), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]))
def test_a_batch_does_not_depend_on_hosts(kind: str, t: int, processes: int, accumulation: int) -> None:
    """Any number of processes and any accumulation put together give the same rows in the same places."""
    order = open_order(sized(100, kind=kind, batch=32))
    shape = plan(processes=processes, data_parallel=8, micro_batch=4 // accumulation, accumulation=accumulation)
    rows = [process_rows(shape, p) for p in range(processes)]
    assert np.array_equal(np.concatenate(rows, axis=1).reshape(-1), np.arange(32))
    ids = np.concatenate([order.batch_ids(t)[r] for r in rows], axis=1).reshape(-1)
    assert np.array_equal(ids, order.batch_ids(t))


@both_kinds
def test_epochs_and_seeds_differ(kind: str) -> None:
    one, other = (open_order(sized(512, kind=kind, seed=seed)) for seed in (3, 700))
    epochs = [order.block(e * 64, e * 64 + 64).tobytes() for order in (one, other) for e in range(4)]
    assert len(set(epochs)) == 8


@both_kinds
def test_the_epoch_is_the_batch_number_over_whole_batches(kind: str) -> None:
    order = open_order(sized(8 * 5 + 7, kind=kind))
    assert order.batches_per_epoch == 5
    assert [order.epoch_of(t) for t in (0, 4, 5, 9, 10)] == [0, 0, 1, 1, 2]
    assert order.tail(0).size == 7


def test_olmo_core_is_numpys_shuffle_with_epochs_counted_from_one() -> None:
    """The first epoch of seed 34521 is PCG64(34522), in uint32, as AI2's loader builds it."""
    expected = np.arange(1000, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(34522)).shuffle(expected)
    order = open_order(sized(1000, kind="olmo_core", batch=512))
    assert np.array_equal(order.batch_ids(0), expected[:512])
    expected = np.arange(1000, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(34523)).shuffle(expected)
    assert np.array_equal(order.batch_ids(1), expected[:512])


def test_known_answers() -> None:
    """Version 1 of both, for ever."""
    assert open_order(sized(1000, kind="olmo_core")).batch_ids(0).tolist() == [905, 250, 414, 554, 333, 834, 537, 775]
    assert open_order(sized(1000, kind="feistel")).batch_ids(0).tolist() == [867, 837, 41, 77, 866, 800, 958, 167]


def test_a_corpus_smaller_than_a_batch_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="global_batch 8 is larger than the corpus of 7"):
        open_order(sized(7))


def test_olmo_core_refuses_what_uint32_cannot_count() -> None:
    with pytest.raises(ConfigurationError, match="use kind feistel"):
        open_order(sized((1 << 32) + 1, kind="olmo_core"))
    open_order(sized((1 << 32) + 1, kind="feistel"))


def test_ids_go_beyond_32_bits() -> None:
    ids = open_order(sized(1 << 40)).batch_ids(10**9)
    assert ids.dtype == np.uint64
    assert ids.max() > 1 << 32


# -- the table of olmo_core


def with_table(instances: int, epochs: int = 1) -> tuple[BatchOrder, FakeStore]:
    """An order that must read its table, as if the corpus were too large for memory."""
    recipe, store = sized(instances, kind="olmo_core"), FakeStore()
    for epoch in range(epochs):
        table = olmo_core_permutation(instances, 34521, epoch).astype("<u4").tobytes()
        store.objects[table_key(instances, 34521, epoch)] = table
    return BatchOrder(recipe, store, in_memory=0), store


def test_the_table_gives_the_order_computed_in_memory() -> None:
    order, store = with_table(100, epochs=2)
    assert np.array_equal(order.block(0, 24), open_order(sized(100, kind="olmo_core")).block(0, 24))
    store.reads.clear()
    order.batch_ids(3)
    assert store.reads == [(table_key(100, 34521, 0), 3 * 8 * 4, 8 * 4)]


def test_a_missing_table_says_how_to_make_it() -> None:
    order, _ = with_table(100)
    order.require(0, 12)
    with pytest.raises(ConfigurationError, match="python -m trainer data order --run-directory memory"):
        order.require(0, 13)
    with pytest.raises(ConfigurationError, match="needs its table"):
        BatchOrder(sized(100, kind="olmo_core"), None, in_memory=0).batch_ids(0)


@pytest.mark.parametrize("change", [lambda b: b[:-4], lambda b: b + b"\0\0\0\0", lambda b: b[:-1]])
def test_a_table_of_the_wrong_length_is_refused(change: object) -> None:
    order, store = with_table(100)
    key = table_key(100, 34521, 0)
    store.objects[key] = change(store.objects[key])  # type: ignore[operator]
    with pytest.raises(ConfigurationError, match="not 400 bytes long"):
        order.batch_ids(0)


def test_an_impossible_id_in_a_table_is_refused() -> None:
    order, store = with_table(100)
    key = table_key(100, 34521, 0)
    table = np.frombuffer(store.objects[key], "<u4").copy()  # type: ignore[arg-type]
    table[9] = 100
    store.objects[key] = table.tobytes()
    order.batch_ids(0)
    with pytest.raises(ConfigurationError, match="damaged at position 8"):
        order.batch_ids(1)


@both_kinds
def test_a_start_at_step_1_000_000_of_724_million_instances_takes_under_a_second(kind: str, tmp_path: Path) -> None:
    instances, t = 724_000_000, 1_000_000
    recipe, store = sized(instances, kind=kind, batch=512), FakeStore()
    expected = np.arange(512, dtype="<u4")[::-1]
    if kind == "olmo_core":
        table = tmp_path / "table"  # sparse: it takes no space
        with table.open("wb") as file:
            file.seek(4 * 512 * t)
            file.write(expected.tobytes())
            file.truncate(4 * instances)
        store.objects[table_key(instances, 34521, 0)] = table
    began = time.perf_counter()
    ids = open_order(recipe, store).batch_ids(t)
    assert time.perf_counter() - began < 0.5
    if kind == "olmo_core":
        assert np.array_equal(ids, expected)
    else:
        assert not store.reads
        assert np.unique(ids).size == 512
