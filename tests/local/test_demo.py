"""The demo, whole: a run survives six interruptions by four causes, and ends as the run that was never interrupted."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNTILDONE = [sys.executable, "-m", "orchestrator"]


@dataclass(frozen=True)
class DemoResult:
    out: Path
    process: subprocess.CompletedProcess[str]

    @property
    def summary(self) -> dict[str, object]:
        body = json.loads((self.out / "summary.json").read_text())
        assert isinstance(body, dict)
        return body


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoResult:
    out = tmp_path_factory.mktemp("demo") / "out"
    command = [sys.executable, "examples/demo.py", "--out", str(out)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    return DemoResult(out, process)


pytestmark = pytest.mark.timeout(1900)


def test_the_demo_ends_with_every_proof(demo: DemoResult) -> None:
    assert demo.process.returncode == 0, demo.process.stdout + demo.process.stderr
    assert "FAIL" not in demo.process.stdout
    assert "\x1b[" not in demo.process.stdout


def test_what_happened_to_it(demo: DemoResult) -> None:
    endings = demo.summary["endings"]
    assert isinstance(endings, list)
    causes = [ending["cause"] for ending in endings]
    assert len(endings) >= 6
    assert {"preempted", "host-failure", "hang", "plan-change", "completed"} <= set(causes)
    assert causes[-1] == "completed"
    for ending in endings:
        devices = {"cpu-8": 8, "cpu-2": 2}[ending["device_type"]]
        assert devices * ending["micro_batch"] * ending["accumulation"] == 512
    assert {ending["device_type"] for ending in endings} == {"cpu-8", "cpu-2"}


def test_nothing_was_repeated_missed_or_changed(demo: DemoResult) -> None:
    figures = demo.summary
    assert (figures["repeated_instances"], figures["missed_instances"]) == (0, 0)
    assert figures["done_step"] == figures["target_step"]
    assert figures["redone_steps"] == figures["redone_steps_bitwise_equal"]
    assert figures["redone_steps"], "no interruption cost a step, so nothing was proven by doing it again"
    # Eight devices, two, eight again: the parameters and moments of the run that always had eight.
    assert 0 < figures["first_resize_step"] < figures["done_step"]
    assert figures["digest_equal_reference_until_step"] == figures["done_step"]
    assert figures["loss_equal_reference_until_step"] == figures["done_step"]
    assert figures["ends_as_reference"] is True


def test_the_torn_save_left_files_and_no_commit(demo: DemoResult) -> None:
    """The third interruption came in the middle of a save: a checkpoint folder that no commit record names."""
    run = demo.out / "run"
    line = next(text for text in demo.process.stdout.splitlines() if "3/6 torn save" in text)
    start = line.split("start ")[1].split(",")[0]
    step = line.split("step ")[1].split(":")[0]
    assert not (run / "commits" / start / f"{step}.json").exists()


def test_the_pictures_are_there(demo: DemoResult) -> None:
    for name in ("report.html", "loss.png", "timeline.png", "coverage.png", "summary.json"):
        assert (demo.out / name).stat().st_size > 1000


def test_nothing_of_it_is_left_running(demo: DemoResult) -> None:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except (OSError, ProcessLookupError):
                continue
            assert str(demo.out).encode() not in command, f"process {entry.name} still works on the demo"


def test_the_done_run_submits_nothing_more(demo: DemoResult) -> None:
    attempts = sorted((demo.out / "run" / "attempts").iterdir())
    again = subprocess.run(
        [*UNTILDONE, "run", "-f", str(demo.out / "demo.yaml"), "--local", str(demo.out / "local" / "demo")],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert "already done" in again.stdout
    assert sorted((demo.out / "run" / "attempts").iterdir()) == attempts


def test_one_flipped_bit_is_found_by_verify(demo: DemoResult) -> None:
    """Last, because it damages the run."""
    step = demo.summary["done_step"]
    (folder,) = (demo.out / "run" / "checkpoints").glob(f"*/{step}")
    victim = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    body = bytearray(victim.read_bytes())
    body[len(body) // 2] ^= 1
    os.chmod(victim, 0o644)
    victim.write_bytes(bytes(body))
    done = subprocess.run(
        [*UNTILDONE, "verify", str(demo.out / "run")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "FAIL    checkpoints" in done.stdout
