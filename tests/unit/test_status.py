"""The status of a TrainingRun: against a small model of the world, and the cases that people and tools rely on."""

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.api import TrainingRun
from orchestrator.daemon import Look
from orchestrator.decisions import Freeze, OwnedByOther, Refused, Wait
from orchestrator.explain import explanation, status_word
from orchestrator.memory import Memory
from orchestrator.observation import Observation
from orchestrator.observe import read_observation
from orchestrator.operating.happenings import happenings, told_before
from orchestrator.status import RunStatus, differs_materially, refused_status, status_of
from orchestrator.status_model import CONDITIONS, ENDINGS_KEPT
from tests.support.statuses import Writer, until, with_generation
from tests.support.world import TARGET, World, run_of

FAULTS = (
    "kill",
    "fail",
    "hang",
    "delete_by_hand",
    "cut_off",
    "deactivate",
    "cluster_down",
    "store_down",
    "heal",
    "freeze_view",
    "capacity_2",
    "capacity_8",
    "capacity_0",
    "suspend",
    "resume",
    "another_ladder",
    "lower_target",
    "raise_target",
    "crash",
)
LADDER = [{"deviceType": "cpu-8", "waitInQueue": 20}, {"deviceType": "cpu-2", "waitInQueue": 20}]
CHANGES: dict[str, dict[str, Any]] = {
    "suspend": {"suspend": True, "suspendReason": "maintenance window, says ops"},
    "resume": {"suspend": False, "suspendReason": None},
    "another_ladder": {"ladder": list(reversed(LADDER))},
    "lower_target": {"targetStep": 8},
    "raise_target": {"targetStep": TARGET},
}


def check(run: TrainingRun, o: Observation, decision: Any, old: RunStatus | None, new: RunStatus, now: float) -> None:
    """What holds of every status that is ever written."""
    assert [c.type for c in new.conditions] == list(CONDITIONS)
    assert new.observed_generation == run.metadata.generation
    assert {c.observed_generation for c in new.conditions} == {run.metadata.generation}
    said = {c.type: c.status for c in new.conditions}
    word = new.condition("Succeeded").reason
    frozen_end = isinstance(decision, Freeze) and said["Finished"] == "True"
    assert word == status_word(run, o, decision) or frozen_end, "the list and explain disagree"

    assert (word == "Completed") == (said["Succeeded"] == "True")
    assert (word == "BudgetExhausted") == (said["Succeeded"] == "False")
    assert (said["Finished"] == "True") == (said["Succeeded"] != "Unknown")
    assert (word == "Suspended") == (said["Suspended"] == "True")
    if said["Succeeded"] == "True":
        assert new.committed_step is not None and new.target_step is not None
        assert new.committed_step >= new.target_step
    if said["Finished"] == "True":
        assert said["Training"] == said["Suspended"] == said["Reconciling"] == "False"
    if word in ("Queued", "Preempted"):
        assert said["Admitted"] == "False", "a queued run holds its machines"
    if word == "Training":
        assert said["Training"] == said["Admitted"] == "True"
    if said["Training"] == "True":
        assert said["Admitted"] == "True"
        assert said["Suspended"] != "True"
    if word in ("Refused", "BudgetExhausted"):
        assert (said["Ready"], said["Stalled"]) == ("False", "True")
    if word == "TruthUnknown":
        assert (said["Ready"], said["Stalled"], said["Finished"]) == ("Unknown", "Unknown", "Unknown")
    if said["Reconciling"] == "True":
        assert said["Ready"] == "True", "kstatus: in progress is not failed"
    assert new.step is None or new.committed_step is None or new.step >= new.committed_step
    assert len(new.endings) <= ENDINGS_KEPT
    if o.unknown and old is not None:
        assert (new.committed_step, new.attempt) == (
            old.committed_step,
            old.attempt,
        ) or "run directory" not in o.unknown

    if old is not None:
        for before, after in zip(old.conditions, new.conditions, strict=True):
            if before.status == after.status:
                assert before.last_transition_time == after.last_transition_time
            else:
                assert after.last_transition_time.timestamp() == int(now)
        if {c.type: (c.status, c.reason) for c in old.conditions} != {
            c.type: (c.status, c.reason) for c in new.conditions
        }:
            assert differs_materially(old, new)
        if old.model_dump(
            exclude={"step", "message", "next_action", "next_action_time", "conditions"}
        ) != new.model_dump(
            exclude={"step", "message", "next_action", "next_action_time", "conditions", "last_commit_time"}
        ) | {"last_commit_time": old.last_commit_time}:
            assert differs_materially(old, new)


def inject(world: World, writer: Writer, fault: str) -> None:
    match fault:
        case "cluster_down":
            world.cluster_down = True
        case "store_down":
            world.rundir.down = True
        case "capacity_0" | "capacity_2" | "capacity_8":
            world.capacity = int(fault.removeprefix("capacity_"))
        case "crash":
            writer.memory = Memory(lambda: world.now)
        case _ if fault in CHANGES:
            writer.change(**CHANGES[fault])
        case _:
            getattr(world, fault)()


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(0, 12)), max_size=14), st.booleans())
def test_no_status_ever_contradicts_itself(script: list[tuple[str, int]], remembers: bool) -> None:
    world = World(run_of(), remembers)
    writer = Writer(world, check)
    for fault, seconds in [("capacity_8", 3), *script]:
        inject(world, writer, fault)
        writer.step()
        for _ in range(seconds):
            world.tick()
            writer.step()


def said(status: RunStatus) -> dict[str, str]:
    return {c.type: c.status for c in status.conditions}


def test_all_conditions_are_there_at_the_first_visit() -> None:
    status = Writer(World(run_of())).step()
    assert said(status) == {
        "Ready": "True",
        "Succeeded": "Unknown",
        "Finished": "False",
        "Admitted": "False",
        "Training": "False",
        "Suspended": "False",
        "Degraded": "False",
        "Stalled": "False",
        "Reconciling": "True",
    }
    assert (status.step, status.committed_step, status.target_step) == (0, 0, TARGET)


def test_a_healthy_run_is_ready_from_its_first_gang_to_its_end() -> None:
    writer = Writer(World(run_of()))
    status = until(writer, "Training")
    assert said(status)["Reconciling"] == "False"
    assert (status.plan, status.attempt, status.start, status.per_device_batch) == ("cpu-8", 1, 1, 64)
    status = until(writer, "Completed")
    assert said(status) == {
        "Ready": "True",
        "Succeeded": "True",
        "Finished": "True",
        "Admitted": "False",
        "Training": "False",
        "Suspended": "False",
        "Degraded": "False",
        "Stalled": "False",
        "Reconciling": "False",
    }
    assert (status.step, status.committed_step) == (TARGET, TARGET)
    assert status.last_commit_time is not None


def test_a_run_that_waits_in_the_queue_is_ready_and_not_reconciling() -> None:
    world = World(run_of(ladder=[{"deviceType": "cpu-8"}]))
    world.capacity = 0
    status = until(Writer(world), "Queued")
    assert (said(status)["Ready"], said(status)["Reconciling"], said(status)["Admitted"]) == ("True", "False", "False")


def test_a_lower_rung_is_degraded_and_names_both() -> None:
    world = World(run_of())
    world.capacity = 2
    writer = Writer(world)
    for _ in range(40):
        world.tick()
        status = writer.step()
    degraded = status.condition("Degraded")
    assert (degraded.status, status.plan) == ("True", "cpu-2")
    assert "spec.ladder[1]" in degraded.message and "cpu-8" in degraded.message


def test_rows_without_an_instance_are_told_and_stay_visible() -> None:
    """512 instances on 12 devices: 43 rows each, the last four empty."""
    world = World(run_of(ladder=[{"deviceType": "cpu-12"}]))
    world.capacity = 12
    writer = Writer(world)
    status = until(writer, "Training")
    assert (status.plan, status.per_device_batch) == ("cpu-12", 43)
    said = "4 of 516 rows per step hold no instance"
    assert said in status.condition("Degraded").message
    assert status.condition("Degraded").status == "False", "it was asked for"
    observation = read_observation(world.run, world.recipe, world, world.rundir, writer.memory)
    explained = explanation(world.run, observation, Wait("Training", "steps advance"), world.now)
    assert any(said in warning for warning in explained.warnings)
    told = happenings(world.run, Look(observation, Wait("Training", "steps advance"), world.now))
    (event,) = [h for h in told if h.reason == "EmptyRows"]
    assert said in event.note and event.warning
    assert told_before(event, status) and not told_before(event, None)


def test_suspended_says_why_and_nothing_trains() -> None:
    writer = Writer(World(run_of()))
    until(writer, "Training")
    writer.change(**CHANGES["suspend"])
    status = until(writer, "Suspended")
    assert "maintenance window, says ops" in status.condition("Suspended").message
    for _ in range(10):
        writer.world.tick()
        status = writer.step()
    assert (said(status)["Suspended"], said(status)["Training"], said(status)["Stalled"]) == ("True", "False", "False")
    writer.change(**CHANGES["resume"])
    assert said(until(writer, "Training"))["Suspended"] == "False"


def test_an_end_is_not_taken_back_by_an_outage() -> None:
    writer = Writer(World(run_of()))
    done = until(writer, "Completed")
    writer.world.rundir.down = True
    writer.world.tick()
    assert writer.step() == done
    writer.change(targetStep=TARGET + 8)
    assert writer.step().condition("Succeeded").reason == "TruthUnknown"


def test_an_outage_leaves_the_numbers_and_says_that_nothing_is_known() -> None:
    writer = Writer(World(run_of()))
    until(writer, "Training")
    for _ in range(6):
        writer.world.tick()
        before = writer.step()
    writer.world.rundir.down = True
    after = writer.step()
    assert after.condition("Succeeded").reason == "TruthUnknown"
    assert (after.committed_step, after.attempt, after.plan) == (before.committed_step, 1, "cpu-8")
    assert before.committed_step
    assert {said(after)[kind] for kind in ("Ready", "Training", "Admitted", "Finished", "Stalled")} == {"Unknown"}


def test_three_endings_without_a_commit_are_a_stall_and_a_commit_ends_it() -> None:
    writer = Writer(World(run_of(backoff={"initial": 0})))
    until(writer, "Training")
    stalled = False
    for _ in range(40):
        writer.world.fail()
        status = writer.step()
        stalled = stalled or (status.condition("Stalled").reason == "NoNewCommit")
        if stalled:
            break
        writer.world.tick()
    assert stalled and "noNewCommit" in status.condition("Stalled").message
    assert said(until(writer, "Completed"))["Stalled"] == "False"


def test_a_spent_budget_is_an_end_that_failed() -> None:
    writer = Writer(World(run_of(budgets={"applicationError": 0}, backoff={"initial": 0})))
    until(writer, "Training")
    writer.world.fail()
    status = until(writer, "BudgetExhausted")
    assert (said(status)["Succeeded"], said(status)["Finished"], said(status)["Ready"]) == ("False", "True", "False")
    assert "spec.budgets.applicationError" in status.condition("Stalled").message
    assert [e.cause for e in status.endings] == ["application-error"]
    assert status.endings[0].message == "ValueError: wrong"


def test_a_refusal_before_anything_was_looked_at() -> None:
    run = with_generation(run_of(), 3)
    status = status_of(run, None, Refused("spec.ladder[0].deviceType 'cpu-7': no"), None, 5.0)
    assert (said(status)["Ready"], said(status)["Stalled"], said(status)["Training"]) == ("False", "True", "Unknown")
    assert status.condition("Ready").message == "spec.ladder[0].deviceType 'cpu-7': no"
    assert status.committed_step is None
    frozen = status_of(run, None, Freeze("no answer", ("run directory",), 15.0), status, 6.0)
    assert (said(frozen)["Ready"], frozen.condition("Succeeded").reason) == ("Unknown", "TruthUnknown")


def test_a_run_that_is_being_prepared_is_on_its_way_and_not_ready_yet() -> None:
    status = status_of(with_generation(run_of(), 1), None, Wait("Starting", "the data is looked at"), None, 5.0)
    assert (said(status)["Ready"], said(status)["Reconciling"], said(status)["Stalled"]) == ("Unknown", "True", "False")
    assert (status.condition("Succeeded").reason, said(status)["Finished"]) == ("Starting", "False")


def test_a_spec_that_cannot_be_read_keeps_what_is_known_of_the_run() -> None:
    writer = Writer(World(run_of()))
    trained = until(writer, "Training")
    status = refused_status("spec.targetStep: required", 2, trained, writer.world.now)
    assert (status.observed_generation, status.attempt, status.plan) == (2, trained.attempt, trained.plan)
    assert {c.observed_generation for c in status.conditions} == {2}
    assert (said(status)["Ready"], said(status)["Stalled"], said(status)["Succeeded"]) == ("False", "True", "Unknown")
    assert differs_materially(trained, status)


def test_another_owner_is_said_to_have_the_run() -> None:
    writer = Writer(World(run_of()))
    until(writer, "Training")
    world = writer.world
    o = read_observation(world.run, world.recipe, world, world.rundir, writer.memory)
    status = status_of(world.run, o, OwnedByOther("Refused", "daemon/x has it", None, "daemon/x"), None, 1.0)
    assert status.condition("Ready").reason == "OwnedByOther"
    assert said(status)["Training"] == "True"


def test_steps_and_wording_wait_and_everything_else_is_written_at_once() -> None:
    writer = Writer(World(run_of()))
    old = until(writer, "Training")
    assert old.step is not None
    quiet = old.model_copy(update={"step": old.step + 1, "message": "other words", "next_action": "x"})
    assert not differs_materially(old, quiet)
    assert differs_materially(None, old)
    assert differs_materially(old, old.model_copy(update={"committed_step": 8}))


def test_a_run_that_waits_writes_nothing_while_nothing_changes() -> None:
    world = World(run_of(ladder=[{"deviceType": "cpu-8"}]))
    world.capacity = 0
    writer = Writer(world)
    until(writer, "Queued")
    world.tick()
    first = writer.step()
    for _ in range(30):
        world.tick()
        status = writer.step()
    assert status == first


def test_a_status_of_another_version_is_read_as_far_as_it_goes() -> None:
    status = Writer(World(run_of())).step()
    written = status.to_object()
    assert RunStatus.of({"status": written | {"goodput": 0.9}}) == status
    assert RunStatus.of({"status": {"phase": "Running"}}) is None
    assert RunStatus.of({}) is None


def test_a_long_message_is_cut_and_stays_valid() -> None:
    run = with_generation(run_of(), 1)
    status = status_of(run, None, Refused("spec.x: " + "long " * 5000), None, 0.0)
    assert status.message is not None and len(status.message) == 1024
    assert len(status.condition("Ready").message) == 4096


def test_the_plan_of_several_slices_has_no_spaces() -> None:
    writer = Writer(World(run_of()))
    until(writer, "Training")
    world = writer.world
    o = read_observation(world.run, world.recipe, world, world.rundir, writer.memory)
    assert o.spec is not None
    plan = o.spec.plan.model_copy(update={"slices": 2})
    o = replace(o, spec=o.spec.model_copy(update={"plan": plan}))
    assert status_of(world.run, o, Wait("Training", "x"), None, 0.0).plan == "2×cpu-8"
