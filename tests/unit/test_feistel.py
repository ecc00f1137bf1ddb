"""The Feistel permutation: a bijection at every size, fixed for ever, and as good as a shuffle for training."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.feistel import MAX_SIZE, Feistel

EDGES = [1, 2, 3, 4, 5] + [n + d for n in (8, 16, 64, 256, 1024, 4096, 65536) for d in (-1, 0, 1)]


def everything(permutation: Feistel) -> np.ndarray:
    return permutation(np.arange(permutation.size, dtype=np.uint64)).astype(np.int64)


@pytest.mark.parametrize("size", EDGES)
def test_bijective_at_edge_sizes(size: int) -> None:
    assert np.array_equal(np.sort(everything(Feistel(size, "k"))), np.arange(size))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20_000), st.text(max_size=20))
def test_bijective(size: int, key: str) -> None:
    assert np.array_equal(np.sort(everything(Feistel(size, key))), np.arange(size))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, MAX_SIZE), st.data())
def test_in_range_and_without_collisions_at_any_size(size: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, max(0, size - 3000)))
    indices = np.arange(first, min(size, first + 3000), dtype=np.uint64)
    images = Feistel(size, "k")(indices)
    assert images.max() < size
    assert np.unique(images).size == images.size


@settings(max_examples=40, deadline=None)
@given(st.integers(2, MAX_SIZE), st.lists(st.integers(0, MAX_SIZE), min_size=1, max_size=50))
def test_each_image_depends_on_its_index_only(size: int, indices: list[int]) -> None:
    permutation = Feistel(size, "k")
    wanted = np.array([i % size for i in indices], np.uint64)
    together = permutation(wanted)
    assert together.tolist() == [int(permutation(np.array([i], np.uint64))[0]) for i in wanted]


@given(st.integers(1, MAX_SIZE))
def test_the_network_is_hardly_larger_than_the_range(size: int) -> None:
    """The stated bound on walking: N ≤ a·b < N + a, a = ceil(√N)."""
    permutation = Feistel(size, "k")
    assert size <= permutation.a * permutation.b < size + permutation.a
    assert permutation.a == math.ceil(math.sqrt(size)) or permutation.a**2 >= size > (permutation.a - 1) ** 2
    assert permutation.b <= permutation.a <= 1 << 21


def test_known_answers() -> None:
    """Version 1, for ever: a run resumed years later reads the same instances."""
    assert Feistel(10, "a")(np.arange(10, dtype=np.uint64)).tolist() == [3, 9, 1, 7, 0, 2, 6, 8, 5, 4]
    large = Feistel(724_000_000, "seed 34521, epoch 0")
    assert large(np.array([0, 1, 2, 723_999_999], np.uint64)).tolist() == [39786769, 574280046, 59244182, 652419497]


def test_sizes_and_indices_out_of_range_are_errors() -> None:
    for size in (0, -1, MAX_SIZE + 1):
        with pytest.raises(ValueError, match="size from 1"):
            Feistel(size, "k")
    with pytest.raises(IndexError, match="not below"):
        Feistel(10, "k")(np.array([10], np.uint64))


# -- as good as a shuffle. Limits are about 5 standard deviations of a random permutation; keys are fixed, so these
#    tests never fail by chance. A linear congruence x → a·x + c, or a network of 2 rounds, fails most of them.

SIZE = 200_003
KEYS = [f"seed {s}, epoch 0" for s in range(4)]


@pytest.mark.parametrize("key", KEYS)
def test_every_stretch_of_the_order_spreads_over_the_whole_corpus(key: str) -> None:
    """χ² of where 400 stretches of 500 positions land, over 50 equal parts of the corpus."""
    images = everything(Feistel(SIZE, key))[:200_000].reshape(400, 500)
    cells = np.stack([np.bincount(row * 50 // SIZE, minlength=50) for row in images])
    chi2 = ((cells - 10.0) ** 2 / 10.0).sum(axis=1)  # mean 49, standard deviation about 9.9
    assert abs(chi2.mean() - 49) < 5 * 9.9 / math.sqrt(400)
    assert chi2.max() < 49 + 6 * 9.9


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("lag", [1, 2, 3, 8, 447, 448, 449, 512, 1024, 65536])
def test_neighbours_in_the_order_are_unrelated(key: str, lag: int) -> None:
    """Serial correlation at small lags, at √N (the width of the halves) and at batch sizes."""
    images = everything(Feistel(SIZE, key)) / SIZE
    r = np.corrcoef(images[:-lag], images[lag:])[0, 1]
    assert abs(r) < 5 / math.sqrt(SIZE - lag)


@pytest.mark.parametrize("key", KEYS)
def test_steps_between_neighbours_do_not_repeat(key: str) -> None:
    """A linear congruence has one step; a random permutation has nearly as many as positions (63 % distinct)."""
    steps = np.diff(everything(Feistel(SIZE, key))) % SIZE
    distinct = np.unique(steps).size / SIZE
    assert abs(distinct - (1 - 1 / math.e)) < 0.01
    assert np.bincount(steps).max() <= 12


@pytest.mark.parametrize("key", KEYS)
def test_position_and_instance_are_unrelated(key: str) -> None:
    images = everything(Feistel(SIZE, key))
    r = np.corrcoef(np.arange(SIZE), images)[0, 1]
    assert abs(r) < 5 / math.sqrt(SIZE)
    assert (images == np.arange(SIZE)).sum() < 12  # fixed points: Poisson with mean 1


def test_epochs_share_no_structure() -> None:
    """Two keys give unrelated places, also relative to each other, and batches hardly overlap."""
    one, two = (everything(Feistel(SIZE, f"seed 1, epoch {e}")) for e in (0, 1))
    assert abs(np.corrcoef(one, two)[0, 1]) < 5 / math.sqrt(SIZE)
    assert (one == two).sum() < 12
    relative = (one - two) % SIZE
    assert np.bincount(relative).max() <= 12
    batches = np.empty(SIZE, np.int64)
    batches[two] = np.arange(SIZE) // 512
    together = max(np.bincount(batches[one[k : k + 512]]).max() for k in range(0, 51_200, 512))
    assert together < 15  # of 512 instances, at most a handful meet again; the mean is 1.3


def test_a_small_corpus_reaches_many_orders() -> None:
    """All 24 permutations of 4, evenly: χ² over 24 cells, 4,800 keys."""
    seen: dict[tuple[int, ...], int] = {}
    for key in range(4800):
        order = tuple(everything(Feistel(4, str(key))).tolist())
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 24
    chi2 = sum((count - 200) ** 2 / 200 for count in seen.values())
    assert chi2 < 23 + 5 * math.sqrt(46)


def test_a_batch_of_a_huge_corpus_takes_no_time_and_no_memory() -> None:
    began = time.perf_counter()
    images = Feistel(724_000_000, "k")(np.arange(512_000_000, 512_000_512, dtype=np.uint64))
    assert time.perf_counter() - began < 0.5
    assert np.unique(images).size == 512
