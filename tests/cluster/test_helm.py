"""The chart in a real cluster: installed, tested, used, upgraded, taken away. The operator is a pod with the chart's rights.

In this order, on one installation: each test leaves it as the next one needs it.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from orchestrator.operating.rights import RIGHTS
from tests.lab.lab import Lab
from tests.support.gang import ROOT
from tests.support.installed import CHART, DEVICE, HOME, NAME, TEAM, Release, cluster
from tests.support.lab_objects import wait
from tests.support.operated import AppliedRun, kubectl, run_document
from tools.render_manifests import CRD

pytestmark = pytest.mark.cluster
DEFINITION = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingruns.untildone.dev"
RUNS = f"/apis/untildone.dev/v1alpha1/namespaces/{TEAM}/trainingruns"
LADDER = [{"deviceType": DEVICE}]
INSTALL = ("upgrade", "--install", NAME, str(CHART))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Iterator[Lab]:
    with cluster(tmp_path_factory.mktemp("helm") / "lab") as one:
        one.share(shared)
        yield one


@pytest.fixture(scope="module")
def release(lab: Lab) -> Release:
    return Release(lab)


def test_the_api_server_accepts_everything(lab: Lab, release: Release) -> None:
    rendered = release.helm("template", NAME, str(CHART), "--set", "image.repository=x,networkPolicy.enabled=true")
    objects = [o for o in yaml.safe_load_all(rendered) if o and o["kind"] != "Pod"]  # its account does not exist yet
    said = kubectl(lab, "apply", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump_all(objects), check=False)
    assert said.count("(server dry run)") == len(objects) >= 12, said
    assert "Warning" not in said, said  # Pod Security would warn of pods it refuses
    plain = (ROOT / "manifests" / "install.yaml").read_text().replace("REGISTRY", "lab.example")
    namespace = next(yaml.safe_load_all(plain))
    assert namespace["kind"] == "Namespace"
    lab.api.apply(namespace)
    kubectl(lab, "apply", "--server-side", "--dry-run=server", "-f", "-", stdin=plain)


def test_install(lab: Lab, release: Release) -> None:
    said = release.install()
    assert "helm test untildone" in said and "kubectl apply -f run.yaml" in said
    assert "No namespace may use" not in said
    deployment = lab.api.get(f"/apis/apps/v1/namespaces/{HOME}/deployments/{NAME}")
    assert deployment["status"]["availableReplicas"] == 1
    answer = release.test()
    assert "Phase:          Succeeded" in answer
    checks = {line.split()[0]: line.split()[1] for line in answer.splitlines() if " PASS " in line}
    assert set(checks) == {"cluster", "kinds", "definition", "rights", "runDirectories", "operator"}, answer


def test_examples_are_accepted(lab: Lab, release: Release) -> None:
    lab.api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "research"}})
    for file in ("queues.yaml", "run.yaml"):
        text = (ROOT / "examples" / "kubernetes" / file).read_text().replace("DIGEST", "0" * 64)
        kubectl(lab, "apply", "--dry-run=server", "-f", "-", stdin=text)


def test_another_namespace_s_place_is_refused_by_condition(lab: Lab, release: Release) -> None:
    stranger = AppliedRun.apply(lab, "stranger", namespace="default")
    stranger.until("refused", lambda: stranger.condition("Ready").get("status") == "False")
    message = stranger.condition("Ready")["message"]
    assert "spec.runDirectory gs://runs/default/stranger" in message and "runDirectories.default" in message, message
    assert stranger.condition("Stalled")["status"] == "True" and not stranger.jobsets
    stranger.delete()
    outside = AppliedRun.apply(lab, "outside", namespace=TEAM, runDirectory="gs://other/outside")
    outside.until("refused", lambda: "gs://other/outside" in outside.condition("Ready").get("message", ""))
    outside.delete()


def test_a_run_is_trained_with_exactly_the_rights_of_the_chart(lab: Lab, release: Release) -> None:
    run = AppliedRun.apply(lab, "one", 100_000, TEAM, ladder=LADDER, checkpoint={"everySteps": 5})
    run.until_step(5)
    run.patch(env=[{"name": "A_CHANGE", "value": "of the program"}])  # another attempt: the first JobSet is deleted
    run.until("a second attempt", lambda: run.status.get("attempt") == 2)
    run.patch(targetStep=run.committed + 20)
    run.wait_for("condition=Succeeded")
    assert run.condition("Ready")["status"] == "True"

    # A JobSet that is not ours has the name: it is read, and left alone.
    foreign = run_document(lab, "taken", 8, TEAM, ladder=LADDER)
    lab.api.create(_jobset("taken-a1"))
    taken = AppliedRun(lab, "taken", TEAM, foreign)
    kubectl(lab, "apply", "-f", "-", stdin=yaml.safe_dump(foreign))
    taken.until("a conflict is told", lambda: "taken-a1" in json.dumps(taken.status.get("conditions", [])))
    taken.delete()
    lab.api.delete(f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{TEAM}/jobsets/taken-a1")

    calls = release.calls()
    assert not [call for call in calls if call[3] in (401, 403)], sorted(calls)
    used = {(verb, resource) for verb, resource, *_ in calls}
    allowed = {(verb, right.kind) for right in RIGHTS for verb in right.verbs}
    # Checked within the creation of a JobSet, and not a call of its own.
    within = {("update", "trainingruns/finalizers.untildone.dev")}
    assert used == allowed - within, (sorted(used - allowed), sorted(allowed - used))


def _jobset(name: str) -> dict[str, object]:
    """Suspended for ever, and somebody else's."""
    container = {"name": "main", "image": "none", "command": ["true"]}
    pod = {"restartPolicy": "Never", "containers": [container]}
    job = {"template": {"spec": pod}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "namespace": TEAM},
        "spec": {"suspend": True, "replicatedJobs": [{"name": "other", "replicas": 1, "template": {"spec": job}}]},
    }


@pytest.fixture
def older_chart(tmp_path: Path) -> Path:
    """The chart as it was when the definition lacked some fields."""
    chart = tmp_path / "untildone"
    shutil.copytree(CHART, chart)
    older = yaml.safe_load(CRD.read_text())
    fields = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    del fields["goUp"], fields["hang"]["properties"]["heartbeat"]
    (chart / "files" / "trainingruns.yaml").write_text(yaml.safe_dump(older, sort_keys=False))
    return chart


def test_upgrade_brings_new_values_and_the_new_definition(lab: Lab, release: Release, older_chart: Path) -> None:
    done = lab.api.get(f"{RUNS}/one")["status"]["committedStep"]
    release.install(chart=older_chart)
    answer = wait("doctor sees it", lambda: "older than" in (said := release.test(check=False)) and said, 40)
    assert "it lacks spec.goUp, spec.goUp.after, spec.goUp.every, spec.hang.heartbeat" in answer, answer
    before = {pod["metadata"]["uid"] for pod in release.pods()}

    release.install(replicas=2, logLevel="debug")
    served = lab.api.get(DEFINITION)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert "goUp" in served["properties"] and "heartbeat" in served["properties"]["hang"]["properties"]
    wait(
        "two new pods", lambda: len({p["metadata"]["uid"] for p in release.pods()} - before) == len(release.pods()) == 2
    )
    assert lab.api.get(f"{RUNS}/one")["status"]["committedStep"] == done
    wait("doctor is content", lambda: "Phase:          Succeeded" in release.test(check=False), 60)
    holder = lab.api.get(f"/apis/coordination.k8s.io/v1/namespaces/{HOME}/leases/{NAME}")["spec"]["holderIdentity"]
    assert holder in {pod["metadata"]["name"] for pod in release.pods()}


def test_uninstall_keeps_the_runs_and_what_runs(lab: Lab, release: Release) -> None:
    run = AppliedRun.apply(lab, "kept", target=8, namespace=TEAM, queue="never", ladder=LADDER)
    run.until_status("Queued")
    uid = run.jobsets[0]["metadata"]["uid"]
    assert "trainingruns.untildone.dev" in release.helm("uninstall", NAME, "--wait")
    assert lab.api.get(f"{RUNS}/kept")["metadata"]["name"] == "kept"
    assert [jobset["metadata"]["uid"] for jobset in run.jobsets] == [uid]
    assert not lab.api.items(f"/apis/apps/v1/namespaces/{HOME}/deployments")

    release.install()
    release.test()
    assert [jobset["metadata"]["uid"] for jobset in run.jobsets] == [uid]
    assert run.word == "Queued"
    run.delete()
    wait("its JobSet goes with it", lambda: not run.jobsets)


def test_in_one_namespace_with_the_least_rights(lab: Lab, release: Release) -> None:
    release.install(rbac={"clusterWide": False, "clusterReads": False}, watchNamespaces=[TEAM])
    answer = release.test()
    assert answer.count(" WARN ") == 6 and "may not list nodes (host failures and maintenance)" in answer, answer
    run = AppliedRun.apply(lab, "small", target=8, namespace=TEAM, ladder=LADDER)
    run.wait_for("condition=Succeeded")
    elsewhere = AppliedRun.apply(lab, "elsewhere", namespace="default", queue="never")
    assert not elsewhere.status
    elsewhere.delete()
    run.verified()


def test_without_keep_everything_goes(lab: Lab, release: Release) -> None:
    release.install(crds={"keep": False})
    release.helm("uninstall", NAME, "--wait")
    wait("no definition", lambda: lab.api.find(DEFINITION) is None)


def test_a_definition_that_was_applied_by_hand_is_taken_over(lab: Lab, release: Release) -> None:
    kubectl(lab, "apply", "--server-side", "-f", str(CRD))
    refused = release.helm(*INSTALL, "--set", "image.repository=x", check=False)
    assert "invalid ownership metadata" in refused, refused
    taken = release.helm(*INSTALL, "--set", "image.repository=x", "--take-ownership", "--force-conflicts")
    assert "STATUS: deployed" in taken
    assert lab.api.get(DEFINITION)["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"
