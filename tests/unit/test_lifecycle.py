"""decide(), case by case: what each state of the world leads to, and above all what it does not."""

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.api import TrainingRun
from orchestrator.clusters.base import Admission, ClusterView, ContainerEnd, Gang
from orchestrator.decisions import (
    AppendEnding,
    DeleteGang,
    Done,
    Freeze,
    GiveUp,
    RecordSubmitted,
    Refused,
    RequestCommit,
    StopForPlanChange,
    SubmitGang,
    SwapHead,
    Wait,
    WriteRecipe,
    WriteSpec,
)
from orchestrator.lifecycle import decide
from orchestrator.marks import beat_marks, gone_marks, marks_of, over_mark, phase_mark
from orchestrator.memory import Mark, Memory
from orchestrator.observation import CLUSTER, RUN_DIRECTORY, Observation, StartFacts
from orchestrator.observe import read_observation
from orchestrator.planning import ladder, settings
from tests.support.world import TARGET, World, run_of, tiny_recipe
from trainer.rundir.records import (
    AttemptSpec,
    CommitRef,
    Ending,
    Evidence,
    ExitRecord,
    Head,
    InitRecord,
    Progress,
    RecipeRecord,
    StartRecord,
    Submitted,
)
from trainer.settings import InitFrom

NOW = 5000.0
RUN = run_of()
RECIPE = tiny_recipe()
RUNGS = ladder(RUN, RECIPE)
EIGHT, TWO = RUNGS


def spec(attempt: int = 1, rung: int = 0, run: TrainingRun = RUN) -> AttemptSpec:
    return AttemptSpec(
        attempt=attempt,
        nonce=f"n{attempt}",
        gang=run.gang(attempt),
        plan=RUNGS[rung].plan,
        settings=settings(run),
        image="test",
    )


def gang(phase: str = "Running", attempt: int = 1, *admissions: Admission, **changes: Any) -> Gang:
    made = Gang(f"demo-a{attempt}", f"uid-{attempt}", attempt, f"n{attempt}", phase, admissions)  # type: ignore[arg-type]
    return replace(made, **changes)


LIVE = Admission("adm-1", 0, began=10.0, pod_uids=("pod-1",))
ENDED = replace(LIVE, ended=20.0, containers=(ContainerEnd("demo-a1-0", "pod-1", 0, 1, None, 20.0),))


def view(*gangs: Gang, quota: int | None = 8, deleted: tuple[Gang, ...] = ()) -> ClusterView:
    return ClusterView("c1", gangs, deleted, None if quota is None else {"cpu": quota})


def started(step: int | None = 5, phase: str = "Training", start: int = 1) -> StartFacts:
    record = StartRecord(
        attempt=1,
        start=start,
        pod_uid=f"pod-{start}",
        restart_attempt=0,
        processes=2,
        devices=8,
        device_kind="cpu",
        restored=None,
        versions={},
        fingerprint=RECIPE.fingerprint(),
        settings=settings(RUN),
        plan=EIGHT.plan,
        time=10.0,
    )
    progress = Progress(phase=phase, step=step, beats=3, time=11.0)  # type: ignore[arg-type]
    return StartFacts(start, f"pod-{start}", 0, record, progress)


def look(**changes: Any) -> Observation:
    """HEAD at attempt 1, start 1, committed step 4; its gang runs and trains on cpu-8."""
    made = Observation(
        recipe=RECIPE,
        rungs=RUNGS,
        image="test",
        nonce="fresh",
        recorded=RecipeRecord(fingerprint=RECIPE.fingerprint(), recipe=RECIPE),
        head=Head(attempt=1, start=1, pod_uid="pod-1", restart_attempt=0, commit=commit(4), op_id="op"),
        generation=7,
        spec=spec(),
        submitted=Submitted(cluster_uid="c1", namespace="d", gang_uid="uid-1"),
        starts=(started(),),
        view=view(gang("Running", 1, LIVE)),
    )
    return replace(made, **changes)


def commit(step: int) -> CommitRef:
    return CommitRef(attempt=1, start=1, step=step)


def head(step: int, attempt: int = 1, start: int = 1) -> Head:
    return Head(attempt=attempt, start=start, pod_uid="pod-1", restart_attempt=0, commit=commit(step), op_id="op")


def ending(cause: str = "application-error", index: int = 1, charged: bool = True, **changes: Any) -> Ending:
    body: dict[str, Any] = {
        "attempt": 1,
        "start": index,
        "index": index,
        "key": f"k{index}",
        "cause": cause,
        "evidence": [Evidence(source="pod demo-a1-0", field="exit code", value="1")],
        "charged": charged,
        "last_committed_step": 4,
        "ended": 20.0,
    }
    return Ending.model_validate(body | changes)


def held(*names: str, seconds: float = 0.0, count: int = 2) -> dict[str, Mark]:
    return {name: Mark(count, seconds) for name in names}


# -- beginning


def fresh(**changes: Any) -> Observation:
    empty = look(recorded=None, head=None, generation=0, spec=None, submitted=None, starts=(), view=view())
    return replace(empty, **changes)


def test_a_new_run_writes_recipe_spec_head_gang_record_in_this_order() -> None:
    recorded = look().recorded
    assert decide(RUN, fresh(), NOW) == WriteRecipe(RECIPE)
    first = decide(RUN, fresh(recorded=recorded), NOW)
    assert isinstance(first, WriteSpec)
    assert (first.spec.attempt, first.spec.nonce, first.spec.gang, first.spec.plan) == (
        1,
        "fresh",
        "demo-a1",
        EIGHT.plan,
    )
    assert decide(RUN, fresh(recorded=recorded, next_spec=spec()), NOW) == SwapHead(1, 0)
    submitting = look(head=Head(attempt=1, start=0, op_id="x"), submitted=None, starts=(), view=view())
    assert decide(RUN, submitting, NOW) == SubmitGang(spec())
    accepted = replace(submitting, view=view(gang("Queued")))
    assert decide(RUN, accepted, NOW) == RecordSubmitted(1, "uid-1")


def test_a_suspended_run_submits_nothing() -> None:
    run = run_of(suspend=True)
    recorded = look().recorded
    for o in (
        fresh(recorded=recorded),
        look(head=Head(attempt=1, start=0, op_id="x"), submitted=None, starts=(), view=view()),
    ):
        decision = decide(run, o, NOW)
        assert isinstance(decision, Wait)
        assert decision.word == "Suspended"
    assert isinstance(decide(run, look(), NOW), RequestCommit)
    assert isinstance(decide(run, look(asked=True, answered=True), NOW), DeleteGang)


# -- what forbids to act


def test_an_unknown_source_freezes_everything() -> None:
    for source in (CLUSTER, RUN_DIRECTORY):
        decision = decide(RUN, look(unknown={source: "timeout"}), NOW)
        assert isinstance(decision, Freeze)
        assert decision.sources == (source,)
        assert decision.until > NOW


@pytest.mark.parametrize(
    "changes",
    [
        {"later_attempts": True},
        {"spec": None},
        {"view": view(gang("Running", 1, LIVE), gang("Running", 3))},
        {"view": view(gang("Running", 1, LIVE, nonce="another"))},
        {"view": replace(view(), cluster_uid="c2")},
    ],
    ids=["HEAD set back", "spec lost", "gang of the future", "another nonce", "another cluster"],
)
def test_what_cannot_be_true_freezes(changes: dict[str, Any]) -> None:
    decision = decide(RUN, look(**changes), NOW)
    assert isinstance(decision, Freeze), decision


def test_another_cluster_is_taken_over_only_when_told_and_seen_twice() -> None:
    o = look(view=replace(view(), cluster_uid="c2"), take_over=True, starts=())
    assert isinstance(decide(RUN, o, NOW), Wait)
    o = replace(o, marks=held(*gone_marks(o)))
    assert isinstance(decide(RUN, o, NOW), AppendEnding)


def test_another_recipe_is_refused_naming_the_differences() -> None:
    decision = decide(RUN, look(recipe_differences=("global_batch: 512 → 256",)), NOW)
    assert isinstance(decision, Refused)
    assert "global_batch: 512 → 256" in decision.message


def test_a_document_from_a_newer_version_is_refused() -> None:
    decision = decide(RUN, look(refusals=("HEAD: written by a newer untildone",)), NOW)
    assert decision == Refused("HEAD: written by a newer untildone")


def test_another_beginning_is_refused() -> None:
    init = InitRecord(source=InitFrom(run="/runs/parent"))
    decision = decide(RUN, look(init=init), NOW)
    assert isinstance(decision, Refused)
    assert "spec.initFrom" in decision.message


def test_a_target_below_the_commit_is_refused_and_names_both() -> None:
    decision = decide(run_of(targetStep=3), look(), NOW)
    assert isinstance(decision, Refused)
    assert "spec.targetStep 3" in decision.message
    assert "committed step 4" in decision.message


# -- done


def test_a_target_that_was_passed_while_it_was_applied_is_reached() -> None:
    run = run_of(targetStep=6)
    lowered = spec(2, run=run)
    o = look(head=head(8), next_spec=lowered)
    assert isinstance(decide(run, o, NOW), DeleteGang), "the attempt would train on to its own target"
    ended = replace(LIVE, ended=20.0, containers=(ContainerEnd("demo-a1-0", "pod-1", 0, 75, None, 20.0),))
    over = replace(
        o, view=view(gang("Failed", 1, ended)), endings=(ending("plan-change", charged=False, key="uid-1/adm-1"),)
    )
    assert isinstance(decide(run, over, NOW), Done)


def test_done_is_a_commit_at_the_target_and_nothing_else() -> None:
    ended = replace(LIVE, ended=30.0, containers=(ContainerEnd("demo-a1-0", "pod-1", 0, 0, None, 30.0),))
    succeeded = view(gang("Succeeded", 1, ended))
    written = (ending("completed", key="uid-1/adm-1", charged=False),)
    assert isinstance(decide(RUN, look(head=head(TARGET), view=succeeded, endings=written), NOW), Done)
    short = decide(RUN, look(view=succeeded), NOW)
    assert isinstance(short, AppendEnding)
    assert (short.ending.cause, short.ending.charged) == ("unknown", True)
    for step in (4, TARGET - 1):
        assert isinstance(decide(RUN, look(head=head(step), view=succeeded, endings=written), NOW), WriteSpec)


def test_the_last_ending_is_written_before_the_run_is_done() -> None:
    ended = replace(LIVE, ended=30.0, containers=(ContainerEnd("demo-a1-0", "pod-1", 0, 0, None, 30.0),))
    decision = decide(RUN, look(head=head(TARGET), view=view(gang("Succeeded", 1, ended))), NOW)
    assert isinstance(decision, AppendEnding)
    assert (decision.ending.cause, decision.ending.start, decision.ending.key) == ("completed", 1, "uid-1/adm-1")


def test_a_running_gang_is_let_end_after_the_target() -> None:
    decision = decide(RUN, look(head=head(TARGET)), NOW)
    assert isinstance(decision, Wait)
    assert decision.word == "Saving"


def test_a_finished_run_is_done_even_when_the_cluster_is_away() -> None:
    o = look(head=head(TARGET), endings=(ending("completed", charged=False),), unknown={CLUSTER: "x"}, view=None)
    assert isinstance(decide(RUN, o, NOW), Done)
    assert isinstance(decide(RUN, replace(o, endings=()), NOW), Freeze), "the ledger is not complete"


def test_a_raised_target_goes_on_after_the_old_one() -> None:
    o = look(
        head=head(TARGET),
        view=view(gang("Succeeded", 1, replace(LIVE, ended=30.0))),
        endings=(ending("completed", key="uid-1/adm-1", charged=False, last_committed_step=TARGET),),
    )
    decision = decide(run_of(targetStep=48), o, NOW)
    assert isinstance(decision, WriteSpec)
    assert (decision.spec.attempt, decision.spec.settings.target_step) == (2, 48)


def test_a_lowered_target_replaces_the_attempt_that_would_pass_it() -> None:
    decision = decide(run_of(targetStep=12), look(), NOW)
    assert isinstance(decision, WriteSpec)
    assert decision.spec.settings.target_step == 12


# -- gone, stale, stuck


def test_one_look_without_the_gang_changes_nothing() -> None:
    o = look(view=view())
    decision = decide(RUN, replace(o, marks=held(*gone_marks(o), count=1)), NOW)
    assert isinstance(decision, Wait)


def test_a_gang_that_still_reports_is_not_gone() -> None:
    o = look(view=view())
    gone, silent = gone_marks(o)
    reporting = {gone: Mark(20, 20.0), silent: Mark(2, 0.5)}
    assert isinstance(decide(RUN, replace(o, marks=reporting), NOW), Wait)
    quiet = {gone: Mark(20, 20.0), silent: Mark(5, 5.0)}
    assert isinstance(decide(RUN, replace(o, marks=quiet), NOW), AppendEnding)


def test_a_deleted_gang_that_the_cluster_remembers_is_gone_at_once() -> None:
    o = look(view=view(deleted=(gang("Deleted", 1, replace(LIVE, ended=20.0)),)))
    decision = decide(RUN, o, NOW)
    assert isinstance(decision, AppendEnding)
    assert decision.ending.cause == "gone"


def test_a_gone_attempt_is_never_submitted_again() -> None:
    o = look(view=view(deleted=(gang("Deleted", 1, ENDED),)), endings=(ending("gone", key="uid-1/adm-1"),))
    decision = decide(RUN, replace(o, marks=held(over_mark(o), seconds=60)), NOW)
    assert isinstance(decision, WriteSpec)
    assert decision.spec.attempt == 2


def test_a_stale_gang_is_deleted_by_uid_after_a_second_look() -> None:
    current = gang("Queued", 2)
    o = look(
        head=head(4, attempt=2, start=0),
        spec=spec(2),
        submitted=Submitted(cluster_uid="c1", namespace="d", gang_uid="uid-2"),
        starts=(),
        view=view(gang("Running", 1, LIVE), current),
    )
    assert not isinstance(decide(RUN, replace(o, marks=held("stale/uid-1", count=1)), NOW), DeleteGang)
    decision = decide(RUN, replace(o, marks=held("stale/uid-1")), NOW)
    assert isinstance(decision, DeleteGang)
    assert (decision.name, decision.uid) == ("demo-a1", "uid-1")


def test_a_gang_of_the_same_name_with_another_uid_is_not_ours() -> None:
    o = look(view=view(gang("Running", 1, LIVE, uid="uid-9")))
    o = replace(o, marks=held("stale/uid-9"))
    decision = decide(RUN, o, NOW)
    assert isinstance(decision, DeleteGang)
    assert decision.uid == "uid-9"


def test_a_gang_stuck_in_deletion_is_waited_for_but_not_for_ever() -> None:
    stuck = gang("Deleting", 1, LIVE)
    o = look(view=view(stuck))
    assert isinstance(decide(RUN, o, NOW), Wait)
    decision = decide(RUN, replace(o, marks=held(phase_mark(stuck), seconds=1000)), NOW)
    assert isinstance(decision, AppendEnding)
    written = (ending("gone", key="uid-1/adm-1"),)
    o = look(view=view(stuck), endings=written)
    marks = held(phase_mark(stuck), over_mark(o), seconds=1000)
    assert isinstance(decide(RUN, replace(o, marks=marks), NOW), WriteSpec)


# -- queue


def test_a_preempted_gang_is_left_in_the_queue() -> None:
    signal = Evidence(source="Workload x", field="Evicted", value="Preempted")
    waiting = gang("Queued", 1, replace(ENDED, queue_signals=(signal,)))
    first = decide(RUN, look(view=view(waiting, quota=0)), NOW)
    assert isinstance(first, AppendEnding)
    assert (first.ending.cause, first.ending.charged) == ("preempted", False)
    o = look(view=view(waiting, quota=0), endings=(ending("preempted", key="uid-1/adm-1", charged=False),))
    decision = decide(RUN, replace(o, marks=held(phase_mark(waiting), seconds=5)), NOW)
    assert isinstance(decision, Wait)
    assert (decision.word, decision.until) == ("Preempted", NOW + 15)
    still = decide(RUN, replace(o, marks=held(phase_mark(waiting), seconds=500)), NOW)
    assert isinstance(still, Wait), "no rung has room: the place in the queue is kept"


@pytest.mark.parametrize(("quota", "moves"), [(2, True), (None, True), (1, False)])
def test_after_waiting_the_next_rung_is_tried_where_there_is_room(quota: int | None, moves: bool) -> None:
    waiting = gang("Queued")
    o = look(head=head(4, start=0), starts=(), view=view(waiting, quota=quota))
    o = replace(o, marks=held(phase_mark(waiting), seconds=21))
    decision = decide(RUN, o, NOW)
    if moves:
        assert isinstance(decision, WriteSpec)
        assert decision.spec.plan == TWO.plan
    else:
        assert isinstance(decision, Wait)


def test_the_last_rung_waits_for_ever_when_nobody_knows_the_quota() -> None:
    waiting = gang("Queued")
    o = look(head=head(4, start=0), starts=(), spec=spec(rung=1), view=view(waiting, quota=None))
    decision = decide(RUN, replace(o, marks=held(phase_mark(waiting), seconds=1e6)), NOW)
    assert isinstance(decision, Wait)
    assert decision.until is None


# -- switching plans


def on_two(**changes: Any) -> Observation:
    return look(spec=spec(rung=1), **changes)


def test_going_up_needs_capacity_without_a_break_and_training() -> None:
    ready = held("fits/0", seconds=11)
    decision = decide(RUN, on_two(marks=ready), NOW)
    assert isinstance(decision, WriteSpec)
    assert (decision.spec.attempt, decision.spec.plan) == (2, EIGHT.plan)
    assert isinstance(decide(RUN, on_two(marks=held("fits/0", seconds=9)), NOW), Wait)
    compiling = on_two(marks=ready, starts=(started(None, "Compiling"),))
    assert isinstance(decide(RUN, compiling, NOW), Wait), "not before it trains"


def test_going_up_happens_at_most_once_in_a_while() -> None:
    moved = ending("plan-change", charged=False, attempt=1, start=9, index=1, ended=NOW - 20)
    assert isinstance(decide(RUN, on_two(marks=held("fits/0", seconds=11), endings=(moved,)), NOW), Wait)
    assert isinstance(decide(RUN, on_two(marks=held("fits/0", seconds=11), endings=(moved,)), NOW + 11), WriteSpec)


def test_the_old_plan_stops_only_when_the_new_one_is_written_and_head_moves_only_when_it_ended() -> None:
    o = on_two(next_spec=spec(2))
    first = decide(RUN, o, NOW)
    assert first == RequestCommit(1, "stop-1.1", "cpu-2 → cpu-8"), "a commit is asked for before anything is stopped"
    o = replace(o, asked=True)
    assert isinstance(decide(RUN, o, NOW), Wait)
    slow = replace(o, marks=held("asked/stop-1.1", seconds=7))
    assert isinstance(decide(RUN, slow, NOW), StopForPlanChange), (
        "a trainer that does not answer is stopped all the same"
    )
    o = replace(o, answered=True)
    decision = decide(RUN, o, NOW)
    assert isinstance(decision, StopForPlanChange)
    assert (decision.uid, decision.grace_seconds, decision.old, decision.new) == ("uid-1", 3, TWO.plan, EIGHT.plan)
    deleting = replace(o, view=view(gang("Deleting", 1, LIVE)))
    waiting = decide(RUN, deleting, NOW)
    assert isinstance(waiting, Wait)
    assert waiting.word == "Switching"
    done = replace(LIVE, ended=30.0, containers=(ContainerEnd("demo-a1-0", "pod-1", 0, 75, None, 30.0),))
    gone = replace(o, view=view(deleted=(gang("Deleted", 1, done),)))
    written = decide(RUN, gone, NOW)
    assert isinstance(written, AppendEnding)
    assert (written.ending.cause, written.ending.charged) == ("plan-change", False)
    after = replace(gone, endings=(written.ending,))
    assert decide(RUN, after, NOW) == SwapHead(2, 7)


def test_healthy_training_is_not_stopped_for_capacity_that_went_away() -> None:
    o = on_two(next_spec=spec(2), view=view(gang("Running", 1, LIVE), quota=2))
    assert isinstance(decide(RUN, o, NOW), Wait)


def test_a_rung_that_left_the_ladder_is_left() -> None:
    run = run_of(ladder=[{"deviceType": "cpu-4"}])
    o = look(rungs=ladder(run, RECIPE))
    decision = decide(run, o, NOW)
    assert isinstance(decision, WriteSpec)
    assert decision.spec.plan.device_type == "cpu-4"


# -- hangs


def test_a_silent_gang_is_written_down_as_hung_and_then_deleted() -> None:
    o = look()
    beats, _ = beat_marks(o, o.gang)  # type: ignore[arg-type]
    assert isinstance(decide(RUN, replace(o, marks=held(beats, seconds=20)), NOW), Wait), "twice the watchdog's limit"
    decision = decide(RUN, replace(o, marks=held(beats, seconds=21)), NOW)
    assert isinstance(decision, AppendEnding)
    assert (decision.ending.cause, decision.ending.start, decision.ending.key) == ("hang", 1, "uid-1/adm-1")
    after = decide(RUN, replace(o, endings=(decision.ending,)), NOW)
    assert isinstance(after, DeleteGang)


def test_beats_without_steps_are_a_hang_too_but_compiling_may_take_longer() -> None:
    o = look()
    _, step = beat_marks(o, o.gang)  # type: ignore[arg-type]
    assert isinstance(decide(RUN, replace(o, marks=held(step, seconds=21)), NOW), AppendEnding)
    compiling = look(starts=(started(None, "Compiling"),))
    _, step = beat_marks(compiling, compiling.gang)  # type: ignore[arg-type]
    assert isinstance(decide(RUN, replace(compiling, marks=held(step, seconds=39)), NOW), Wait)
    assert isinstance(decide(RUN, replace(compiling, marks=held(step, seconds=41)), NOW), AppendEnding)


# -- failures


def test_after_a_failure_comes_a_pause_then_the_next_attempt_on_the_same_rung() -> None:
    o = on_two(view=view(gang("Failed", 1, ENDED)))
    first = decide(RUN, o, NOW)
    assert isinstance(first, AppendEnding)
    assert (first.ending.cause, first.ending.charged, first.ending.last_committed_step) == (
        "application-error",
        True,
        4,
    )
    o = replace(o, endings=(first.ending,))
    pausing = decide(RUN, o, NOW)
    assert isinstance(pausing, Wait)
    assert pausing.word == "BackingOff"
    assert pausing.until is not None
    assert NOW < pausing.until <= NOW + 2
    decision = decide(RUN, replace(o, marks=held(over_mark(o), seconds=3)), NOW)
    assert isinstance(decision, WriteSpec)
    assert decision.spec.plan == TWO.plan


def test_a_spent_budget_ends_the_run_and_names_the_field() -> None:
    failed = tuple(ending(index=n, key="uid-1/adm-1" if n == 1 else f"k{n}") for n in range(1, 5))
    o = look(view=view(gang("Failed", 1, ENDED)), endings=failed, starts=())
    decision = decide(RUN, o, NOW)
    assert isinstance(decision, GiveUp)
    assert decision.cause == "application-error"
    assert "spec.budgets.applicationError is 3" in decision.message
    assert decision.evidence
    more = run_of(budgets={"applicationError": 9})
    assert isinstance(decide(more, replace(o, marks=held(over_mark(o), seconds=60)), NOW), WriteSpec)


def test_a_gang_that_restarts_by_itself_is_stopped_when_its_budget_is_spent() -> None:
    hosts = tuple(ending("host-failure", index=n) for n in range(1, 12))
    o = look(endings=hosts, head=head(4, start=12), starts=(started(start=12),), view=view(gang("Running", 1, LIVE)))
    o = replace(o, starts=(replace(started(start=12), pod_uid="pod-1"),))
    assert isinstance(decide(RUN, o, NOW), DeleteGang)


def test_endings_missed_while_away_are_written_before_anything_else() -> None:
    third = replace(started(start=3), pod_uid="pod-1")
    record = third.record.model_copy(update={"restored": commit(4)})  # type: ignore[union-attr]
    second = replace(started(start=2), pod_uid="pod-2", exit=ExitRecord(code=77, reason="no step", time=15.0))
    first = replace(started(start=1), pod_uid="pod-0", record=None, progress=None)
    starts = (first, second, replace(third, record=record))
    o = look(head=head(8, start=3), starts=starts)
    one = decide(RUN, o, NOW)
    assert isinstance(one, AppendEnding)
    assert (one.ending.start, one.ending.cause, one.ending.charged) == (1, "unknown-while-absent", False)
    two = decide(RUN, replace(o, endings=(one.ending,)), NOW)
    assert isinstance(two, AppendEnding)
    assert (two.ending.start, two.ending.cause, two.ending.last_committed_step) == (2, "hang", 4)
    assert isinstance(decide(RUN, replace(o, endings=(one.ending, two.ending)), NOW), Wait)


def test_an_attempt_that_never_came_up_has_an_entry_too() -> None:
    o = look(head=head(4, start=0), starts=(), view=view(gang("Deactivated", message="requeuing limit exceeded")))
    decision = decide(RUN, o, NOW)
    assert isinstance(decision, AppendEnding)
    assert (decision.ending.start, decision.ending.cause) == (None, "deactivated")
    assert "requeuing limit" in decision.ending.evidence[0].value


# -- observing


def test_memory_counts_on_its_own_clock_and_breaks_what_must_not_have_gaps() -> None:
    clock = [0.0]
    memory = Memory(lambda: clock[0])
    memory.note({"fits/0", "beats/x/3"})
    clock[0] = 5.0
    marks = memory.note({"fits/0", "beats/x/3"})
    assert marks == {"fits/0": Mark(2, 5.0), "beats/x/3": Mark(2, 5.0)}
    clock[0] = 6.0
    memory.note(set(), unknown={"cluster"})
    clock[0] = 9.0
    marks = memory.note({"fits/0", "beats/x/3"})
    assert marks["fits/0"] == Mark(1, 0.0), "capacity was not seen without a break"
    assert marks["beats/x/3"] == Mark(3, 9.0), "the heartbeat is the same as before the outage"
    assert "beats/x/3" not in memory.note({"beats/x/4"})


def test_an_observation_never_guesses() -> None:
    world = World(RUN)
    memory = Memory(lambda: world.now)
    world.cluster_down = True
    o = read_observation(RUN, RECIPE, world, world.rundir, memory)
    assert set(o.unknown) == {CLUSTER}
    assert o.view is None
    world.cluster_down, world.rundir.down = False, True
    o = read_observation(RUN, RECIPE, world, world.rundir, memory)
    assert set(o.unknown) == {RUN_DIRECTORY}
    assert (o.head, o.spec, o.endings) == (None, None, ())
    assert marks_of(o) == set()


def test_a_head_lower_than_one_seen_before_is_unknown() -> None:
    world = World(RUN)
    memory = Memory(lambda: world.now)
    world.rundir.swap(Head(attempt=3, start=0, op_id="x"))
    read_observation(RUN, RECIPE, world, world.rundir, memory)
    world.rundir.swap(Head(attempt=2, start=0, op_id="y"))
    o = read_observation(RUN, RECIPE, world, world.rundir, memory)
    assert RUN_DIRECTORY in o.unknown
    assert isinstance(decide(RUN, o, NOW), Freeze)


def test_deciding_changes_nothing_and_says_the_same_again() -> None:
    o = look(view=view(gang("Failed", 1, ENDED)))
    assert decide(RUN, o, NOW) == decide(RUN, o, NOW)


def test_the_run_directory_of_another_name_is_refused_whatever_it_is_doing() -> None:
    mine = look()
    assert mine.spec is not None
    theirs = mine.spec.model_copy(update={"gang": "other-a1"})
    for o in (mine, look(view=view()), look(head=head(TARGET))):
        decision = decide(RUN, replace(o, spec=theirs), NOW)
        assert isinstance(decision, Refused)
        assert "metadata.name to 'other'" in decision.message
