"""The daemon as a process, on the local cluster, with trainers that commit but compute nothing."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from orchestrator.api import load_run
from orchestrator.clusters.local import LocalCluster
from orchestrator.clusters.processes import kill_all_with_nonce
from orchestrator.daemon import resume_until_done
from tests.support.story import a_run
from trainer.errors import ConfigurationError
from trainer.rundir.rundir import RunDirectory

ROOT = Path(__file__).resolve().parents[2]


class Setting:
    """A run with data and a run directory, and the local cluster it runs on."""

    def __init__(self, folder: Path, target: int, step_seconds: float = 0.05) -> None:
        self.folder, self.target, self.step_seconds = folder, target, step_seconds
        self.rundir_path = folder / "run"
        (folder / "data").mkdir()
        recipe = folder / "recipe.py"
        recipe.write_text(
            "from tests.support.story import a_recipe\n"
            "def recipe():\n"
            "    found = a_recipe()\n"
            "    files = tuple(f.model_copy(update={'bytes': None}) for f in found.data.files)\n"
            "    return found.model_copy(update={'data': found.data.model_copy(update={'files': files})})\n"
        )
        (folder / "data" / "a.bin").write_bytes(bytes(100_000))
        run = a_run(
            self.rundir_path, recipe={"name": str(recipe)}, data={"root": str(folder / "data")}, targetStep=target
        )
        self.yaml = folder / "run.yaml"
        self.yaml.write_text(yaml.safe_dump(run.model_dump(mode="json", by_alias=True, exclude_unset=True)))
        self.cluster = LocalCluster(folder / "cluster")
        self.daemons: list[subprocess.Popen[str]] = []

    def daemon(self) -> "subprocess.Popen[str]":
        command = [
            sys.executable,
            "-m",
            "tests.support.run_daemon",
            self.yaml,
            self.cluster.root,
            str(self.step_seconds),
        ]
        child = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.daemons.append(child)
        return child

    @property
    def step(self) -> int:
        try:
            found = RunDirectory.open(str(self.rundir_path)).head()
        except ConfigurationError:
            return 0
        return found[0].commit.step if found and found[0].commit else 0

    def wait_step(self, step: int, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while self.step < step:
            assert time.monotonic() < end, f"step {step} not reached, at {self.step}: {self.cluster.observe('demo')}"
            time.sleep(0.02)

    def allow(self, attempt: int, step: int) -> None:
        self.rundir_path.mkdir(exist_ok=True)
        temporary = self.rundir_path / ".allow"
        temporary.write_text(str(step))
        temporary.rename(self.rundir_path / f"allow-{attempt}")

    def check_done(self, target: int) -> RunDirectory:
        """Done, every gang once, the ledger without doubles, the lineage without a gap."""
        rundir = RunDirectory.open(str(self.rundir_path))
        found = rundir.head()
        assert found is not None
        assert found[0].commit is not None
        assert found[0].commit.step == target
        steps = [record.ref.step for record in rundir.lineage(found[0].commit)]
        assert steps == list(range(target, 0, -1))
        endings = rundir.endings()
        assert len({e.key for e in endings}) == len(endings)
        view = self.cluster.observe("demo")
        attempts = [gang.attempt for gang in (*view.gangs, *view.deleted)]
        assert sorted(attempts) == list(range(1, found[0].attempt + 1)), "one gang per attempt"
        return rundir

    def clean(self) -> None:
        for child in self.daemons:
            if child.poll() is None:
                child.kill()
            child.communicate()
        view = self.cluster.observe("demo")
        for gang in view.gangs:
            self.cluster.delete(gang.name, gang.uid, 0)
        end = time.monotonic() + 10
        while self.cluster.observe("demo").gangs and time.monotonic() < end:
            time.sleep(0.05)
        for gang in (*view.gangs, *view.deleted):
            kill_all_with_nonce(gang.nonce)


@pytest.fixture
def setting(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Setting]:
    built = Setting(tmp_path, target=getattr(request, "param", 40))
    try:
        yield built
    finally:
        built.clean()


def test_killed_at_random_moments_and_started_again(setting: Setting) -> None:
    dice = random.Random(7)
    trainers_killed = 0
    setting.allow(1, setting.target - 10)  # it is not done while daemons are killed, however slow they start
    for number in range(12):
        child = setting.daemon()
        assert child.stderr is not None
        assert "looking after the run" in child.stderr.readline()
        time.sleep(dice.uniform(0.0, 0.25))
        assert child.poll() is None, child.communicate()
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        if number % 4 == 3 and (pids := setting.cluster.pids("demo-a1")):
            os.kill(pids[1], signal.SIGKILL)  # so that there is something to write down, too
            trainers_killed += 1
    setting.allow(1, setting.target)
    last = setting.daemon()
    out, err = last.communicate(timeout=90)
    assert last.returncode == 0, err
    assert out.startswith("Completed:")
    rundir = setting.check_done(setting.target)
    assert trainers_killed
    assert {e.cause for e in rundir.endings()} == {"host-failure", "completed"}
    assert len(rundir.endings()) == trainers_killed + 1


def test_ctrl_c_leaves_the_training_and_the_next_adopts_it(setting: Setting) -> None:
    first = setting.daemon()
    setting.wait_step(3)
    pids = setting.cluster.pids("demo-a1")
    first.send_signal(signal.SIGINT)
    out, err = first.communicate(timeout=20)
    assert first.returncode == 130
    assert "goes on by itself" in out
    assert "adopts it" in out
    assert setting.cluster.pids("demo-a1") == pids
    for line in err.splitlines():
        json.loads(line)  # not a terminal: one JSON object per line
    at = setting.step
    setting.wait_step(at + 3)
    second = setting.daemon()
    out, err = second.communicate(timeout=90)
    assert second.returncode == 0, err
    setting.check_done(setting.target)


def test_two_daemons_at_once(setting: Setting) -> None:
    children = [setting.daemon(), setting.daemon()]
    setting.wait_step(5)
    os.kill(setting.cluster.pids("demo-a1")[1], signal.SIGKILL)
    for child in children:
        out, err = child.communicate(timeout=90)
        assert child.returncode == 0, (out, err)
    rundir = setting.check_done(setting.target)
    assert [e.cause for e in rundir.endings()] == ["host-failure", "completed"]


def test_everything_that_befalls_it(setting: Setting) -> None:
    """Killed supervisor, stopped process, quota cut to another plan and back; each ending once, with its cause."""
    setting.cluster.set_capacity({"cpu": 8})
    for attempt, step in ((1, 15), (2, 20)):
        setting.allow(attempt, step)
    child = setting.daemon()
    setting.wait_step(3)
    supervisor = setting.cluster.supervisor("demo-a1")
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    setting.wait_step(8)
    pids = setting.cluster.pids("demo-a1")
    os.kill(pids[1], signal.SIGSTOP)
    os.kill(pids[0], signal.SIGKILL)
    setting.wait_step(15)
    setting.cluster.set_capacity({"cpu": 2})
    setting.wait_step(20)
    setting.cluster.set_capacity({"cpu": 8})
    out, err = child.communicate(timeout=90)
    assert child.returncode == 0, (out, err)
    rundir = setting.check_done(setting.target)
    endings = rundir.endings()
    assert [(e.attempt, e.start, e.cause) for e in endings] == [
        (1, 1, "host-failure"),
        (1, 2, "host-failure"),
        (1, 3, "preempted"),
        (2, 1, "plan-change"),
        (3, 1, "completed"),
    ]
    assert all(e.evidence for e in endings)
    specs = [rundir.read_spec(n) for n in (1, 2, 3)]
    assert [s.plan.device_type for s in specs if s] == ["cpu-8", "cpu-2", "cpu-8"]
    assert [s.plan.accumulation * s.plan.micro_batch * s.plan.data_parallel for s in specs if s] == [16, 16, 16]
    for before, after in itertools.pairwise(endings):
        assert before.last_committed_step <= after.last_committed_step


@pytest.mark.parametrize("setting", [2], indirect=True)
def test_done_already_says_so_and_submits_nothing(setting: Setting) -> None:
    first = setting.daemon()
    first.communicate(timeout=90)
    assert first.returncode == 0
    before = sorted(p for p in setting.rundir_path.rglob("*") if p.is_file())
    second = setting.daemon()
    out, _ = second.communicate(timeout=20)
    assert second.returncode == 0
    assert out.startswith("Completed:")
    assert sorted(p for p in setting.rundir_path.rglob("*") if p.is_file()) == before
    assert len(setting.cluster.observe("demo").gangs) + len(setting.cluster.observe("demo").deleted) == 1


def test_bad_input_touches_nothing(setting: Setting) -> None:
    (setting.folder / "data" / "a.bin").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"a\.bin is empty"):
        resume_until_done(load_run(setting.yaml), setting.cluster)
    assert not setting.rundir_path.exists()
    assert setting.cluster.observe("demo").gangs == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runDirectory": "/no/such/disk/run"}, r"spec\.runDirectory .*does not exist"),
        ({"runDirectory": "/proc/run"}, "run directory /proc/run"),
        ({"ladder": [{"deviceType": "cpu-7"}]}, r"spec\.ladder\[0\]\.deviceType"),
        ({"recipe": {"name": "tinny"}}, "recipe 'tinny' not found"),
        ({"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}, "secretKeyRef"),
    ],
)
def test_one_clear_error_and_nothing_is_made(setting: Setting, changes: dict[str, object], message: str) -> None:
    document = yaml.safe_load(setting.yaml.read_text())
    document["spec"].update(changes)
    setting.yaml.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigurationError, match=message):
        resume_until_done(load_run(setting.yaml), setting.cluster)
    assert not setting.rundir_path.exists()
    assert setting.cluster.observe("demo").gangs == ()


def test_held_out_text_in_training_files_is_refused_before_the_recipe_is_fixed(setting: Setting) -> None:
    """Once recipe.json exists the mended file would count as another recipe: the check comes before it."""
    data = setting.folder / "data"
    text = (data / "a.bin").read_bytes()
    (data / "h.bin").write_bytes(text[: len(text) // 2])
    document = yaml.safe_load(setting.yaml.read_text())
    document["spec"]["recipe"]["overrides"] = {"data.held_out": [{"path": "h.bin"}]}
    setting.yaml.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigurationError, match=r"h\.bin"):
        resume_until_done(load_run(setting.yaml), setting.cluster)
    assert not setting.rundir_path.exists()


@pytest.mark.parametrize("setting", [2], indirect=True)
def test_another_recipe_is_refused_and_named(setting: Setting) -> None:
    setting.daemon().communicate(timeout=90)
    (setting.folder / "data" / "a.bin").write_bytes(bytes(50_000))
    again = setting.daemon()
    out, err = again.communicate(timeout=20)
    assert again.returncode == 1
    assert "data.files.0.bytes: 100000 → 50000" in out + err
