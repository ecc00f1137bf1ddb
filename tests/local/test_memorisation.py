"""The memorisation alarm, shown on real trainers: one reads as MaxText 0.2.5 does (double sharding), the other rightly.

The text is random, so that nothing about it can be learnt but by having read it: a small model with a large vocabulary
remembers what it has read once.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.support.double_sharded_trainer import HOSTS
from tests.support.gang import Run, small_recipe
from trainer.data.audit import audit
from trainer.recipe import Data, DataFile, Model, Order, Recipe, SchedulePiece

BATCH, LENGTH, VOCAB = 16, 16, 4096
STEPS, EVERY = 240, 5  # one epoch
HELD_OUT = 512
BROKEN = ("-m", "tests.support.double_sharded_trainer", "train")


def recipe() -> Recipe:
    return small_recipe(
        model=Model(
            vocab_size=VOCAB,
            padded_vocab_size=VOCAB,
            d_model=64,
            n_layers=1,
            n_heads=2,
            n_kv_heads=2,
            head_dim=32,
            mlp_hidden=128,
        ),
        data=Data(
            files=(DataFile(path="train.bin"),),
            held_out=(DataFile(path="held-out.bin"),),
            dtype="uint16",
            eos_id=VOCAB - 1,
            order=Order(kind="feistel", seed=0),
        ),
        schedule=(SchedulePiece(shape="constant", peak=3e-2, warmup_steps=5, total_steps=1000, alpha_f=1.0),),
        global_batch=BATCH,
        sequence_length=LENGTH,
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    draw = np.random.default_rng(0)
    for name, instances in (("train.bin", STEPS * BATCH), ("held-out.bin", HELD_OUT)):
        draw.integers(0, VOCAB - 1, instances * LENGTH).astype("<u2").tofile(folder / name)
    return folder


def trained(folder: Path, text: Path, cache: Path, program: tuple[str, ...]) -> Run:
    run = Run.new(folder, text, cache, recipe(), optimised=True)
    spec = run.submit(
        "cpu-1",
        STEPS,
        micro_batch=BATCH,
        commit_every=EVERY,
        evaluate_every=EVERY,
        held_out_same_text=True,
        progress_seconds=5,
    )
    gang = run.launch(spec, program=program)
    assert gang.wait(240) == [0], gang.logs()
    return run


def test_a_loader_that_shards_twice_is_heard_and_a_right_one_is_not(
    tmp_path: Path, text: Path, compile_cache: Path
) -> None:
    right = trained(tmp_path / "right", text, compile_cache, ("-m", "trainer", "train"))
    assert right.rundir().open_alarms() == ()
    assert audit(right.rundir()).ok

    broken = trained(tmp_path / "broken", text, compile_cache, BROKEN)
    found = broken.rundir()
    coverage, memorisation = map(found.read_alarm, found.open_alarms())
    assert coverage is not None and memorisation is not None
    # The second look finds the first wrong batch and names the mistake.
    assert (coverage.kind, coverage.step) == ("coverage", 1)
    assert f"double sharding over {HOSTS} processes" in coverage.message
    # The losses alone say it too, before the end of the only epoch.
    assert memorisation.kind == "memorisation"
    assert STEPS // HOSTS < memorisation.step < STEPS
    assert memorisation.figures["training_loss"] < memorisation.figures["expected"] - 0.01
    assert broken.progress()["alarms"] == list(found.open_alarms())
    assert '"event": "alarm"' in broken.gangs[0].logs()

    counted = audit(found)
    assert counted.repeated_instances > 0.2 * counted.instances
    assert counted.missed_instances > 0.25 * counted.instances
