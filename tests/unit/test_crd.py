"""The CustomResourceDefinition is that of the models: committed as generated, structural, and with the same defaults."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import crd as made
from orchestrator.api import TrainingRun, from_object, parse_run
from orchestrator.crd_rules import FIELDS, OBJECTS
from orchestrator.durations import PATTERN, format_duration, parse_duration
from orchestrator.tolerance import CAUSES, UNLIMITED

ROOT = Path(__file__).resolve().parents[2]
VERSION: dict[str, Any] = made.crd()["spec"]["versions"][0]
SCHEMA: dict[str, Any] = VERSION["schema"]["openAPIV3Schema"]
SPEC: dict[str, Any] = SCHEMA["properties"]["spec"]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema within `schema`, with its path."""
    yield path, schema
    for name, below in schema.get("properties", {}).items():
        yield from nodes(below, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}.{key}")


def test_the_committed_file_is_what_is_generated() -> None:
    committed = (ROOT / made.PATH).read_text(encoding="utf-8")
    assert committed == made.crd_yaml(), "run: make manifests"
    assert yaml.safe_load(committed) == made.crd()


def test_the_schema_is_structural() -> None:
    for path, schema in nodes(SCHEMA):
        kinds = ("type" in schema) + ("x-kubernetes-int-or-string" in schema)
        assert kinds == 1, path
        assert not schema.keys() & {"$ref", "anyOf", "allOf", "oneOf", "not", "nullable", "title", "const"}, path
        if schema.get("type") == "array":
            assert "x-kubernetes-list-type" in schema, path


def test_every_field_says_what_it_is() -> None:
    for path, schema in nodes(SCHEMA):
        if path.startswith((".spec", ".status")) and not path.endswith(("items", "additionalProperties")):
            text = schema.get("description", "")
            assert re.fullmatch(r"[A-Z0-9].{10,}[.…]", text), f"{path}: {text!r}"


def test_every_field_of_the_models_is_there_under_its_own_name() -> None:
    names = {path.rpartition(".")[2] for path, _ in nodes(SPEC)}
    assert {"targetStep", "runDirectory", "waitInQueue", "secretKeyRef", "optimizerState", "noNewCommit"} <= names
    assert not any("_" in name for name in names)
    assert set(SPEC["required"]) == {"recipe", "data", "targetStep", "runDirectory", "ladder", "image", "queue"}


def test_every_rule_ended_up_in_the_schema() -> None:
    written = [rule["rule"] for _, schema in nodes(SCHEMA) for rule in schema.get("x-kubernetes-validations", [])]
    for rules in (*OBJECTS.values(), *FIELDS.values()):
        for rule in rules:
            assert rule.rule in written
            assert rule.message


def test_status_is_shown_by_the_type_of_its_condition() -> None:
    columns = {c["name"]: (c["jsonPath"], c["priority"]) for c in VERSION["additionalPrinterColumns"]}
    assert columns["STATUS"] == ('.status.conditions[?(@.type=="Succeeded")].reason', 0)
    assert [name for name, (_, priority) in columns.items() if priority == 0] == [
        "STATUS",
        "STEP",
        "TARGET",
        "PLAN",
        "ATTEMPT",
        "AGE",
    ]
    for path, _ in columns.values():
        if "[" not in path and path.startswith(".status"):
            assert path.removeprefix(".status.") in SCHEMA["properties"]["status"]["properties"]


def test_conditions_are_merged_by_type_and_variables_by_name() -> None:
    conditions = SCHEMA["properties"]["status"]["properties"]["conditions"]
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]
    assert SPEC["properties"]["env"]["x-kubernetes-list-map-keys"] == ["name"]


def with_defaults(value: Any, schema: dict[str, Any]) -> Any:
    """What the API server makes of `value`: a field that is left out gets its default, then the defaults within."""
    if schema.get("type") == "object" and isinstance(value, dict):
        filled = dict(value)
        for name, below in schema.get("properties", {}).items():
            if name not in filled and "default" in below:
                filled[name] = copy.deepcopy(below["default"])
            if name in filled:
                filled[name] = with_defaults(filled[name], below)
        if "additionalProperties" in schema:
            filled = {name: with_defaults(part, schema["additionalProperties"]) for name, part in filled.items()}
        return filled
    if schema.get("type") == "array" and isinstance(value, list):
        return [with_defaults(part, schema["items"]) for part in value]
    return value


durations = st.one_of(st.integers(1, 10**6), st.sampled_from(["300s", "5m", "1h30m", "2d", "0.5h"]))
budgets = st.one_of(st.integers(0, 99), st.just(UNLIMITED))
pauses = st.fixed_dictionaries({}, optional={"initial": durations, "max": durations, "jitter": st.floats(0, 1)})
specs = st.fixed_dictionaries(
    {
        "recipe": st.sampled_from([{"name": "tiny"}, {"configMap": {"name": "mine"}, "overrides": {"seed": 7}}]),
        "data": st.just({"root": "gs://b/data"}),
        "targetStep": st.integers(1, 2**31 - 1),
        "runDirectory": st.just("gs://b/run"),
        "image": st.just("i"),
        "queue": st.just("q"),
        "ladder": st.lists(
            st.fixed_dictionaries(
                {"deviceType": st.sampled_from(["tpu7x-4x4x4", "v5p-4x4x8", "cpu-8"])},
                optional={"slices": st.integers(1, 4), "waitInQueue": durations},
            ),
            min_size=1,
            max_size=3,
            unique_by=lambda rung: (rung["deviceType"], rung.get("slices", 1)),
        ),
    },
    optional={
        "goUp": st.fixed_dictionaries({}, optional={"after": durations, "every": durations}),
        "checkpoint": st.fixed_dictionaries({}, optional={"keep": st.just({"last": 2})}),
        "budgets": st.fixed_dictionaries({}, optional=dict.fromkeys(CAUSES, budgets)),
        "backoff": st.fixed_dictionaries(
            {}, optional={"initial": durations, "causes": st.dictionaries(st.sampled_from(CAUSES), pauses, max_size=3)}
        ),
        "hang": st.fixed_dictionaries({}, optional={"step": durations, "heartbeat": durations}),
        "env": st.just([{"name": "A", "value": "b"}]),
        "command": st.just(["python", "train.py"]),
        "initFrom": st.just({"run": "gs://b/other"}),
        "suspend": st.booleans(),
        "podTemplate": st.just({"metadata": {"labels": {"a": "b"}}, "spec": {"hostNetwork": False}}),
        "logEvery": durations,
    },
)


@given(specs)
def test_the_defaults_of_the_api_server_are_those_of_the_models(spec: dict[str, Any]) -> None:
    document = {
        "apiVersion": "untildone.dev/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": "demo", "namespace": "n"},
        "spec": spec,
    }
    stored = with_defaults(document, SCHEMA)
    stored["metadata"] |= {
        "uid": "u",
        "generation": 3,
        "resourceVersion": "7",
        "managedFields": [{"manager": "kubectl"}],
    }
    read = from_object(stored)
    assert read.spec == parse_run(document, "run.yaml").spec
    assert (read.metadata.uid, read.metadata.generation) == ("u", 3)


@given(st.text(alphabet="0123456789.dhms", max_size=12))
def test_a_duration_fits_the_pattern_exactly_when_it_is_one(text: str) -> None:
    try:
        parse_duration(text)
    except ValueError as error:
        if "between 0 and ten years" in str(error):
            return
        fits = False
    else:
        fits = True
    assert bool(text and re.fullmatch(PATTERN, text)) == fits


@given(st.integers(0, 10 * 365 * 86400))
def test_durations_are_written_as_they_are_read(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


def test_the_example_for_kubernetes_is_a_run_that_every_rung_can_train() -> None:
    from orchestrator.planning import ladder
    from trainer import recipe as recipes

    document = yaml.safe_load((ROOT / "examples/kubernetes/run.yaml").read_text(encoding="utf-8"))
    run: TrainingRun = parse_run(document, "run.yaml")
    assert run.spec.recipe.name is not None
    rungs = ladder(run, recipes.load(run.spec.recipe.name, run.spec.recipe.overrides))
    assert [(str(rung), rung.plan.per_device_batch) for rung in rungs] == [
        ("tpu7x-4x8x8", 1),
        ("tpu7x-4x4x4", 4),
        ("v5p-4x4x8", 4),
    ]
