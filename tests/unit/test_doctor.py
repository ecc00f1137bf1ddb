"""`untildone doctor`: what it says of a cluster that lacks something. The cluster is a table of answers."""

import copy
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from orchestrator.cli import untildone
from orchestrator.clusters.base import ClusterUnavailable
from orchestrator.clusters.kubernetes_api import ApiError
from orchestrator.crd import crd
from orchestrator.operating.configuration import Configuration
from orchestrator.operating.doctor import Check, examine
from orchestrator.operating.rights import RIGHTS, Scope, missing

LEASES = "/apis/coordination.k8s.io/v1/namespaces/home/leases/untildone"
CONFIGURATION = Configuration.parse(
    {"runDirectories": {"team": ["gs://runs"]}, "lease": {"namespace": "home"}}, "operator.yaml"
)


class Cluster:
    """Answers as a cluster with everything would, less what a test takes away."""

    def __init__(self) -> None:
        self.schema = copy.deepcopy(crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
        self.schema["x-kubernetes-group-version-kind"] = [{"group": "untildone.dev", "kind": "TrainingRun"}]
        self.served = {
            "untildone.dev/v1alpha1": ["trainingruns", "trainingruns/status"],
            "jobset.x-k8s.io/v1alpha2": ["jobsets"],
            "kueue.x-k8s.io/v1beta2": ["workloads"],
        }
        self.denied: set[tuple[str, str]] = set()  # (resource, verb)
        self.reviews: list[dict[str, str]] = []
        self.renewals = 0
        self.renewing = True
        self.lease = True
        self.away = False

    @property
    def cluster_uid(self) -> str:
        if self.away:
            raise ClusterUnavailable("connection refused")
        return "1234"

    def request(self, method: str, path: str, body: Any = None, **_: Any) -> dict[str, Any]:
        if self.away:
            raise ClusterUnavailable("connection refused")
        if method == "POST":
            wanted = body["spec"]["resourceAttributes"]
            self.reviews.append(wanted)
            full = "/".join(filter(None, (wanted["resource"], wanted.get("subresource"))))
            return {"status": {"allowed": (full, wanted["verb"]) not in self.denied}}
        if path == LEASES:
            if not self.lease:
                raise ApiError(404, "NotFound", "no lease")
            self.renewals += self.renewing
            return {"spec": {"renewTime": f"t{self.renewals}", "holderIdentity": "pod-1"}}
        if path.startswith("/openapi"):
            return {"components": {"schemas": {"a": {}, "b": self.schema}}}
        group = path.removeprefix("/apis/")
        if group not in self.served:
            raise ApiError(404, "NotFound", "no such group")
        return {"resources": [{"name": name} for name in self.served[group]]}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr("orchestrator.operating.doctor.POLL_SECONDS", 0.001)
    return Cluster()


def results(cluster: Cluster, configuration: Configuration = CONFIGURATION) -> dict[str, Check]:
    found = list(examine(cluster, configuration, 0.05))  # type: ignore[arg-type]
    return {check.name: check for check in found}


def test_all_is_well(cluster: Cluster) -> None:
    found = results(cluster)
    assert {check.result for check in found.values()} == {"PASS"} and len(found) == 6
    assert "pod-1" in found["operator"].message


def test_missing_kinds(cluster: Cluster) -> None:
    del cluster.served["jobset.x-k8s.io/v1alpha2"]
    assert (
        results(cluster)["kinds"].message
        == "jobsets.jobset.x-k8s.io v1alpha2: not served by this cluster; install JobSet"
    )


def test_no_definition_and_an_older_one(cluster: Cluster) -> None:
    del cluster.schema["properties"]["spec"]["properties"]["ladder"]["items"]["properties"]["slices"]
    del cluster.schema["properties"]["status"]["properties"]["step"]
    older = results(cluster)["definition"]
    assert older.result == "FAIL" and "lacks spec.ladder.slices, status.step; run: kubectl apply" in older.message
    cluster.served["untildone.dev/v1alpha1"] = ["trainingruns"]
    assert "not served" in results(cluster)["definition"].message


def test_a_newer_definition_is_no_problem(cluster: Cluster) -> None:
    cluster.schema["properties"]["spec"]["properties"]["new"] = {"type": "string"}
    assert results(cluster)["definition"].result == "PASS"


def test_missing_rights_are_named_and_only_the_needed_ones_fail(cluster: Cluster) -> None:
    cluster.denied = {("nodes", "list")}
    assert results(cluster)["rights"] == Check("rights", "WARN", "may not list nodes (host failures and maintenance)")
    cluster.denied = {("trainingruns/status", "patch")}
    assert results(cluster)["rights"].result == "FAIL"
    assert "patch trainingruns/status.untildone.dev" in results(cluster)["rights"].message


def test_each_right_is_asked_for_where_it_is_needed(cluster: Cluster) -> None:
    cluster.denied = {(right.resource, verb) for right in RIGHTS for verb in right.verbs}
    found = list(missing(cluster, ["a", "b"], "home", "untildone"))  # type: ignore[arg-type]
    per_scope = {Scope.RUNS: {"a", "b"}, Scope.CLUSTER: {None}, Scope.OWN: {"home"}}
    for right in RIGHTS:
        mine = [item for item in found if item.right is right]
        assert {item.namespace for item in mine} == per_scope[right.scope]
        assert {item.verb for item in mine} == set(right.verbs)
    named = [review for review in cluster.reviews if review["resource"] == "leases" and review["verb"] != "create"]
    assert {review["name"] for review in named} == {"untildone"}
    assert not [item for item in missing(cluster, [], "home", None) if item.right.scope is Scope.OWN]  # type: ignore[arg-type]


def test_nobody_works(cluster: Cluster) -> None:
    cluster.renewing = False
    assert "is not renewed; pod-1 held it last" in results(cluster)["operator"].message
    cluster.lease = False
    assert "does not exist" in results(cluster)["operator"].message
    assert results(cluster)["operator"].result == "FAIL"


def test_no_run_directories(cluster: Cluster) -> None:
    nothing = CONFIGURATION.model_copy(update={"run_directories": {}})
    assert results(cluster, nothing)["runDirectories"].result == "WARN"


@pytest.mark.parametrize(("state", "code"), [("well", 0), ("older", 1), ("away", 5)])
def test_exit_codes(
    cluster: Cluster, state: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if state == "older":
        del cluster.schema["properties"]["spec"]["properties"]["ladder"]
    cluster.away = state == "away"
    monkeypatch.setattr("orchestrator.clusters.kubernetes_api.KubernetesApi", lambda _: cluster)
    monkeypatch.setattr("orchestrator.clusters.kubernetes_api.configuration_from", lambda *_: None)
    file = tmp_path_factory.mktemp("doctor") / "operator.yaml"
    file.write_text(yaml.safe_dump({"lease": {"namespace": "home"}}))
    done = CliRunner().invoke(untildone, ["doctor", "--config", str(file), "--wait", "0.05"], standalone_mode=False)
    assert done.return_value == code, done.output
    assert ("UNKNOWN" in done.output) == (state == "away")
