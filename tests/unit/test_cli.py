"""The command line: fast help, one line per error, exit codes, plain text when piped, one JSON document with --json."""

import json
import os
import pty
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cli import COMMANDS, Exit, describe_error, main
from orchestrator.commands.output import columns, duration, rate
from orchestrator.commands.progress import Shown
from orchestrator.registry import KnownRun, RunNotFound, find_run, known_runs, remember
from tests.support.synthetic_run import STORY, DictStore, write
from trainer.data.byte_tokens import tokenize
from trainer.errors import ConfigurationError, StorageUnavailable, TruthUnknown
from trainer.rundir.disk import DiskStore

ROOT = Path(__file__).resolve().parents[2]
RUN_YAML = """
apiVersion: untildone.dev/v1alpha1
kind: TrainingRun
metadata: {name: small}
spec:
  recipe: {name: tiny}
  data: {root: data}
  targetStep: 8
  runDirectory: run
  ladder: [{deviceType: cpu-8}, {deviceType: cpu-2}]
"""


def untildone(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestrator", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | environment, timeout=60, check=False
    )


def on_disk(store: DictStore, folder: Path) -> Path:
    """The made-up run as a real run directory."""
    folder.mkdir(parents=True)
    disk = DiskStore(folder)
    for key, data in store.objects.items():
        if key == "HEAD":
            disk.swap("HEAD", data, 0)
        else:
            disk.create(key, data)
    return folder


@pytest.fixture
def known(tmp_path: Path) -> Path:
    """A local cluster's folder that knows one finished run, `demo`."""
    folder = on_disk(write(), tmp_path / "run")
    remember(tmp_path / "local", KnownRun(name="demo", run_directory=str(folder), file=str(tmp_path / "gone.yaml")))
    return tmp_path / "local"


# -- start-up


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from orchestrator.cli import main; code = main(['--help']);"
        "heavy = {'pydantic', 'rich', 'yaml', 'numpy', 'matplotlib', 'structlog', 'kubernetes', 'jax'} & set(sys.modules);"
        "sys.exit(f'{heavy}' if heavy or code else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


def test_help_takes_less_than_150_ms_of_processor_time() -> None:
    def spent() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert untildone("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(spent() for _ in range(5)) < 0.150


def test_no_command_imports_jax() -> None:
    modules = [module for module, _ in COMMANDS.values()] + ["orchestrator.looking", "orchestrator.report.write"]
    script = f"import importlib, sys; [importlib.import_module(m) for m in {modules}]; sys.exit('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == Exit.DONE
    assert f"untildone {name}" in capsys.readouterr().out


# -- errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError("spec.x: wrong"), Exit.USAGE),
        (RunNotFound("no run 'x'"), Exit.NOT_FOUND),
        (StorageUnavailable("bucket silent"), Exit.UNKNOWN),
        (TruthUnknown("HEAD is unreadable"), Exit.UNKNOWN),
        (PermissionError(13, "Permission denied", "/x"), Exit.FAILED),
        (ZeroDivisionError("division\nby zero"), Exit.FAILED),
    ],
)
def test_every_error_is_one_line_with_its_code(error: Exception, code: Exit) -> None:
    text, found = describe_error(error)
    assert found == code
    assert "\n" not in text
    assert text


def test_a_near_miss_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["statsu"]) == Exit.USAGE
    assert "did you mean 'status'?" in capsys.readouterr().err


def test_bad_input_is_one_line_on_stderr_and_never_a_traceback(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(RUN_YAML.replace("targetStep", "targetSteps"))
    done = untildone("plan", "-f", str(file))
    assert done.returncode == Exit.USAGE
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "targetStep" in done.stderr
    assert "bad.yaml" in done.stderr


def test_a_run_that_nobody_knows_is_not_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["status", "nope"], ["explain", "nope"], ["verify", "nope"], ["report", "nope", "-o", "x"]):
        assert main([*command, "--local", str(tmp_path)]) == Exit.NOT_FOUND
        assert "known runs: none" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["5 minutes", "", "-3", "1h-2m"])
def test_a_bad_timeout_names_the_accepted_forms(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN_YAML)
    assert main(["run", "-f", str(file), "--timeout", text]) == Exit.USAGE
    assert "5m" in capsys.readouterr().err


# -- plan


def test_plan_shows_the_arithmetic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN_YAML)
    assert main(["plan", "-f", str(file)]) == Exit.DONE
    out = capsys.readouterr().out
    assert re.search(r"^0 +cpu-8 +fsdp=8 +64×1×8 +none", out, re.MULTILINE)
    assert "micro-batch × accumulation × fsdp devices = 512" in out
    assert main(["plan", "-f", str(file), "--json"]) == Exit.DONE
    body = json.loads(capsys.readouterr().out)
    assert (body["apiVersion"], body["kind"]) == ("untildone.dev/v1alpha1", "Plan")
    for plan in body["plans"]:
        assert plan["devices"] * plan["micro_batch"] * plan["accumulation"] == body["global_batch"] == 512


def test_plan_for_other_hardware(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN_YAML)
    arguments = ["plan", "-f", str(file), "--device", "v7x-128", "--device", "v5p-4x4x4", "--json"]
    assert main(arguments) == Exit.DONE
    kinds = [plan["device_type"] for plan in json.loads(capsys.readouterr().out)["plans"]]
    assert kinds == ["tpu7x-4x4x4", "v5p-4x4x4"]
    assert main(["plan", "-f", str(file), "--device", "tpu7x-4x4x5"]) == Exit.USAGE
    assert "tpu7x-4x4x4" in capsys.readouterr().err
    assert main(["plan", "-f", str(file), "--slices", "2"]) == Exit.USAGE


# -- status and explain


def test_status_of_a_finished_run(known: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--local", str(known)]) == Exit.DONE
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "STATUS", "STEP", "TARGET", "PLAN", "ATTEMPT", "COMMITTED", "LEFT", "AGE"]
    assert row.split()[:7] == ["demo", "Completed", "56", "56", "cpu-8", "3.1", "56"]


def test_status_and_explain_agree_in_json(known: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "demo", "--local", str(known), "--json"]) == Exit.DONE
    (listed,) = json.loads(capsys.readouterr().out)["runs"]
    assert main(["explain", "demo", "--local", str(known), "--json"]) == Exit.DONE
    explained = json.loads(capsys.readouterr().out)
    assert {name: explained[name] for name in listed} == listed


def test_a_run_whose_cluster_is_unknown_exits_5(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = on_disk(write(STORY[:4], done=False), tmp_path / "going")
    assert main(["status", str(folder), "--local", str(tmp_path / "local")]) == Exit.UNKNOWN
    assert "TruthUnknown" in capsys.readouterr().out


def test_a_lost_head_exits_5_and_says_how_to_recover(known: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (known.parent / "run" / "HEAD.d").iterdir():
        path.unlink()
    assert main(["explain", "demo", "--local", str(known)]) == Exit.UNKNOWN
    assert "untildone recover" in capsys.readouterr().out


def test_an_empty_list_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--local", str(tmp_path), "--json"]) == Exit.DONE
    assert json.loads(capsys.readouterr().out)["runs"] == []


# -- terminal or pipe


def in_terminal(known: Path, **environment: str) -> bytes:
    leader, follower = pty.openpty()
    environment = {"TERM": "xterm-256color"} | environment
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "status", "--local", str(known)],
        cwd=ROOT, stdout=follower, stderr=subprocess.PIPE, env=clean | environment,
    )  # fmt: skip
    assert process.wait(timeout=60) == 0
    os.close(follower)
    output = os.read(leader, 65536)
    os.close(leader)
    return output


def test_colour_only_on_a_terminal_and_never_with_no_color(known: Path) -> None:
    assert b"\x1b[" in in_terminal(known)
    assert b"\x1b[" not in in_terminal(known, NO_COLOR="1")
    assert b"\x1b[" not in in_terminal(known, TERM="dumb")
    assert "\x1b[" not in untildone("status", "--local", str(known)).stdout


def test_a_request_that_is_refused_is_not_noted(tmp_path: Path) -> None:
    local, file = tmp_path / "local", tmp_path / "run.yaml"
    tokenize("stdlib", tmp_path / "data")
    (tmp_path / "run").mkdir()
    accepted = KnownRun(name="small", run_directory=str(tmp_path / "run"), file=str(tmp_path / "before.yaml"))
    remember(local, accepted)
    text = RUN_YAML.replace("root: data", f"root: {tmp_path}/data")
    for place, code in ((tmp_path / "no" / "run", Exit.USAGE), (on_disk(write(), tmp_path / "other"), Exit.FAILED)):
        file.write_text(text.replace("runDirectory: run", f"runDirectory: {place}"))
        done = untildone("run", "-f", str(file), "--local", str(local))
        assert done.returncode == code, done.stderr
        assert known_runs(local) == [accepted]

    # Another place under the name of a known run, and nobody can say yet what is there.
    for generation in (tmp_path / "other" / "HEAD.d").iterdir():
        generation.unlink()
    done = untildone("run", "-f", str(file), "--local", str(local), "--timeout", "1s")
    assert done.returncode == Exit.TIMEOUT
    assert "TruthUnknown" in done.stdout
    assert known_runs(local) == [accepted]


# -- small things


def test_the_registry_finds_by_name_and_by_place(tmp_path: Path) -> None:
    run = KnownRun(name="a", run_directory=str(tmp_path / "a"), file="a.yaml")
    remember(tmp_path, run)
    remember(tmp_path, run)
    assert known_runs(tmp_path) == [run]
    assert find_run(tmp_path, "a") == find_run(tmp_path, str(tmp_path / "a")) == run
    assert find_run(tmp_path, "gs://bucket/b").run_directory == "gs://bucket/b"


def test_figures_as_people_write_them() -> None:
    assert [duration(s) for s in (None, 4.4, 125, 11520, 187200)] == ["-", "4s", "2m05s", "3h12m", "2d04h"]
    assert [rate(v) for v in (None, 950.0, 12345.0, 1.43e6)] == ["-", "950", "12.3k", "1.43M"]
    assert columns(("A", "B"), [("long", "x")]) == "A     B\nlong  x"


def test_a_progress_line_is_plain_and_complete() -> None:
    line = Shown("Training", "1.2", "cpu-8", 16, 56, 8, 3.21, 43100.0, 40.0, "", ()).line()
    wanted = ("attempt=1.2", "plan=cpu-8", "step=16/56 28.6%", "committed=8", "loss=3.2100", "tok/s=43.1k", "eta=40s")
    assert all(part in line for part in wanted)
    assert line.startswith("Training")
