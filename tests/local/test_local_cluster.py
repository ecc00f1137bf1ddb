"""The local cluster with real supervisors and real processes that train nothing."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.clusters import gang_state as state
from orchestrator.clusters.base import ClusterUnavailable, GangRequest, SubmitConflict
from orchestrator.clusters.local import SUPERVISOR, LocalCluster
from orchestrator.clusters.processes import living_with_nonce, start_ticks
from tests.support.gangs import Stage, spec, stage


@pytest.fixture
def on(tmp_path: Path) -> Iterator[Stage]:
    with stage(tmp_path) as built:
        yield built


def test_a_gang_gets_its_environment_and_nothing_stale(on: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEGASCALE_NUM_SLICES", "JAX_COORDINATOR_ADDRESS", "TPU_WORKER_ID", "XLA_FLAGS", "UNTILDONE_NONCE"):
        monkeypatch.setenv(name, "stale")
    monkeypatch.setenv("KEPT", "kept")
    attempt = spec(1)
    gang = on.cluster.submit(on.request(attempt))
    assert (gang.name, gang.attempt, gang.nonce, gang.phase) == ("demo-a1", 1, attempt.nonce, "Queued")
    on.wait_up("demo-a1")
    first, second = (on.environment("demo-a1", 0, rank) for rank in (0, 1))
    assert not any(k.startswith(("MEGASCALE_", "JAX_", "TPU_", "XLA_FLAGS")) for k in first)
    assert (first["KEPT"], first["FROM_REQUEST"]) == ("kept", "yes")
    assert first["UNTILDONE_NONCE"] == attempt.nonce
    assert (first["UNTILDONE_PROCESS_ID"], second["UNTILDONE_PROCESS_ID"]) == ("0", "1")
    assert first["UNTILDONE_PROCESS_COUNT"] == "2"
    assert first["UNTILDONE_RUN_DIRECTORY"] == str(on.folder / "run")
    assert first["UNTILDONE_COORDINATOR"] == second["UNTILDONE_COORDINATOR"]
    assert first["UNTILDONE_COORDINATOR"].startswith("127.0.0.1:")
    running = on.gang("demo-a1")
    assert running is not None
    assert running.admissions[-1].pod_uids == (first["UNTILDONE_POD_UID"], second["UNTILDONE_POD_UID"])


def test_success_needs_every_process(on: Stage) -> None:
    on.cluster.submit(on.request(spec(1)))
    on.wait_up("demo-a1")
    on.tell("demo-a1", 1, "exit 0")
    time.sleep(0.5)
    gang = on.gang("demo-a1")
    assert gang is not None
    assert gang.phase == "Running"
    on.tell("demo-a1", 0, "exit 0")
    gang = on.wait_phase("demo-a1", "Succeeded")
    assert [(c.rank, c.exit_code) for c in gang.admissions[-1].containers] == [(1, 0), (0, 0)]


@pytest.mark.parametrize("code", [1, 64, 74, 76, 78, 79])
def test_these_exit_codes_fail_the_gang_for_good(on: Stage, code: int) -> None:
    on.cluster.submit(on.request(spec(1)))
    on.wait_up("demo-a1")
    on.tell("demo-a1", 1, f"exit {code}")
    gang = on.wait_phase("demo-a1", "Failed")
    containers = gang.admissions[-1].containers
    assert (containers[0].rank, containers[0].exit_code) == (1, code)
    assert len(containers) == 2
    assert len(gang.admissions) == 1
    assert on.cluster.pids("demo-a1") == {}


@pytest.mark.parametrize("how", ["exit 75", "exit 77", "exit 3", "SIGKILL", "SIGSEGV"])
def test_everything_else_restarts_it_in_place(on: Stage, how: str) -> None:
    on.cluster.submit(on.request(spec(1)))
    before = on.wait_up("demo-a1")
    ports = on.environment("demo-a1", 0, 0)["UNTILDONE_COORDINATOR"]
    time.sleep(0.6)  # past the shortest time between two starts
    if how.startswith("SIG"):
        os.kill(before[1], signal.Signals[how])
    else:
        on.tell("demo-a1", 1, how)
    after = on.wait_up("demo-a1", restart=1)
    assert not set(before.values()) & set(after.values())
    gang = on.gang("demo-a1")
    assert gang is not None
    ended, current = gang.admissions
    assert (ended.restart_attempt, current.restart_attempt) == (0, 1)
    assert ended.key != current.key
    assert ended.containers[0].rank == 1
    assert (ended.containers[0].signal is not None) == how.startswith("SIG")
    assert ended.ended is not None
    assert current.began is not None
    assert current.began - ended.containers[0].time < 1.0, "death of a process to the next start requested"
    assert on.environment("demo-a1", 1, 0)["UNTILDONE_COORDINATOR"] != ports


def test_a_stopped_process_dies_with_its_gang(on: Stage) -> None:
    on.cluster.submit(on.request(spec(1)))
    pids = on.wait_up("demo-a1")
    os.kill(pids[1], signal.SIGSTOP)
    on.tell("demo-a1", 0, "exit 77")
    on.wait_up("demo-a1", restart=1)
    gang = on.gang("demo-a1")
    assert gang is not None
    first, second = gang.admissions[0].containers
    assert (first.rank, first.exit_code) == (0, 77)
    assert (second.rank, second.signal) == (1, signal.SIGKILL)


def test_a_second_submission_collides(on: Stage) -> None:
    attempt = spec(1)
    gang = on.cluster.submit(on.request(attempt))
    again = LocalCluster(on.cluster.root).submit(on.request(attempt))
    assert again.uid == gang.uid
    with pytest.raises(SubmitConflict, match="another submission"):
        on.cluster.submit(on.request(spec(1)))
    assert len(on.cluster.observe("demo").gangs) == 1


@pytest.mark.parametrize("same", [True, False])
def test_many_submissions_at_once(on: Stage, same: bool) -> None:
    """One gang, whoever wins. All with one nonce are given it; of several nonces all but one are refused."""
    attempt = spec(1)
    requests = [on.request(attempt if same else spec(1)) for _ in range(8)]
    clusters = [LocalCluster(on.cluster.root) for _ in requests]
    together = threading.Barrier(len(requests))

    def submit(cluster: LocalCluster, request: GangRequest) -> str:
        together.wait()
        try:
            return cluster.submit(request).uid
        except SubmitConflict:
            return "refused"

    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(submit, clusters, requests))
    assert len(set(answers)) == (1 if same else 2)
    assert answers.count("refused") == (0 if same else 7)
    on.wait_up("demo-a1")
    gang = on.gang("demo-a1")
    assert gang is not None
    assert gang.uid in answers
    assert len(gang.admissions) == 1
    assert not list((on.cluster.root / "gangs").glob(".new-*"))


def test_deletion_needs_the_uid_and_leaves_the_record(on: Stage) -> None:
    attempt = spec(1)
    gang = on.cluster.submit(on.request(attempt))
    on.wait_up("demo-a1")
    on.cluster.delete("demo-a1", "another uid", 0)
    on.cluster.delete("no-such-gang", gang.uid, 0)
    time.sleep(0.3)
    assert len(on.cluster.pids("demo-a1")) == 2
    on.cluster.delete("demo-a1", gang.uid, 5)
    on.wait_phase("demo-a1", "Deleting", "Deleted")
    gone = on.wait_phase("demo-a1", "Deleted")
    assert on.cluster.observe("demo").gangs == ()
    assert {c.exit_code for c in gone.admissions[-1].containers} == {75}
    assert gone.admissions[-1].ended is not None
    assert living_with_nonce(attempt.nonce) == []
    on.cluster.delete("demo-a1", gang.uid, 5)
    # A late second submission of the same attempt does not bring it up again; another one may use the name.
    assert on.cluster.submit(on.request(attempt)).phase == "Deleted"
    assert on.cluster.submit(on.request(spec(1))).uid != gang.uid


def test_deletion_kills_after_the_grace(on: Stage) -> None:
    attempt = spec(1)
    gang = on.cluster.submit(on.request(attempt))
    on.tell("demo-a1", "on-term", "ignore")
    pids = on.wait_up("demo-a1")
    os.kill(pids[0], signal.SIGSTOP)
    began = time.monotonic()
    on.cluster.delete("demo-a1", gang.uid, 1.0)
    on.wait(lambda: (g := on.gang("demo-a1")) is not None and g.phase == "Deleting", what="Deleting")
    assert living_with_nonce(attempt.nonce)
    gone = on.wait_phase("demo-a1", "Deleted")
    assert 1.0 <= time.monotonic() - began < 4
    assert {c.signal for c in gone.admissions[-1].containers} == {signal.SIGKILL}
    # A second call may shorten the grace.
    other = on.cluster.submit(on.request(spec(2)))
    on.tell("demo-a2", "on-term", "ignore")
    on.wait_up("demo-a2")
    on.cluster.delete("demo-a2", other.uid, 60)
    on.cluster.delete("demo-a2", other.uid, 0.2)
    on.wait_phase("demo-a2", "Deleted", seconds=5)


def test_a_failed_gang_stays_until_it_is_deleted(on: Stage) -> None:
    gang = on.cluster.submit(on.request(spec(1)))
    on.wait_up("demo-a1")
    on.tell("demo-a1", 0, "exit 1")
    on.wait_phase("demo-a1", "Failed")
    on.wait(lambda: on.cluster.supervisor("demo-a1") is None, what="supervisor leaves")
    on.cluster.delete("demo-a1", gang.uid, 5)
    assert on.wait_phase("demo-a1", "Deleted").admissions[-1].containers[0].exit_code == 1


def test_children_of_a_trainer_do_not_survive_it(on: Stage) -> None:
    attempt = spec(1, devices=4)
    script = (
        "import os, subprocess, sys, time\n"
        "subprocess.Popen(['sleep', '600'])\n"  # in its group
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"  # escaped from it
        "time.sleep(0.6); os._exit(1)\n"
    )
    on.cluster.submit(replace(on.request(attempt), command=(sys.executable, "-I", "-S", "-c", script)))
    on.wait_phase("demo-a1", "Failed")
    assert living_with_nonce(attempt.nonce) == []


def test_a_killed_supervisor_is_a_host_failure_and_is_replaced(on: Stage) -> None:
    attempt = spec(1)
    on.cluster.submit(on.request(attempt))
    before = on.wait_up("demo-a1")
    supervisor = on.cluster.supervisor("demo-a1")
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    after = on.wait_up("demo-a1", restart=1)
    assert not set(before.values()) & set(after.values())
    assert sorted(living_with_nonce(attempt.nonce)) == sorted(after.values())
    gang = on.gang("demo-a1")
    assert gang is not None
    ended, current = gang.admissions
    assert current.restart_attempt == 1
    assert "supervisor" in ended.node_signals[0].value
    assert on.cluster.supervisor("demo-a1") != supervisor


def test_trainers_die_with_their_supervisor_even_if_nobody_looks(on: Stage) -> None:
    attempt = spec(1)
    on.cluster.submit(on.request(attempt))
    on.wait_up("demo-a1")
    supervisor = on.cluster.supervisor("demo-a1")
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    on.wait(lambda: not living_with_nonce(attempt.nonce), seconds=3, what="no trainer left")


def test_what_a_killed_supervisor_left_is_found_and_killed(on: Stage) -> None:
    """A child that escaped to a session of its own survives supervisor and trainer; the successor ends it first."""
    attempt = spec(1, devices=4)
    marks = on.folder / "marks"
    marks.mkdir()
    script = (
        "import os, pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"pathlib.Path({str(marks)!r}, str(child.pid)).touch()\n"
        "time.sleep(600)\n"
    )
    on.cluster.submit(replace(on.request(attempt), command=(sys.executable, "-I", "-S", "-c", script)))
    on.wait(lambda: on.gang("demo-a1") and list(marks.iterdir()), what="first start up")
    (first,) = (int(path.name) for path in marks.iterdir())
    supervisor = on.cluster.supervisor("demo-a1")
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    time.sleep(0.3)
    assert start_ticks(first) is not None, "it has escaped"
    on.wait(lambda: on.gang("demo-a1") and len(list(marks.iterdir())) == 2, what="second start up")
    assert start_ticks(first) is None, "two starts of one attempt were alive at once"


def test_a_stopped_supervisor_is_replaced(on: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.clusters.local.STOPPED_SECONDS", 0.5)
    on.cluster.submit(on.request(spec(1)))
    on.wait_up("demo-a1")
    supervisor = on.cluster.supervisor("demo-a1")
    assert supervisor is not None
    os.kill(supervisor, signal.SIGSTOP)
    on.wait_up("demo-a1", restart=1)
    assert on.cluster.supervisor("demo-a1") != supervisor


def test_nobody_but_one_supervises(on: Stage) -> None:
    on.cluster.submit(on.request(spec(1)))
    on.wait_up("demo-a1")
    rivals = [subprocess.Popen([sys.executable, "-m", SUPERVISOR, str(on.cluster.root), "demo-a1"]) for _ in range(3)]
    assert [rival.wait(20) for rival in rivals] == [0, 0, 0]
    gang = on.gang("demo-a1")
    assert gang is not None
    assert len(gang.admissions) == 1


def test_a_submitter_that_died_before_the_supervisor(on: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = spec(1)
    dying = LocalCluster(on.cluster.root)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dying, "_start_supervisor", die)
    with pytest.raises(KeyboardInterrupt):
        dying.submit(on.request(attempt))
    assert on.cluster.supervisor("demo-a1") is None
    on.wait_up("demo-a1")  # the next observation sees to it


def test_capacity_cut_evicts_and_the_place_is_kept(on: Stage) -> None:
    on.cluster.set_capacity({"cpu": 8})
    old = on.cluster.submit(on.request(spec(1)))
    before = on.wait_up("demo-a1")
    on.cluster.set_capacity({"cpu": 2})
    evicted = on.wait_phase("demo-a1", "Queued")
    assert evicted.uid == old.uid
    assert evicted.admissions[-1].queue_signals[0].field == "Evicted"
    assert evicted.admissions[-1].queue_signals[0].value.startswith("Preempted: quota is 2 cpu devices")
    assert {c.exit_code for c in evicted.admissions[-1].containers} == {75}
    assert on.cluster.observe("demo").quota_devices == {"cpu": 2}
    # Another gang of 8 comes later: it stays behind the evicted one.
    on.cluster.submit(on.request(spec(1, run="other"), run="other"))
    on.wait(
        lambda: (
            "1 gangs wait ahead" in str(on.gang("other-a1", "other"))
            or "ExceedsMaxQuota" in str(on.gang("other-a1", "other"))
        )
    )
    for start in on.orders("demo-a1").glob("start-*"):
        start.unlink()
    on.cluster.set_capacity({"cpu": 8})
    after = on.wait_up("demo-a1")  # restart attempt 0 again: an eviction is no restart
    assert not set(before.values()) & set(after.values())
    back = on.gang("demo-a1")
    assert back is not None
    assert [a.restart_attempt for a in back.admissions] == [0, 0]
    assert back.admissions[0].key != back.admissions[1].key
    assert on.wait_phase("other-a1", "Queued", run="other").message.startswith("WaitingForQuota")
    assert on.cluster.observe("other").quota_devices == {"cpu": 0}
    on.cluster.delete("demo-a1", old.uid, 5)
    on.wait_up("other-a1", run="other")


def test_eviction_kills_after_the_grace_of_the_request(on: Stage) -> None:
    on.cluster.set_capacity({"cpu": 8})
    on.cluster.submit(on.request(spec(1, grace=0.8)))
    on.tell("demo-a1", "on-term", "ignore")
    on.wait_up("demo-a1")
    on.cluster.set_capacity({"cpu": 0})
    gang = on.wait_phase("demo-a1", "Queued")
    assert {c.signal for c in gang.admissions[-1].containers} == {signal.SIGKILL}


def test_quota_is_free_only_when_the_processes_are_gone(on: Stage) -> None:
    on.cluster.set_capacity({"cpu": 8})
    on.cluster.submit(on.request(spec(1, grace=1.0)))
    on.tell("demo-a1", "on-term", "ignore")
    on.wait_up("demo-a1")
    on.cluster.submit(on.request(spec(1, run="other", devices=4), run="other"))
    on.cluster.set_capacity({"cpu": 4})  # room for the younger one, once the older one has left
    began = time.monotonic()
    while not (younger := on.cluster.pids("other-a1")):
        time.sleep(0.01)
    assert time.monotonic() - began >= 1.0
    assert younger
    assert on.cluster.pids("demo-a1") == {}


def test_two_gangs_never_hold_the_same_devices(on: Stage) -> None:
    on.cluster.set_capacity({"cpu": 8})
    on.cluster.submit(on.request(spec(1)))
    on.cluster.submit(on.request(spec(1, run="other"), run="other"))
    seen = set()
    for _ in range(4):
        on.wait(lambda: any(on.cluster.pids(g) for g in ("demo-a1", "other-a1")), what="one of them runs")
        for _ in range(20):
            up = frozenset(g for g in ("demo-a1", "other-a1") if on.cluster.pids(g))
            assert len(up) <= 1, "both hold the last devices"
            seen |= up
            time.sleep(0.01)
        on.cluster.set_capacity({"cpu": 0})
        on.wait(lambda: not any(on.cluster.pids(g) for g in ("demo-a1", "other-a1")))
        on.cluster.set_capacity({"cpu": 8})
    assert seen == {"demo-a1"}, "the older one comes first, each time"


def test_supervisor_told_to_shut_down_leaves_in_order(on: Stage) -> None:
    on.cluster.submit(on.request(spec(1)))
    on.wait_up("demo-a1")
    supervisor = on.cluster.supervisor("demo-a1")
    assert supervisor is not None
    os.kill(supervisor, signal.SIGTERM)
    folder = on.cluster.root / "gangs" / "demo-a1"
    on.wait(lambda: not state.held(folder / "supervisor.lock") or len(state.read_status(folder).admissions) > 1)
    first = state.read_status(folder).admissions[0]
    assert first.node_signals[0].field == "shutdown"
    assert {pod.exit_code for pod in first.pods} == {75}
    on.wait(lambda: on.gang("demo-a1") and len(on.cluster.pids("demo-a1")) == 2, what="up again after an observation")


def test_a_removed_folder_ends_everything(on: Stage) -> None:
    """Somebody removes the state folder by hand: no training may go on that nobody can see or end."""
    attempt = spec(1)
    on.cluster.submit(on.request(attempt))
    on.wait_up("demo-a1")
    supervisor = on.cluster.supervisor("demo-a1")
    assert supervisor is not None
    shutil.rmtree(on.cluster.root)
    end = time.monotonic() + 10
    while living_with_nonce(attempt.nonce) or start_ticks(supervisor) is not None:
        assert time.monotonic() < end
        time.sleep(0.05)
    on.cluster = LocalCluster(on.cluster.root)


def test_damage_is_not_knowledge(on: Stage) -> None:
    on.cluster.submit(on.request(spec(1)))
    on.wait_up("demo-a1")
    path = on.cluster.root / "capacity.json"
    path.write_text("{")
    with pytest.raises(ClusterUnavailable, match=r"capacity\.json"):
        on.cluster.observe("demo")
    time.sleep(0.4)
    assert len(on.cluster.pids("demo-a1")) == 2, "an unreadable quota evicts nobody"
    path.unlink()
