"""The CustomResourceDefinition of TrainingRun, made from the pydantic models: python -m orchestrator.crd FILE.

A structural schema: no references, no unions but int-or-string for durations and budgets. What is optional is left out,
never null: clients drop nulls on their way, so null cannot mean anything. Defaults and descriptions are those of the
models; crd_rules.py has what a schema cannot say.
"""

import sys
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from orchestrator import api, crd_rules
from orchestrator.crd_rules import Rule
from orchestrator.durations import FORMS, PATTERN, format_duration, parse_duration
from orchestrator.status_model import RunStatus, Timestamp
from orchestrator.tolerance import UNLIMITED, parse_budget

GROUP, VERSION, PLURAL = "untildone.dev", "v1alpha1", "trainingruns"
PATH = Path("manifests/crd/untildone.dev_trainingruns.yaml")
HEADER = "# Made by `make manifests` from orchestrator/api.py, crd_rules.py and status_model.py. Change those.\n"

Schema = dict[str, Any]
RULES = "x-kubernetes-validations"
HOW = f"Written as {FORMS}."  # kubectl explain has no type for durations
INT_OR_STRING: Schema = {"x-kubernetes-int-or-string": True}

# A cluster needs what the local cluster, which runs this installation, does not.
REQUIRED_IN_A_CLUSTER = {(api.Spec, "image"), (api.Spec, "queue")}
MERGE_KEYS: dict[tuple[type[BaseModel], str], str] = {(api.Spec, "env"): "name", (RunStatus, "conditions"): "type"}
SPECIAL: dict[tuple[type[BaseModel], str], Schema] = {
    (api.Spec, "pod_template"): {
        "type": "object",
        "properties": {
            "metadata": {
                "type": "object",
                "description": "Labels and annotations that are added.",
                "properties": {
                    key: {
                        "type": "object",
                        "description": f"{key.capitalize()} of the pods.",
                        "additionalProperties": {"type": "string"},
                    }
                    for key in ("labels", "annotations")
                },
            },
            "spec": {
                "type": "object",
                "description": "Fields of a pod's spec.",
                "x-kubernetes-preserve-unknown-fields": True,
            },
        },
    }
}
# Told by a rule with a message that says what to do.
SAID_BY_A_RULE = frozenset({"minItems"})

COLUMNS = (
    ("STATUS", "string", '.status.conditions[?(@.type=="Succeeded")].reason', "what the run does now", 0),
    ("STEP", "integer", ".status.step", "last completed step", 0),
    # The target that STATUS is about, not one that nobody has looked at yet.
    ("TARGET", "integer", ".status.targetStep", "the run is done when this step is committed", 0),
    ("PLAN", "string", ".status.plan", "hardware of the current attempt", 0),
    ("ATTEMPT", "integer", ".status.attempt", "submissions so far", 0),
    ("AGE", "date", ".metadata.creationTimestamp", "since the TrainingRun was created", 0),
    ("QUEUE", "string", ".status.queue", "Kueue LocalQueue", 1),
    ("COMMITTED", "integer", ".status.committedStep", "step that a resumed run continues from", 1),
    ("LAST-COMMIT", "date", ".status.lastCommitTime", "when the last commit was seen", 1),
    ("PREEMPTIONS", "integer", ".status.preemptions", "endings because the machines were taken back", 1),
    ("MESSAGE", "string", ".status.message", "what the run does or waits for", 1),
)


def crd() -> dict[str, Any]:
    """The CustomResourceDefinition."""
    names = {
        "kind": "TrainingRun",
        "listKind": "TrainingRunList",
        "plural": PLURAL,
        "singular": "trainingrun",
        "shortNames": ["trun"],
        "categories": ["untildone"],
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _root()},
        "subresources": {"status": {}},
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "description": _sentence(what), "priority": priority}
            for name, kind, path, what, priority in COLUMNS
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{PLURAL}.{GROUP}",
            "labels": {"app.kubernetes.io/name": "untildone", "app.kubernetes.io/component": "crd"},
        },
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def crd_yaml() -> str:
    """The same as the text of the committed file."""
    return HEADER + yaml.dump(crd(), Dumper=_Plain, sort_keys=False, width=120, allow_unicode=True)


class _Plain(yaml.SafeDumper):
    """No anchors: the same value twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _root() -> Schema:
    name: Schema = {"type": "string", "maxLength": 253}
    root: Schema = {
        "type": "object",
        "description": _sentence(api.TrainingRun.__doc__),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            # Declared for the bound on the length only: without it, checking the name counts as expensive.
            "metadata": {"type": "object", "properties": {"name": name, "generateName": name}},
            "spec": _object(api.Spec),
            "status": _object(RunStatus),
        },
    }
    return root | _validations(crd_rules.ROOT)


def _object(model: type[BaseModel]) -> Schema:
    fields = model.model_fields
    required = [
        str(field.alias)
        for name, field in fields.items()
        if field.is_required() or (model, name) in REQUIRED_IN_A_CLUSTER
    ]
    schema: Schema = {"type": "object", "description": _sentence(model.__doc__)}
    if required:
        schema["required"] = required
    schema["properties"] = {str(field.alias): _field(model, name, field) for name, field in fields.items()}
    return schema | _validations(crd_rules.OBJECTS.get(model, ()))


def _field(model: type[BaseModel], name: str, field: FieldInfo) -> Schema:
    kind = _without_none(field.annotation)
    schema = SPECIAL.get((model, name)) or _type(kind, tuple(field.metadata))
    if field.description:
        schema["description"] = _sentence(field.description) + (f" {HOW}" if parse_duration in _parsers(field) else "")
    if (model, name) in MERGE_KEYS:
        schema |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [MERGE_KEYS[model, name]]}
    default = _written(field)
    if default is not None:
        schema["default"] = default
    rules = [*schema.pop(RULES, []), *_validations(crd_rules.FIELDS.get((model, name), ())).get(RULES, [])]
    return schema | ({RULES: rules} if rules else {})


def _type(kind: Any, metadata: tuple[Any, ...]) -> Schema:
    """Schema of one annotation, with the limits in `metadata`."""
    if get_origin(kind) is Annotated:
        kind, *own = get_args(kind)
        return _type(kind, (*own, *metadata))
    flat = tuple(part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else (item,)))
    parsers = {part.func for part in flat if isinstance(part, BeforeValidator)}
    if parse_duration in parsers:
        return INT_OR_STRING | _duration(flat)
    if parse_budget in parsers:
        return INT_OR_STRING | {"pattern": f"^{UNLIMITED}$", "minimum": 0} | _validations((crd_rules.BUDGET,))
    if any(part is Timestamp for part in flat):
        return {"type": "string", "format": "date-time"}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return {"type": "string", "enum": list(arguments)}
    if origin is tuple:
        items = _type(arguments[0], ())
        return {"type": "array", "x-kubernetes-list-type": "atomic", "items": items} | _limits(flat, "Items")
    if origin is dict:
        if arguments[1] is Any:
            return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        return {"type": "object", "additionalProperties": _type(arguments[1], ())} | _limits(flat, "Properties")
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return _object(kind)
    if kind is str:
        return {"type": "string"} | _limits(flat, "Length")
    if kind is bool:
        return {"type": "boolean"}
    if kind is int:
        return {"type": "integer", "format": "int64"} | _bounds(flat)
    if kind is float:
        return {"type": "number"} | _bounds(flat)
    raise TypeError(f"no schema for {kind}")


def _duration(metadata: tuple[Any, ...]) -> Schema:
    """Of a text or of whole seconds. Fractions of a second are written as text: "0.5s"."""
    bounds = {"minimum": 0} | _bounds(metadata)
    return {"pattern": f"^{PATTERN}$", "minLength": 2, "maxLength": 32} | bounds | _validations((crd_rules.DURATION,))


def _limits(metadata: tuple[Any, ...], what: str) -> Schema:
    """minLength, maxItems and the like, and the pattern of a text."""
    limits: Schema = {}
    for part in metadata:
        if isinstance(part, annotated_types.MinLen) and f"min{what}" not in SAID_BY_A_RULE:
            limits[f"min{what}"] = part.min_length
        if isinstance(part, annotated_types.MaxLen):
            limits[f"max{what}"] = part.max_length
        if getattr(part, "pattern", None):
            limits["pattern"] = part.pattern
    return limits


def _bounds(metadata: tuple[Any, ...]) -> Schema:
    """minimum and maximum; those of whole numbers are inclusive."""
    bounds: Schema = {}
    for part in metadata:
        if isinstance(part, annotated_types.Ge):
            bounds["minimum"] = part.ge
        if isinstance(part, annotated_types.Gt):
            bounds["minimum"] = int(str(part.gt)) + 1
        if isinstance(part, annotated_types.Le):
            bounds["maximum"] = part.le
        if isinstance(part, annotated_types.Lt):
            bounds["maximum"] = int(str(part.lt)) - 1
    return bounds


def _without_none(kind: Any) -> Any:
    """The type of a field that may be left out."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    kinds = [argument for argument in get_args(kind) if argument is not type(None)]
    if len(kinds) != 1:
        raise TypeError(f"a union has no structural schema: {kind}")
    return kinds[0]


def _parsers(field: FieldInfo) -> set[Any]:
    """The functions that read the values of a field."""
    kind = _without_none(field.annotation)
    metadata = (*field.metadata, *getattr(kind, "__metadata__", ()))
    return {part.func for part in metadata if isinstance(part, BeforeValidator)}


def _written(field: FieldInfo) -> Any:
    """The default of a field as a user would write it; None: nothing. That of a part is empty: its fields have theirs."""
    default = field.get_default(call_default_factory=True)
    parsers = _parsers(field)
    if default is None and parse_budget in parsers:
        return UNLIMITED
    if default is PydanticUndefined or default in (None, (), {}):
        return None
    if isinstance(default, BaseModel):
        return {}
    if parse_duration in parsers:
        return format_duration(default)
    return list(default) if isinstance(default, tuple) else default


def _validations(rules: tuple[Rule, ...]) -> Schema:
    written = []
    for rule in rules:
        entry = {"rule": rule.rule, "message": rule.message}
        if rule.path:
            entry["fieldPath"] = rule.path
        written.append(entry)
    return {RULES: written} if written else {}


def _sentence(text: str | None) -> str:
    """Words of the models as kubectl explain shows them: one paragraph, beginning and ending as a sentence."""
    flat = " ".join((text or "").split())
    assert flat, "every field says what it is"
    return flat[0].upper() + flat[1:] + ("" if flat.endswith((".", "…")) else ".")


def main(arguments: list[str]) -> None:
    """Write the file named by the only argument."""
    path = Path(arguments[0]) if arguments else PATH
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(crd_yaml(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
