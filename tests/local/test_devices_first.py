"""JAX is told which devices to use before it is imported, by every command that computes: afterwards it does not listen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gang import write_corpus

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.local

# In place of prepare_jax: says whether JAX was there already, and ends.
WATCHED = """
import os, sys, time
import trainer.environment
def prepare_jax(*_):
    print("too late" if "jax" in sys.modules else "in time", flush=True)
    os._exit(0)
trainer.environment.prepare_jax = prepare_jax
from trainer.cli import main
main(time.monotonic(), sys.argv[1:])
"""
HF = "tests/golden/transformers/mha"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, a recipe over it, and a run of it with one commit."""
    folder = tmp_path_factory.mktemp("devices-first")
    write_corpus(folder / "data")
    (folder / "small.py").write_text("from tests.support.gang import small_recipe as recipe\n")
    done = started([sys.executable, "-m", "trainer", *train(folder, "run")])
    assert done.returncode == 0, done.stderr
    (folder / "said").write_text(done.stderr)
    return folder


def started(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Without what the tests themselves tell JAX."""
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def train(here: Path, run: str, *more: str) -> list[str]:
    places = ["--run-directory", str(here / run), "--data-root", str(here / "data")]
    return ["train", "--recipe", str(here / "small.py"), *places, "--target", "1", "--commit-every", "1", *more]


def commands(here: Path) -> dict[str, list[str]]:
    return {
        "train": train(here, "a"),
        "train from a run": train(here, "b", "--init-from", f"{here}/run"),
        "evaluate a run": ["evaluate", "--run-directory", str(here / "run")],
        "evaluate weights": ["evaluate", "--hf", HF, "--sets", "some=a.bin", "--data-root", str(here / "data")],
    }


@pytest.mark.parametrize("name", commands(Path()))
def test_jax_is_told_its_devices_in_time(here: Path, name: str) -> None:
    done = started([sys.executable, "-c", WATCHED, *commands(here)[name]])
    assert done.stdout.splitlines()[-1:] == ["in time"], f"{done.stdout}\n{done.stderr}"


def test_a_run_on_a_cpu_says_nothing_of_tpus(here: Path) -> None:
    """Where libtpu is installed and there is no TPU, JAX would look for one for half a minute, and complain."""
    assert "libtpu" not in (here / "said").read_text()
