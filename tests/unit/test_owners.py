"""owner.json: one of several orchestrators acts; silence, an orderly exit or an order hands the run over."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.daemon import Caretaker
from orchestrator.decisions import Done, Freeze, OwnedByOther, Refused, Wait
from orchestrator.owners import BEAT_SECONDS, READ_SECONDS, STALE_SECONDS, Ownership
from tests.support.faulty_store import Fault, FaultyStore, Plan, always, dice, never
from tests.support.memory_store import MemoryStore
from tests.support.story import World, a_world, caretaker, end_state
from trainer.errors import StorageUnavailable
from trainer.rundir import disk
from trainer.rundir.disk import DiskStore
from trainer.rundir.records import Owner
from trainer.rundir.rundir import RunDirectory


@dataclass
class Bench:
    """One store, a clock, and orchestrators that come to it through stores of their own."""

    now: float = 1000.0
    store: MemoryStore = field(default_factory=MemoryStore)
    stores: list[FaultyStore] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def ownership(self, owner: str, plan: Plan = never, **options: Any) -> Ownership:
        store = FaultyStore(self.store, plan)
        self.stores.append(store)
        rundir = RunDirectory(store, patience_seconds=0.0, clock=self.clock, sleep=lambda _: None)
        return Ownership(rundir, owner, "cluster", monotonic=self.clock, clock=self.clock, **options)

    @property
    def document(self) -> Owner:
        found = RunDirectory(self.store).owner()
        assert found is not None
        return found[0]


def test_the_first_claims_and_the_second_says_who_has_it() -> None:
    bench = Bench()
    first, second = bench.ownership("a"), bench.ownership("b", how="annotate OWNER")
    assert first.hold() is None and first.held
    other = second.hold()
    assert other is not None and other.owner == "a" and not second.held
    assert "a (cluster cluster) looks after this run" in second.told(other)
    assert "or now: annotate a" in second.told(other)


def test_it_is_read_every_ten_seconds_and_renewed_every_thirty() -> None:
    bench = Bench()
    first = bench.ownership("a")
    for _ in range(1200):
        assert first.hold() is None
        bench.now += 0.25
    calls = [call.method for call in bench.stores[0].calls]
    assert calls.count("swap") == pytest.approx(300 / BEAT_SECONDS, abs=1)
    assert calls.count("get") == pytest.approx(300 / READ_SECONDS, abs=1)
    assert bench.document.beats == calls.count("swap")


def hold_for(bench: Bench, ownership: Ownership, seconds: float, beat: Callable[[], object] = lambda: None) -> bool:
    """Whether `ownership` was held at some moment of the next `seconds`."""
    end = bench.now + seconds
    while bench.now < end:
        bench.now += 5
        beat()
        if ownership.hold() is None:
            return True
    return False


def test_a_silent_owner_is_succeeded_after_three_minutes_and_not_before() -> None:
    bench = Bench()
    first, second = bench.ownership("a"), bench.ownership("b")
    first.hold()
    assert not hold_for(bench, second, 600, beat=first.hold)
    assert not hold_for(bench, second, STALE_SECONDS - 2 * READ_SECONDS)
    assert hold_for(bench, second, 3 * READ_SECONDS)
    other = first.hold()  # it wakes up, and finds that it was replaced
    assert other is not None and other.owner == "b"
    assert not hold_for(bench, first, 600, beat=second.hold)


def test_a_newcomer_waits_in_full_whatever_the_clock_in_the_document_says() -> None:
    bench = Bench()
    bench.ownership("a").hold()
    bench.now += 100 * STALE_SECONDS
    assert not hold_for(bench, bench.ownership("b"), STALE_SECONDS - READ_SECONDS)


@pytest.mark.parametrize("order", [{"take_over": True}, {"take_over_from": "a"}])
def test_taken_over_at_once_when_told_so_but_only_once(order: dict[str, Any]) -> None:
    bench = Bench()
    first, second = bench.ownership("a"), bench.ownership("b", **order)
    first.hold()
    assert second.hold() is None
    bench.now += READ_SECONDS
    assert first.hold() is not None
    third = bench.ownership("c", take_over=True)
    assert third.hold() is None
    bench.now += READ_SECONDS
    other = second.hold()  # it does not take the run back
    assert other is not None and other.owner == "c"


def test_an_order_that_names_another_owner_takes_nothing() -> None:
    bench = Bench()
    bench.ownership("a").hold()
    assert bench.ownership("b", take_over_from="c").hold() is not None


def test_released_means_at_once() -> None:
    bench = Bench()
    first, second = bench.ownership("a"), bench.ownership("b")
    first.hold()
    second.hold()
    first.release()
    assert bench.document.released and not first.held
    bench.now += READ_SECONDS
    assert second.hold() is None
    first.release()  # not ours any more: nothing happens
    assert bench.document.owner == "b" and not bench.document.released


def test_replicas_share_an_owner_and_do_not_disturb_each_other() -> None:
    bench = Bench()
    one, two = bench.ownership("a"), bench.ownership("a")
    for _ in range(200):
        assert one.hold() is None
        assert two.hold() is None
        bench.now += 1
    assert bench.document.beats <= 200 / BEAT_SECONDS + 3
    one.release()
    bench.now += READ_SECONDS
    assert two.hold() is None and not bench.document.released  # the other one is still there


def test_an_outage_is_no_silence() -> None:
    """While the store is away nobody can beat: what was seen before it proves nothing after it."""
    bench = Bench()
    away = False
    second = bench.ownership("b", lambda call: Fault.BEFORE if away else None)
    bench.ownership("a").hold()
    second.hold()
    away = True
    for _ in range(60):
        bench.now += 10
        with pytest.raises(StorageUnavailable):
            second.hold()
    away = False
    assert not hold_for(bench, second, STALE_SECONDS - READ_SECONDS)
    assert hold_for(bench, second, 3 * READ_SECONDS)


def test_a_lost_answer_of_our_own_claim_is_ours() -> None:
    bench = Bench()
    first = bench.ownership("a", lambda call: Fault.AFTER if call.write == 0 else None)
    with pytest.raises(StorageUnavailable):
        first.hold()
    assert first.hold() is None


moves = st.lists(st.sampled_from("aAbBrRt"), min_size=5, max_size=60)


@settings(max_examples=150, deadline=None)
@given(moves=moves, seed=st.integers(0, 2**16), rate=st.sampled_from([0.0, 0.2, 0.5]))
def test_never_two_holders_that_have_just_read(moves: list[str], seed: int, rate: float) -> None:
    """a, b: one of them looks; A, B: it is replaced by a fresh process; r, R: it leaves; t: time passes.

    Whoever reads the document now and finds that it is his is alone: each other one, reading now too, says so.
    """
    bench = Bench()
    held: dict[str, Ownership] = {}
    for move in moves:
        name = {"r": "a", "R": "b"}.get(move, move.lower())
        if move == "t":
            bench.now += 17
        elif move in "AB" or name not in held:
            held[name] = bench.ownership(name, dice(seed, rate))
        try:
            if move in "rR":
                held[name].release()
            elif move in "ab":
                held[name].hold()
        except StorageUnavailable:
            pass
    for store in bench.stores:
        store.plan = never
    bench.now += READ_SECONDS
    readers = {name: bench.ownership(name) for name in "ab"}
    answers = {name: reader.hold() for name, reader in readers.items()}
    assert list(answers.values()).count(None) == 1
    holder = next(name for name, answer in answers.items() if answer is None)
    assert all(answer is None or answer.owner == holder for answer in answers.values())


def owned(world: World, name: str, store: Any = None) -> Caretaker:
    """A fresh orchestrator that keeps to owner.json."""
    keeper = caretaker(world)
    keeper.ownership = Ownership(
        RunDirectory(store or DiskStore(world.folder), patience_seconds=0.0, sleep=lambda _: None),
        name,
        world.uid,
        monotonic=world.clock,
        clock=world.clock,
    )
    return keeper


def test_of_two_orchestrators_one_acts_and_the_other_ends_with_it() -> None:
    with a_world() as world:
        acting, idle = owned(world, "a"), owned(world, "b")
        acts: set[str] = set()
        for _ in range(400):
            mine = acting.step().decision
            theirs = idle.step().decision
            acts.add(type(theirs).__name__)
            if isinstance(mine, Done) and isinstance(theirs, Done):
                break
            world.tick()
        assert acts == {"OwnedByOther", "Done"}
        end_state(world)


@settings(max_examples=8, deadline=None)
@given(moves=st.text(alphabet="abABt", min_size=20, max_size=100), seed=st.integers(0, 2**16))
def test_two_owners_over_a_store_that_fails_finish_the_run(moves: str, seed: int) -> None:
    """a, b: a step; A, B: killed and replaced; t: time passes. The store loses answers; one of them finishes the run."""
    with a_world() as world:
        stores = [FaultyStore(DiskStore(world.folder), dice(seed, 0.3)) for _ in "ab"]
        keepers = {name: owned(world, name, store) for name, store in zip("ab", stores, strict=True)}
        for move in moves:
            if move == "t":
                world.tick()
                continue
            name = move.lower()
            if move in "AB":
                keepers[name] = owned(world, name, stores["ab".index(name)])
            keepers[name].step()
        for store in stores:
            store.plan = never
        for _ in range(900):
            ended = {name for name, keeper in keepers.items() if isinstance(keeper.step().decision, Done)}
            if ended:
                break
            world.tick()
        assert ended, {name: keeper.look().decision for name, keeper in keepers.items()}
        end_state(world)


def test_store_outages_freeze_and_a_store_that_may_not_be_written_is_said() -> None:
    with a_world() as world:
        away = FaultyStore(DiskStore(world.folder), always(Fault.BEFORE, frozenset({"get", "swap"})))
        assert isinstance(owned(world, "a", away).step().decision, Freeze)
        closed = FaultyStore(DiskStore(world.folder), always(Fault.READ_ONLY))
        assert isinstance(owned(world, "a", closed).step().decision, Refused)
        assert world.created == []
        keeper = owned(world, "a")
        while world.created == []:
            keeper.step()
        assert isinstance(owned(world, "a", closed).step().decision, (Freeze, Wait))


def test_who_is_not_the_owner_looks_and_does_nothing() -> None:
    with a_world() as world:
        owned(world, "a").step()
        before = sorted(str(path) for path in Path(world.folder).rglob("*"))
        look = owned(world, "b").step()
        assert isinstance(look.decision, OwnedByOther) and look.decision.word == "Refused"
        assert look.decision.owner == "a"
        assert sorted(str(path) for path in Path(world.folder).rglob("*")) == before


def test_beats_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "KEPT_BEATS", 5)
    rundir = RunDirectory(DiskStore(tmp_path))
    generation = 0
    for beats in range(1, 13):
        document = Owner(owner="a", cluster_uid="c", beats=beats, op_id=str(beats), time=0.0)
        generation = rundir.swap_owner(document, generation) or 0
    assert generation == 12
    assert sorted(int(path.name) for path in (tmp_path / "owner.json.d").iterdir()) == [8, 9, 10, 11, 12]
    found = RunDirectory(DiskStore(tmp_path)).owner()
    assert found is not None and found[0].beats == 12
