"""Quota of the local cluster: what fits is admitted in order, what no longer fits is evicted, nobody starves."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.clusters.capacity import Claimant, admissible, in_use, to_evict

capacities = st.one_of(st.none(), st.fixed_dictionaries({}, optional={"cpu": st.integers(0, 16)}))
claimants = st.lists(
    st.builds(
        Claimant,
        uid=st.uuids().map(str),
        created=st.integers(0, 5).map(float),
        family=st.sampled_from(["cpu", "tpu7x"]),
        devices=st.integers(1, 8),
        reserved=st.booleans(),
    ),
    max_size=7,
    unique_by=lambda c: c.uid,
)


def quota(capacity: dict[str, int] | None, family: str) -> int:
    if capacity is None:
        return 1_000_000 if family == "cpu" else 0
    return capacity.get(family, 0)


@given(capacities, claimants)
def test_what_is_admitted_fits_beside_what_is_in_use(capacity: dict[str, int] | None, all_: list[Claimant]) -> None:
    chosen = admissible(capacity, all_)
    assert all(not c.reserved for c in all_ if c.uid in chosen)
    for family in ("cpu", "tpu7x"):
        new = sum(c.devices for c in all_ if c.uid in chosen and c.family == family)
        if new:
            assert in_use(all_, family) + new <= quota(capacity, family)


@given(capacities, claimants)
def test_nobody_overtakes_an_older_gang_that_could_fit(capacity: dict[str, int] | None, all_: list[Claimant]) -> None:
    chosen = admissible(capacity, all_)
    for old in all_:
        if old.reserved or old.uid in chosen or old.devices > quota(capacity, old.family):
            continue
        younger = [c for c in all_ if (c.created, c.uid) > (old.created, old.uid) and c.family == old.family]
        assert not [c for c in younger if c.uid in chosen]


@given(capacities, claimants)
def test_after_the_eviction_the_rest_fits_and_the_decision_stands(
    capacity: dict[str, int] | None, all_: list[Claimant]
) -> None:
    losers = to_evict(capacity, all_)
    assert all(c.reserved for c in all_ if c.uid in losers)
    stay = [c for c in all_ if c.uid not in losers]
    for family in ("cpu", "tpu7x"):
        assert in_use(stay, family) <= quota(capacity, family)
    assert to_evict(capacity, stay) == set()
    # While the losers stop they still count, and everybody keeps deciding alike.
    assert to_evict(capacity, all_) == losers
    # Nobody is evicted who would fit beside those that stay.
    for c in all_:
        if c.uid in losers:
            older = [s for s in stay if (s.created, s.uid) < (c.created, c.uid)]
            assert in_use(older, c.family) + c.devices > quota(capacity, c.family)


@given(capacities, claimants)
def test_admission_never_causes_an_eviction(capacity: dict[str, int] | None, all_: list[Claimant]) -> None:
    losers = to_evict(capacity, all_)
    settled = [c for c in all_ if c.uid not in losers]
    chosen = admissible(capacity, settled)
    after = [Claimant(c.uid, c.created, c.family, c.devices, c.reserved or c.uid in chosen) for c in settled]
    assert to_evict(capacity, after) == set()


def test_a_gang_larger_than_the_quota_holds_back_nobody() -> None:
    large, small = Claimant("a", 1, "cpu", 8, False), Claimant("b", 2, "cpu", 2, False)
    assert admissible({"cpu": 2}, [large, small]) == {"b"}
    assert admissible({"cpu": 8}, [large, small]) == {"a"}
    assert admissible({"cpu": 10}, [large, small]) == {"a", "b"}
    assert admissible({}, [large, small]) == set()
