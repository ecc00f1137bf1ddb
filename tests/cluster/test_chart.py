"""The chart as Helm renders it, without a cluster: what it makes of its values, and what it refuses."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.operating.configuration import load_configuration
from tests.lab.build_helm import helm_binary
from tools.render_manifests import CHART, CRD, ROOT, VARIANTS, manifest

pytestmark = pytest.mark.cluster
IMAGE = {"image": {"repository": "registry.example/untildone-operator"}}
RELEASE = ["pretrain", str(CHART), "--namespace", "machines"]


@pytest.fixture(scope="session")
def helm() -> str:
    return str(helm_binary())


def template(helm: str, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    command = [helm, "template", *RELEASE, "--values", "-"]
    return subprocess.run(command, input=yaml.safe_dump(values), capture_output=True, text=True, check=False)


def render(helm: str, **values: Any) -> dict[tuple[str, str, str], dict[str, Any]]:
    """(kind, namespace or "", name) → object."""
    done = template(helm, {**IMAGE, **values})
    assert done.returncode == 0, done.stderr
    objects = [o for o in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if o]
    return {(o["kind"], o["metadata"].get("namespace", ""), o["metadata"]["name"]): o for o in objects}


def kinds(objects: dict[tuple[str, str, str], dict[str, Any]]) -> set[str]:
    return {kind for kind, _, _ in objects}


def only(objects: dict[tuple[str, str, str], dict[str, Any]], kind: str) -> dict[str, Any]:
    found = [o for (k, _, _), o in objects.items() if k == kind]
    assert len(found) == 1, [*objects]
    return found[0]


def test_lint(helm: str) -> None:
    for values in ({}, IMAGE):
        command = [helm, "lint", "--strict", str(CHART), "--values", "-"]
        done = subprocess.run(command, input=yaml.safe_dump(values), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", VARIANTS)
def test_committed_manifests_are_what_the_chart_renders(helm: str, file: str) -> None:
    assert (ROOT / "manifests" / file).read_text() == manifest(helm, file), "run: make manifests"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "image.repository is not set: build docker/operator.Dockerfile"),
        ({**IMAGE, "replica": 2}, "additional properties 'replica' not allowed"),
        ({"image": {"repositry": "x"}}, "at '/image': additional properties 'repositry' not allowed"),
        ({**IMAGE, "rbac": {"clusterwide": False}}, "at '/rbac': additional properties 'clusterwide' not allowed"),
        ({**IMAGE, "resources": {"limit": {}}}, "at '/resources': additional properties 'limit' not allowed"),
        ({**IMAGE, "runDirectories": {"team-a": "gs://b"}}, "at '/runDirectories/team-a': got string, want array"),
        ({**IMAGE, "runDirectories": {"team-a": []}}, "at '/runDirectories/team-a': minItems"),
        ({**IMAGE, "runDirectories": {"team-a": ["runs"]}}, "at '/runDirectories/team-a/0'"),
        ({**IMAGE, "runDirectories": {"Team A": ["gs://b"]}}, "'/runDirectories': additional properties 'Team A' not"),
        ({**IMAGE, "watchNamespaces": ["Team A"]}, "at '/watchNamespaces/0'"),
        ({**IMAGE, "workers": 0}, "at '/workers': minimum: got 0, want 1"),
        ({**IMAGE, "logLevel": "verbose"}, "at '/logLevel': value must be one of 'debug', 'info', 'warning', 'error'"),
        ({"image": {"repository": "x", "digest": "latest"}}, "at '/image/digest'"),
        ({**IMAGE, "podDisruptionBudget": {"maxUnavailable": 0}}, "at '/podDisruptionBudget/maxUnavailable'"),
        ({**IMAGE, "replicas": 2, "leaderElection": {"enabled": False}}, "enable it, or set replicas to 1"),
        ({**IMAGE, "serviceAccount": {"create": False}}, "serviceAccount.name is not set"),
    ],
)
def test_what_is_wrong_is_said(helm: str, values: dict[str, Any], said: str) -> None:
    done = template(helm, values)
    assert done.returncode != 0 and said in done.stderr, done.stderr


def test_cluster_wide(helm: str) -> None:
    objects = render(helm)
    assert ("Role", "machines", "pretrain-untildone-leader") in objects
    assert len([o for o in objects if o[0] == "Role"]) == 1
    rules = objects["ClusterRole", "", "machines-pretrain-untildone"]["rules"]
    assert {"jobsets", "nodes", "namespaces"} <= {r for rule in rules for r in rule["resources"]}
    assert not {"secrets", "*"} & {r for rule in rules for key in ("resources", "verbs") for r in rule[key]}


@pytest.mark.parametrize(("watched", "wanted"), [([], ["machines"]), (["team-b", "team-a"], ["team-a", "team-b"])])
def test_in_namespaces(helm: str, tmp_path: Path, watched: list[str], wanted: list[str]) -> None:
    objects = render(helm, rbac={"clusterWide": False}, watchNamespaces=watched)
    name = "machines-pretrain-untildone"
    assert sorted(namespace for kind, namespace, n in objects if kind == "Role" and n == name) == wanted
    assert sorted(namespace for kind, namespace, n in objects if kind == "RoleBinding" and n == name) == wanted
    cluster = {r for rule in objects["ClusterRole", "", name]["rules"] for r in rule["resources"]}
    assert cluster == {"nodes", "clusterqueues", "resourceflavors", "namespaces"}
    least = render(helm, rbac={"clusterWide": False, "clusterReads": False})["ClusterRole", "", name]["rules"]
    assert least == [
        {"apiGroups": [""], "resources": ["namespaces"], "resourceNames": ["kube-system"], "verbs": ["get"]}
    ]
    assert configuration(objects, tmp_path).watch_namespaces == tuple(wanted)


def configuration(objects: dict[tuple[str, str, str], dict[str, Any]], folder: Path) -> Any:
    """The operator's configuration file, read by the operator's own reader."""
    file = folder / "operator.yaml"
    file.write_text(only(objects, "ConfigMap")["data"]["operator.yaml"])
    return load_configuration(file)


def test_the_operator_reads_its_configuration(helm: str, tmp_path: Path) -> None:
    places = {"team-a": ["gs://runs/a", "/mnt/runs"], "*": ["gs://everybody"]}
    found = configuration(render(helm, runDirectories=places, workers=3, logLevel="debug", healthPort=9000), tmp_path)
    assert found.run_directories == {name: tuple(prefixes) for name, prefixes in places.items()}
    assert (found.workers, found.log_level, found.health.port, found.watch_namespaces) == (3, "debug", 9000, ())
    assert (found.lease.enabled, found.lease.name, found.lease.namespace) == (True, "pretrain-untildone", "machines")
    without = configuration(render(helm, leaderElection={"enabled": False}), tmp_path)
    assert not without.lease.enabled and without.run_directories == {}


def test_prometheus_may_scrape_where_it_is_told_to(helm: str) -> None:
    assert not any(kind == "PodMonitor" for kind, _, _ in render(helm))
    objects = render(helm, podMonitor={"enabled": True, "labels": {"release": "p"}}, networkPolicy={"enabled": True})
    monitor = only(objects, "PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "p"
    pod = only(objects, "Deployment")["spec"]["template"]
    endpoint = monitor["spec"]["podMetricsEndpoints"][0]
    ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    assert (endpoint["path"], endpoint["interval"]) == ("/metrics", "30s")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    ingress = only(objects, "NetworkPolicy")["spec"]["ingress"]
    assert [port["port"] for rule in ingress for port in rule["ports"]] == [ports[endpoint["port"]]]


def test_another_configuration_is_another_pod(helm: str) -> None:
    def checksum(**values: Any) -> str:
        pod = only(render(helm, **values), "Deployment")["spec"]["template"]
        return str(pod["metadata"]["annotations"]["checksum/configuration"])

    assert checksum() == checksum(crds={"keep": False})
    assert checksum() != checksum(runDirectories={"team-a": ["gs://b"]})


@pytest.mark.parametrize("keep", [True, False])
def test_the_definition_is_the_committed_one(helm: str, keep: bool) -> None:
    rendered = only(render(helm, crds={"keep": keep}), "CustomResourceDefinition")
    committed = yaml.load(CRD.read_text(), Loader=yaml.CSafeLoader)
    assert rendered["spec"] == committed["spec"]
    assert committed["metadata"]["labels"].items() <= rendered["metadata"]["labels"].items()
    annotations = rendered["metadata"].get("annotations", {})
    assert annotations.get("helm.sh/resource-policy") == ("keep" if keep else None)
    assert "CustomResourceDefinition" not in kinds(render(helm, crds={"enabled": False}))


def test_what_can_be_switched_off(helm: str) -> None:
    off = {"create": False, "aggregateToDefaultRoles": False}
    objects = render(
        helm, rbac=off, podDisruptionBudget={"enabled": False}, serviceAccount={"create": False, "name": "mine"}
    )
    assert kinds(objects) == {"ConfigMap", "CustomResourceDefinition", "Deployment", "Pod"}
    assert only(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == "mine"
    assert "NetworkPolicy" in kinds(render(helm, networkPolicy={"enabled": True}))


def test_names_and_labels(helm: str) -> None:
    objects = render(helm, networkPolicy={"enabled": True})
    for (kind, _, name), item in objects.items():
        labels = item["metadata"]["labels"]
        assert len(name) <= 63
        assert labels["app.kubernetes.io/managed-by"] == "Helm" and labels["helm.sh/chart"] == "untildone-0.1.0", kind
        assert labels["app.kubernetes.io/instance"] == "pretrain" and labels["app.kubernetes.io/name"] == "untildone"
    selector = only(objects, "Deployment")["spec"]["selector"]["matchLabels"]
    for kind, place in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        assert only(objects, kind)["spec"][place]["matchLabels"] == selector
    assert not selector.items() <= only(objects, "Pod")["metadata"]["labels"].items()  # helm test's is no replica


def test_values_reach_the_pod(helm: str) -> None:
    digest = "sha256:" + "0" * 64
    objects = render(
        helm,
        image={"repository": "r/op", "digest": digest},
        replicas=2,
        env=[{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        nodeSelector={"pool": "system"},
        tolerations=[{"key": "dedicated", "operator": "Exists"}],
        priorityClassName="system-cluster-critical",
        podLabels={"team": "x"},
        podAnnotations={"note": "seen"},
        imagePullSecrets=[{"name": "registry"}],
        serviceAccount={"annotations": {"iam.gke.io/gcp-service-account": "u@p.iam.gserviceaccount.com"}},
    )
    deployment = only(objects, "Deployment")["spec"]
    pod = deployment["template"]["spec"]
    assert deployment["replicas"] == 2 and pod["containers"][0]["image"] == f"r/op@{digest}"
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in pod["containers"][0]["env"]
    assert pod["nodeSelector"] == {"pool": "system"} and pod["tolerations"][0]["key"] == "dedicated"
    assert pod["priorityClassName"] == "system-cluster-critical" and pod["imagePullSecrets"] == [{"name": "registry"}]
    assert deployment["template"]["metadata"]["labels"]["team"] == "x"
    assert deployment["template"]["metadata"]["annotations"]["note"] == "seen"
    assert "iam.gke.io/gcp-service-account" in only(objects, "ServiceAccount")["metadata"]["annotations"]
