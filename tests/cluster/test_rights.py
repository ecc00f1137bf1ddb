"""What the operator says when a right of the chart is taken from it: a condition of the run, or a line of its log.

One verb at a time is taken out of the roles that Helm installed; a new operator pod and a new run meet what is left.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from orchestrator.operating.rights import RIGHTS
from tests.lab.api import Object
from tests.lab.lab import Lab
from tests.support.installed import DEVICE, HOME, NAME, TEAM, Release, cluster
from tests.support.operated import AppliedRun

pytestmark = pytest.mark.cluster
ROLES = "/apis/rbac.authorization.k8s.io/v1"
CLUSTER_ROLE = f"{ROLES}/clusterroles/{HOME}-{NAME}"
LEADER_ROLE = f"{ROLES}/namespaces/{HOME}/roles/{NAME}-leader"


@dataclass(frozen=True)
class Case:
    """Verbs taken away at once, and what is said without them: in a condition of the run, or in the operator's log."""

    verb: str
    resources: tuple[str, ...]
    said: tuple[str, ...]
    condition: str | None = None
    leader: bool = False  # they are in the leader's role

    @property
    def name(self) -> str:
        return f"{self.verb}-{self.resources[0].replace('/', '-')}"


CASES = (
    Case("list", ("trainingruns",), ("list, watch on trainingruns.untildone.dev",)),
    Case("watch", ("trainingruns",), ("list, watch on trainingruns.untildone.dev",)),
    Case("patch", ("trainingruns/status",), ("a status was refused",)),
    Case("update", ("trainingruns/finalizers",), ("finalizers",), "Ready"),
    Case("create", ("jobsets",), ("create on jobsets.jobset.x-k8s.io",), "Ready"),
    Case("list", ("jobsets",), ("list, watch on jobsets.jobset.x-k8s.io",), "Ready"),
    Case("list", ("workloads",), ("list, watch on workloads.kueue.x-k8s.io",), "Ready"),
    Case("list", ("pods",), ("list, watch on pods",), "Ready"),
    Case("get", ("configmaps",), ("get on configmaps",), "Ready"),
    Case("get", ("namespaces",), ("get on namespaces, name kube-system",), "Ready"),
    Case("create", ("events",), ("an event was refused",)),
    # Without these the run goes on, and less is known.
    Case(
        "list",
        ("nodes", "clusterqueues", "resourceflavors", "localqueues"),
        tuple(
            f"list, watch on {kind}"
            for kind in (
                "nodes",
                "clusterqueues.kueue.x-k8s.io",
                "resourceflavors.kueue.x-k8s.io",
                "localqueues.kueue.x-k8s.io",
            )
        ),
    ),
    Case("create", ("leases",), ("working without the lease",), leader=True),
    Case("get", ("leases",), ("working without the lease",), leader=True),
    Case("update", ("leases",), ("working without the lease",), leader=True),
)
# `watch` follows a list and is refused like one; the others need what these tests do not make: a name that is taken, an
# attempt to delete, a pod that the cluster refuses.
UNTRIED = {("jobsets", "get"), ("jobsets", "delete"), ("pods", "create")}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with cluster(tmp_path_factory.mktemp("rights") / "lab") as one:
        yield one


@pytest.fixture(scope="module")
def release(lab: Lab) -> Release:
    release = Release(lab)
    release.install()
    return release


@contextlib.contextmanager
def without(release: Release, case: Case) -> Iterator[None]:
    """The roles without these verbs."""
    path = LEADER_ROLE if case.leader else CLUSTER_ROLE
    rules = release.api.get(path)["rules"]

    def left(rule: Object) -> list[str]:
        return [v for v in rule["verbs"] if v != case.verb or not set(case.resources) & set(rule["resources"])]

    fewer = [{**rule, "verbs": left(rule)} for rule in rules]
    assert fewer != rules, f"the chart does not give {case.verb} on {case.resources}"
    release.api.patch(path, {"rules": [rule for rule in fewer if rule["verbs"]]})
    try:
        yield
    finally:
        release.api.patch(path, {"rules": rules})


def told(release: Release, run: AppliedRun, case: Case) -> str:
    """Where it should be said."""
    return release.log() if case.condition is None else str(run.condition(case.condition).get("message", ""))


def test_every_verb_has_its_case_or_a_reason() -> None:
    given = {(right.resource, verb) for right in RIGHTS for verb in right.verbs}
    tried = {(resource, case.verb) for case in CASES for resource in case.resources}
    watched = {(resource, verb) for resource, verb in given if verb == "watch"}
    assert tried <= given
    assert given - tried == UNTRIED | (watched - tried)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_missing_right_is_said(lab: Lab, release: Release, case: Case) -> None:
    with without(release, case):
        if (case.verb, case.resources) == ("create", ("leases",)):
            release.api.delete(f"/apis/coordination.k8s.io/v1/namespaces/{HOME}/leases/{NAME}")
        release.restart()
        run = AppliedRun.apply(lab, f"r-{case.name}", 8, TEAM, queue="never", ladder=[{"deviceType": DEVICE}])
        try:
            for said in case.said:
                run.until(f"{said!r} is said", lambda said=said: said in told(release, run, case))
        finally:
            run.delete()
