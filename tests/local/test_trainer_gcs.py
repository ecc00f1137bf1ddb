"""The trainer on a bucket: the same run directory, commits, resume, profiles and proofs as on disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gang import ROOT
from tests.support.gcs_server import GcsServer
from trainer.rundir.records import Request
from trainer.rundir.rundir import RunDirectory

RECIPE = """
from tests.support.gang import small_recipe

recipe = small_recipe
"""


def test_a_run_in_a_bucket_is_resumed_and_proven(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.py").write_text(RECIPE)
    with GcsServer() as server:
        server.create_bucket("runs")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        env = {**os.environ, "PYTHONPATH": str(ROOT)}

        def call(*command: str, expect: int = 0) -> str:
            done = subprocess.run(
                [sys.executable, "-m", *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == expect, done.stderr[-3000:]
            assert "WARNING" not in done.stderr, done.stderr
            said.append(done.stderr)
            return done.stdout

        said: list[str] = []

        def train(target: int) -> str:
            where = ("--data-root", str(corpus), "--run-directory", "gs://runs/small", "--device", "cpu-2")
            much = ("--target", str(target), "--commit-every", "2")
            call("trainer", "train", "--recipe", str(tmp_path / "small.py"), *where, *much)
            return said[-1]

        assert '"program": "compiled"' in train(3)
        rundir = RunDirectory.open("gs://runs/small")
        assert any("jit_train_step" in key for key in rundir.store.list("cache/compile"))
        rundir.request("profile-a", Request(kind="profile", attempt=1, at=5, steps=1, time=0.0))
        assert '"program": "from the compile cache"' in train(6)
        coverage = json.loads(call("trainer", "data", "audit", "gs://runs/small", "--json"))
        assert (coverage["steps"], coverage["repeated_instances"], coverage["missed_instances"]) == (6, 0, 0)
        verdict = call("orchestrator", "verify", "gs://runs/small")
        assert "every file with the checksum it was committed with" in verdict
        assert "all " in verdict
        call("orchestrator", "verify", "gs://runs/nothing", expect=4)
        done = rundir.read_answer("profile-a")
        assert done is not None and not done.failed, done
        assert done.place in call("orchestrator", "profile", "gs://runs/small", "--list")
        program, trace = sorted(rundir.store.list(done.place), key=len)
        assert rundir.store.get(program).data.startswith(b"HloModule jit_train_step")
        assert rundir.store.stat(trace).bytes > 10_000
