"""Evaluation in real runs: named sets and tasks in the loop, on one process and on two, taken up where it was killed."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.gang import LENGTH, ROOT, Run

TASK, OTHER = "lab_bench_protocolqa_mc_3shot", "boolq_mc_5shot_bpb"
METRIC = f"eval/downstream/{TASK} (accuracy)"


@pytest.fixture(scope="module")
def documents(corpus: Path) -> str:
    """30 documents of 3 to 40 tokens below the data root, as the set that the runs evaluate."""
    random = np.random.default_rng(1)
    tokens = [t for n in random.integers(3, 41, 30) for t in [*random.integers(0, 256, n - 1).tolist(), 256]]
    np.asarray(tokens, "<u2").tofile(corpus / "documents.bin")
    return "documents.bin"


def evaluation(documents: str) -> dict[str, Any]:
    return {"sets": [{"name": "mine", "files": [documents]}], "tasks": [TASK, OTHER], "tasks_every": 8}


def read(path: Path) -> dict[str, Any]:
    body = json.loads(path.read_text())
    assert isinstance(body, dict)
    return body


def by_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainer", "evaluate", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


def test_sets_and_tasks_in_the_loop_are_the_same_on_any_devices(new_run: Callable[..., Run], documents: str) -> None:
    run = new_run()
    run.train("cpu-1", 8, evaluate_every=4, evaluation=evaluation(documents))
    first, last = read(run.folder / "eval/1.1/4.json"), read(run.folder / "eval/1.1/8.json")
    assert set(first["sets"]) == {"mine"} and not first["tasks"]  # tasks are due at step 8 only
    assert set(last["tasks"]) == {TASK, OTHER}
    assert set(first["metrics"]) == {f"eval/lm/{name}/{m}" for name in ("mine", "held_out") for m in ("CE loss", "PPL")}
    assert last["metrics"]["eval/lm/held_out/CE loss"] == last["loss"]
    assert 0 <= last["metrics"][METRIC] <= 1
    assert last["sets"]["mine"]["documents"] == 30
    assert last["tasks"][TASK]["truncated"] == last["tasks"][TASK]["choices"]  # of 16 bytes each
    assert not list(run.folder.glob("evaluating/**/*.json"))

    # Killed in the middle of it: one task is there (told apart by a value that nothing computes), the rest is not.
    (run.folder / "eval/1.1/8.json").unlink()
    part = run.folder / f"evaluating/1.1/8/task-{TASK}.json"
    part.parent.mkdir(parents=True)
    part.write_text(json.dumps({"metrics": {METRIC: 7.0}, "metric": "acc", "seconds": 1.0}))
    run.train("cpu-4", 12, evaluate_every=4, evaluation=evaluation(documents))  # two processes of two devices
    again = read(run.folder / "eval/1.1/8.json")
    assert again["by"] == "2.1"
    assert again["metrics"][METRIC] == 7.0
    bits = [name for name in last["metrics"] if OTHER in name or "/mine/" in name]
    assert len(bits) == 4
    assert {name: again["metrics"][name] for name in bits} == {name: last["metrics"][name] for name in bits}
    assert again["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert not list(run.folder.glob("evaluating/**/*.json"))

    where = ("--run-directory", str(run.folder), "--step", "8", "--device", "cpu-4")
    done = by_command(*where, "--sets", "mine", "--tasks", f"{TASK},{OTHER}", "--json")
    assert done.returncode == 0, done.stderr
    ours = json.loads(done.stdout)["metrics"]
    assert ours == {name: value for name, value in last["metrics"].items() if name in ours}
    assert len(ours) == len(last["metrics"]) - 2  # all but the windows

    shown = by_command(*where, "--sets", "all", "--tasks", OTHER, "--limit", "3", "--out", str(run.folder / "out.json"))
    assert shown.returncode == 0, shown.stderr
    assert "held-out loss" in shown.stdout
    assert any(line.startswith(OTHER) and line.endswith(" 3") for line in shown.stdout.splitlines())
    assert len(read(run.folder / "out.json")["parts"]) == 3
    again_shown = by_command(
        *where, "--sets", "all", "--tasks", OTHER, "--limit", "3", "--out", str(run.folder / "out.json")
    )
    assert again_shown.stdout == shown.stdout
    assert "rows" not in again_shown.stderr and OTHER not in again_shown.stderr  # nothing was left to compute


def test_held_out_text_of_a_set_is_never_trained_on(new_run: Callable[..., Run], corpus: Path) -> None:
    (corpus / "copy.bin").write_bytes((corpus / "b.bin").read_bytes()[: 2 * 5 * LENGTH])
    run = new_run()
    settings = {"evaluate_every": 4, "evaluation": {"sets": [{"name": "copy", "files": ["copy.bin"]}]}}
    gang = run.train("cpu-1", 4, expect=64, **settings)
    assert "held-out text is in the training data" in gang.logs()
    assert "copy.bin (held out)" in gang.logs()
