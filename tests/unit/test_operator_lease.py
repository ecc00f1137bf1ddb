"""Which replica works: takeover of a silent holder, a stopped one that wakes up, outages, missing rights."""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest

from orchestrator.clusters.base import ClusterUnavailable
from orchestrator.clusters.kubernetes_api import ApiError
from orchestrator.operating.lease import DEADLINE_SECONDS, DURATION_SECONDS, RENEW_SECONDS, Lease


@dataclass
class Server:
    """Leases of an API server, with resource versions; and a clock."""

    now: float = 1000.0
    lease: dict[str, Any] | None = None
    away: bool = False
    forbidden: bool = False
    calls: list[str] = field(default_factory=list)

    def request(self, method: str, path: str, body: Any = None, **_: Any) -> dict[str, Any]:
        self.calls.append(method)
        if self.away:
            raise ClusterUnavailable("no route to host")
        if self.forbidden:
            raise ApiError(403, "Forbidden", "leases is forbidden")
        if method == "POST":
            if self.lease is not None:
                raise ApiError(409, "AlreadyExists", "exists")
            assert path.endswith("/leases")
            return self._store(body, 1)
        if self.lease is None:
            raise ApiError(404, "NotFound", "not found")
        if method == "PUT":
            if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
                raise ApiError(409, "Conflict", "the object has been modified")
            return self._store(body, int(self.lease["metadata"]["resourceVersion"]) + 1)
        return copy.deepcopy(self.lease)

    def _store(self, body: Any, version: int) -> dict[str, Any]:
        self.lease = copy.deepcopy(body)
        self.lease["metadata"]["resourceVersion"] = str(version)
        return copy.deepcopy(self.lease)

    @property
    def holder(self) -> str:
        assert self.lease is not None
        return str(self.lease["spec"]["holderIdentity"])

    def replica(self, name: str) -> Lease:
        return Lease(self, "ns", "untildone", name, monotonic=lambda: self.now, clock=lambda: 1e9 + self.now)


def turns(server: Server, *replicas: Lease, seconds: float) -> None:
    """Each replica takes its turns for so long."""
    due = {id(lease): server.now for lease in replicas}
    end = server.now + seconds
    while server.now < end:
        for lease in replicas:
            if due[id(lease)] <= server.now:
                due[id(lease)] = server.now + lease.turn()
            assert sum(other.leads for other in replicas) <= 1, "two work at once"
        server.now += 0.5


def test_one_works_and_keeps_working_with_one_call_every_five_seconds() -> None:
    server = Server()
    one, two = server.replica("one"), server.replica("two")
    turns(server, one, two, seconds=2)
    assert one.leads and not two.leads
    server.calls.clear()
    turns(server, one, seconds=120)
    assert one.leads and server.holder == "one"
    assert server.calls == ["PUT"] * len(server.calls)
    assert len(server.calls) == pytest.approx(120 / RENEW_SECONDS, abs=1)


def test_a_killed_holder_is_succeeded_when_its_lease_has_run_out_on_the_others_clock() -> None:
    server = Server()
    one, two = server.replica("one"), server.replica("two")
    turns(server, one, two, seconds=20)
    began = server.now
    while not two.leads and server.now - began < 60:
        turns(server, two, seconds=0.5)
    waited = server.now - began
    assert DURATION_SECONDS - RENEW_SECONDS <= waited <= DURATION_SECONDS + RENEW_SECONDS
    assert server.holder == "two"
    assert server.lease is not None and server.lease["spec"]["leaseTransitions"] == 2


def test_a_stopped_holder_that_wakes_up_does_not_work() -> None:
    """SIGSTOP for two leases, then SIGCONT: before its first turn it knows that its time is over."""
    server = Server()
    one, two = server.replica("one"), server.replica("two")
    turns(server, one, two, seconds=20)
    turns(server, two, seconds=2 * DURATION_SECONDS + 5)  # one is stopped
    assert two.leads
    assert not one.leads, "awake again, it would have worked beside its successor"
    turns(server, one, two, seconds=60)
    assert two.leads and not one.leads and server.holder == "two"


def test_stopped_for_a_moment_it_goes_on() -> None:
    server = Server()
    one, two = server.replica("one"), server.replica("two")
    turns(server, one, two, seconds=20)
    turns(server, two, seconds=DEADLINE_SECONDS + 1)
    assert not one.leads
    turns(server, one, two, seconds=6)
    assert one.leads and not two.leads


def test_released_means_at_once() -> None:
    server = Server()
    one, two = server.replica("one"), server.replica("two")
    turns(server, one, two, seconds=20)
    one.release()
    assert not one.leads and server.holder == ""
    turns(server, two, seconds=3)
    assert two.leads
    one.release()  # not ours any more
    assert server.holder == "two"


def test_the_same_pod_continues_at_once() -> None:
    server = Server()
    turns(server, server.replica("one"), seconds=20)
    again = server.replica("one")
    again.turn()
    assert again.leads


def test_without_answers_the_holder_goes_on_saying_so_and_a_newcomer_does_not_begin() -> None:
    server = Server()
    one, two = server.replica("one"), server.replica("two")
    turns(server, one, two, seconds=20)
    server.away = True
    turns(server, one, two, seconds=120)
    assert one.leads and not two.leads
    server.away = False
    turns(server, one, two, seconds=10)
    assert one.leads and not two.leads


def test_a_holder_whose_answers_are_lost_meets_its_successor() -> None:
    server = Server()
    one, two = server.replica("one"), server.replica("two")
    turns(server, one, two, seconds=20)
    for _ in range(60):  # one alone is cut off
        server.away = True
        one.turn()
        server.away = False
        two.turn()
        server.now += 1
    assert two.leads and server.holder == "two"
    one.turn()
    assert not one.leads


def test_a_race_for_a_free_lease_has_one_winner() -> None:
    server = Server()
    replicas = [server.replica(str(number)) for number in range(5)]
    turns(server, *replicas, seconds=30)
    assert sum(lease.leads for lease in replicas) == 1
    silent = next(lease for lease in replicas if lease.leads)
    rest = [lease for lease in replicas if lease is not silent]
    turns(server, *rest, seconds=40)
    assert sum(lease.leads for lease in rest) == 1


def test_without_the_right_to_a_lease_it_works_all_the_same() -> None:
    server = Server(forbidden=True)
    one = server.replica("one")
    one.turn()
    assert one.leads
    server.forbidden = False
    one.turn()
    assert one.leads and server.holder == "one"
