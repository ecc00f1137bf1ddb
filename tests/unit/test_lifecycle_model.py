"""decide() against a small model of the world: random faults, lost answers, killed and doubled orchestrators."""

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from orchestrator.budgets import NO_NEW_COMMIT
from orchestrator.clusters.base import ClusterUnavailable
from orchestrator.decisions import (
    Decision,
    DeleteGang,
    Done,
    Freeze,
    GiveUp,
    Refused,
    StopForPlanChange,
    Wait,
)
from orchestrator.lifecycle import decide
from orchestrator.memory import Memory
from orchestrator.observation import Observation
from orchestrator.observe import read_observation
from tests.support.world import TARGET, World, run_of
from trainer.errors import Fenced, StorageUnavailable
from trainer.rundir.records import Program

# Long after the last fault: queue waits, backoff, hang detection (2 × hang) and training have all had their time.
PATIENCE = 400

FAULTS = (
    "kill",
    "fail",
    "hang",
    "delete_by_hand",
    "cut_off",
    "deactivate",
    "cluster_down",
    "cluster_up",
    "store_down",
    "store_up",
    "stale_view",
    "fresh_view",
    "capacity_2",
    "capacity_8",
    "capacity_0",
    "crash",  # the orchestrator loses its memory
    "lose_before",  # the next act does not arrive
    "lose_after",  # the next act arrives, its answer does not
    "quiet",
)


class Orchestrator:
    """One process: observe, decide, act; checks after each decision."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.memory = Memory(lambda: world.now)
        self.lose: str | None = None
        self.last: Decision | None = None

    def step(self) -> Decision:
        world = self.world
        o = read_observation(world.run, world.recipe, world, world.rundir, self.memory)
        decision = decide(world.run, o, world.now)
        check(world, o, decision)
        self.last = decision
        if not isinstance(decision, (Freeze, Refused, Done, GiveUp, Wait)):
            lose, self.lose = self.lose, None
            if lose != "before":
                try:
                    world.carry_out(decision)
                except (ClusterUnavailable, StorageUnavailable, Fenced):
                    pass
        return decision


def check(world: World, o: Observation, decision: Decision) -> None:
    """What must hold of every single decision, and of the world at that moment."""
    store = world.rundir
    if o.unknown:
        assert isinstance(decision, (Freeze, Done, Refused)), f"acted on unknown: {decision}"
    if isinstance(decision, Done):
        assert store.committed >= TARGET, "done without a commit at the target"
    if isinstance(decision, (DeleteGang, StopForPlanChange)):
        check_deletion(world, o, decision)
    if isinstance(decision, GiveUp):
        check_giving_up(world, decision)
    head = store.head_
    if head is not None:
        live = [g for g in world.gangs.values() if g.process is not None and g.spec.attempt == head.attempt]
        assert len(live) <= 1, "two live gangs of HEAD's attempt"
    entries = store.entries
    keys = [entry.key for entry in entries]
    assert len(set(keys)) == len(keys), "an ending is in the ledger twice"
    starts = [(entry.attempt, entry.start) for entry in entries if entry.start is not None]
    assert len(set(starts)) == len(starts), f"a start ended twice: {starts}"
    steps = [step for _, _, step in world.commits]
    assert steps == sorted(steps), f"committed steps went back: {world.commits}"
    charged = sum(entry.cause == "application-error" for entry in entries)
    assert charged <= world.application_errors, "the program was blamed for something else"


def check_deletion(world: World, o: Observation, act: DeleteGang | StopForPlanChange) -> None:
    gang = world.gangs.get(act.name)
    assert act.uid
    if gang is None or gang.uid != act.uid or o.head is None or gang.spec.attempt != world.rundir.head_.attempt:  # type: ignore[union-attr]
        return
    if isinstance(act, StopForPlanChange):
        assert gang.spec.attempt + 1 in world.rundir.specs, "stopped before the next attempt was written down"
        return
    hung = gang.process is not None and gang.process.silent
    recorded = any(entry.attempt == gang.spec.attempt and entry.cause == "hang" for entry in world.rundir.entries)
    done = world.rundir.committed >= TARGET
    spent = "budget" in act.why
    assert hung or recorded or done or spent, f"deleted a healthy gang: {act.why}"


def check_giving_up(world: World, decision: GiveUp) -> None:
    charged = [e for e in world.rundir.entries if e.cause not in ("preempted", "plan-change") or e.charged]
    limit = world.run.spec.budgets.no_new_commit
    if decision.cause == NO_NEW_COMMIT:
        assert len(charged) >= limit
    else:
        allowed = world.run.spec.budgets.of(decision.cause)
        assert allowed is not None
        assert sum(e.cause == decision.cause for e in charged) > allowed
    assert world.running() is None or world.running().spec.attempt < world.rundir.head_.attempt  # type: ignore[union-attr]


def inject(world: World, orchestrators: list[Orchestrator], fault: str) -> None:
    match fault:
        case "cluster_down" | "cluster_up":
            world.cluster_down = fault == "cluster_down"
        case "store_down" | "store_up":
            world.rundir.down = fault == "store_down"
        case "stale_view":
            world.freeze_view()
        case "fresh_view":
            world.stale_view = None
        case "capacity_0" | "capacity_2" | "capacity_8":
            world.capacity = int(fault.removeprefix("capacity_"))
        case "crash":
            orchestrators[0] = Orchestrator(world)
        case "lose_before" | "lose_after":
            orchestrators[0].lose = fault.removeprefix("lose_")
        case "quiet":
            pass
        case "upper_0" | "upper_16":
            world.quota["tpu7x"] = int(fault.removeprefix("upper_"))
        case "lower_0" | "lower_4":
            world.quota["v5p"] = int(fault.removeprefix("lower_"))
        case "new_image" | "broken_image":
            world.wanted = Program(image=f"{fault}-{world.now}", command=("python",))
            if fault == "broken_image":
                world.broken.add(world.wanted.image)
        case _:
            getattr(world, fault)()


def run_script(
    script: list[tuple[str, int]],
    orchestrators: int,
    remembers: bool,
    tells: bool,
    quota: dict[str, int] | None = None,
    program: Program | None = None,
    **spec: Any,
) -> World:
    """Play `script` (fault, seconds until the next), then heal everything and wait for an end."""
    world = World(run_of(**spec), remembers, quota)
    world.wanted = program
    world.tells_quota = tells
    crew = [Orchestrator(world) for _ in range(orchestrators)]
    for fault, seconds in script:
        inject(world, crew, fault)
        for _ in range(seconds):
            world.tick()
            for one in crew:
                one.step()
    world.heal()
    for _ in range(PATIENCE):
        world.tick()
        decisions = [one.step() for one in crew]
        if all(isinstance(d, (Done, GiveUp, Refused)) for d in decisions):
            break
    else:
        pytest.fail(f"no end after {PATIENCE} s: {crew[0].last}, gangs {list(world.gangs.values())}")
    before = (world.rundir.generation, dict(world.rundir.specs), world.rundir.entries, len(world.gangs))
    for _ in range(10):
        world.tick()
        for one in crew:
            decision = one.step()
            assert isinstance(decision, (Done, GiveUp)), f"not finished after the end: {decision}"
    after = (world.rundir.generation, dict(world.rundir.specs), world.rundir.entries, len(world.gangs))
    assert before == after, "something was still done after the end"
    return world


TWO_FAMILIES = {
    "ladder": [{"deviceType": "tpu7x-2x2x2", "waitInQueue": 20}, {"deviceType": "v5p-2x2x1", "waitInQueue": 20}],
    "quota": {"tpu7x": 16, "v5p": 4},
}
OTHER_FAULTS = (
    "upper_0",
    "upper_16",
    "lower_0",
    "lower_4",
    "new_image",
    "broken_image",
    "kill",
    "hang",
    "crash",
    "quiet",
)
OTHER_FAULTS += (
    "store_down",
    "store_up",
    "cluster_down",
    "cluster_up",
    "lose_after",
    "stale_view",
    "fresh_view",
    "fail",
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.sampled_from(OTHER_FAULTS), st.integers(0, 30)), max_size=14),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
)
def test_any_faults_on_two_families_with_changing_programs(
    script: list[tuple[str, int]], orchestrators: int, remembers: bool, tells: bool
) -> None:
    first = Program(image="first", command=("python",))
    run_script(script, orchestrators, remembers, tells, program=first, **TWO_FAMILIES)


@pytest.mark.parametrize("tells", [True, False])
def test_going_up_to_another_family_costs_no_step_and_waits_as_long_as_it_takes(tells: bool) -> None:
    world = World(run_of(targetStep=TARGET, ladder=TWO_FAMILIES["ladder"]), False, TWO_FAMILIES["quota"])  # type: ignore[arg-type]
    world.tells_quota = tells
    world.quota["tpu7x"] = 0
    one = Orchestrator(world)
    for _ in range(70):
        world.tick()
        one.step()
    assert len([gang for gang in world.gangs.values() if gang.phase == "Queued"]) <= 1
    assert world.rundir.committed == TARGET, "the lower rung trained to the end while the upper one queued"
    assert {entry.cause for entry in world.rundir.entries} <= {"plan-change", "completed"}


def test_a_broken_image_is_tried_once_and_the_run_goes_on() -> None:
    script = [("quiet", 5), ("broken_image", 20)]
    world = run_script(script, 1, False, True, program=Program(image="first", command=("python",)))
    images = [spec.image for _, spec in sorted(world.rundir.specs.items())]
    assert images[0] == "first" and images[-1] == "first" and len(images) == 3, images
    assert world.rundir.committed == TARGET
    assert not any(entry.charged for entry in world.rundir.entries)


scripts = st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(0, 12)), max_size=14)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scripts, st.integers(1, 2), st.booleans(), st.booleans())
@example([("stale_view", 5), ("hang", 2)], 1, False, False)  # taken for gone, and hung afterwards
def test_any_faults_end_in_done_or_in_a_spent_budget(
    script: list[tuple[str, int]], orchestrators: int, remembers: bool, tells: bool
) -> None:
    run_script(script, orchestrators, remembers, tells)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.sampled_from(["capacity_0", "capacity_2", "capacity_8", "crash"]), st.integers(0, 30)), max_size=20
    ),
    st.booleans(),
)
def test_preemption_alone_never_costs_a_budget(script: list[tuple[str, int]], tells: bool) -> None:
    world = run_script(script, 1, True, tells)
    assert world.rundir.committed == TARGET
    assert {entry.cause for entry in world.rundir.entries} <= {"preempted", "plan-change", "completed"}
    assert not any(entry.charged for entry in world.rundir.entries)


def test_an_undisturbed_run_takes_one_attempt_and_one_start() -> None:
    world = run_script([], 1, True, True)
    assert list(world.rundir.specs) == [1]
    assert [(e.attempt, e.start, e.cause) for e in world.rundir.entries] == [(1, 1, "completed")]


def test_a_preempted_gang_keeps_its_place_in_the_queue() -> None:
    world = run_script([("quiet", 5), ("capacity_0", 15), ("capacity_8", 5)], 1, True, True)
    assert list(world.rundir.specs) == [1], "the queued gang was replaced before spec.ladder[0].waitInQueue"
    assert [e.cause for e in world.rundir.entries] == ["preempted", "completed"]


def test_shrunk_capacity_moves_the_run_down_and_back_up_uncharged() -> None:
    world = run_script([("quiet", 5), ("capacity_2", 28)], 1, True, True)
    plans = [world.rundir.specs[n].plan.device_type for n in sorted(world.rundir.specs)]
    assert plans == ["cpu-8", "cpu-2", "cpu-8"]
    causes = [e.cause for e in world.rundir.entries]
    assert causes == ["preempted", "plan-change", "completed"]
    batches = {
        n: spec.plan.micro_batch * spec.plan.accumulation * spec.plan.devices for n, spec in world.rundir.specs.items()
    }
    assert set(batches.values()) == {512}


def test_the_programs_own_errors_exhaust_their_budget_and_nothing_runs_on() -> None:
    script = [("fail", 1)] * 60
    world = run_script([("quiet", 4), *script], 1, True, True, budgets={"applicationError": 3})
    assert [e.cause for e in world.rundir.entries].count("application-error") == 4
    assert world.rundir.committed < TARGET


def test_a_cut_off_trainer_never_commits_after_the_next_attempt_claimed() -> None:
    world = run_script([("quiet", 5), ("cut_off", 1)], 1, False, True)
    attempts = [attempt for attempt, _, _ in world.commits]
    assert attempts == sorted(attempts)
    assert world.rundir.committed == TARGET


def test_a_hang_is_ended_from_outside_and_charged_once() -> None:
    world = run_script([("quiet", 5), ("hang", 30)], 1, True, True)
    assert [e.cause for e in world.rundir.entries].count("hang") == 1
    assert world.rundir.committed == TARGET
