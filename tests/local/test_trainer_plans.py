"""Other device counts, other beginnings, evaluations: what must not depend on where and how often a run was started."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.gang import BATCH, HELD_OUT, ROOT, Run, small_recipe, until


def trainer(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainer", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=90, check=False
    )


def test_resize_keeps_every_batch_and_every_restored_bit(new_run: Callable[..., Run]) -> None:
    reference = new_run("reference")
    reference.train("cpu-4", 12)
    run = new_run("run")
    for device, target in (("cpu-4", 4), ("cpu-2", 8), ("cpu-4", 12)):
        run.train(device, target)
    talked = ["[Gloo]" in gang.logs() for gang in run.gangs]
    assert talked == [True, False, True], "devices of one process share their memory and need no TCP"
    for found, wanted in zip(run.lines(), reference.lines(), strict=True):
        assert (found.step, found.ids, found.data, found.lr) == (wanted.step, wanted.ids, wanted.data, wanted.lr)
        assert found.loss == pytest.approx(wanted.loss, rel=2e-5)
    assert run.numbers()[:4] == reference.numbers()[:4]
    # Each start compared the digest of what it restored; here a mesh that none of them had reads the same bits.
    import jax

    from trainer.checkpoint import Checkpoints
    from trainer.digest import state_digest_numpy
    from trainer.sharding import mesh_of
    from trainer.step import abstract_state

    checkpoints = Checkpoints()
    for record in run.lineage():
        state = checkpoints.restore(
            run.rundir().path(record.checkpoint), abstract_state(run.recipe, mesh_of(jax.devices()))
        )
        assert state_digest_numpy(state) == record.digest


def test_sequences_can_be_shared_by_devices_for_a_while(new_run: Callable[..., Run]) -> None:
    """By two of one process, then by all four of two processes, which both read every row; then by none."""
    reference = new_run("reference")
    reference.train("cpu-2", 12, micro_batch=8, evaluate_every=4)
    run = new_run("run")
    for device, processes, sequence, micro_batch, target in (
        ("cpu-4", 1, 2, 8, 4),
        ("cpu-4", 2, 4, 8, 8),
        ("cpu-2", 1, 1, 8, 12),
    ):
        made = {"processes": processes, "sequence": sequence, "micro_batch": micro_batch}
        run.train(device, target, evaluate_every=4, **made)
    same_training(run, reference)


def test_devices_need_not_divide_the_batch(new_run: Callable[..., Run]) -> None:
    """16 instances on twelve devices in three processes, the last of which has none; on three; then on two."""
    reference = new_run("reference")
    reference.train("cpu-2", 12, micro_batch=8, evaluate_every=4)
    run = new_run("run")
    for device, processes, micro_batch, target in (("cpu-12", 3, 2, 4), ("cpu-3", 1, 6, 8), ("cpu-2", 1, 8, 12)):
        gang = run.train(device, target, processes=processes, micro_batch=micro_batch, evaluate_every=4)
        assert ("rows per step hold no instance" in gang.logs()) == (device != "cpu-2")
    same_training(run, reference)
    assert run.rundir().open_alarms() == ()


def same_training(run: Run, reference: Run) -> None:
    """Twelve steps in three attempts, and the evaluations at their ends, against one attempt."""
    for found, wanted in zip(run.lines(), reference.lines(), strict=True):
        assert (found.step, found.ids, found.data, found.lr) == (wanted.step, wanted.ids, wanted.data, wanted.lr)
        assert found.loss == pytest.approx(wanted.loss, rel=2e-5)
    losses: list[tuple[float, float]] = []
    for attempt, step in ((1, 4), (2, 8), (3, 12)):
        found, wanted = (
            json.loads((folder / f"eval/{of}.1/{step}.json").read_text())
            for folder, of in ((run.folder, attempt), (reference.folder, 1))
        )
        assert (found["instances"], found["ids"], found["targets"]) == (HELD_OUT, wanted["ids"], wanted["targets"])
        losses.append((found["loss"], wanted["loss"]))
    assert [a for a, _ in losses] == pytest.approx([b for _, b in losses], rel=1e-4)  # unseen text shows more of it


def test_a_missed_evaluation_is_caught_up(new_run: Callable[..., Run]) -> None:
    run = new_run()
    run.train("cpu-2", 8, evaluate_every=4)
    path = run.folder / "eval/1.1/8.json"
    first = json.loads(path.read_text())
    path.unlink()
    run.train("cpu-4", 12, processes=1, evaluate_every=4)
    again = json.loads(path.read_text())
    assert again["by"] == "2.1"
    assert (again["instances"], again["ids"], again["step"]) == (HELD_OUT, first["ids"], 8)
    assert again["loss"] == pytest.approx(first["loss"], rel=1e-6)  # other devices, one instance's own sum at most
    assert sorted(p.name for p in run.folder.glob("eval/*/*.json")) == ["12.json", "4.json", "8.json"]

    done = trainer("evaluate", "--run-directory", str(run.folder), "--step", "8", "--device", "cpu-2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loss"] == pytest.approx(first["loss"], rel=1e-6)
    wrong = trainer("evaluate", "--run-directory", str(run.folder), "--step", "7", "--json")
    assert wrong.returncode == 64
    assert "step 7 is not committed" in wrong.stderr


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory, corpus: Path, compile_cache: Path) -> Run:
    run = Run.new(tmp_path_factory.mktemp("parent") / "parent", corpus, compile_cache)
    run.train("cpu-2", 8)
    return run


def digests(run: Run) -> dict[int, dict[str, int]]:
    return {record.ref.step: record.digest for record in run.lineage()}


def test_a_run_goes_on_from_a_commit_of_another(parent: Run, new_run: Callable[..., Run]) -> None:
    """With optimizer state and step carried over, the child's step 8 is the parent's step 8."""
    child = new_run("child")
    source = {"run": f"{parent.folder}@4", "step": True}
    child.train("cpu-2", 8, init_from=source)
    assert digests(child)[8] == digests(parent)[8]
    assert [line.step for line in child.lines()] == [5, 6, 7, 8]
    # The first commit is damaged: the next attempt begins where the first began, though it is not told again.
    (child.folder / "checkpoints/1.1/8/_METADATA").unlink()
    child.train("cpu-2", 12)
    assert [line.step for line in child.lines()] == list(range(5, 13))
    init = child.rundir().read_init()
    assert init is not None
    assert init.digest == digests(parent)[4]


def test_the_commit_it_begins_with_is_kept_until_it_has_its_own(new_run: Callable[..., Run]) -> None:
    """The parent trains on and collects, the child is killed before its first commit and begins again."""
    parent, child = new_run("parent"), new_run("child")
    keep = {"last": 1, "min_age_seconds": 0}
    parent.train("cpu-2", 2, commit_every=1)
    spec = child.submit("cpu-2", 2000, commit_every=10000, init_from={"run": f"{parent.folder}@1"})
    gang = child.launch(spec)
    until(lambda: child.progress().get("phase") == "Training", gang)
    gang.kill()
    assert child.head().commit is None

    def checkpoints() -> set[str]:
        return {folder.name for folder in parent.folder.glob("checkpoints/*/*")}

    parent.train("cpu-2", 6, commit_every=1, keep=keep)
    assert checkpoints() == {"1", "4", "5", "6"}
    child.train("cpu-2", 4, init_from={"run": f"{parent.folder}@1"})
    assert child.committed_step() == 4
    parent.train("cpu-2", 7, commit_every=1, keep=keep)
    assert checkpoints() == {"5", "6", "7"}


def test_weights_alone_can_be_taken_from_a_folder(parent: Run, new_run: Callable[..., Run]) -> None:
    child = new_run("child")
    folder = str(parent.folder / "checkpoints/1.1/8")
    child.train("cpu-4", 4, processes=1, init_from={"checkpoint": folder, "optimizer_state": False})
    init = child.rundir().read_init()
    assert init is not None
    assert init.digest is not None
    theirs = digests(parent)[8]
    assert {k: v for k, v in init.digest.items() if k.startswith("params/")} == {
        k: v for k, v in theirs.items() if k.startswith("params/")
    }
    assert all(v == 0 for k, v in init.digest.items() if k.startswith(("mu/", "nu/", "step", "count")))
    assert [line.step for line in child.lines()] == [1, 2, 3, 4]


def test_a_source_of_another_shape_is_refused(parent: Run, new_run: Callable[..., Run]) -> None:
    model = small_recipe().model.model_copy(update={"mlp_hidden": 32})
    child = new_run("child", recipe=small_recipe(model=model))
    gang = child.train("cpu-2", 4, expect=64, init_from={"run": str(parent.folder)})
    assert "initFrom" in gang.logs()
    assert child.head().commit is None


def test_a_loss_that_is_not_finite_is_never_committed(new_run: Callable[..., Run]) -> None:
    recipe = small_recipe()
    steep = recipe.schedule[0].model_copy(update={"peak": 1e30, "shape": "constant", "warmup_steps": 6})
    run = new_run(recipe=recipe.model_copy(update={"schedule": (steep,)}))
    gang = run.train("cpu-1", 40, expect=78, commit_every=1)
    assert "nothing of it was committed" in run.exit()["reason"]
    assert all(line.loss == line.loss and abs(line.loss) < 1e38 for line in run.lines()), gang.logs()


def test_standalone_trains_resumes_and_refuses(tmp_path: Path, corpus: Path) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text("from tests.support.gang import small_recipe as recipe\n")
    run = tmp_path / "run"

    def train(target: int, *more: str, **changes: Any) -> subprocess.CompletedProcess[str]:
        options = {"--recipe": str(recipe), "--data-root": str(corpus), "--run-directory": str(run), **changes}
        return trainer("train", *(x for pair in options.items() for x in pair), "--target", str(target), *more)

    done = train(4, "--commit-every", "2", "--set", "init_seed=5")
    assert done.returncode == 0, done.stderr
    done = train(6, "--commit-every", "2", "--set", "init_seed=5", "--device", "cpu-2")
    assert done.returncode == 0, done.stderr
    spec = json.loads((run / "attempts/2/spec.json").read_text())
    assert spec["plan"]["accumulation"] * spec["plan"]["micro_batch"] * 2 == BATCH
    done = train(6, "--set", "init_seed=5")
    assert done.returncode == 0
    assert "done already" in done.stdout
    assert not (run / "attempts/3").exists()
    for wrong, said in (
        (train(6, "--set", "init_seed=6"), "init_seed"),
        (train(2, "--set", "init_seed=5"), "lower than what is committed"),
        (train(6, "--set", "no_such=1"), "no_such"),
        (train(6, "--device", "cpu-8"), "cpu-4"),
        (trainer("train"), "UNTILDONE_RUN_DIRECTORY"),
    ):
        assert wrong.returncode == 64, wrong.stderr
        assert said in wrong.stderr
        assert "Traceback" not in wrong.stderr
