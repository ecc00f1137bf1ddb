"""Which cause wins: labelled endings as they were seen on real clusters, and what must hold of any ending."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.causes import classify, stopped
from orchestrator.clusters.base import Admission, ContainerEnd
from trainer.rundir.records import Evidence, ExitRecord

# -- short forms: q(ueue), n(ode), p(od) signals; a container is (exit code or -signal, time)


def q(value: str, field: str = "Evicted") -> Evidence:
    return Evidence(source="Workload jobset-demo-a1", field=field, value=value)


def n(value: str, field: str = "taint") -> Evidence:
    return Evidence(source="node n1", field=field, value=value)


def p(value: str, field: str = "DisruptionTarget") -> Evidence:
    return Evidence(source="pod demo-a1-0", field=field, value=value)


def admission(
    *ends: tuple[int, float],
    queue: tuple[Evidence, ...] = (),
    node: tuple[Evidence, ...] = (),
    pod: tuple[Evidence, ...] = (),
) -> Admission:
    containers = tuple(
        ContainerEnd(
            f"demo-a1-{rank}", f"uid-{rank}", rank, code if code >= 0 else None, -code if code < 0 else None, at
        )
        for rank, (code, at) in enumerate(ends)
    )
    return Admission("adm-1", 0, containers=containers, queue_signals=queue, node_signals=node, pod_signals=pod)


def said(code: int, error: str, rank: int = 0, time: float = 0.0) -> dict[str, ExitRecord]:
    """exit.json of one pod."""
    return {f"uid-{rank}": ExitRecord(code=code, reason="exception", error=error, rank=rank, time=time)}


KILL, TERM, ABRT, SEGV = -9, -15, -6, -11
MET = "UNAVAILABLE: Socket closed"  # what peers say when one of them has died

# (name, admission, exit records, cause)
CASES: list[tuple[str, Admission, dict[str, ExitRecord], str]] = [
    # The queue
    (
        "Kueue preempted, pods killed after the grace",
        admission((137, 9), (137, 9), queue=(q("Preempted"),)),
        {},
        "preempted",
    ),
    ("Kueue preempted, trainer exited 75", admission((75, 2), (75, 2), queue=(q("Preempted"),)), {}, "preempted"),
    ("Kueue preempted, exit 1 in the race", admission((1, 2), queue=(q("Preempted"),)), said(1, "x"), "preempted"),
    ("reclaimed in the cohort", admission((143, 2), queue=(q("InCohortReclamation", "Preempted"),)), {}, "preempted"),
    ("preempted within the queue", admission((143, 2), queue=(q("InClusterQueue", "Preempted"),)), {}, "preempted"),
    ("fair sharing", admission(queue=(q("InCohortFairSharing", "Preempted"),)), {}, "preempted"),
    ("pods deleted by the suspension", admission(queue=(q("Preempted"),)), {}, "preempted"),
    ("queue stopped", admission((143, 1), queue=(q("ClusterQueueStopped"),)), {}, "preempted"),
    ("local queue stopped", admission((143, 1), queue=(q("LocalQueueStopped"),)), {}, "preempted"),
    ("admission check withdrawn", admission((143, 1), queue=(q("AdmissionCheck"),)), {}, "preempted"),
    ("moved to another flavour", admission((143, 1), queue=(q("FlavorMigration"),)), {}, "preempted"),
    ("evicted on the manager", admission((143, 1), queue=(q("EvictedOnManagerCluster"),)), {}, "preempted"),
    ("local queue shrank", admission((75, 1), queue=(q("Preempted: quota is 2 cpu devices"),)), {}, "preempted"),
    (
        "queue and node: the queue wins",
        admission((137, 1), queue=(q("Preempted"),), node=(n("NotReady"),)),
        {},
        "preempted",
    ),
    ("evicted for failed nodes", admission((137, 1), queue=(q("NodeFailures"),)), {}, "host-failure"),
    ("never ready in time", admission(queue=(q("PodsReadyTimeout"),)), {}, "unknown"),
    (
        "deactivated at the requeuing limit",
        admission(queue=(q("DeactivatedDueToRequeuingLimitExceeded"),)),
        {},
        "deactivated",
    ),
    ("deactivated by a person", admission((143, 1), queue=(q("Deactivated"),)), {}, "deactivated"),
    (
        "ran too long",
        admission((143, 1), queue=(q("DeactivatedDueToMaximumExecutionTimeExceeded"),)),
        {},
        "deactivated",
    ),
    (
        "preempted, then deactivated",
        admission(queue=(q("Preempted"), q("DeactivatedDueToAdmissionCheck"))),
        {},
        "deactivated",
    ),
    # The node
    ("node NotReady", admission((137, 5), node=(n("False: NodeStatusUnknown", "Ready"),)), {}, "host-failure"),
    ("node unreachable", admission(node=(n("node.kubernetes.io/unreachable"),)), {}, "host-failure"),
    ("node out of service", admission(node=(n("node.kubernetes.io/out-of-service"),)), {}, "host-failure"),
    (
        "TPU fault reported",
        admission((1, 1), node=(n("x", "cloud.google.com/fault-behavior"),)),
        said(1, "x"),
        "host-failure",
    ),
    (
        "maintenance under way",
        admission((143, 5), node=(n("ONGOING", "cloud.google.com/active-node-maintenance"),)),
        {},
        "maintenance",
    ),
    (
        "maintenance window",
        admission((143, 5), node=(n("cloud.google.com/maintenance-window-started"),)),
        {},
        "maintenance",
    ),
    (
        "impending termination",
        admission((75, 5), node=(n("cloud.google.com/impending-node-termination"),)),
        {},
        "maintenance",
    ),
    ("scaled down", admission((143, 5), node=(n("ToBeDeletedByClusterAutoscaler"),)), {}, "maintenance"),
    ("spot machine reclaimed", admission((143, 5), node=(n("cloud.google.com/gke-spot preempted"),)), {}, "preempted"),
    (
        "supervisor of a local gang died",
        admission((KILL, 1), node=(n("False: supervisor gone", "Ready"),)),
        {},
        "host-failure",
    ),
    # The pod
    ("scheduler preemption", admission((143, 1), pod=(p("PreemptionByScheduler"),)), {}, "preempted"),
    (
        "Kueue's mark on pods",
        admission((143, 1), pod=(p("WorkloadEvictedDueToPreempted", "TerminationTarget"),)),
        {},
        "preempted",
    ),
    ("taint manager", admission((137, 1), pod=(p("DeletionByTaintManager"),)), {}, "host-failure"),
    ("pod garbage collected with its node", admission(pod=(p("DeletionByPodGC"),)), {}, "host-failure"),
    ("kubelet under pressure", admission((137, 1), pod=(p("TerminationByKubelet"),)), {}, "host-failure"),
    (
        "force-deleted after a failed node",
        admission(pod=(p("KueueForcefullyTerminated", "Failed"),)),
        {},
        "host-failure",
    ),
    ("drained", admission((143, 1), pod=(p("EvictionByEvictionAPI"),)), {}, "maintenance"),
    ("out of host memory", admission((137, 1), pod=(p("OOMKilled", "terminated"),)), {}, "application-error"),
    ("image name malformed", admission(pod=(p("InvalidImageName", "waiting"),)), {}, "bad-configuration"),
    ("image cannot be pulled now", admission(pod=(p("ImagePullBackOff", "waiting"),)), {}, "unknown"),
    ("pod mark before exit code", admission((1, 1), pod=(p("PreemptionByScheduler"),)), said(1, "x"), "preempted"),
    (
        "mark nobody knows: the container decides",
        admission((78, 1), pod=(p("requested", "deletion"),)),
        {},
        "non-finite",
    ),
    # Containers: the trainer's exit codes
    ("application error", admission((1, 1.0), (1, 1.2)), said(1, "ValueError: wrong shape"), "application-error"),
    ("usage error", admission((2, 1)), {}, "bad-configuration"),
    ("bad configuration", admission((64, 1), (64, 1)), said(64, "recipe differs"), "bad-configuration"),
    ("command not found", admission((127, 1)), {}, "bad-configuration"),
    ("storage unavailable", admission((74, 1), (1, 2)), said(74, "no space left on device"), "storage"),
    ("stopped in order, nobody says by whom", admission((75, 1), (75, 1)), {}, "preempted"),
    ("fenced", admission((76, 1), (137, 2)), {}, "fenced"),
    ("watchdog", admission((77, 1), (KILL, 4)), {}, "hang"),
    ("watchdog on all ranks", admission((77, 1), (77, 1)), {}, "hang"),
    ("loss is NaN", admission((78, 1), (78, 1)), {}, "non-finite"),
    ("gang mixed", admission((79, 1), (79, 1)), {}, "mixed-gang"),
    ("all done", admission((0, 1), (0, 2)), {}, "completed"),
    (
        "one done, one failed at exit",
        admission((0, 1), (1, 2)),
        said(1, "RuntimeError: bad", rank=1),
        "application-error",
    ),
    # Containers: deaths from outside
    ("one process SIGKILLed", admission((KILL, 1)), {}, "host-failure"),
    ("137 alone", admission((137, 1)), {}, "host-failure"),
    ("all SIGKILLed at once", admission((KILL, 1), (KILL, 1)), {}, "host-failure"),
    ("SIGKILL, the peer dies of it", admission((1, 1.4), (KILL, 1.0)), said(1, MET, time=1.4), "host-failure"),
    ("SIGKILL, the peer aborts", admission((ABRT, 1.4), (KILL, 1.0)), said(134, MET), "host-failure"),
    ("SIGKILL and exit 1 in the same second", admission((1, 1.0), (KILL, 1.0)), {}, "host-failure"),
    ("SIGTERM from nobody known", admission((143, 1), (KILL, 4)), {}, "preempted"),
    (
        "first death, then the supervisor kills the gang",
        admission((1, 1), (143, 1.1)),
        said(1, "ValueError"),
        "application-error",
    ),
    ("first death, then SIGKILL after the grace", admission((78, 1), (KILL, 31)), {}, "non-finite"),
    ("segmentation fault", admission((SEGV, 1), (1, 1.2)), {}, "unknown"),
    ("bus error without words", admission((135, 1)), {}, "unknown"),
    ("code nobody knows", admission((42, 1)), {}, "unknown"),
    # Containers: the cascade
    (
        "peers die of the cascade, whoever is listed first",
        admission((1, 2.0), (64, 1.0)),
        said(1, MET),
        "bad-configuration",
    ),
    ("clocks differ: the victim seems first", admission((1, 1.0), (78, 1.3)), said(1, MET), "non-finite"),
    (
        "a peer stopped (SIGSTOP): the other misses it, then it is killed",
        admission((1, 5.0), (KILL, 6.0)),
        said(1, "coordination service: task 1 heartbeat timeout"),
        "hang",
    ),
    ("the same, by abort", admission((ABRT, 5.0), (KILL, 6.0)), said(134, "heartbeat timeout"), "hang"),
    ("a peer vanished without a trace", admission((1, 5.0)), said(1, "Connection reset by peer"), "host-failure"),
    ("gloo lost the other side", admission((1, 5.0)), said(1, "Gloo: Connection closed by peer"), "host-failure"),
    ("another incarnation in the port", admission((1, 5.0)), said(1, "different incarnation"), "host-failure"),
    # Containers: what the machine did to the program
    ("TPU busy", admission((1, 1)), said(1, "open(/dev/vfio/0): Device or resource busy"), "host-failure"),
    ("no healthy TPU", admission((1, 1)), said(1, "no healthy devices present"), "host-failure"),
    ("port taken", admission((1, 1)), said(1, "Address already in use: 8476"), "host-failure"),
    ("backend does not come up", admission((1, 1)), said(1, "Unable to initialize backend 'tpu'"), "host-failure"),
    ("disk full as an exception", admission((1, 1)), said(1, "OSError: [Errno 28] No space left on device"), "storage"),
    ("bucket says 503", admission((1, 1)), said(1, "google.api_core 503 POST"), "storage"),
    ("read-only file system", admission((1, 1)), said(1, "OSError: Read-only file system"), "storage"),
    ("watchdog spoke before it was killed", admission((KILL, 3)), said(77, "no step for 600 s"), "hang"),
    ("NaN said before SIGTERM won", admission((TERM, 3)), said(78, "loss is nan"), "non-finite"),
    # Nothing but records, or nothing at all
    ("no containers, the record says hang", admission(), said(77, "no step"), "hang"),
    ("no containers, the record says error", admission(), said(1, "ValueError"), "application-error"),
    ("no containers, the record misses a peer", admission(), said(1, MET), "unknown"),
    ("no containers, no record", admission(), {}, "unknown-while-absent"),
]
INFRASTRUCTURE = {"preempted", "maintenance", "host-failure", "deactivated", "unknown"}


def test_what_ended_well_was_not_ended_by_its_host() -> None:
    node = (n("node.kubernetes.io/unreachable"),)
    assert classify(admission((0, 10.0), (0, 10.0), node=node), {}).cause == "completed"
    assert classify(admission((0, 10.0), (143, 10.0), node=node), {}).cause == "host-failure"


def test_there_are_enough_labelled_cases() -> None:
    assert len(CASES) >= 60
    assert len({name for name, *_ in CASES}) == len(CASES)


@pytest.mark.parametrize(("name", "ended", "exits", "cause"), CASES, ids=[name for name, *_ in CASES])
def test_cause(name: str, ended: Admission, exits: dict[str, ExitRecord], cause: str) -> None:
    verdict = classify(ended, exits)
    assert verdict.cause == cause, verdict
    assert verdict.evidence, "a cause without evidence"


def test_a_start_of_which_nothing_is_left_is_told_by_its_exit_record_alone() -> None:
    record = ExitRecord(code=75, reason="SIGTERM", time=1.0)
    assert classify(None, {}, record).cause == "preempted"
    absent = classify(None, {}, None)
    assert (absent.cause, absent.charged) == ("unknown-while-absent", False)


@pytest.mark.parametrize("signal", [KILL, TERM, ABRT, SEGV])
@pytest.mark.parametrize(
    ("code", "cause"), [(64, "bad-configuration"), (74, "storage"), (77, "hang"), (78, "non-finite")]
)
def test_who_said_why_and_was_then_ended_by_a_signal_is_believed(signal: int, code: int, cause: str) -> None:
    """On the way out after a watchdog's verdict the runtime may abort the process before its own exit code counts."""
    exits = said(code, "")
    assert classify(admission((signal, 1), (KILL, 2)), exits).cause == cause


def test_preemption_by_a_signal_of_the_queue_is_free_and_by_exit_code_alone_is_not() -> None:
    assert not classify(admission((75, 1), queue=(q("Preempted"),)), {}).charged
    assert classify(admission((75, 1)), {}).charged


def test_a_stop_that_was_asked_for_explains_only_what_nothing_else_explains() -> None:
    asked = Evidence(source="attempts/2/spec.json", field="plan", value="cpu-2")
    for ends in ((75, 75), (143, KILL), (KILL, KILL), (0, 0), (76, 76)):
        verdict = stopped(classify(admission((ends[0], 1), (ends[1], 2)), {}), "plan-change", asked)
        assert (verdict.cause, verdict.charged) == ("plan-change", False)
        assert verdict.evidence[0] == asked
    own_fault = stopped(classify(admission((1, 1)), said(1, "ValueError")), "plan-change", asked)
    assert (own_fault.cause, own_fault.charged) == ("application-error", True)
    queue = stopped(classify(admission((75, 1), queue=(q("Preempted"),)), {}), "plan-change", asked)
    assert queue.cause == "preempted"


# -- properties

codes = st.sampled_from([0, 1, 2, 42, 64, 74, 75, 76, 77, 78, 79, 127, 134, 137, 139, 143, KILL, TERM, ABRT, SEGV])
ends = st.lists(st.tuples(codes, st.sampled_from([1.0, 1.5, 2.0, 3.0])), min_size=1, max_size=5)
words = st.sampled_from(["ValueError: x", MET, "heartbeat timeout", "no healthy devices present", "No space left", ""])


@st.composite
def endings(draw: st.DrawFn) -> tuple[Admission, dict[str, ExitRecord]]:
    made = draw(ends)
    exits: dict[str, ExitRecord] = {}
    for rank, (code, at) in enumerate(made):
        if draw(st.booleans()):
            exits |= said(code if code >= 0 else 128 - code, draw(words), rank, at)
    return admission(*made), exits


@given(endings(), st.randoms())
def test_the_order_in_which_containers_are_listed_never_matters(case, random) -> None:
    ended, exits = case
    shuffled = list(ended.containers)
    random.shuffle(shuffled)
    assert classify(replace(ended, containers=tuple(shuffled)), exits) == classify(ended, exits)


@given(endings(), st.sampled_from(["Preempted", "InCohortReclamation", "ClusterQueueStopped"]))
def test_a_signal_of_the_queue_always_wins(case, reason) -> None:
    ended, exits = case
    ended = replace(ended, queue_signals=(q(reason),), node_signals=(n("NotReady"),), pod_signals=(p("OOMKilled"),))
    verdict = classify(ended, exits)
    assert verdict.cause == "preempted"
    assert not verdict.charged


@given(endings(), st.sampled_from([n("NotReady"), n("cloud.google.com/impending-node-termination")]))
def test_a_signal_of_the_node_is_never_charged_to_the_program(case, signal) -> None:
    ended, exits = case
    assert classify(replace(ended, node_signals=(signal,)), exits).cause in (*INFRASTRUCTURE, "completed")


@given(endings())
def test_only_the_program_itself_can_be_blamed_for_an_application_error(case) -> None:
    ended, exits = case
    verdict = classify(ended, exits)
    if verdict.cause == "application-error":
        blamed = [
            end
            for end in ended.containers
            if end.exit_code == 1 or (exits.get(end.pod_uid) and exits[end.pod_uid].code == 1)
        ]
        assert blamed
        assert not all(MET in exits[end.pod_uid].error for end in blamed if end.pod_uid in exits) or any(
            end.pod_uid not in exits for end in blamed
        )


@given(endings(), st.floats(0, 100))
def test_only_differences_of_time_count(case, shift) -> None:
    ended, exits = case
    moved = tuple(replace(end, time=end.time + shift) for end in ended.containers)
    assert classify(replace(ended, containers=moved), exits).cause == classify(ended, exits).cause
