"""What MaxText's own launcher of OLMo 3 7B, stage 1, would start: asked of the launcher, not copied from it.

The script ends by calling `python -m maxtext.trainers.pre_train.train`. Here the first `python` on its PATH writes down
what it is called with.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.maxtext_environment import package

LAUNCHER = "trainers/pre_train/scripts/olmo/run_olmo3_7b_stage1.sh"
# What it insists on and no program depends on.
REQUIRED = {
    "INDEX_PATH": "/nonexistent/index.json",
    "GCS_BASE": "gs://nonexistent/",
    "LOCAL_MOUNT": "/nonexistent/",
    "OUTPUT_DIR": "/nonexistent",
    "LOAD_PARAMETERS_PATH": "/nonexistent",  # without it, its own configuration refuses the empty path
    "HF_TOKEN": "none",
    "VENV_PATH": "/nonexistent",
}
# Without data or a tokenizer's download; `train_compile` takes the shapes of its batch from the configuration alone.
WITHOUT_DATA = {
    "dataset_type": "synthetic",
    "enable_checkpointing": "False",
    "jax_cache_dir": "",
    "log_config": "False",
}
RECORDER = """#!{python}
import json, os, sys
with open(os.environ["RECORD"], "w") as out:
    json.dump({{"arguments": sys.argv[1:], "libtpu": os.environ["LIBTPU_INIT_ARGS"]}}, out)
"""


@dataclass(frozen=True)
class Launch:
    """`settings` as in NAME=VALUE behind the configuration file; `libtpu` the compiler's flags."""

    settings: dict[str, str]
    libtpu: str


def launch(python: Path, devices: int, environment: dict[str, str]) -> Launch:
    """What the launcher starts on this many devices with these variables of its own (GRAD_ACCUM_STEPS, …)."""
    with tempfile.TemporaryDirectory() as folder:
        recorder, record = Path(folder) / "python", Path(folder) / "record.json"
        recorder.write_text(RECORDER.format(python=sys.executable))
        recorder.chmod(0o755)
        env = {
            **{name: value for name, value in os.environ.items() if name not in ("LIBTPU_INIT_ARGS", "HF_SECRETS")},
            **REQUIRED,
            **environment,
            "TOTAL_DEVICES": str(devices),
            "PATH": os.pathsep.join((folder, str(python.parent), os.environ["PATH"])),
            "RECORD": str(record),
        }
        script = package(python) / LAUNCHER
        done = subprocess.run(
            ["bash", str(script)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode or not record.is_file():
            raise SystemExit(f"MaxText's launcher ended with {done.returncode}: {done.stdout[-500:]}")
        recorded = json.loads(record.read_text())
    module, _, *settings = recorded["arguments"][1:]
    assert module == "maxtext.trainers.pre_train.train", module
    pairs = dict(setting.split("=", 1) for setting in settings)
    return Launch(pairs | WITHOUT_DATA, " ".join(recorded["libtpu"].split()))
