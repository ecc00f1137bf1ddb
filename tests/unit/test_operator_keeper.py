"""What an operator does about one TrainingRun: which spec counts, what it writes, and what it tells."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.api import TrainingRun
from orchestrator.clusters.base import ClusterUnavailable, ClusterView
from orchestrator.operating.keeper import LIVE_SECONDS, TAKE_OVER
from orchestrator.owners import STALE_SECONDS, Ownership
from tests.support.kept import UID, Kept
from tests.support.story import TARGET, Chapter, a_world, end_state
from trainer.errors import ConfigurationError, StorageUnavailable
from trainer.rundir.disk import DiskStore
from trainer.rundir.rundir import RunDirectory

FOREVER = (Chapter(1, 3, "nothing"), Chapter(2, 10**6, "nothing"))


def test_it_carries_a_run_through_everything_to_its_end() -> None:
    with a_world() as world:
        kept = Kept(world)
        kept.until(lambda: kept.word == "Completed")
        end_state(world)
        assert kept.condition("Succeeded")["status"] == "True"
        assert kept.condition("Ready")["status"] == "True"
        assert kept.server.reasons == [
            "Submitted",
            "Admitted",
            "Training",
            "HostFailure",
            "Restarted",
            "Training",
            "Preempted",
            "Switching",
            "Stopping",
            "Submitted",
            "Admitted",
            "Training",
            "Switching",
            "CommitRequested",
            "Stopping",
            "PlanChanged",
            "Submitted",
            "Admitted",
            "Training",
            "ApplicationError",
            "BackingOff",
            "Submitted",
            "Admitted",
            "Training",
            "AttemptCompleted",
            "Completed",
        ]
        owner = RunDirectory(DiskStore(world.folder)).owner()
        assert owner is not None and owner[0].owner == UID and owner[0].released


def test_when_it_is_done_it_only_waits_for_news() -> None:
    with a_world() as world:
        kept = Kept(world)
        kept.until(lambda: kept.word == "Completed")
        looks, writes = world.looks, len(kept.server.statuses)
        for _ in range(20):
            assert kept.visit() is None
        assert (world.looks, len(kept.server.statuses)) == (looks, writes)
        kept.change(targetStep=TARGET + 1)
        kept.visit()
        kept.visit()
        assert world.looks > looks


def test_another_operator_tells_nothing_twice() -> None:
    """Two at once, and each replaced now and then: the names collide, and what the status shows is not tried again."""
    with a_world() as world:
        kept = Kept(world)
        keepers = [kept.fresh("a"), kept.fresh("b")]
        for number in range(300):
            for index, keeper in enumerate(keepers):
                kept.visit(keeper)
                if number % 7 == index:
                    keepers[index] = kept.fresh(f"{number}")
            if kept.word == "Completed":
                break
            world.tick()
        assert kept.word == "Completed"
        told = [(event["reason"], event["message"]) for event in kept.server.events.values()]
        assert [twice for twice in told if told.count(twice) > 1] == []
        before = list(kept.server.tried)
        kept.server.events.clear()  # an hour later they have expired
        late = kept.fresh("late")
        for _ in range(5):
            kept.visit(late)
        assert kept.server.tried == before


def test_a_crash_between_event_and_status_tells_once() -> None:
    with a_world() as world:
        kept = Kept(world)
        kept.until(lambda: "Training" in kept.server.reasons)
        while kept.visit() == 0.0:
            pass
        again = kept.fresh()  # as if the last status had never been written
        again._teller._written = None
        told = dict(kept.server.events)
        for _ in range(3):
            kept.visit(again)
        assert kept.server.events == told


def test_events_that_cannot_be_written_do_not_matter() -> None:
    with a_world() as world:
        kept = Kept(world)
        kept.server.refuses = {"/events": 403}
        kept.until(lambda: kept.word == "Completed")
        end_state(world)


def test_a_quiet_run_is_written_once_a_minute_and_read_every_ten_seconds() -> None:
    with a_world(FOREVER) as world:
        kept = Kept(world, checkpoint={"everySteps": 1})
        kept.until(lambda: kept.word == "Training" and kept.obj["status"]["committedStep"] >= 3)
        kept.visit()
        writes, looks, began = len(kept.server.statuses), world.looks, world.now
        while world.now - began < 600:
            pause = kept.visit()
            assert pause is not None and pause >= LIVE_SECONDS * 0.9 - 1e-6
            for _ in range(int(pause / 0.5)):
                world.tick()
        minutes = (world.now - began) / 60
        assert len(kept.server.statuses) - writes <= minutes + 1
        assert world.looks - looks <= (world.now - began) / (LIVE_SECONDS * 0.9) + 2


def test_between_acts_nothing_is_written_but_the_spec_is_answered_at_once() -> None:
    with a_world(FOREVER) as world:
        kept = Kept(world)
        pauses = [kept.visit()]
        assert kept.obj["status"]["observedGeneration"] == 1
        while pauses[-1] == 0.0:
            writes = len(kept.server.statuses)
            pauses.append(kept.visit())
            assert len(kept.server.statuses) - writes == (pauses[-1] != 0.0)
        assert len(pauses) > 4  # recipe, spec, HEAD, gang
        assert kept.word in ("Queued", "Starting")


def test_steps_and_commits_alone_are_written_once_a_minute_but_a_change_at_once() -> None:
    with a_world((Chapter(1, 9, "nothing"), Chapter(2, 10**6, "nothing"))) as world:
        kept = Kept(world, targetStep=10)
        kept.until(lambda: kept.word == "Training")
        writes, began = len(kept.server.statuses), world.now
        while world.now - began < 4:  # eight commits
            kept.visit()
            world.tick()
        assert len(kept.server.statuses) - writes <= 2
        kept.change(suspend=True)
        kept.until(lambda: kept.word == "Suspended")


def test_a_refused_spec_leaves_the_run_to_the_last_accepted_one() -> None:
    """A typo must not harm a run that trains: it goes on, through a failure even, and both are said."""
    with a_world() as world:
        kept = Kept(world)
        kept.until(lambda: kept.word == "Training")
        gangs = list(world.created)
        kept.change(targetStep="many")
        kept.visit()
        ready = kept.condition("Ready")
        assert (ready["status"], ready["reason"]) == ("False", "Refused")
        assert "targetStep" in ready["message"] and "generation 1 of its spec" in ready["message"]
        assert {c["observedGeneration"] for c in kept.obj["status"]["conditions"]} == {2}
        assert kept.condition("Stalled")["status"] == "True"
        assert world.created == gangs
        assert kept.word in ("Starting", "Training")
        kept.until(lambda: kept.word == "Completed")
        assert len(world.created) == 4, "the failures of the story were survived under the refused spec"
        assert kept.condition("Ready")["status"] == "False"
        assert kept.server.reasons.count("Refused") == 1
        kept.change(targetStep=TARGET)
        kept.until(lambda: kept.condition("Ready")["status"] == "True")
        end_state(world)


def test_an_operator_that_comes_later_goes_on_with_the_accepted_spec() -> None:
    """The operator before it took the last good spec to its grave: the status has it."""
    with a_world() as world:
        kept = Kept(world)
        kept.until(lambda: kept.word == "Training")
        kept.change(targetStep="many")
        for _ in range(3):
            kept.keeper = kept.fresh()  # the operator is restarted, again and again
            kept.until(lambda: len(world.created) >= 2 or kept.word == "Completed")
            ready = kept.condition("Ready")
            assert (ready["status"], ready["reason"]) == ("False", "Refused")
            assert "generation 1 of its spec" in ready["message"]
            assert kept.obj["status"]["accepted"]["generation"] == 1
        kept.until(lambda: kept.word == "Completed")
        end_state(world)
        assert kept.condition("Ready")["status"] == "False"


def test_the_accepted_spec_is_no_way_around_tenancy() -> None:
    """What may be used is asked of a recalled spec as well: the configuration may have changed meanwhile."""
    with a_world() as world:
        kept = Kept(world)
        kept.until(lambda: kept.word == "Training")
        elsewhere = json.dumps(kept.obj["spec"] | {"runDirectory": "/elsewhere/run"})
        kept.obj["status"]["accepted"]["spec"] = elsewhere
        kept.change(targetStep="many")
        kept.keeper = kept.fresh()
        looks = world.looks
        for _ in range(5):
            kept.visit()
        assert world.looks == looks and kept.word == "Refused"


def test_every_spec_survives_its_way_through_the_status() -> None:
    for path in sorted(Path("examples/kubernetes").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] != "TrainingRun":
                continue
            run = TrainingRun.parse(document, str(path))
            spec = json.loads(run.spec.model_dump_json(by_alias=True, exclude_unset=True))
            assert TrainingRun.parse({**document, "spec": spec}, "status").spec == run.spec


def test_a_spec_that_contradicts_the_run_is_refused_likewise() -> None:
    with a_world(FOREVER) as world:
        kept = Kept(world)
        kept.until(lambda: kept.obj.get("status", {}).get("committedStep") == 3, 200)
        kept.change(targetStep=2)  # lower than what is committed
        for _ in range(5):
            kept.visit()
        ready = kept.condition("Ready")
        assert (ready["status"], ready["reason"]) == ("False", "Refused")
        assert "lower than the committed step 3" in ready["message"]
        assert kept.word == "Training" and len(world.created) == 1
        prepared = len(kept.prepared)
        began = world.now
        while world.now - began < 200:
            kept.visit()
            world.now += 10
            world.tick()
        assert len(kept.prepared) == prepared, "looked at again and again"


def test_without_an_accepted_spec_a_refusal_is_all_there_is() -> None:
    with a_world() as world:
        kept = Kept(world)
        kept.change(ladder=[])
        kept.visit()
        assert kept.word == "Refused"
        assert "ladder" in kept.condition("Ready")["message"]
        assert len(kept.obj["status"]["conditions"]) == 9
        assert world.created == [] and list(world.folder.iterdir()) == []
        assert kept.server.reasons == ["Refused"]
        writes = len(kept.server.statuses)
        for _ in range(5):
            assert kept.visit() is None
        assert len(kept.server.statuses) == writes
        kept.change(ladder=[{"deviceType": "cpu-8"}])
        kept.until(lambda: kept.word == "Training")


def test_what_another_namespace_owns_is_never_read() -> None:
    with a_world() as world:
        kept = Kept(world, runDirectory="/elsewhere/run")
        kept.visit()
        assert kept.word == "Refused" and "spec.runDirectory /elsewhere/run" in kept.condition("Ready")["message"]
        assert kept.prepared == [] and world.looks == 0


def test_a_missing_file_is_looked_for_again() -> None:
    with a_world() as world:
        kept = Kept(world)

        def missing(_: object) -> None:
            raise ConfigurationError("data file a.bin is missing")

        kept.prepare = missing
        pause = kept.visit()
        pause = kept.visit()
        assert kept.word == "Refused" and "a.bin is missing" in kept.condition("Ready")["message"]
        assert pause is not None and 100 < pause <= 300
        kept.prepare = lambda run: None
        world.now += 301
        kept.until(lambda: kept.word == "Training")


def test_an_outage_while_preparing_is_waited_out_with_growing_pauses() -> None:
    with a_world() as world:
        kept = Kept(world)

        def away(_: object) -> None:
            raise StorageUnavailable("503")

        kept.prepare = away
        began = world.now
        while world.now - began < 120:
            world.now += max(0.5, kept.visit() or 0.0)  # None: a preparation has just ended, which wakes it
        assert kept.word == "TruthUnknown"
        assert 5 <= len(kept.prepared) <= 12
        kept.prepare = lambda run: None
        world.now += 31
        kept.until(lambda: kept.word == "Training")


def test_preparation_is_beside_the_visits_and_done_once_for_a_generation() -> None:
    with a_world(FOREVER) as world:
        kept = Kept(world)
        kept.threads.held = True
        kept.visit()
        assert kept.word == "Starting" and kept.condition("Reconciling")["status"] == "True"
        assert kept.condition("Ready")["status"] == "Unknown"
        kept.threads.go()
        kept.until(lambda: kept.word == "Training")
        kept.change(goUp={"after": 5, "every": 5})
        looks = world.looks
        for _ in range(6):
            kept.visit()
        assert world.looks - looks == 6, "the run is looked after meanwhile"
        assert kept.obj["status"]["observedGeneration"] == 1, "the new spec has not been seen through yet"
        kept.threads.go()
        kept.visit()
        assert kept.obj["status"]["observedGeneration"] == 2
        assert kept.prepared == [1, 2]


def test_an_operator_that_follows_says_nothing_until_it_knows() -> None:
    with a_world(FOREVER) as world:
        kept = Kept(world)
        kept.until(lambda: kept.word == "Training")
        writes = len(kept.server.statuses)
        kept.threads.held = True
        late = kept.fresh()
        kept.visit(late)
        assert len(kept.server.statuses) == writes
        kept.threads.go()
        kept.visit(late)
        assert kept.word == "Training"


def test_after_an_outage_it_looks_again_soon_and_then_ever_less_often() -> None:
    with a_world(FOREVER) as world:
        kept = Kept(world)
        kept.until(lambda: kept.word == "Training")
        assert kept.keeper._caretaker is not None
        cluster = kept.keeper._caretaker.cluster

        def away(_: str) -> ClusterView:
            raise ClusterUnavailable("connection refused")

        answering, cluster.observe = cluster.observe, away  # type: ignore[method-assign]
        pauses = [kept.visit() or 0.0 for _ in range(8)]
        assert kept.word == "TruthUnknown"
        assert pauses[0] <= 0.5 and pauses[1] <= 1.0 and min(pauses[6:]) >= 9.0 and max(pauses) <= LIVE_SECONDS
        cluster.observe = answering  # type: ignore[method-assign]
        kept.visit()
        assert kept.word == "Training"
        cluster.observe = away  # type: ignore[method-assign]
        assert (kept.visit() or 0.0) <= 0.5


def test_the_highest_attempt_of_the_status_is_believed() -> None:
    with a_world(FOREVER) as world:
        kept = Kept(world)
        kept.until(lambda: kept.word == "Training")
        kept.obj["status"]["attempt"] = 7
        kept.visit(kept.fresh())
        assert kept.word == "TruthUnknown"
        assert "rolled back" in kept.condition("Succeeded")["message"]


def test_a_daemon_that_looks_after_the_run_is_named_with_the_way_out() -> None:
    with a_world(FOREVER) as world:
        kept = Kept(world)
        rundir = RunDirectory(DiskStore(world.folder))
        daemon = Ownership(rundir, "daemon/host/ns/demo", "c", monotonic=world.clock, clock=world.clock)
        assert daemon.hold() is None
        kept.visit()
        pause = kept.visit()
        assert kept.word == "Refused" and world.created == []
        ready = kept.condition("Ready")
        assert (ready["status"], ready["reason"]) == ("False", "OwnedByOther")
        assert f"kubectl annotate trun demo -n ns --overwrite {TAKE_OVER}=daemon/host/ns/demo" in ready["message"]
        assert pause is not None and pause <= 10
        annotations = {TAKE_OVER: "daemon/host/ns/demo"}
        kept.obj["metadata"] = {**kept.obj["metadata"], "annotations": annotations}
        kept.until(lambda: kept.word == "Training", 60)
        assert kept.server.reasons[0] == "OwnedByOther"


def test_a_run_of_a_cluster_that_is_gone_is_taken_over_by_its_name() -> None:
    with a_world(FOREVER) as world:
        kept = Kept(world)
        kept.until(lambda: kept.word == "Training")
        gone = world.uid
        world.uid, world.lives = "another", {}
        late = kept.fresh()
        late_visits = [kept.visit(late) for _ in range(3)]
        assert late_visits[-1] is not None and kept.word == "TruthUnknown"
        message = kept.condition("Succeeded")["message"]
        order = f"kubectl annotate trun demo -n ns --overwrite {TAKE_OVER}={gone}"
        assert order in message and "--take-over " not in message
        kept.obj["metadata"] = {**kept.obj["metadata"], "annotations": {TAKE_OVER: "daemon/x"}}
        kept.visit(late)
        kept.visit(late)
        assert kept.word == "TruthUnknown", "another owner's name says nothing about the cluster"
        kept.obj["metadata"] = {**kept.obj["metadata"], "annotations": {TAKE_OVER: gone}}
        for _ in range(40):
            kept.visit(late)
            world.tick()
        assert [attempt for attempt, _ in world.created] == [1, 2]


def test_a_silent_daemon_is_succeeded() -> None:
    with a_world(FOREVER) as world:
        kept = Kept(world)
        daemon = Ownership(RunDirectory(DiskStore(world.folder)), "d", "c", monotonic=world.clock, clock=world.clock)
        daemon.hold()
        began = world.now
        kept.until(lambda: kept.word == "Training", 900)
        assert STALE_SECONDS <= world.now - began <= STALE_SECONDS + 60


def test_a_run_in_the_queue_keeps_its_owner_alive() -> None:
    with a_world(FOREVER) as world:
        world.quota = 0
        kept = Kept(world)
        kept.until(lambda: kept.word == "Queued")
        daemon = Ownership(RunDirectory(DiskStore(world.folder)), "d", "c", monotonic=world.clock, clock=world.clock)
        began = world.now
        while world.now - began < 2 * STALE_SECONDS:
            pause = kept.visit()
            assert pause is not None
            for _ in range(max(1, int(pause / 5))):
                world.now += 5
                assert daemon.hold() is not None


def test_deleted_means_released() -> None:
    with a_world(FOREVER) as world:
        kept = Kept(world)
        kept.until(lambda: kept.word == "Training")
        kept.keeper.close()
        owner = RunDirectory(DiskStore(world.folder)).owner()
        assert owner is not None and owner[0].released


def test_a_status_that_was_not_answered_is_written_again() -> None:
    with a_world() as world:
        kept = Kept(world)
        kept.until(lambda: kept.word == "Training")
        kept.until(lambda: len(world.created) == 4 and world.lives["demo-a4"].gang.phase == "Succeeded")
        kept.server.away = True
        for _ in range(20):
            with contextlib.suppress(ClusterUnavailable):
                kept.visit()
            world.tick()
        assert kept.word != "Completed"
        kept.server.away = False
        kept.until(lambda: kept.word == "Completed", 10)


def test_missing_rights_are_conditions_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_world(FOREVER) as world:
        kept = Kept(world)
        kept.until(lambda: kept.word == "Training")

        def refused(_: str) -> Any:
            raise ClusterUnavailable("not allowed: needed are the verbs list, watch on jobsets.jobset.x-k8s.io")

        monkeypatch.setattr(world, "observe", refused)
        kept.visit(kept.fresh())
        kept.visit(kept.fresh())
        message = kept.condition("Succeeded")["message"]
        assert kept.word == "TruthUnknown"
        assert "verbs list, watch on jobsets" in message and "Helm values rbac.create" in message


def test_an_error_nobody_foresaw_is_shown() -> None:
    with a_world(FOREVER) as world:
        kept = Kept(world)
        kept.until(lambda: kept.word == "Training")
        kept.keeper.fail(KeyError("boom"))
        kept.obj["status"] = kept.server.statuses[-1]
        assert kept.word == "TruthUnknown" and "unexpected KeyError: 'boom'" in kept.condition("Succeeded")["message"]
        kept.visit()
        assert kept.word == "Training"


def test_an_error_nobody_foresaw_does_not_turn_the_generation_back() -> None:
    with a_world(FOREVER) as world:
        kept = Kept(world)
        kept.until(lambda: kept.word == "Training")
        kept.change(targetStep="many")
        kept.visit()
        kept.keeper.fail(KeyError("boom"))
        assert kept.server.statuses[-1]["observedGeneration"] == 2
