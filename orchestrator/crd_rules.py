"""The rules of a TrainingRun that a schema cannot say, in CEL, for the API server. One for each check of the models.

A rule's message names the field and the fix. Rules that compare with `oldSelf` are checked at updates only. Those that
look at the status must hold whenever untildone writes it: they compare only what a user changes.
"""

from dataclasses import dataclass

from pydantic import BaseModel

from orchestrator import api, inline_secrets, tolerance, trainer_fields
from orchestrator.durations import FORMS, UNITS


@dataclass(frozen=True)
class Rule:
    """One entry of x-kubernetes-validations. `path` is the field below, for the message."""

    rule: str
    message: str
    path: str = ""


def _text(value: str) -> str:
    """A Python string as a raw string of CEL."""
    assert '"' not in value
    return f'r"{value}"'


_FIXED = "to change it, create another TrainingRun with a run directory of its own"

ROOT = (
    Rule(
        f"self.metadata.name.size() <= {api.NAME_LIMIT} && self.metadata.name.matches({_text(f'^{api.DNS_LABEL}$')})",
        f"metadata.name must be a DNS label: lower-case letters, digits and '-', beginning with a letter, at most "
        f"{api.NAME_LIMIT} characters",
    ),
    Rule(
        "self.spec.targetStep == oldSelf.spec.targetStep || !has(self.status) || !has(self.status.committedStep) || "
        "self.spec.targetStep >= self.status.committedStep",
        "spec.targetStep is lower than status.committedStep; set it to the committed step or more",
    ),
)

OBJECTS: dict[type[BaseModel], tuple[Rule, ...]] = {
    api.RecipeRef: (
        Rule("has(self.name) != has(self.configMap)", "recipe: give exactly one of name and configMap"),
        Rule(
            f"!has(self.name) || self.name.matches({_text('^[A-Za-z][A-Za-z0-9_]*$')})",
            "recipe.name names a recipe that comes with untildone; a path is for the local cluster only: write your "
            "recipe into a ConfigMap and give recipe.configMap",
            ".name",
        ),
    ),
    api.InitFrom: (
        Rule(
            "!self.step || !has(self.hf)",
            "initFrom.step: true carries a step counter over, and hf has none; give run, or leave step out",
            ".step",
        ),
        Rule(
            "[has(self.run), has(self.checkpoint), has(self.hf)].filter(given, given).size() == 1",
            "initFrom: give exactly one of run, checkpoint and hf",
        ),
        Rule(
            "!self.step || self.optimizerState",
            "initFrom.step: true needs initFrom.optimizerState: true",
            ".step",
        ),
    ),
    trainer_fields.EnvVar: (
        Rule("has(self.value) != has(self.valueFrom)", "env: give exactly one of value and valueFrom"),
        Rule(
            f"!self.name.startsWith('{trainer_fields.RESERVED_ENV}')",
            f"env: names that begin with {trainer_fields.RESERVED_ENV} are set by untildone; choose another",
            ".name",
        ),
        Rule(
            f"!has(self.value) || self.value == '' || !self.name.matches({_text(inline_secrets.SECRET_NAME)}) || "
            f"self.value.matches({_text(f'^({inline_secrets.PATH})$')})",
            f"env value looks like a secret by its name; {inline_secrets.INSTEAD}",
            ".value",
        ),
        Rule(
            f"!has(self.value) || !self.value.matches({_text(inline_secrets.TOKEN)})",
            f"env value looks like a secret; {inline_secrets.INSTEAD}",
            ".value",
        ),
    ),
    api.Spec: (
        Rule(
            "has(self.initFrom) == has(oldSelf.initFrom) && (!has(self.initFrom) || self.initFrom == oldSelf.initFrom)",
            f"spec.initFrom cannot be changed; {_FIXED}",
        ),
        Rule(
            "!has(self.evaluation.everySteps) || self.evaluation.everySteps % self.checkpoint.everySteps == 0",
            "spec.evaluation.everySteps must be a multiple of spec.checkpoint.everySteps: evaluations belong to commits",
            ".evaluation.everySteps",
        ),
        Rule(
            "!has(self.evaluation.tasksEverySteps) || self.evaluation.tasksEverySteps % self.checkpoint.everySteps == 0",
            "spec.evaluation.tasksEverySteps must be a multiple of spec.checkpoint.everySteps: evaluations belong to commits",
            ".evaluation.tasksEverySteps",
        ),
        Rule(
            "!has(self.suspendReason) || self.suspend",
            "spec.suspendReason goes with suspend: true; set it, or remove the reason",
            ".suspendReason",
        ),
    ),
}

FIELDS: dict[tuple[type[BaseModel], str], tuple[Rule, ...]] = {
    (api.Spec, "recipe"): (Rule("self == oldSelf", f"spec.recipe cannot be changed; {_FIXED}"),),
    (api.Spec, "run_directory"): (
        Rule(
            "self == oldSelf",
            "spec.runDirectory cannot be changed; to use another, create another TrainingRun with it",
        ),
    ),
    (api.Spec, "ladder"): (
        Rule("self.size() > 0", "spec.ladder is empty; name at least one deviceType"),
        Rule(
            "self.all(a, self.exists_one(b, b.deviceType == a.deviceType && b.slices == a.slices))",
            "spec.ladder names the same deviceType and slices twice; keep one of them",
        ),
    ),
    (api.Spec, "command"): (
        Rule("self.size() > 0", "spec.command is empty; give the trainer's command, or leave the field out"),
        Rule(
            f"!self.exists(argument, argument.matches({_text(inline_secrets.TOKEN)}))",
            f"spec.command looks like it holds a secret; {inline_secrets.INSTEAD}",
        ),
    ),
    (trainer_fields.Trainer, "contract"): (
        Rule(
            "self == 'untildone'",
            "trainer.contract orbax is not built yet; use untildone, with this project's trainer in the image",
        ),
    ),
    (tolerance.Backoff, "causes"): (
        Rule(
            f"self.all(cause, cause in {list(tolerance.CAUSES)})",
            f"backoff.causes names no cause of an ending; causes: {', '.join(tolerance.CAUSES)}",
        ),
    ),
}

# Not checked by a regular expression: the text has no bound that the API server would take into account.
DURATION = Rule(
    f"type(self) == int || {list(UNITS)}.exists(unit, self.endsWith(unit))", f"not a duration; write it as {FORMS}"
)
BUDGET = Rule(
    f"type(self) == int || self == '{tolerance.UNLIMITED}'",
    f"not a budget; write the number of endings that are tolerated, or {tolerance.UNLIMITED}",
)
