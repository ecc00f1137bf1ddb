"""The CRD on a real API server: what it accepts, what it refuses and with which words, and how it is shown.

Many kinds of bad TrainingRuns, each refused with a message that names the field and the fix: by the API server where it
can know, else by what the operator checks before it touches anything, whose message becomes the condition Ready=False.
"""

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from orchestrator.api import from_object, parse_run
from orchestrator.decisions import Refused
from orchestrator.jobset import check_gang
from orchestrator.operating.tenancy import refusals
from orchestrator.planning import ladder
from orchestrator.preparing import load_recipe
from orchestrator.status import RunStatus, status_of
from orchestrator.status_model import CONDITIONS
from tests.lab.api import APPLY, JSON, Api, ApiError, Object
from tests.lab.lab import Lab
from tests.support.bad_runs import BY_THE_OPERATOR, BY_THE_SERVER, GOOD, NAMESPACE, RUNG, SECRET, spec
from tests.support.gang import ROOT
from tests.support.operated import install_crd, kubectl
from tests.support.statuses import Writer, until
from tests.support.world import World, run_of
from trainer.errors import ConfigurationError
from trainer.rundir.records import Program

RUNS = f"/apis/untildone.dev/v1alpha1/namespaces/{NAMESPACE}/trainingruns"
ALLOWED = {NAMESPACE: ["gs://bucket/"]}


@pytest.fixture(scope="module")
def server(lab: Lab) -> Iterator[Api]:
    """The lab's API server with the CRD, and a namespace of its own."""
    install_crd(lab)
    lab.api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    yield lab.api
    lab.api.delete(f"/api/v1/namespaces/{NAMESPACE}")


def create(api: Api, document: Object, dry_run: bool = True) -> Object:
    """POST as kubectl does: unknown fields are errors."""
    query = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
    return api.request("POST", RUNS, document, JSON, **query)


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(ApiError) as caught:
        call()
    assert caught.value.status in (400, 422), caught.value
    return str(caught.value)


def operator_says(obj: Object) -> str:
    """Why the operator refuses an object that the API server accepted; empty when it does not."""
    try:
        run = from_object(obj)
        found = refusals(run, NAMESPACE, ALLOWED)
        if found:
            return "; ".join(found)
        ladder(run, load_recipe(run))
        for rung in run.spec.ladder:
            check_gang(run, rung, Program(image=str(run.spec.image), command=run.spec.command), NAMESPACE)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_there_are_enough_kinds() -> None:
    assert len(BY_THE_SERVER) + len(BY_THE_OPERATOR) >= 30


@pytest.mark.parametrize("kind", BY_THE_SERVER)
def test_the_api_server_refuses(server: Api, kind: str) -> None:
    mistake = BY_THE_SERVER[kind]
    message = refused(lambda: create(server, mistake.document))
    for word in mistake.words:
        assert word in message, message
    assert SECRET not in message


@pytest.mark.parametrize("kind", BY_THE_OPERATOR)
def test_the_operator_refuses_what_the_api_server_cannot_know(server: Api, kind: str) -> None:
    mistake = BY_THE_OPERATOR[kind]
    message = operator_says(create(server, mistake.document))
    for word in mistake.words:
        assert word in message, message
    assert SECRET not in message
    status = status_of(run_of(), None, Refused(message), None, 1.0)
    assert status.condition("Ready").status == "False" and message.split()[0] in status.condition("Ready").message


@pytest.mark.parametrize("kind", BY_THE_SERVER)
def test_the_command_line_refuses_it_as_well(kind: str) -> None:
    """Except for what only Kubernetes needs, or what a path on this machine is allowed to be."""
    here_it_is_fine = {"no image", "no queue", "a recipe by its path"}
    document = BY_THE_SERVER[kind].document
    if kind in here_it_is_fine:
        parse_run(document, "run.yaml")
        return
    with pytest.raises(ConfigurationError):
        parse_run(document, "run.yaml")


GOOD_SPECS: dict[str, Object] = {
    "the least": GOOD,
    "seconds, and a budget without limit": spec(
        goUp={"after": 60, "every": "1h30m"}, budgets={"hang": "unlimited", "storage": 0}, hang={"heartbeat": "30s"}
    ),
    "a pause by cause": spec(backoff={"causes": {"storage": {"initial": "0.5s", "jitter": 0.5}}}),
    "a recipe in a ConfigMap": spec(
        recipe={"configMap": {"name": "mine"}, "overrides": {"model.n_layers": 4, "x": [1]}}
    ),
    "a Secret, and a path to one": spec(
        env=[
            {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            {"name": "GOOGLE_APPLICATION_CREDENTIALS", "value": "/var/run/key.json"},
            {"name": "TOKENIZER", "value": "bytes"},
        ]
    ),
    "several slices": spec(ladder=[RUNG | {"slices": 2}, RUNG]),
    "suspended, with a reason": spec(suspend=True, suspendReason="a flood"),
    "a beginning": spec(initFrom={"run": "gs://bucket/a@100", "step": True}),
    "a beginning with weights of others": spec(initFrom={"hf": "gs://bucket/hf"}),
    "a pod template": spec(podTemplate={"metadata": {"labels": {"a": "b"}}, "spec": {"nodeSelector": {"c": "d"}}}),
    "evaluations at commits": spec(checkpoint={"everySteps": 50}, evaluation={"everySteps": 100}),
}


@pytest.mark.parametrize("kind", GOOD_SPECS)
def test_what_is_accepted_is_read_back_as_it_was_meant(server: Api, kind: str) -> None:
    """Defaults filled in by the API server are those that the models would have used."""
    document = GOOD_SPECS[kind]
    obj = create(server, document)
    assert obj["spec"]["backoff"]["max"] == "5m", "defaults are shown in the object"
    assert from_object(obj).spec == parse_run(document, "run.yaml").spec


def test_the_example_is_accepted(server: Api) -> None:
    document = yaml.safe_load((ROOT / "examples/kubernetes/run.yaml").read_text())
    document["metadata"]["namespace"] = NAMESPACE
    assert from_object(create(server, document)).spec == parse_run(document, "run.yaml").spec


# -- one run, from its creation on


@pytest.fixture
def run(server: Api) -> Iterator[Object]:
    """A TrainingRun that exists."""
    yield create(server, GOOD, dry_run=False)
    server.delete(f"{RUNS}/good")


def patch(api: Api, **changes: Any) -> Object:
    return api.patch(f"{RUNS}/good", {"spec": changes})


def write_status(api: Api, status: RunStatus) -> Object:
    """As the operator does: server-side apply to the status alone."""
    body = {
        "apiVersion": GOOD["apiVersion"],
        "kind": "TrainingRun",
        "metadata": {"name": "good"},
        "status": status.to_object(),
    }
    return api.request("PATCH", f"{RUNS}/good/status", body, APPLY, fieldManager="untildone", force=True)


def committed(step: int, target: int = 100) -> RunStatus:
    """The status of a run whose last commit is at `step`."""
    world = World(run_of(targetStep=target))
    status = status_of(world.run, None, Refused("x"), None, 1.7e9)
    return status.model_copy(update={"committed_step": step, "step": step})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"recipe": {"name": "olmo3_7b_stage1"}}, ("spec.recipe", "create another TrainingRun")),
        ({"recipe": {"overrides": {"model.n_layers": 5}}}, ("spec.recipe", "create another TrainingRun")),
        ({"runDirectory": "gs://bucket/runs/other"}, ("spec.runDirectory", "create another TrainingRun")),
        ({"initFrom": {"run": "gs://bucket/a"}}, ("spec.initFrom", "create another TrainingRun")),
    ],
)
def test_what_makes_the_run_cannot_be_changed(server: Api, run: Object, change: Object, words: tuple[str, ...]) -> None:
    message = refused(lambda: patch(server, **change))
    for word in words:
        assert word in message, message
    assert run["metadata"]["generation"] == 1


def test_the_rest_can_be_changed_and_counts_as_a_new_generation(server: Api, run: Object) -> None:
    del run
    obj = patch(server, targetStep=200, image="other", ladder=[{"deviceType": "v5p-2x2x1"}], suspend=True)
    assert obj["metadata"]["generation"] == 2


def test_the_target_is_never_set_below_what_is_committed(server: Api, run: Object) -> None:
    del run
    write_status(server, committed(60))
    message = refused(lambda: patch(server, targetStep=50))
    assert "spec.targetStep" in message and "set it to the committed step or more" in message
    patch(server, targetStep=60)
    # A run directory that has more than is asked for is refused by a condition; the status must still be writable.
    assert write_status(server, committed(90))["status"]["committedStep"] == 90
    patch(server, suspend=True)


def test_status_is_a_subresource(server: Api, run: Object) -> None:
    """The spec's writers cannot touch it, it bumps no generation, and its writer cannot touch the spec."""
    obj = write_status(server, committed(60))
    assert obj["metadata"]["generation"] == run["metadata"]["generation"]
    assert [c["type"] for c in obj["status"]["conditions"]] == list(CONDITIONS)
    obj = server.patch(f"{RUNS}/good", {"status": {"committedStep": 1}, "spec": {"suspend": True}})
    assert (obj["status"]["committedStep"], obj["spec"]["suspend"]) == (60, True)
    obj = server.patch(f"{RUNS}/good/status", {"spec": {"suspend": False}})
    assert obj["spec"]["suspend"] is True
    assert RunStatus.of(obj) == committed(60)
    bad_status = committed(60).to_object() | {"committedStep": "many"}
    assert "status.committedStep" in refused(lambda: server.patch(f"{RUNS}/good/status", {"status": bad_status}))


def test_a_field_that_is_no_longer_known_goes_away(server: Api, run: Object) -> None:
    del run
    write_status(server, committed(60).model_copy(update={"plan": "tpu7x-2x2x2"}))
    assert "plan" not in write_status(server, committed(60))["status"]


def test_kubectl_waits_for_conditions(server: Api, run: Object, lab: Lab) -> None:
    world = World(run_of())
    refusal = status_of(world.run, None, Refused("spec.queue: no such queue; create it"), None, 1.7e9)
    generation = run["metadata"]["generation"]
    stale = refusal.model_copy(update={"observed_generation": 0})
    wait = ("-n", NAMESPACE, "wait", "trun/good", "--timeout=20s")
    process = subprocess.Popen(
        [str(lab.binaries / "kubectl"), *wait, "--for=condition=Succeeded"],
        env=lab.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    write_status(server, stale)
    done = refusal.model_copy(
        update={
            "observed_generation": generation,
            "conditions": tuple(
                c.model_copy(
                    update={"observed_generation": generation}
                    | (
                        {"status": "True", "reason": "Completed"}
                        if c.type in ("Succeeded", "Finished", "Ready")
                        else {}
                    )
                )
                for c in refusal.conditions
            ),
        }
    )
    assert process.poll() is None, "Succeeded is Unknown: nobody may be told otherwise"
    write_status(server, done)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and "condition met" in out
    for kind in ("Ready", "Finished"):
        kubectl(lab, *wait, f"--for=condition={kind}")


def test_lists_show_the_reason_of_succeeded(server: Api, run: Object, lab: Lab) -> None:
    del run
    status = committed(60).model_copy(update={"attempt": 3, "plan": "tpu7x-2x2x2", "queue": "tpus", "preemptions": 2})
    write_status(server, status)
    header, row = kubectl(lab, "-n", NAMESPACE, "get", "trun").splitlines()
    assert header.split() == ["NAME", "STATUS", "STEP", "TARGET", "PLAN", "ATTEMPT", "AGE"]
    assert row.split()[:6] == ["good", "Refused", "60", "100", "tpu7x-2x2x2", "3"]
    header, row = kubectl(lab, "-n", NAMESPACE, "get", "trun", "-o", "wide").splitlines()
    assert header.split()[7:] == ["QUEUE", "COMMITTED", "LAST-COMMIT", "PREEMPTIONS", "MESSAGE"]
    assert row.split()[7:9] == ["tpus", "60"]
    assert "trainingrun.untildone.dev/good" in kubectl(lab, "-n", NAMESPACE, "get", "untildone", "-o", "name")


def test_the_crd_is_established_and_structural(server: Api) -> None:
    crd = server.get("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingruns.untildone.dev")
    said = {c["type"]: c["status"] for c in crd["status"]["conditions"]}
    assert said["Established"] == said["NamesAccepted"] == "True"
    assert "NonStructuralSchema" not in said


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("trun.spec.ladder", ("best first", "deviceType", "-required-", "waitInQueue", '"300s", "5m", "1h30m"')),
        ("trun.spec.budgets", ("a number or", "unlimited", "hostFailure")),
        ("trun.spec.recipe", ("exactly one of name and configMap", "overrides")),
        ("trun.status.conditions", ("Succeeded", "observedGeneration", "lastTransitionTime")),
    ],
)
def test_kubectl_explains(server: Api, lab: Lab, path: str, words: tuple[str, ...]) -> None:
    del server
    text = " ".join(kubectl(lab, "explain", path).split())
    for word in words:
        assert word in text, text


def test_a_finished_status_of_the_operator_is_accepted(server: Api, run: Object) -> None:
    """What status_of makes of a simulated run goes through the schema of the API server, from first visit to end."""
    del run
    writer = Writer(World(run_of()))
    for word in ("Starting", "Training", "Completed"):
        obj = write_status(server, until(writer, word))
        assert RunStatus.of(obj) == writer.status
