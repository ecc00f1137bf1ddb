"""The CRD on a real API server: what it accepts, what it refuses and with which words, and how it is shown.

Many kinds of bad TrainingRuns, each refused with a message that names the field and the fix: by the API server where it
can know, else by what the operator checks before it touches anything, whose message becomes the condition Ready=False.
"""

import copy
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from tests.support.gang import ROOT
from tests.support.operated import install_crd, kubectl
from tests.support.statuses import Writer, until
from tests.support.world import World, run_of
from trainer.errors import ConfigurationError
from trainer.rundir.records import Program

NAMESPACE = "crd"
RUNS = f"/apis/untildone.dev/v1alpha1/namespaces/{NAMESPACE}/trainingruns"
ALLOWED = {NAMESPACE: ["gs://bucket/"]}

GOOD: Object = {
    "apiVersion": "untildone.dev/v1alpha1",
    "kind": "TrainingRun",
    "metadata": {"name": "good", "namespace": NAMESPACE},
    "spec": {
        "recipe": {"name": "tiny"},
        "data": {"root": "gs://bucket/data"},
        "targetStep": 100,
        "runDirectory": "gs://bucket/runs/good",
        "image": "registry.example/trainer@sha256:0",
        "queue": "tpus",
        "ladder": [{"deviceType": "tpu7x-2x2x2"}],
    },
}
ABSENT = object()


@pytest.fixture(scope="module")
def server(lab: Lab) -> Iterator[Api]:
    """The lab's API server with the CRD, and a namespace of its own."""
    install_crd(lab)
    lab.api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    yield lab.api
    lab.api.delete(f"/api/v1/namespaces/{NAMESPACE}")


def changed(**changes: Any) -> Object:
    """GOOD with fields set, or left out (ABSENT). Paths are dotted; __ stands for the dot."""
    document = copy.deepcopy(GOOD)
    for path, value in changes.items():
        node: Any = document
        *parents, last = path.split("__")
        for part in parents:
            node = node[int(part)] if part.isdecimal() else node.setdefault(part, {})
        if value is ABSENT:
            del node[last]
        else:
            node[last] = value
    return document


def spec(**changes: Any) -> Object:
    return changed(**{f"spec__{path}": value for path, value in changes.items()})


def env(**variable: Any) -> Object:
    return spec(env=[variable])


def create(api: Api, document: Object, dry_run: bool = True) -> Object:
    """POST as kubectl does: unknown fields are errors."""
    query = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
    return api.request("POST", RUNS, document, JSON, **query)


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(ApiError) as caught:
        call()
    assert caught.value.status in (400, 422), caught.value
    return str(caught.value)


# -- bad TrainingRuns

SECRET = "hf_" + "a" * 30
RUNG = {"deviceType": "tpu7x-2x2x2"}


@dataclass(frozen=True)
class Bad:
    """A kind of mistake, and the words that its refusal has: the field, and the fix."""

    document: Object
    words: tuple[str, ...]


def bad(document: Object, *words: str) -> Bad:
    return Bad(document, words)


BY_THE_SERVER: dict[str, Bad] = {
    "no image": bad(spec(image=ABSENT), "spec.image", "Required value"),
    "no queue": bad(spec(queue=ABSENT), "spec.queue", "Required value"),
    "no target": bad(spec(targetStep=ABSENT), "spec.targetStep", "Required value"),
    "no recipe": bad(spec(recipe=ABSENT), "spec.recipe", "Required value"),
    "no run directory": bad(spec(runDirectory=ABSENT), "spec.runDirectory", "Required value"),
    "no data": bad(spec(data={}), "spec.data.root", "Required value"),
    "no spec": bad(changed(spec=ABSENT), "spec", "Required value"),
    "a misspelt field": bad(spec(targetSteps=5), 'unknown field "spec.targetSteps"'),
    "a misspelt field of a rung": bad(spec(ladder=[RUNG | {"slice": 2}]), 'unknown field "spec.ladder[0].slice"'),
    "an empty image": bad(spec(image=""), "spec.image", "at least 1 chars"),
    "an empty queue": bad(spec(queue=""), "spec.queue", "at least 1 chars"),
    "a target of 0": bad(spec(targetStep=0), "spec.targetStep", "greater than or equal to 1"),
    "a target beyond the counter": bad(spec(targetStep=2**31), "spec.targetStep", "less than or equal to 2147483647"),
    "a target in words": bad(spec(targetStep="many"), "spec.targetStep", "must be of type integer"),
    "an empty ladder": bad(spec(ladder=[]), "spec.ladder", "name at least one deviceType"),
    "a rung without device type": bad(spec(ladder=[{"slices": 2}]), "spec.ladder[0].deviceType", "Required value"),
    "a rung twice": bad(spec(ladder=[RUNG, RUNG | {"slices": 1}]), "spec.ladder", "twice; keep one of them"),
    "no slices": bad(spec(ladder=[RUNG | {"slices": 0}]), "spec.ladder[0].slices", "greater than or equal to 1"),
    "too many rungs": bad(
        spec(ladder=[RUNG | {"slices": n} for n in range(1, 18)]), "spec.ladder", "must have at most 16 items"
    ),
    "a duration in words": bad(spec(goUp={"after": "soon"}), "spec.goUp.after", 'write it as "300s"'),
    "a duration without unit": bad(spec(hang={"step": "300"}), "spec.hang.step", 'write it as "300s"'),
    "a duration in the wrong order": bad(spec(gracePeriod="1s1h"), "spec.gracePeriod", "should match"),
    "no grace": bad(spec(gracePeriod=0), "spec.gracePeriod", "greater than or equal to 1"),
    "a negative budget": bad(spec(budgets={"hang": -1}), "spec.budgets.hang", "greater than or equal to 0"),
    "a budget in words": bad(spec(budgets={"hang": "many"}), "spec.budgets.hang", "number of endings", "unlimited"),
    "a pause for no cause": bad(spec(backoff={"causes": {"store": {}}}), "spec.backoff.causes", "storage"),
    "a jitter above 1": bad(spec(backoff={"jitter": 2}), "spec.backoff.jitter", "less than or equal to 1"),
    "evaluations between commits": bad(
        spec(evaluation={"everySteps": 3000}), "spec.evaluation.everySteps", "multiple of spec.checkpoint.everySteps"
    ),
    "commits after no step": bad(spec(checkpoint={"everySteps": 0}), "spec.checkpoint.everySteps", "equal to 1"),
    "two recipes": bad(
        spec(recipe={"name": "tiny", "configMap": {"name": "mine"}}), "spec.recipe", "exactly one of name and configMap"
    ),
    "an empty recipe": bad(spec(recipe={}), "spec.recipe", "exactly one of name and configMap"),
    "a recipe by its path": bad(spec(recipe={"name": "./mine.py"}), "spec.recipe.name", "give recipe.configMap"),
    "two beginnings": bad(
        spec(initFrom={"run": "gs://bucket/a", "checkpoint": "gs://bucket/b"}),
        "spec.initFrom",
        "exactly one of run, checkpoint and hf",
    ),
    "no beginning": bad(spec(initFrom={"step": False}), "spec.initFrom", "exactly one of run, checkpoint and hf"),
    "a Hugging Face folder": bad(spec(initFrom={"hf": "gs://bucket/hf"}), "spec.initFrom.hf", "give run or checkpoint"),
    "a counter without its moments": bad(
        spec(initFrom={"run": "gs://bucket/a", "step": True, "optimizerState": False}),
        "spec.initFrom.step",
        "needs initFrom.optimizerState: true",
    ),
    "contract orbax": bad(spec(trainer={"contract": "orbax"}), "spec.trainer.contract", "not built yet", "untildone"),
    "an unknown contract": bad(
        spec(trainer={"contract": "maxtext"}), "spec.trainer.contract", 'supported values: "unt'
    ),
    "a variable twice": bad(
        spec(env=[{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]), "spec.env[1]", "Duplicate value"
    ),
    "our own variable": bad(env(name="UNTILDONE_NONCE", value="1"), "spec.env[0].name", "choose another"),
    "a variable without value": bad(env(name="A"), "spec.env[0]", "exactly one of value and valueFrom"),
    "a variable with two values": bad(
        env(name="A", value="1", valueFrom={"secretKeyRef": {"name": "s", "key": "k"}}),
        "spec.env[0]",
        "exactly one of value and valueFrom",
    ),
    "a variable with a space": bad(env(name="A B", value="1"), "spec.env[0].name", "should match"),
    "a secret by its name": bad(env(name="WANDB_API_KEY", value="1"), "spec.env[0].value", "secretKeyRef"),
    "a secret by its looks": bad(env(name="X", value=SECRET), "spec.env[0].value", "secretKeyRef"),
    "a secret in the command": bad(spec(command=["train", f"--token={SECRET}"]), "spec.command", "secretKeyRef"),
    "a Secret without key": bad(
        env(name="A", valueFrom={"secretKeyRef": {"name": "s"}}), "spec.env[0].valueFrom.secretKeyRef.key", "Required"
    ),
    "no command": bad(spec(command=[]), "spec.command", "leave the field out"),
    "a reason without suspension": bad(spec(suspendReason="a flood"), "spec.suspendReason", "suspend: true"),
    "suspended by a word": bad(spec(suspend="yes"), "spec.suspend", "must be of type boolean"),
    "containers at the wrong place": bad(
        spec(podTemplate={"containers": []}), 'unknown field "spec.podTemplate.containers"'
    ),
    "a name with capitals": bad(changed(metadata__name="Good"), "metadata.name", "lower"),
    "a name that is too long": bad(changed(metadata__name="x" * 41), "metadata.name", "at most 40 characters"),
    "a name with dots": bad(changed(metadata__name="a.b"), "metadata.name", "DNS label"),
    "a name that begins with a digit": bad(changed(metadata__name="7b"), "metadata.name", "beginning with a letter"),
}

BY_THE_OPERATOR: dict[str, Bad] = {
    "an unknown device type": bad(spec(ladder=[{"deviceType": "tpu7-4x4x4"}]), "spec.ladder[0].deviceType", "tpu7x"),
    "an unknown topology": bad(spec(ladder=[RUNG, {"deviceType": "v5p-5x5x5"}]), "spec.ladder[1].deviceType", "v5p-"),
    "a batch that cannot be split": bad(
        spec(ladder=[{"deviceType": "tpu7x-4x4x12"}]), "spec.ladder[0].deviceType", "these fit", "tpu7x-4x4x8"
    ),
    "one slice by two names": bad(
        spec(ladder=[{"deviceType": "tpu7x-4x4x4"}, {"deviceType": "tpu7x-128"}]), "spec.ladder[1].deviceType", "remove"
    ),
    "CPUs in a cluster": bad(spec(ladder=[{"deviceType": "cpu-8"}]), "spec.ladder", "give a TPU slice"),
    "an unknown recipe": bad(spec(recipe={"name": "tinny"}), "recipe 'tinny'", "tiny"),
    "an override of nothing": bad(
        spec(recipe={"name": "tiny", "overrides": {"model.layers": 4}}),
        "model.layers: unknown field",
        "did you mean 'n_layers'",
    ),
    "another's run directory": bad(
        spec(runDirectory="gs://other/run"), "spec.runDirectory gs://other/run", "runDirectories"
    ),
    "a way out of the bucket": bad(spec(runDirectory="gs://bucket/../other"), "spec.runDirectory", "'..'"),
    "another's data": bad(spec(data={"root": "gs://other/data"}), "spec.data.root gs://other/data", "runDirectories"),
    "another's checkpoint": bad(
        spec(initFrom={"run": "gs://other/run@100"}), "spec.initFrom.run gs://other/run", "runDirectories"
    ),
    "a secret in an override": bad(
        spec(recipe={"name": "tiny", "overrides": {"note": SECRET}}), "spec.recipe.overrides.note", "secretKeyRef"
    ),
    "a secret in the pod template": bad(
        spec(podTemplate={"spec": {"containers": [{"name": "trainer", "args": [SECRET]}]}}),
        "spec.podTemplate.spec.containers.0.args.0",
        "secretKeyRef",
    ),
    "a duration of a century": bad(spec(hang={"step": "900000h"}), "spec.hang.step", "between 0 and ten years"),
}


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
    assert SECRET not in message or "spec.command" not in message


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
