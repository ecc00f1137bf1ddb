"""TrainingRun: what is accepted, and one clear error naming file, field and fix for what is not."""

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.api import Budgets, TrainingRun, from_object, load_run, parse_duration, parse_run
from trainer.errors import ConfigurationError

MINIMAL: dict[str, Any] = {
    "apiVersion": "untildone.dev/v1alpha1",
    "kind": "TrainingRun",
    "metadata": {"name": "demo"},
    "spec": {
        "recipe": {"name": "tiny"},
        "data": {"root": "/data"},
        "targetStep": 100,
        "runDirectory": "/runs/demo",
        "ladder": [{"deviceType": "cpu-8"}],
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """MINIMAL with one dotted field set."""
    document = copy.deepcopy(MINIMAL)
    node: Any = document
    *parents, last = path.split(".")
    for part in parents:
        node = node[int(part)] if part.isdecimal() else node.setdefault(part, {})
    node[last] = value
    return document


def refused(document: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        parse_run(document, "run.yaml")
    return str(caught.value)


def test_the_minimal_run_has_documented_defaults() -> None:
    run = parse_run(MINIMAL, "run.yaml")
    assert run.name == "demo"
    assert run.gang(7) == "demo-a7"
    spec = run.spec
    assert (spec.ladder[0].slices, spec.ladder[0].wait_in_queue) == (1, 300)
    assert (spec.go_up.after, spec.go_up.every, spec.backoff.max, spec.grace_period) == (600, 21600, 300, 30)
    assert spec.budgets == Budgets()
    assert (spec.budgets.of("preempted"), spec.budgets.of("bad-configuration"), spec.budgets.of("hang")) == (
        None,
        0,
        10,
    )


def test_a_pause_is_that_of_its_cause_and_else_the_common_one() -> None:
    causes = {"storage": {"initial": "30s"}, "applicationError": {"max": 60, "jitter": 0}}
    backoff = parse_run(changed("spec.backoff", {"initial": 2, "causes": causes}), "run.yaml").spec.backoff
    assert (backoff.of("storage").initial, backoff.of("storage").max) == (30, 300)
    failed = backoff.of("application-error")
    assert (failed.initial, failed.max, failed.jitter) == (2, 60, 0)
    assert backoff.of("hang") == backoff


def test_unlimited_is_no_number_of_endings() -> None:
    budgets = parse_run(changed("spec.budgets", {"hang": "unlimited", "storage": 0}), "run.yaml").spec.budgets
    assert (budgets.of("hang"), budgets.of("storage")) == (None, 0)


def test_an_object_of_the_api_server_is_read_without_what_the_server_added() -> None:
    document = changed("spec.image", "i")
    document["metadata"] |= {
        "namespace": "research",
        "uid": "u-1",
        "generation": 4,
        "labels": {"team": "a"},
        "annotations": {"note": "b"},
        "resourceVersion": "12",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "managedFields": [{"manager": "kubectl"}],
        "ownerReferences": [],
    }
    document["status"] = {"conditions": [{"type": "Ready"}]}
    run = from_object(document)
    assert run.spec == parse_run(changed("spec.image", "i"), "run.yaml").spec
    meta = run.metadata
    assert (meta.name, meta.namespace, meta.uid, meta.generation) == ("demo", "research", "u-1", 4)
    assert (meta.labels, meta.annotations) == ({"team": "a"}, {"note": "b"})


def test_an_error_in_an_object_names_the_object() -> None:
    document = changed("spec.env", [{"name": "HF_TOKEN", "value": "abc"}])
    document["metadata"]["namespace"] = "research"
    with pytest.raises(ConfigurationError, match=r"TrainingRun research/demo: spec\.env\.0\.value \(HF_TOKEN\)"):
        from_object(document)
    del document["spec"]
    with pytest.raises(ConfigurationError, match=r"TrainingRun research/demo: spec\.recipe: required"):
        from_object(document)


def test_a_secret_in_the_annotations_of_other_tools_is_not_ours_to_refuse() -> None:
    document = changed("metadata.annotations", {"other/tool": "https://user:pass" + "word@host/x"})
    assert from_object(document).name == "demo"


def test_a_file_is_loaded_and_durations_are_seconds(tmp_path: Path) -> None:
    document = changed("spec.goUp", {"after": "1h30m", "every": 45})
    document["spec"]["ladder"][0]["waitInQueue"] = "5m"
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(document))
    run = load_run(path)
    assert (run.spec.go_up.after, run.spec.go_up.every, run.spec.ladder[0].wait_in_queue) == (5400, 45, 300)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("300s", 300), ("5m", 300), ("1h30m", 5400), ("2d", 172800), ("1.5s", 1.5), (7, 7), (0.5, 0.5), ("0s", 0)],
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "5 minutes", "m5", "-5s", -1, True, None, float("inf"), "1s1h"])
def test_no_durations(text: object) -> None:
    with pytest.raises(ValueError):
        parse_duration(text)


@given(st.integers(0, 999), st.integers(0, 59), st.integers(0, 59))
def test_a_duration_is_the_sum_of_its_parts(hours: int, minutes: int, seconds: int) -> None:
    assert parse_duration(f"{hours}h{minutes}m{seconds}s") == hours * 3600 + minutes * 60 + seconds


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("spec.targetSteps", 5, ["run.yaml", "spec.targetSteps", "targetStep"]),
        ("spec.target_step", 5, ["spec.target_step", "targetStep"]),
        ("spec.ladder.0.devicetype", "cpu-8", ["spec.ladder.0.devicetype", "deviceType"]),
        ("spec.goUp.evry", "6h", ["spec.goUp.evry", "every"]),
        ("spec.budgets.applicationErrors", 3, ["spec.budgets.applicationErrors", "applicationError"]),
        ("spec.budgets.hang", -1, ["spec.budgets.hang", "0 or more endings, or unlimited"]),
        ("spec.budgets.hang", None, ["spec.budgets.hang", "a number of endings, or unlimited"]),
        ("spec.budgets.hang", "many", ["spec.budgets.hang", "a number of endings, or unlimited"]),
        ("spec.backoff.causes", {"store": {"initial": 1}}, ["spec.backoff.causes", "store", "storage"]),
        ("spec.backoff.causes", {"storage": {"intial": 1}}, ["spec.backoff.causes.storage.intial", "initial"]),
        ("spec.suspendReason", "a flood", ["suspendReason", "suspend: true"]),
        ("spec.podTemplate", {"containers": []}, ["spec.podTemplate", "containers", "metadata and spec"]),
        (
            "spec.podTemplate",
            {"metadata": {"name": "x"}},
            ["spec.podTemplate", "metadata.name", "labels and annotations"],
        ),
        ("spec.podTemplate", {"spec": []}, ["spec.podTemplate", "spec is a mapping"]),
        ("spec.trainer.contract", "orbax", ["spec.trainer", "orbax is not built yet", "untildone"]),
        ("spec.initFrom", {"hf": "gs://b/hf", "step": True}, ["spec.initFrom", "hf has none; give run"]),
        (
            "spec.recipe",
            {"name": "tiny", "configMap": {"name": "mine"}},
            ["spec.recipe", "exactly one of name and configMap"],
        ),
        ("spec.image", "", ["spec.image", "at least 1 character"]),
        ("spec.targetStep", 0, ["spec.targetStep", "greater than 0"]),
        ("spec.targetStep", "many", ["spec.targetStep", "a number", "many"]),
        ("spec.targetStep", "100", ["spec.targetStep", "a number, without quotes"]),
        ("spec.suspend", "yes", ["spec.suspend", "true or false, without quotes"]),
        ("spec.ladder", [], ["spec.ladder", "at least 1"]),
        ("spec.gracePeriod", "soon", ["spec.gracePeriod", "300s"]),
        ("spec.evaluation.everySteps", 3, ["evaluation.everySteps 3", "checkpoint.everySteps"]),
        ("spec.evaluation", {"tasks": ["fast"], "tasksEverySteps": 3}, ["tasksEverySteps 3", "checkpoint.everySteps"]),
        ("spec.evaluation", {"tasks": ["fast"]}, ["neither tasksEverySteps nor everySteps"]),
        ("spec.evaluation.sets", [{"name": "pile-validatoin"}], ["spec.evaluation", "did you mean pile-validation"]),
        ("spec.evaluation.sets", [{"name": "mine", "files": ["../b"]}], ["spec.evaluation", "without '.' or '..'"]),
        ("spec.env", [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}], ["A twice"]),
        ("spec.env", [{"name": "UNTILDONE_NONCE", "value": "1"}], ["UNTILDONE_NONCE", "choose another"]),
        ("spec.env", [{"name": "A"}], ["exactly one of value and valueFrom"]),
        ("spec.initFrom", {"run": "/a", "checkpoint": "/b"}, ["exactly one of run, checkpoint and hf"]),
        ("spec.initFrom", {"run": "/a", "step": True, "optimizerState": False}, ["optimizerState"]),
        ("spec.ladder", [{"deviceType": "cpu-8"}, {"deviceType": "cpu-8"}], ["ladder", "twice"]),
        ("metadata.name", "Demo_Run", ["metadata", "DNS label"]),
        ("metadata.name", "x" * 41, ["metadata", "40"]),
        ("apiVersion", "v1", ["apiVersion", "untildone.dev/v1alpha1"]),
        ("kind", "Job", ["kind", "TrainingRun"]),
    ],
)
def test_bad_input_names_the_field_and_the_fix(path: str, value: Any, words: list[str]) -> None:
    message = refused(changed(path, value))
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", ["line", "not YAML"]),
        ("", ["0 documents"]),
        ("a: 1\n---\nb: 2", ["2 documents"]),
        ("- 1", ["mapping", "list"]),
    ],
)
def test_files_that_are_no_run(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        load_run(path)
    for word in ("bad.yaml", *words):
        assert word in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing\.yaml: no such file"):
        load_run(tmp_path / "nothing.yaml")


SECRETS = [
    ("HF", "hf_" + "a" * 30),
    ("ANY", "ghp_" + "b" * 36),
    ("ANY", "AKIA" + "ABCDEFGHIJKLMNOP"),
    ("ANY", "-----BEGIN RSA PRIVATE KEY-----\nabc"),
    ("URL", "https://user:pass" + "word@host/x"),
    ("HF_TOKEN", "anything"),
    ("WANDB_API_KEY", "0123456789"),
    ("DB_PASSWORD", "hunter2"),
]


@pytest.mark.parametrize(("name", "value"), SECRETS)
def test_an_inline_secret_is_refused_and_never_repeated(name: str, value: str) -> None:
    message = refused(changed("spec.env", [{"name": name, "value": value}]))
    assert "secretKeyRef" in message
    assert value not in message


def test_a_bearer_document_is_found_wherever_it_begins() -> None:
    token = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"
    for value in (token, f"x={token}", f"a b {token}"):
        refused(changed("spec.env", [{"name": "ANY", "value": value}]))


def test_a_long_text_does_not_hold_up_other_runs() -> None:
    for text in ("a" * 400_000, "eyJ" * 130_000, "-eyJ" * 100_000):
        run = changed("spec.podTemplate", {"metadata": {"annotations": {"note": text}}})
        began = time.process_time()
        parse_run(run, "run.yaml")
        assert time.process_time() - began < 5.0


def test_the_name_of_a_config_map_is_no_path() -> None:
    for name in ("../../other/configmaps/theirs", "..", "a/b", "a%2fb", "a?watch=1", "A"):
        assert "spec.recipe.configMap.name" in refused(changed("spec.recipe", {"configMap": {"name": name}}))
    parse_run(changed("spec.recipe", {"configMap": {"name": "kube-root-ca.crt"}}), "run.yaml")


def test_a_secret_anywhere_is_refused() -> None:
    message = refused(changed("spec.recipe.overrides", {"note": "hf_" + "c" * 30}))
    assert "spec.recipe.overrides.note" in message
    assert "ccc" not in message


@pytest.mark.parametrize(
    "variable",
    [
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},
        {"name": "GOOGLE_APPLICATION_CREDENTIALS", "value": "/var/run/key.json"},
        {"name": "XLA_FLAGS", "value": "--xla_dump_to=/tmp/dump"},
        {"name": "TOKENIZER", "value": "bytes"},
    ],
)
def test_references_and_plain_values_are_fine(variable: dict[str, Any]) -> None:
    run = parse_run(changed("spec.env", [variable]), "run.yaml")
    assert run.spec.env[0].name == variable["name"]


def test_every_field_of_the_schema_says_what_it_is() -> None:
    schema = TrainingRun.model_json_schema()
    silent = [
        f"{model}.{name}"
        for model, body in schema["$defs"].items()
        for name, field in body.get("properties", {}).items()
        if not field.get("description") and not any("$ref" in str(part) for part in (field, field.get("anyOf", "")))
    ]
    assert not silent
    names = json.dumps(schema)
    assert "target_step" not in names
    assert "targetStep" in names


@pytest.mark.parametrize("field", ["targetStep", "gracePeriod", "checkpoint.everySteps", "budgets.hang", "image"])
def test_true_is_not_one(field: str) -> None:
    assert f"spec.{field}: true and false" in refused(changed(f"spec.{field}", True))


@pytest.mark.parametrize("value", ["99999999999999999999h", 1e30, "4000d", float("nan")])
def test_a_duration_that_no_timer_takes_is_refused(value: object) -> None:
    assert "spec.gracePeriod: a duration is between 0 and ten years" in refused(changed("spec.gracePeriod", value))


def test_a_target_beyond_the_step_counter_is_refused() -> None:
    assert "spec.targetStep" in refused(changed("spec.targetStep", 10**30))


@pytest.mark.parametrize(
    ("path", "value"),
    [("spec.ladderr", []), ("spec.evaluation", {"everySteps": 7}), ("spec.ladder", [{"slices": 2}]), ("metadata", {})],
)
def test_an_error_does_not_repeat_the_document(path: str, value: Any) -> None:
    document = changed(path, value)
    if path == "spec.ladderr":
        del document["spec"]["ladder"]
    message = refused(document)
    assert "{" not in message
    assert len(message) < 200


def test_a_misspelt_field_comes_before_the_one_that_is_missing_for_it() -> None:
    document = changed("spec.ladderr", MINIMAL["spec"]["ladder"])
    del document["spec"]["ladder"]
    assert refused(document) == (
        "run.yaml: spec.ladderr: unknown field; did you mean 'ladder'?; spec.ladder: required, but not there"
    )


def test_errors_speak_of_lists_not_of_tuples() -> None:
    assert "spec.ladder: Input should be a valid list (got 'cpu-8')" in refused(changed("spec.ladder", "cpu-8"))
