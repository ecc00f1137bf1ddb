"""Tests on labs go to two workers only, while there is anything else for the others."""

from hypothesis import given
from hypothesis import strategies as st

from tests.support.share_out import CLUSTER, WITH_A_LAB, first_choice

FILES = [CLUSTER + "a", CLUSTER + "b", CLUSTER + "c", "tests/local/a", "tests/local/b"]


@given(
    st.permutations(FILES), st.lists(st.sampled_from(["gw0", "gw1", "gw2"]), min_size=len(FILES), max_size=len(FILES))
)
def test_each_takes_its_own_kind_first_in_order_and_nothing_is_left(files: list[str], workers: list[str]) -> None:
    left = list(files)
    for worker in workers:
        taken = first_choice(left, worker)
        own = [file for file in left if file.startswith(CLUSTER) == (worker in WITH_A_LAB)]
        assert taken == own[0] if own else taken == left[0]
        left.remove(taken)
    assert not left
