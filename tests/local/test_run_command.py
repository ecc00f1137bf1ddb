"""`untildone run` on a real gang: it may end, be interrupted or come back at any time, and the training goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from orchestrator.clusters.local import LocalCluster
from trainer.data.byte_tokens import tokenize

ROOT = Path(__file__).resolve().parents[2]

RUN_YAML = """
apiVersion: untildone.dev/v1alpha1
kind: TrainingRun
metadata: {{name: walk}}
spec:
  recipe:
    name: tiny
    overrides: {{model.n_layers: 1, model.d_model: 32, model.head_dim: 8, model.mlp_hidden: 64}}
  data: {{root: {here}/data}}
  targetStep: 8
  runDirectory: {here}/run
  ladder: [{{deviceType: cpu-2}}]
  checkpoint: {{everySteps: 2}}
  progressEvery: 0.2s
  logEvery: 0.2s
  hang: {{step: 60s, start: 300s}}
"""


def command(here: Path, *more: str) -> list[str]:
    local = ["--local", str(here / "local")]
    return [sys.executable, "-m", "orchestrator", more[0], *more[1:], *local]


def test_leave_come_back_and_come_back_when_it_is_done(tmp_path: Path) -> None:
    tokenize("stdlib", tmp_path / "data")
    file = tmp_path / "walk.yaml"
    file.write_text(RUN_YAML.format(here=tmp_path))
    run = command(tmp_path, "run", "-f", str(file))

    # It takes longer than four seconds: exit 3, and the gang is alive. A slow machine needs longer to submit it, too.
    cluster = LocalCluster(tmp_path / "local")
    for limit in ("4s", "8s", "16s", "32s"):
        done = subprocess.run([*run, "--timeout", limit], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 3, done.stderr
        assert f"not done within {limit}" in done.stderr
        if cluster.observe("walk").gangs:
            break
    (gang,) = cluster.observe("walk").gangs

    # Ctrl-C: exit 130 and the way back; the same gang goes on.
    process = subprocess.Popen(run, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not cluster.pids(gang.name) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert process.stdout is not None
    process.stdout.readline()  # it says something: it has set its signal handlers
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "again adopts it" in out
    pids = cluster.pids(gang.name)
    assert pids
    assert all(os.path.exists(f"/proc/{pid}") for pid in pids.values())

    # Back again until it is done, one plain line per change.
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert "\x1b[" not in done.stdout
    assert "Training" in done.stdout
    assert "attempt=1.1" in done.stdout
    assert [g.attempt for g in cluster.observe("walk").gangs] == [1]

    # Done: says so, exits 0, submits nothing; status and verify agree.
    done = subprocess.run([*run, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    body = json.loads(done.stdout)
    assert body["status"] == "Completed"
    assert "already done" in body["message"]
    status = subprocess.run(command(tmp_path, "status"), cwd=ROOT, capture_output=True, text=True, check=False)
    assert status.stdout.splitlines()[1].split()[:4] == ["walk", "Completed", "8", "8"]
    verified = subprocess.run(
        command(tmp_path, "verify", "walk"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert verified.returncode == 0, verified.stdout
