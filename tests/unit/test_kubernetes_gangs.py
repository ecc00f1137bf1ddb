"""From the objects of a cluster to a gang: what happened, which admission it ended, and what the causes make of it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.causes import classify
from orchestrator.clusters.base import Gang
from tests.support.kube_objects import (
    BEGAN,
    UID,
    Cluster,
    disruption,
    jobset_object,
    node_object,
    pod_object,
    workload_object,
)

KEY = ".0badcafe"


def keys(gang: Gang) -> list[tuple[str, bool]]:
    """(key, has ended) of its admissions."""
    return [(a.key.removesuffix(KEY), a.ended is not None) for a in gang.admissions]


def cause(gang: Gang, index: int = -1) -> str:
    return classify(gang.admissions[index], {}).cause


def two(**state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return pod_object(0, **state), pod_object(1, **state)


def test_a_gang_that_waits_says_why_in_kueues_words() -> None:
    cluster = Cluster()
    cluster.jobset = jobset_object(suspend=True)
    cluster.workload = None
    gang = cluster.gang()
    assert gang.phase == "Queued" and gang.admissions == () and "no Workload" in gang.message
    assert gang.queued_since == BEGAN
    cluster.workload = workload_object(pending="8 more needed")
    gang = cluster.gang()
    assert gang.phase == "Queued" and gang.message == "WaitingForQuota: 8 more needed"


def test_a_gang_that_runs_has_one_admission_with_its_pods_by_rank() -> None:
    cluster = Cluster()
    cluster.see(pod_object(1), pod_object(0))
    gang = cluster.gang()
    assert (gang.name, gang.uid, gang.attempt, gang.nonce, gang.phase) == ("demo-a1", UID, 1, "nonce-1", "Running")
    assert keys(gang) == [("e0.r0", False)]
    admission = gang.admissions[0]
    assert [uid.split("-")[4] for uid in admission.pod_uids] == ["0", "1"]
    assert admission.restart_attempt == 0
    assert (admission.queued_at, admission.began) == (BEGAN, BEGAN + 2)


def test_admitted_but_without_pods_it_runs_already() -> None:
    assert keys(Cluster().gang()) == [("e0.r0", False)]
    cluster = Cluster()
    cluster.jobset = jobset_object(suspend=True)  # Kueue has not let it go yet
    assert cluster.gang().phase == "Queued" and cluster.gang().admissions == ()


def test_pods_that_wait_say_what_for() -> None:
    cluster = Cluster()
    scheduling = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/4 nodes"}
    cluster.see(pod_object(0), pod_object(1, phase="Pending", conditions=(scheduling,), codes=()))
    assert cluster.gang().message == "1 of 2 pods have not started: Unschedulable: 0/4 nodes"


# -- preemption


def test_preempted_while_its_pods_still_commit_the_admission_has_not_ended() -> None:
    cluster = Cluster()
    cluster.see(*two())
    cluster.workload = workload_object(evicted="Preempted")
    gang = cluster.gang()
    assert gang.phase == "Running" and keys(gang) == [("e0.r0", False)]
    assert "evicted by Kueue" in gang.message
    cluster.jobset = jobset_object(suspend=True)
    cluster.see(*two(deleted=101))
    assert keys(cluster.gang()) == [("e0.r0", False)]


def test_preempted_it_waits_again_and_the_workload_outweighs_exit_codes() -> None:
    cluster = Cluster()
    cluster.see(*two())
    cluster.workload = workload_object(evicted="Preempted")
    cluster.jobset = jobset_object(suspend=True)
    cluster.see(pod_object(0, deleted=101, codes=(1, 1), phase="Failed", ended=102))
    cluster.see(pod_object(1, deleted=101, codes=(137, 137), phase="Failed", ended=131), gone=True)
    gang = cluster.gang()
    assert gang.phase == "Queued" and keys(gang) == [("e0.r0", True)]
    assert gang.queued_since == BEGAN + 100
    assert gang.admissions[0].ended == BEGAN + 131
    assert cause(gang) == "preempted"
    assert {s.field for s in gang.admissions[0].queue_signals} == {"Evicted", "Preempted"}


def test_readmitted_the_ended_admission_is_remembered_and_the_key_goes_on() -> None:
    cluster = Cluster()
    cluster.see(*two())
    cluster.workload = workload_object(evicted="Preempted")
    cluster.jobset = jobset_object(suspend=True)
    cluster.gang()
    cluster.see(*two(deleted=101, codes=(75, 75), phase="Failed"), gone=True)
    cluster.workload = workload_object(admitted=200, evictions=1)
    cluster.jobset = jobset_object()
    gang = cluster.gang()
    assert keys(gang) == [("e0.r0", True), ("e1.r0", False)]
    assert cause(gang, 0) == "preempted"
    cluster.see(*two(created=201))
    gang = cluster.gang()
    assert keys(gang) == [("e0.r0", True), ("e1.r0", False)]
    assert len(gang.admissions[1].pod_uids) == 2
    assert gang.admissions[1].queued_at == BEGAN + 100


def test_an_eviction_that_was_only_counted_is_still_told() -> None:
    """Preempted and admitted again while nobody looked, but a pod of before is still there, ended."""
    cluster = Cluster()
    cluster.workload = workload_object(admitted=200, evictions=1)
    cluster.see(pod_object(0, created=2, codes=(143, 143), phase="Failed", deleted=101), pod_object(0, created=201))
    gang = cluster.gang()
    assert keys(gang) == [("e0.r0", True), ("e1.r0", False)]
    assert cause(gang, 0) == "preempted"
    assert gang.admissions[0].queue_signals[0].field == "schedulingStats"


def test_evictions_for_several_reasons_are_told_apart_by_what_was_seen() -> None:
    cluster = Cluster()
    cluster.see(*two())
    cluster.workload = workload_object(evicted="NodeFailures")
    cluster.jobset = jobset_object(suspend=True)
    cluster.gang()
    cluster.see(*two(deleted=101, codes=(75, 75), phase="Failed"), gone=True)
    cluster.workload = workload_object(evicted="Preempted", evictions=2)
    stats = cluster.workload["status"]["schedulingStats"]
    stats["evictions"] = [{"reason": reason, "count": 1} for reason in ("NodeFailures", "Preempted")]
    gang = cluster.gang()
    assert keys(gang) == [("e0.r0", True), ("e1.r0", True)]
    assert (cause(gang, 0), cause(gang, 1)) == ("host-failure", "preempted")


def test_an_eviction_that_kueue_has_not_carried_out_yet_ends_nothing() -> None:
    cluster = Cluster()
    cluster.workload = workload_object(evicted="Preempted")  # its JobSet may still make pods
    gang = cluster.gang()
    assert gang.phase == "Running" and keys(gang) == [("e0.r0", False)]
    cluster.jobset = jobset_object(suspend=True)
    gang = cluster.gang()
    assert gang.phase == "Queued" and keys(gang) == [("e0.r0", True)]


def test_an_eviction_is_not_blamed_on_a_workload_that_was_never_admitted() -> None:
    cluster = Cluster()
    cluster.jobset = jobset_object(suspend=True)
    cluster.workload = workload_object(evicted="Deactivated", active=False)
    conditions = cluster.workload["status"]["conditions"]
    cluster.workload["status"]["conditions"] = [c for c in conditions if c["type"] != "Admitted"]
    gang = cluster.gang()
    assert gang.phase == "Deactivated" and gang.admissions == ()


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("NodeFailures", "host-failure"),
        ("PodsReadyTimeout", "unknown"),
        ("ClusterQueueStopped", "preempted"),
        ("AdmissionCheck", "preempted"),
        ("DeactivatedDueToRequeuingLimitExceeded", "deactivated"),
    ],
)
def test_other_evictions(reason: str, expected: str) -> None:
    cluster = Cluster()
    cluster.see(*two())
    cluster.workload = workload_object(evicted=reason)
    cluster.jobset = jobset_object(suspend=True)
    cluster.see(*two(deleted=101, codes=(143, 143), phase="Failed"), gone=True)
    gang = cluster.gang()
    assert gang.phase == ("Deactivated" if expected == "deactivated" else "Queued")
    assert keys(gang) == [("e0.r0", True)] and cause(gang) == expected


def test_deactivated_only_when_its_processes_have_ended() -> None:
    cluster = Cluster()
    cluster.see(*two())
    cluster.workload = workload_object(active=False)  # Kueue has not acted on it yet
    assert cluster.gang().phase == "Running"
    cluster.workload = workload_object(evicted="Deactivated", active=False)
    assert cluster.gang().phase == "Running"
    cluster.jobset = jobset_object(suspend=True)
    assert cluster.gang().phase == "Running"
    cluster.see(*two(deleted=101, codes=(75, 75), phase="Failed"), gone=True)
    gang = cluster.gang()
    assert gang.phase == "Deactivated" and keys(gang) == [("e0.r0", True)]


# -- restarts in place


def test_a_restart_in_place_ends_one_admission_when_its_last_pod_is_gone() -> None:
    cluster = Cluster()
    cluster.see(*two())
    cluster.jobset = jobset_object(restarts=1)
    cluster.see(pod_object(0, codes=(137, 137), phase="Failed", ended=50))
    assert keys(cluster.gang()) == [("e0.r0", False)]
    cluster.see(pod_object(1, codes=(75, 75), phase="Failed", ended=55, deleted=51), gone=True)
    gang = cluster.gang()
    assert gang.phase == "Running" and keys(gang) == [("e0.r0", True), ("e0.r1", False)]
    assert [end.rank for end in gang.admissions[0].containers] == [0, 1, 2, 3]
    assert cause(gang, 0) == "host-failure"
    assert gang.admissions[1].pod_uids == () and gang.admissions[1].restart_attempt == 1
    cluster.see(*two(restart=1, created=60))
    assert len(cluster.gang().admissions[1].pod_uids) == 2


def test_the_one_that_failed_by_itself_comes_before_those_that_were_then_told_to_end() -> None:
    """All within one second, which is all that the cluster's times tell apart."""
    cluster = Cluster()
    cluster.jobset = jobset_object(terminal="Failed", message="first failed job: demo-a1-slice-0")
    cluster.see(pod_object(0, codes=(143, 143), phase="Failed", ended=50, deleted=50))
    cluster.see(pod_object(1, codes=(64, 1), phase="Failed", ended=50))
    gang = cluster.gang()
    assert gang.phase == "Failed" and gang.message == "FailedJobs: first failed job: demo-a1-slice-0"
    assert cause(gang) == "bad-configuration"
    assert gang.admissions[0].containers[0].rank == 2


def test_a_pod_that_somebody_deleted_is_the_first_when_it_was() -> None:
    cluster = Cluster()
    cluster.jobset = jobset_object(restarts=1)
    cluster.see(pod_object(0, codes=(143, 143), phase="Failed", ended=41, deleted=40), gone=True)
    cluster.see(pod_object(1, codes=(1, 1), phase="Failed", ended=43), gone=True)
    assert [end.rank for end in cluster.gang().admissions[0].containers] == [0, 1, 2, 3]


# -- ends for good


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (1, "application-error"),
        (64, "bad-configuration"),
        (74, "storage"),
        (78, "non-finite"),
        (127, "bad-configuration"),
    ],
)
def test_exit_codes_that_are_final(code: int, expected: str) -> None:
    cluster = Cluster()
    cluster.jobset = jobset_object(terminal="Failed")
    cluster.see(
        pod_object(0, codes=(code, code), phase="Failed"), pod_object(1, codes=(143, 143), phase="Failed", deleted=50)
    )
    gang = cluster.gang()
    assert gang.phase == "Failed" and keys(gang) == [("e0.r0", True)] and cause(gang) == expected


def test_failed_only_when_the_last_process_has_ended() -> None:
    cluster = Cluster()
    cluster.see(*two())
    cluster.jobset = jobset_object(terminal="Failed")
    cluster.see(pod_object(0, codes=(1, 1), phase="Failed"))
    gang = cluster.gang()
    assert gang.phase == "Running" and "last processes" in gang.message and keys(gang) == [("e0.r0", False)]


def test_a_failure_in_the_middle_of_an_eviction_is_an_eviction() -> None:
    """Kueue deletes the pods, a Job counts that as its failure, and the JobSet fails of it."""
    cluster = Cluster()
    cluster.see(*two())
    cluster.workload = workload_object(evicted="Preempted")
    cluster.jobset = jobset_object(terminal="Failed", suspend=True)
    cluster.see(*two(codes=(143, 143), phase="Failed", deleted=101))
    gang = cluster.gang()
    assert gang.phase == "Failed" and keys(gang) == [("e0.r0", True)] and cause(gang) == "preempted"


def test_succeeded() -> None:
    cluster = Cluster()
    cluster.jobset = jobset_object(terminal="Completed")
    cluster.see(*two(codes=(0, 0), phase="Succeeded"))
    gang = cluster.gang()
    assert gang.phase == "Succeeded" and cause(gang) == "completed"


def test_out_of_memory() -> None:
    cluster = Cluster()
    cluster.jobset = jobset_object(restarts=1)
    cluster.see(pod_object(0, codes=(137, 137), reason="OOMKilled", phase="Failed"), gone=True)
    cluster.see(pod_object(1, codes=(143, 143), phase="Failed", deleted=51), gone=True)
    assert cause(cluster.gang(), 0) == "application-error"


def test_a_failed_init_container_is_evidence_too() -> None:
    cluster = Cluster()
    cluster.jobset = jobset_object(restarts=1)
    pod = pod_object(0, phase="Failed", codes=())
    ended = {"exitCode": 127, "finishedAt": "2026-09-21T00:00:00Z"}
    pod["status"]["initContainerStatuses"] = [{"name": "fetch", "state": {"terminated": ended}}]
    cluster.see(pod, gone=True)
    gang = cluster.gang()
    assert "init container fetch" in gang.admissions[0].containers[0].pod and cause(gang, 0) == "bad-configuration"


# -- hosts


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (node_object("node-0-0", ready="Unknown"), "host-failure"),
        (node_object("node-0-0", taints=("node.kubernetes.io/out-of-service",)), "host-failure"),
        (node_object("node-0-0", taints=("cloud.google.com/impending-node-termination",)), "maintenance"),
        (node_object("node-0-0", **{"cloud.google.com/active-node-maintenance": "ONGOING"}), "maintenance"),
    ],
)
def test_what_a_node_says_outweighs_its_pods(node: dict[str, Any], expected: str) -> None:
    cluster = Cluster(node)
    cluster.see(*two())
    cluster.jobset = jobset_object(restarts=1)
    cluster.see(*two(codes=(1, 1), phase="Failed"), gone=True)
    gang = cluster.gang()
    assert cause(gang, 0) == expected
    assert {s.source for s in gang.admissions[0].node_signals} == {"Node node-0-0"}


def test_a_node_that_was_unwell_long_ago_explains_nothing() -> None:
    cluster = Cluster(node_object("node-0-0", ready="Unknown"))
    cluster.see(*two())
    cluster.nodes = {}
    cluster.now = 1000.0
    cluster.jobset = jobset_object(terminal="Failed")
    cluster.see(*two(codes=(1, 1), phase="Failed"))
    assert cause(cluster.gang()) == "application-error"


def test_a_node_that_fell_ill_and_recovered_just_before_does() -> None:
    cluster = Cluster(node_object("node-0-0", ready="Unknown"))
    cluster.see(*two())
    cluster.nodes = {}
    cluster.now = 60.0
    cluster.jobset = jobset_object(restarts=1)
    cluster.see(*two(codes=(1, 1), phase="Failed"), gone=True)
    assert cause(cluster.gang(), 0) == "host-failure"


def test_nodes_that_may_not_be_read_say_nothing() -> None:
    cluster = Cluster()
    cluster.nodes = None
    cluster.jobset = jobset_object(restarts=1)
    cluster.see(*two(codes=(137, 137), phase="Failed"), gone=True)
    assert cluster.gang().admissions[0].node_signals == ()


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("DeletionByTaintManager", "host-failure"),
        ("PreemptionByScheduler", "preempted"),
        ("EvictionByEvictionAPI", "maintenance"),
        ("TerminationByKubelet", "host-failure"),
    ],
)
def test_disruptions(reason: str, expected: str) -> None:
    cluster = Cluster()
    cluster.jobset = jobset_object(restarts=1)
    cluster.see(pod_object(0, codes=(1, 1), phase="Failed", ended=51), gone=True)
    cluster.see(
        pod_object(1, codes=(143, 143), phase="Failed", conditions=(disruption(reason),), deleted=49), gone=True
    )
    assert cause(cluster.gang(), 0) == expected


def test_stuck_is_past_the_grace_on_a_host_that_does_not_answer() -> None:
    cluster = Cluster(node_object("node-0-0", ready="Unknown"))
    cluster.see(*two())
    cluster.jobset = jobset_object(restarts=1)
    cluster.see(pod_object(0, deleted=60), pod_object(1, codes=(75, 75), phase="Failed", deleted=60))
    assert cluster.gang().stuck == ()
    cluster.now = 39.0
    assert cluster.gang().stuck == () and keys(cluster.gang()) == [("e0.r0", False)]
    cluster.now = 41.0
    gang = cluster.gang()
    assert [s.source for s in gang.stuck] == ["pod demo-a1-slice-0-0-02"] and "NotReady" in gang.stuck[0].value
    # Its process may live on. Whoever gives up waiting for it has the evidence.
    assert gang.phase == "Running" and keys(gang) == [("e0.r0", False)] and cause(gang) == "host-failure"
    cluster.nodes = {}  # well again: its agent will end it
    assert cluster.gang().stuck == ()


def test_containers_that_cannot_start() -> None:
    cluster = Cluster()
    cluster.see(pod_object(0, phase="Pending", waiting="ImagePullBackOff"), pod_object(1))
    gang = cluster.gang()
    assert gang.phase == "Running"
    assert [s.field for s in gang.cannot_start] == ["container trainer", "container trainer-1"]
    assert gang.cannot_start[0].value == "ImagePullBackOff: it is wrong" and "it is wrong" in gang.message


# -- deletion


def test_deleting_until_the_last_pod_is_gone() -> None:
    cluster = Cluster()
    cluster.see(*two())
    cluster.jobset = jobset_object(deleted=True)
    gang = cluster.gang()
    assert (
        gang.phase == "Deleting"
        and keys(gang) == [("e0.r0", False)]
        and gang.message.endswith("2 of its pods are left")
    )
    cluster.jobset = None  # deleted in the background: its pods are left over
    gang = cluster.gang()
    assert (gang.name, gang.uid, gang.attempt, gang.nonce, gang.phase) == ("demo-a1", UID, 1, "nonce-1", "Deleting")


def test_without_its_workload_no_end_gets_a_name_that_others_would_not_give() -> None:
    cluster = Cluster()
    cluster.workload = None
    cluster.see(*two(codes=(75, 75), phase="Failed", deleted=101))
    cluster.jobset = jobset_object(deleted=True)
    gang = cluster.gang()
    assert gang.phase == "Deleting" and gang.admissions == ()


def test_a_new_workload_counts_from_the_beginning_under_another_name() -> None:
    cluster = Cluster()
    cluster.see(*two())
    cluster.gang()
    cluster.see(*two(codes=(75, 75), phase="Failed", deleted=101), gone=True)
    cluster.workload = workload_object(admitted=200, uid="feedface-0000-4000-8000-000000000001")
    cluster.see(*two(created=201))
    gang = cluster.gang()
    assert [a.key for a in gang.admissions] == ["e0.r0.feedface"] and len(gang.admissions[0].pod_uids) == 2


# -- whatever happens


@given(
    restarts=st.integers(0, 2),
    counted=st.integers(0, 2),
    state=st.sampled_from(["admitted", "evicted", "deactivated", "pending", "missing"]),
    suspend=st.booleans(),
    terminal=st.sampled_from(["", "", "Failed", "Completed"]),
    deleted=st.booleans(),
    pods=st.lists(
        st.tuples(
            st.integers(0, 1),  # host
            st.integers(0, 2),  # restart
            st.sampled_from(["Pending", "Running", "Failed", "Succeeded"]),
            st.booleans(),  # being deleted
            st.booleans(),  # gone
            st.integers(2, 300),  # created
        ),
        max_size=6,
    ),
    waiting=st.floats(0, 100),
)
@settings(max_examples=150, deadline=None)
def test_whatever_the_objects_say_the_gang_is_consistent(
    restarts: int,
    counted: int,
    state: str,
    suspend: bool,
    terminal: str,
    deleted: bool,
    pods: list[tuple[int, int, str, bool, bool, int]],
    waiting: float,
) -> None:
    cluster = Cluster(node_object("node-0-0", ready="Unknown"))
    cluster.workload = {
        "admitted": workload_object(admitted=150, evictions=counted),
        "evicted": workload_object(evicted="Preempted", evictions=counted + 1),
        "deactivated": workload_object(evicted="Deactivated", evictions=counted + 1, active=False),
        "pending": workload_object(pending="later", evictions=counted),
        "missing": None,
    }[state]
    for index, (host, restart, phase, being_deleted, gone, created) in enumerate(pods):
        codes = (1, 143) if phase == "Failed" else (0, 0) if phase == "Succeeded" else (None, None)
        pod = pod_object(
            host,
            restart=min(restart, restarts),
            phase=phase,
            codes=codes,
            created=created,
            deleted=created + 10 if being_deleted else None,
            uid=f"pod-{index}",
        )
        cluster.see(pod)
        if gone:
            cluster.see(pod, gone=True)
    cluster.now = waiting
    cluster.jobset = jobset_object(suspend=suspend, restarts=restarts, terminal=terminal, deleted=deleted)
    gang = cluster.gang()
    assert gang == cluster.gang()
    open_ = [a.ended is None for a in gang.admissions]
    assert not any(open_[:-1])
    if gang.phase == "Running":
        assert open_ and open_[-1]
    elif gang.phase != "Deleting":
        assert not any(open_)
    keys_ = [a.key for a in gang.admissions]
    assert len(set(keys_)) == len(keys_)
    uids = [uid for a in gang.admissions for uid in a.pod_uids]
    assert len(set(uids)) == len(uids)
    for admission in gang.admissions:
        classify(admission, {})
    assert gang.phase in ("Deleting", "Running") or not any(
        phase in ("Pending", "Running") and not gone for _, _, phase, _, gone, _ in pods
    )
