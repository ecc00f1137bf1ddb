"""TrainingRuns with mistakes of many kinds, and the words that each refusal has: the field, and the fix."""

import copy
from dataclasses import dataclass
from typing import Any

from tests.lab.api import Object

NAMESPACE = "crd"

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
    "a counter of weights alone": bad(
        spec(initFrom={"hf": "gs://bucket/hf", "step": True}), "spec.initFrom.step", "hf has none; give run"
    ),
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
        spec(recipe={"name": "tiny", "overrides": {"reduction": "invariant"}}, ladder=[{"deviceType": "tpu7x-4x4x12"}]),
        *("spec.ladder[0].deviceType", "these fit", "tpu7x-4x4x8"),
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
