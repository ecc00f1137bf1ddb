"""A pod on the lab's nodes, against an API that answers as a busy one does: what it ends with is reported until it is gone."""

import threading
from typing import Any

import pytest

import tests.lab.pods as pods
from tests.lab.api import ApiError, Object
from tests.lab.nodes import Node

POD: Object = {
    "metadata": {
        "name": "p",
        "namespace": "default",
        "uid": "u",
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "deletionGracePeriodSeconds": 1,
    },
    "spec": {"containers": [{"name": "c"}]},
    "status": {},
}


class Busy:
    """Refuses the first reports for another writer's sake, and keeps the object for a finalizer."""

    def __init__(self, conflicts: int) -> None:
        self.calls: list[str] = []
        self.conflicts = conflicts
        self.confirmed = threading.Semaphore(0)

    def patch(self, path: str, change: Object, kind: str) -> None:
        self.calls.append("refused" if self.conflicts else change["status"]["phase"])
        if self.conflicts:
            self.conflicts -= 1
            raise ApiError(409, "Conflict", "another writer")

    def find(self, path: str) -> Object:
        return POD

    def delete(self, path: str, uid: str, grace: int) -> None:
        self.calls.append("delete")
        self.confirmed.release()


class Host:
    def __init__(self, api: Busy) -> None:
        self.api: Any = api

    def sandbox(self, pod: Object) -> Any:
        raise AssertionError("a deleted pod is not started")

    def release(self, pod: Object) -> None:
        self.api.calls.append("release")

    def forget(self, pod: Object) -> None:
        self.api.calls.append("forget")


def test_the_end_is_reported_through_conflicts_and_until_the_pod_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pods, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(pods, "CONFIRM_SECONDS", 0.05)
    api = Busy(conflicts=2)
    runner = pods.PodRunner(Host(api), Node("n", "pool", None), POD)
    runner.start()
    for _ in range(3):
        assert api.confirmed.acquire(timeout=10)
    runner.gone()
    runner.join(10)
    assert not runner.is_alive()
    # Its address and name are free before its object is gone.
    assert api.calls[:6] == ["release", "refused", "refused", "Failed", "delete", "Failed"]
    assert api.calls[-2:] == ["release", "forget"]


def test_a_pod_that_is_gone_meanwhile_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conflict with an object of the same name that is another pod: nothing is left to report."""
    monkeypatch.setattr(pods, "RETRY_SECONDS", 0.01)
    api = Busy(conflicts=1_000_000)
    monkeypatch.setattr(api, "find", lambda path: {"metadata": {"uid": "another"}})
    runner = pods.PodRunner(Host(api), Node("n", "pool", None), POD)
    runner.start()
    assert api.confirmed.acquire(timeout=10)
    runner.gone()
    runner.join(10)
    assert not runner.is_alive()
