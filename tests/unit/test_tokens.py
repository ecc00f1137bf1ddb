"""The tokens of a step are compared with the corpus: right ids over wrong tokens do not pass."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.corpus import frozen, write
from trainer.data.coverage import Counter
from trainer.data.hashes import data_hash, ids_hash
from trainer.data.mix import Mix
from trainer.data.order import open_order
from trainer.data.tokens import SAMPLED_STEPS, TokenCheck
from trainer.recipe import Recipe
from trainer.rundir.records import StepLine

STEPS = 30


def checked(recipe: Recipe, root: Path, trained_on: Path | None = None, shift: int = 0) -> tuple[TokenCheck, Counter]:
    """The check of STEPS steps whose devices got, for each instance, the one `shift` further on in `trained_on`."""
    order = open_order(recipe)
    mix = Mix(recipe, str(trained_on or root))
    counter = Counter(order, 0, STEPS)
    check = TokenCheck(recipe, order, str(root), counter)
    check.sample([], 0, STEPS)
    for step in range(1, STEPS + 1):
        ids = order.batch_ids(step - 1)
        tokens = mix.instances((ids + np.uint64(shift)) % np.uint64(len(mix)))
        line = StepLine(
            step=step, loss=1, grad_norm=1, lr=1, skipped=False, ids=ids_hash(ids), data=data_hash(tokens), seconds=1
        )
        check.add("log", line)
    return check, counter


def test_the_right_tokens_pass(tmp_path: Path) -> None:
    check, counter = checked(frozen(tmp_path), tmp_path)
    assert (check.compared, check.unequal, check.unread, counter.problem_count) == (STEPS, 0, "", 0)


def test_wrong_tokens_under_the_right_ids_are_found(tmp_path: Path) -> None:
    check, counter = checked(frozen(tmp_path), tmp_path, shift=1)
    assert (check.unequal, counter.problem_count) == (STEPS, STEPS)
    assert "step 1: the tokens that reached the devices hash to" in counter.problems[0].text


def test_a_file_of_the_same_size_with_one_other_token_is_found(tmp_path: Path) -> None:
    recipe = frozen(tmp_path)
    old = tmp_path / "before"
    old.mkdir()
    for file in tmp_path.glob("*.bin"):
        (old / file.name).write_bytes(file.read_bytes())
    content = bytearray((tmp_path / "f0.bin").read_bytes())
    content[0] ^= 1
    (tmp_path / "f0.bin").write_bytes(content)
    check, _ = checked(recipe, tmp_path, trained_on=old)
    assert 0 < check.unequal <= STEPS


@pytest.mark.parametrize("harm", ["gone", "changed"])
def test_a_corpus_that_is_gone_or_changed_proves_nothing(tmp_path: Path, harm: str) -> None:
    (tmp_path / "old").mkdir()
    recipe = frozen(tmp_path / "old")
    if harm == "changed":
        (tmp_path / "new").mkdir()
        write(tmp_path / "new", (10, 20, 30))
    check, counter = checked(recipe, tmp_path / "new", trained_on=tmp_path / "old")
    assert (check.compared, counter.problem_count) == (0, 0)
    assert "new" in check.unread


def test_a_long_run_is_sampled_from_end_to_end(tmp_path: Path) -> None:
    recipe = frozen(tmp_path)
    order = open_order(recipe)
    check = TokenCheck(recipe, order, str(tmp_path), Counter(order, 0, 10**6))
    check.sample([], 0, 10**6)
    assert len(check.steps) == SAMPLED_STEPS
    assert {1, 10**6} <= check.steps
