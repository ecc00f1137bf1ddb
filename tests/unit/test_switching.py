"""Moves that are wanted, not suffered: another program, other hardware, pods that neither start nor end."""

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.clusters.base import Admission, ClusterView, ContainerEnd
from orchestrator.decisions import (
    AppendEnding,
    DeleteGang,
    GiveUp,
    RequestCommit,
    StopForPlanChange,
    SubmitGang,
    SwapHead,
    Wait,
    WriteSpec,
)
from orchestrator.lifecycle import decide
from orchestrator.marks import beat_marks, cannot_start_mark, phase_mark, stuck_mark
from orchestrator.observation import Observation, request_name
from orchestrator.observe import _with_request
from orchestrator.planning import ladder
from tests.support.world import run_of, tiny_recipe
from tests.unit.test_lifecycle import LIVE, NOW, commit, ending, gang, head, held, look, spec, view
from trainer.rundir.records import AttemptSpec, Category, Evidence, Head, Program

OLD, NEW = (Program(image=f"trainer@sha256:{name}", command=("python",)) for name in ("old", "new"))
RECIPE = tiny_recipe()


def running(program: Program = OLD, **changes: Any) -> AttemptSpec:
    return spec().model_copy(update={"program": program, **changes})


# -- another program


def test_a_new_image_is_planned_asked_for_and_switched_to_at_a_commit() -> None:
    o = look(program=NEW, spec=running())
    planned = decide(run_of(), o, NOW)
    assert isinstance(planned, WriteSpec)
    new = planned.spec
    assert (new.program, new.fallback, new.rejected, new.image) == (NEW, OLD, None, NEW.image)
    assert new.plan == running().plan
    o = replace(o, next_spec=new)
    assert isinstance(decide(run_of(), o, NOW), RequestCommit)
    assert isinstance(decide(run_of(), replace(o, asked=True), NOW), Wait)
    stop = decide(run_of(), replace(o, asked=True, answered=True), NOW)
    assert isinstance(stop, StopForPlanChange)
    assert NEW.image in stop.why


def test_what_was_planned_and_never_submitted_is_not_insisted_on() -> None:
    o = look(program=NEW, spec=running(), submitted=None, starts=(), view=view())
    o = replace(o, head=Head(attempt=1, start=0, commit=commit(4), op_id="x"))
    planned = decide(run_of(), o, NOW)
    assert isinstance(planned, WriteSpec)
    assert (planned.spec.attempt, planned.spec.program) == (2, NEW)
    assert decide(run_of(), replace(o, next_spec=planned.spec), NOW) == SwapHead(2, 7)
    assert isinstance(decide(run_of(), replace(o, program=OLD), NOW), SubmitGang)


def test_the_same_image_changes_nothing() -> None:
    assert isinstance(decide(run_of(), look(program=OLD, spec=running()), NOW), Wait)


@pytest.mark.parametrize("cause", ["application-error", "bad-configuration", "unknown", "non-finite"])
def test_a_program_that_fails_at_once_is_taken_back_once_and_nobody_pays(cause: Category) -> None:
    code = {"application-error": 1, "bad-configuration": 64, "unknown": 139, "non-finite": 78}[cause]
    ended = replace(LIVE, ended=20.0, containers=(ContainerEnd("demo-a1-0", "pod-1", 0, code, None, 20.0),))
    o = look(
        program=NEW,
        spec=running(NEW, fallback=OLD),
        head=Head(attempt=1, start=1, pod_uid="pod-1", commit=None, op_id="x"),
        view=view(gang("Failed", 1, ended)),
    )
    written = decide(run_of(), o, NOW)
    assert isinstance(written, AppendEnding)
    assert (written.ending.cause, written.ending.charged) == (cause, False)
    back = decide(run_of(), replace(o, endings=(written.ending,)), NOW)
    assert isinstance(back, WriteSpec), "at once: no pause, no budget"
    assert (back.spec.program, back.spec.fallback, back.spec.rejected) == (OLD, None, NEW.digest)
    again = look(program=NEW, spec=back.spec.model_copy(update={"attempt": 1, "nonce": "n1", "gang": "demo-a1"}))
    assert isinstance(decide(run_of(), again, NOW), Wait), "tried once is enough"
    third = decide(run_of(), replace(again, program=Program(image="third", command=("x",))), NOW)
    assert isinstance(third, WriteSpec), "another one may be tried"


def test_a_new_program_that_was_preempted_first_is_still_on_trial() -> None:
    preempted = ending("preempted", charged=False)
    o = look(
        program=NEW,
        spec=running(NEW, fallback=OLD),
        head=Head(attempt=1, start=1, pod_uid="pod-1", commit=None, op_id="x"),
        endings=(preempted,),
    )
    assert isinstance(decide(run_of(), o, NOW), Wait)


def test_a_program_that_committed_is_not_taken_back() -> None:
    ended = replace(LIVE, ended=20.0, containers=(ContainerEnd("demo-a1-0", "pod-1", 0, 1, None, 20.0),))
    o = look(program=NEW, spec=running(NEW, fallback=OLD), view=view(gang("Failed", 1, ended)))
    written = decide(run_of(), o, NOW)
    assert isinstance(written, AppendEnding)
    assert written.ending.charged
    run = run_of(budgets={"applicationError": 0})
    assert isinstance(decide(run, replace(o, endings=(written.ending,)), NOW), GiveUp)


def test_pods_that_cannot_start_take_a_new_program_back_and_only_tell_about_an_old_one() -> None:
    blocked = gang("Running", 1, LIVE, cannot_start=(Evidence(source="pod x", field="waiting", value="ErrImagePull"),))
    marks = held(cannot_start_mark(blocked), seconds=121)
    no_commit = Head(attempt=1, start=0, commit=None, op_id="x")
    o = look(program=NEW, spec=running(NEW, fallback=OLD), head=no_commit, starts=(), view=view(blocked), marks=marks)
    written = decide(run_of(), o, NOW)
    assert isinstance(written, AppendEnding)
    assert written.ending.cause == "bad-configuration"
    early = replace(o, marks=held(cannot_start_mark(blocked), seconds=119))
    assert isinstance(decide(run_of(), early, NOW), Wait)
    old = decide(run_of(), replace(o, program=OLD, spec=running()), NOW)
    assert isinstance(old, Wait)
    assert "ErrImagePull" in old.message


# -- other hardware, where it draws on another quota

TPU_RUN = run_of(
    ladder=[{"deviceType": "tpu7x-2x2x2", "waitInQueue": 20}, {"deviceType": "v5p-2x2x1", "waitInQueue": 20}]
)
TPU_RUNGS = ladder(TPU_RUN, RECIPE)


def on_lower(**changes: Any) -> Observation:
    lower = spec().model_copy(update={"plan": TPU_RUNGS[1].plan})
    made = look(rungs=TPU_RUNGS, spec=lower, view=ClusterView("c1", (gang("Running", 1, LIVE),)))
    return replace(made, **changes)


def upper_spec() -> AttemptSpec:
    return spec(2).model_copy(update={"plan": TPU_RUNGS[0].plan})


def with_ahead(phase: str, **changes: Any) -> Observation:
    admissions = (Admission("up-1", 0, began=12.0, pod_uids=("pod-9",)),) if phase == "Running" else ()
    gangs = (gang("Running", 1, LIVE), gang(phase, 2, *admissions))
    return on_lower(next_spec=upper_spec(), view=ClusterView("c1", gangs), **changes)


def test_the_upper_rung_queues_ahead_while_the_lower_trains() -> None:
    trained = held(phase_mark(gang("Running", 1, LIVE)), seconds=11)
    planned = decide(TPU_RUN, on_lower(marks=trained), NOW)
    assert isinstance(planned, WriteSpec)
    assert planned.spec.plan.device_type == "tpu7x-2x2x2"
    assert decide(TPU_RUN, on_lower(next_spec=upper_spec()), NOW) == SubmitGang(upper_spec())
    waiting = decide(TPU_RUN, with_ahead("Queued"), NOW)
    assert isinstance(waiting, Wait), "an upper rung that is never admitted costs nothing"
    assert waiting.word == "Training"
    failed = decide(TPU_RUN, with_ahead("Failed"), NOW)
    assert isinstance(failed, Wait)
    assert "did not come up" in failed.message
    assert failed.until == NOW + TPU_RUN.spec.go_up.after


def test_what_did_not_come_up_ahead_is_queued_again_and_the_lower_rung_never_notices() -> None:
    """A deactivated or failed gang up there must not bar the way up for as long as the lower one lives."""
    for phase in ("Failed", "Deactivated", "Succeeded"):
        o = with_ahead(phase, marks=held(phase_mark(gang(phase, 2)), seconds=11))
        again = decide(TPU_RUN, o, NOW)
        assert isinstance(again, DeleteGang) and (again.name, again.uid) == ("demo-a2", "uid-2")
        deleting = decide(TPU_RUN, with_ahead("Deleting"), NOW)
        assert isinstance(deleting, Wait) and deleting.word == "Training"
        assert decide(TPU_RUN, on_lower(next_spec=upper_spec()), NOW) == SubmitGang(upper_spec())


def test_an_admitted_upper_rung_takes_over_after_a_commit_and_the_ledger() -> None:
    o = with_ahead("Running")
    assert isinstance(decide(TPU_RUN, o, NOW), RequestCommit)
    o = replace(o, asked=True, answered=True)
    written = decide(TPU_RUN, o, NOW)
    assert isinstance(written, AppendEnding)
    assert (written.ending.cause, written.ending.charged, written.ending.attempt) == ("plan-change", False, 1)
    assert decide(TPU_RUN, replace(o, endings=(written.ending,)), NOW) == SwapHead(2, 7)


def test_an_interruption_while_the_upper_rung_queues_is_no_plan_change() -> None:
    killed = replace(LIVE, ended=20.0, containers=(ContainerEnd("demo-a1-0", "pod-1", 0, None, 9, 20.0),))
    restarted = Admission("adm-2", 1, began=21.0, pod_uids=("pod-2",))
    gangs = (gang("Running", 1, killed, restarted), gang("Queued", 2))
    written = decide(TPU_RUN, replace(with_ahead("Queued"), view=ClusterView("c1", gangs)), NOW)
    assert isinstance(written, AppendEnding)
    assert written.ending.cause == "host-failure"


def test_the_lower_rung_ends_while_the_upper_queues_and_nothing_is_lost() -> None:
    failed = replace(LIVE, ended=20.0, containers=(ContainerEnd("demo-a1-0", "pod-1", 0, 1, None, 20.0),))
    o = with_ahead("Queued")
    o = replace(o, view=ClusterView("c1", (gang("Failed", 1, failed), gang("Queued", 2))))
    written = decide(TPU_RUN, o, NOW)
    assert isinstance(written, AppendEnding)
    assert decide(TPU_RUN, replace(o, endings=(written.ending,)), NOW) == SwapHead(2, 7)


def test_nothing_queues_ahead_of_a_run_that_stands_still_or_is_done() -> None:
    suspended = TPU_RUN.model_copy(update={"spec": TPU_RUN.spec.model_copy(update={"suspend": True})})
    gone = DeleteGang("demo-a2", "uid-2", 3, "spec.suspend is true")
    assert decide(suspended, with_ahead("Queued"), NOW) == gone, "or it would come up in a run that stands still"
    for quota in (None, {"tpu7x": 0, "v5p": 4}):
        o = on_lower(next_spec=upper_spec(), view=ClusterView("c1", (gang("Running", 1, LIVE),), (), quota))
        assert isinstance(decide(suspended, o, NOW), RequestCommit)
        assert isinstance(decide(suspended, replace(o, asked=True, answered=True), NOW), DeleteGang)
    done = replace(with_ahead("Queued"), head=head(24))
    assert decide(TPU_RUN, done, NOW) == DeleteGang(
        "demo-a2", "uid-2", 3, "step 24 is committed; nothing is left to train"
    )


def test_what_was_planned_ahead_and_is_outdated_does_not_keep_a_new_image_waiting() -> None:
    planned = upper_spec().model_copy(update={"program": OLD})
    o = replace(with_ahead("Queued"), next_spec=planned, program=NEW, asked=True, answered=True)
    assert isinstance(decide(TPU_RUN, o, NOW), StopForPlanChange)
    assert o.view is not None
    full = replace(o, view=replace(o.view, quota_devices={"tpu7x": 0, "v5p": 4}))
    assert isinstance(decide(TPU_RUN, full, NOW), StopForPlanChange), "capacity that is not there is no reason"


def test_what_trains_while_another_attempt_queues_ahead_is_watched_all_the_same() -> None:
    run = TPU_RUN.model_copy(update={"spec": run_of(hang={"step": 600, "start": 600}).spec})
    run = run.model_copy(update={"spec": run.spec.model_copy(update={"ladder": TPU_RUN.spec.ladder})})
    o = with_ahead("Queued")
    old = gang("Running", 1, LIVE, stuck=STUCK)
    dead = replace(o, view=ClusterView("c1", (old, gang("Queued", 2))))
    dead = replace(dead, marks=held(stuck_mark(old), seconds=31) | held(beat_marks(dead, old)[0], seconds=40))
    written = decide(run, dead, NOW)
    assert isinstance(written, AppendEnding)
    assert written.ending.cause == "host-failure"
    end = decide(run, replace(dead, endings=(written.ending,)), NOW)
    assert isinstance(end, DeleteGang)
    assert end.name == "demo-a1"

    silent = replace(o, marks=held(beat_marks(o, gang("Running", 1, LIVE))[0], seconds=1201))
    hung = decide(run, silent, NOW)
    assert isinstance(hung, AppendEnding)
    assert hung.ending.cause == "hang"
    assert isinstance(decide(run, replace(silent, endings=(hung.ending,)), NOW), DeleteGang)

    often = tuple(ending("application-error", index=n) for n in range(1, 9))
    spent = replace(o, endings=often, head=head(0))
    assert isinstance(decide(run, spent, NOW), DeleteGang)


def test_an_answer_from_before_a_stop_that_did_not_come_to_pass_is_asked_for_again() -> None:
    run = run_of(hang={"step": 600, "start": 600})
    lower = run.model_copy(update={"spec": run.spec.model_copy(update={"ladder": TPU_RUN.spec.ladder})})
    o = replace(with_ahead("Running"), asked=True, answered=True)
    (start,) = o.starts
    assert start.progress is not None
    for step, again in ((40, False), (70, True)):  # 10 s each since step 4
        progress = start.progress.model_copy(update={"step": step, "step_seconds": 10.0})
        decision = decide(lower, replace(o, starts=(replace(start, progress=progress),)), NOW)
        if again:
            assert isinstance(decision, RequestCommit)
            assert decision.identifier == "stop-1.1-2"
        else:
            assert isinstance(decision, AppendEnding)


@pytest.mark.parametrize(
    ("asked", "answers", "seen"),
    [
        (0, 0, (False, False, 1)),
        (1, 0, (True, False, 1)),
        (1, 1, (True, True, 1)),
        (2, 1, (True, False, 2)),
        (2, 2, (True, True, 2)),
    ],
)
def test_the_newest_request_is_the_one_that_counts(asked: int, answers: int, seen: tuple[bool, bool, int]) -> None:
    names = [request_name(head(4), number) for number in (1, 2)]

    class Requests:
        def read_request(self, name: str) -> object:
            return name if name in names[:asked] else None

        def read_answer(self, name: str) -> object:
            return name if name in names[:answers] else None

    o = _with_request(look(), Requests(), head(4))  # type: ignore[arg-type]
    assert (o.asked, o.answered, o.request) == seen


def test_one_that_was_to_make_way_goes_on_when_what_was_admitted_ahead_is_evicted() -> None:
    o = replace(with_ahead("Running"), asked=True, answered=True)
    written = decide(TPU_RUN, o, NOW)
    assert isinstance(written, AppendEnding)
    evicted = replace(with_ahead("Queued"), asked=True, answered=True, endings=(written.ending,))
    assert isinstance(decide(TPU_RUN, evicted, NOW), Wait)


# -- pods on hosts that do not answer

STUCK = (Evidence(source="pod demo-a1-0 on node n1", field="Terminating", value="node NotReady"),)


def stuck(phase: str = "Running", silent: float = 40.0, seconds: float = 31.0) -> Observation:
    g = gang(phase, 1, *((LIVE,) if phase == "Running" else ()), stuck=STUCK)
    o = look(view=view(g))
    return replace(o, marks=held(stuck_mark(g), seconds=seconds) | held(beat_marks(o, g)[0], seconds=silent))


def test_stuck_pods_of_a_silent_gang_are_a_host_failure_and_another_attempt_follows() -> None:
    run = run_of(hang={"step": 600, "start": 600})
    o = stuck()
    written = decide(run, o, NOW)
    assert isinstance(written, AppendEnding)
    assert (written.ending.cause, written.ending.evidence) == ("host-failure", STUCK)
    o = replace(o, endings=(written.ending,))
    assert isinstance(decide(run, o, NOW), DeleteGang)
    going = replace(o, view=view(gang("Deleting", 1, LIVE, stuck=STUCK)))
    following = decide(run_of(backoff={"initial": 0}), going, NOW)
    assert isinstance(following, WriteSpec), "its pods cannot be waited for; HEAD keeps them out"


def test_a_gang_that_still_reports_is_left_alone_and_so_is_one_that_was_just_seen_stuck() -> None:
    run = run_of(hang={"step": 600, "start": 600})
    assert isinstance(decide(run, stuck(silent=2.0), NOW), Wait)
    assert isinstance(decide(run, stuck(seconds=5.0), NOW), Wait)


def test_a_queued_gang_with_stuck_pods_could_never_come_up_again() -> None:
    o = replace(stuck("Queued"), endings=(ending("preempted", charged=False),))
    assert isinstance(decide(run_of(), o, NOW), DeleteGang)


def test_a_silence_with_a_dead_node_is_a_host_failure_not_a_hang() -> None:
    node = (Evidence(source="node n1", field="Ready", value="Ready=Unknown"),)
    g = gang("Running", 1, replace(LIVE, node_signals=node))
    o = look(view=view(g))
    written = decide(run_of(), replace(o, marks=held(beat_marks(o, g)[0], seconds=21)), NOW)
    assert isinstance(written, AppendEnding)
    assert written.ending.cause == "host-failure"
