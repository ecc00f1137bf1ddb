"""What is compiled once is not compiled again, unless something that decides the program has changed; and the command line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.preflight import DEVICE, recipe
from trainer.errors import ConfigurationError, TrainerError
from trainer.hardware import device_type
from trainer.plan import Plan
from trainer.preflight import cache, preflight
from trainer.preflight.accounting import report_of
from trainer.preflight.command import preflight as command
from trainer.preflight.plans import plan_of
from trainer.recipe import Recipe, override

GOLDEN = Path(__file__).parent.parent / "golden"
PLAN = plan_of(recipe(), device_type(DEVICE), 1, 1, "none")
FITS = {"error": None, "compile_seconds": 1.0, "memory": {"peak_memory": 2**30}}
TOO_LARGE = {
    "error": "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (164.90G) exceeds 94.74G",
    "compile_seconds": 2.0,
    "memory": {},
}


class Compiler:
    """Stands in for the process that compiles."""

    def __init__(self, outcome: dict[str, Any], text: str | None) -> None:
        self.outcome, self.text, self.calls = outcome, text, 0

    def __call__(self, asked: Recipe, plan: Plan, options: dict[str, str], out: Path, timeout: float) -> dict[str, Any]:
        self.calls += 1
        if self.text is not None:
            (out / "program.hlo").write_text(self.text)
        return self.outcome


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/there")
    made = Compiler(FITS, gzip.decompress((GOLDEN / "preflight.hlo.gz").read_bytes()).decode())
    monkeypatch.setattr(preflight, "_work", made)
    return made


def test_the_same_program_is_compiled_once(compiler: Compiler, tmp_path: Path) -> None:
    first = preflight.preflight(recipe(), PLAN)
    assert first.verdict == "fits" and first.peak_gib == 1
    renamed = override(recipe(), {"data.files": [{"path": "elsewhere.npy"}], "init_seed": 9})
    kept = tmp_path / "program.hlo"
    assert preflight.preflight(renamed, PLAN, keep_text=kept) == first
    assert compiler.calls == 1 and kept.read_text() == compiler.text
    preflight.preflight(recipe(), PLAN, fresh=True)
    preflight.preflight(recipe(), PLAN, {"xla_tpu_scoped_vmem_limit_kib": "65536"})
    preflight.preflight(recipe(), plan_of(recipe(), device_type(DEVICE), 1, 2, "none"))
    assert compiler.calls == 4


def test_sources_and_versions_are_part_of_the_key(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    preflight.preflight(recipe(), PLAN)
    monkeypatch.setattr(cache, "sources", lambda: "edited")
    preflight.preflight(recipe(), PLAN)
    monkeypatch.setattr(cache, "versions", lambda: {"jax": "0.99"})
    preflight.preflight(recipe(), PLAN)
    assert compiler.calls == 3


def test_what_ran_out_of_memory_is_kept_and_a_process_that_died_is_not(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def died(*_: Any) -> dict[str, Any]:
        raise TrainerError("the process that compiles ended with code -9")

    with monkeypatch.context() as broken:
        broken.setattr(preflight, "_work", died)
        with pytest.raises(TrainerError, match="code -9"):
            preflight.preflight(recipe(), PLAN)
    compiler.outcome, compiler.text = TOO_LARGE, None
    assert preflight.preflight(recipe(), PLAN).peak_gib == 164.9
    assert preflight.preflight(recipe(), PLAN).verdict == "out of memory"
    assert compiler.calls == 1


def test_without_a_compiler_it_says_what_to_install(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPU_LIBRARY_PATH")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'jax\[tpu\]'"):
        preflight.preflight(recipe(), PLAN)
    with pytest.raises(ConfigurationError, match="compiles for tpu7x, v5p"):
        preflight.check(device_type("v6e-8x8"))


def test_the_command_speaks_in_words_and_in_json(compiler: Compiler, tmp_path: Path) -> None:
    file = tmp_path / "recipe.json"
    file.write_bytes(recipe().canonical())
    arguments = ["--recipe", str(file), "--device", DEVICE, "--micro-batch", "1", "--remat", "none"]
    done = CliRunner().invoke(command, arguments, standalone_mode=False)
    assert done.return_value == 0
    for words in (
        "verdict: fits; 1.00 GiB of 94.74 GiB",
        "executed ÷ model 1.347",
        "MFU ceiling",
        "attention backward",
        "all-gather",
    ):
        assert words in done.output
    done = CliRunner().invoke(command, [*arguments, "--json"], standalone_mode=False)
    assert report_of(json.loads(done.output)).verdict == "fits"
    compiler.outcome, compiler.text = TOO_LARGE, None
    done = CliRunner().invoke(command, [*arguments, "--fresh"], standalone_mode=False)
    assert done.return_value == 1
    assert "verdict: out of memory; 164.90 GiB of 94.74 GiB" in done.output
