"""Two orchestrators on one run, neither knowing of the other: late decisions, any interleaving, no harm."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.daemon import Look
from orchestrator.decisions import Done, Freeze, Wait
from tests.support.story import TARGET, a_world, caretaker, end_state

# a and b look; A and B carry out what they last decided, however long ago; t: time passes, trainers move on.
moves = st.text(alphabet="aAbBt", min_size=20, max_size=120)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(moves=moves, remembers=st.booleans())
def test_any_interleaving_finishes_once(moves: str, remembers: bool) -> None:
    with a_world() as world:
        world.remembers = remembers
        keepers = {"a": caretaker(world), "b": caretaker(world)}
        decided: dict[str, Look] = {}
        for move in moves:
            if move == "t":
                world.tick()
            elif move in keepers:
                decided[move] = keepers[move].look()
            elif move.lower() in decided:
                keepers[move.lower()].act(decided[move.lower()])  # again, perhaps: each act may be repeated
        done = set()
        for _ in range(400):
            for name, keeper in keepers.items():
                if name not in done and isinstance(keeper.step().decision, Done):
                    done.add(name)
            if done == set(keepers):
                break
            world.tick()
        assert done == set(keepers), [keeper.look().decision for keeper in keepers.values()]
        state = end_state(world)
        assert state["head"][2].step == TARGET


def test_one_of_them_sleeps_through_it() -> None:
    """B decides to submit attempt 1 and is stopped; it wakes when the run is long past it."""
    with a_world() as world:
        awake, sleeper = caretaker(world), caretaker(world)
        while type((look := sleeper.look()).decision).__name__ != "SubmitGang":
            awake.step()
        for _ in range(400):
            decision = awake.step().decision
            if isinstance(decision, Done):
                break
            world.tick()
        sleeper.act(look)
        world.tick()
        assert [attempt for attempt, _ in world.created] == [1, 2, 3, 4]
        assert isinstance(sleeper.step().decision, (Done, Wait, Freeze))
        end_state(world)
