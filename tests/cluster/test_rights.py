"""What the operator says when a right of the chart is taken from it: a condition of the run, or a line of its log.

One verb at a time is taken out of the roles that Helm installed; a new operator pod and a new run meet what is left.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from orchestrator.operating.rights import RIGHTS
from tests.lab.lab import Lab
from tests.support.installed import DEVICE, HOME, NAME, TEAM, Release, cluster
from tests.support.lab_objects import wait
from tests.support.operated import AppliedRun

pytestmark = pytest.mark.cluster
ROLES = "/apis/rbac.authorization.k8s.io/v1"
CLUSTER_ROLE = f"{ROLES}/clusterroles/{HOME}-{NAME}"
LEADER_ROLE = f"{ROLES}/namespaces/{HOME}/roles/{NAME}-leader"


@dataclass(frozen=True)
class Case:
    """A verb, and what is said without it: in a condition of the run (`condition`), or in the operator's log."""

    resource: str
    verb: str
    said: str
    condition: str | None = None
    leader: bool = False  # the verb is in the leader's role


CASES = (
    Case("trainingruns", "list", "list, watch on trainingruns.untildone.dev"),
    Case("trainingruns", "watch", "watch"),
    Case("trainingruns/status", "patch", "a status was refused"),
    Case("trainingruns/finalizers", "update", "finalizers", "Ready"),
    Case("jobsets", "create", "create on jobsets.jobset.x-k8s.io", "Ready"),
    Case("jobsets", "list", "list, watch on jobsets.jobset.x-k8s.io", "Ready"),
    Case("workloads", "list", "list, watch on workloads.kueue.x-k8s.io", "Ready"),
    Case("pods", "list", "list, watch on pods", "Ready"),
    Case("configmaps", "get", "get on configmaps", "Ready"),
    Case("namespaces", "get", "get on namespaces, name kube-system", "Ready"),
    Case("events", "create", "an event was refused"),
    Case("nodes", "list", "list, watch on nodes"),
    Case("clusterqueues", "list", "list, watch on clusterqueues.kueue.x-k8s.io"),
    Case("resourceflavors", "list", "list, watch on resourceflavors.kueue.x-k8s.io"),
    Case("localqueues", "list", "list, watch on localqueues.kueue.x-k8s.io"),
    Case("leases", "create", "working without the lease", leader=True),
    Case("leases", "get", "working without the lease", leader=True),
    Case("leases", "update", "working without the lease", leader=True),
)


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
    """The roles without this verb, and an operator pod that began under them."""
    path = LEADER_ROLE if case.leader else CLUSTER_ROLE
    rules = release.api.get(path)["rules"]
    left = [
        {
            **rule,
            "verbs": [verb for verb in rule["verbs"] if case.resource not in rule["resources"] or verb != case.verb],
        }
        for rule in rules
    ]
    assert left != rules, f"the chart does not give {case.verb} on {case.resource}"
    release.api.patch(path, {"rules": [rule for rule in left if rule["verbs"]]})
    if case.verb == "create" and case.leader:
        release.api.delete(f"/apis/coordination.k8s.io/v1/namespaces/{HOME}/leases/{NAME}")
    try:
        yield
    finally:
        release.api.patch(path, {"rules": rules})


def test_every_verb_has_its_case_or_a_reason() -> None:
    """`watch` follows a list, and is refused like one; a delete needs an attempt to delete; get meets only a name that is taken."""
    given = {(right.resource, verb) for right in RIGHTS for verb in right.verbs}
    tried = {(case.resource, case.verb) for case in CASES}
    untried = {(resource, "watch") for resource, verb in given if verb == "watch" and resource != "trainingruns"}
    assert tried <= given
    assert given - tried == untried | {("jobsets", "delete"), ("jobsets", "get")}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.verb}-{case.resource.replace('/', '-')}")
def test_a_missing_right_is_said(lab: Lab, release: Release, case: Case) -> None:
    with without(release, case):
        release.restart()
        name = f"r-{case.verb}-{case.resource.replace('/', '-')}"
        run = AppliedRun.apply(lab, name, 8, TEAM, queue="never", ladder=[{"deviceType": DEVICE}])
        try:
            if case.condition is None:
                wait(f"the log says {case.said!r}", lambda: case.said in release.log(), 90)
            else:
                run.until(
                    f"{case.condition} says {case.said!r}",
                    lambda: case.said in run.condition(str(case.condition)).get("message", ""),
                    60,
                )
        finally:
            run.delete()
