"""The step as it stands, compiled for a TPU slice on this machine: the committed report still holds."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.preflight import DEVICE, recipe
from trainer.hardware import device_type
from trainer.preflight.accounting import Report
from trainer.preflight.plans import plan_of
from trainer.preflight.preflight import preflight

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "preflight_step.json").read_text())
EXACT = ("verdict", "limit_gib", "attention", "recomputed")
installed = importlib.util.find_spec("libtpu") is not None or "TPU_LIBRARY_PATH" in os.environ

pytestmark = [
    pytest.mark.local,
    pytest.mark.skipif(not installed, reason="libtpu, the TPU compiler, is not installed: pip install 'jax[tpu]'"),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    cache = tmp_path_factory.mktemp("cache")
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(cache))
    made = preflight(recipe(), plan_of(recipe(), device_type(DEVICE), 1, 1, "none"))
    # What was compiled once is not compiled again, and says the same.
    patch.setattr("trainer.preflight.preflight._work", None)
    assert preflight(recipe(), plan_of(recipe(), device_type(DEVICE), 1, 1, "none")) == made
    patch.undo()
    return made


def test_the_step_that_trains_gives_the_committed_report(report: Report) -> None:
    """If the step was changed on purpose: python tests/golden/make_preflight_hlo.py step, and look at what it changed."""
    now: dict[str, Any] = report.to_json()
    assert {name: now[name] for name in EXACT} == {name: GOLDEN[name] for name in EXACT}
    assert now["flops"] == GOLDEN["flops"]
    assert now["peak_gib"] == pytest.approx(GOLDEN["peak_gib"], rel=0.02)
    assert sum(now["cycles"].values()) == pytest.approx(sum(GOLDEN["cycles"].values()), rel=0.02)
    sent = {(r["kind"], r["dtype"]): r["bytes"] for r in now["communication"]}
    assert sent == {(r["kind"], r["dtype"]): r["bytes"] for r in GOLDEN["communication"]}


def test_the_compiler_does_not_outlive_who_asked_it(tmp_path: Path) -> None:
    """It takes a core for minutes, and its outcome would go nowhere."""
    child = "from trainer.preflight.worker import _end_with_parent as e; e(); print('up', flush=True); import time; time.sleep(60)"
    parent = f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {child!r}]); print(p.pid, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert process.stdout.readline() == "up\n"
        process.kill()
    until = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and "zombie" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < until, "the child is still there"
        time.sleep(0.1)
