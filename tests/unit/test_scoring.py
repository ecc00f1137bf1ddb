"""Log-likelihoods of rows of all lengths: the model's own, whatever mesh, order, batch and padding they came through."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.support.goldens import TRANSFORMERS, random_params, reference
from tests.support.models import small_recipe
from trainer import scoring
from trainer.recipe import Recipe
from trainer.scoring import Row, Scorer, Shape, length_buckets, shape_of
from trainer.sharding import mesh_of, param_shardings
from trainer.weights.on_mesh import load_params
from trainer.weights.sources import open_hugging_face

pytestmark = pytest.mark.slow

LONGEST = 24


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of 24 tokens per device, or three of 16: small programs, which compile in a second or two."""
    monkeypatch.setattr(scoring, "TOKENS_PER_DEVICE", 2 * LONGEST)
    monkeypatch.setattr(scoring, "SHORTEST", 16)


def rows(vocabulary: int, count: int = 30, seed: int = 0) -> list[Row]:
    """Rows of 1 to LONGEST tokens with 1 to 6 tokens asked for, some of them all."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(count):
        length = int(random.integers(1, LONGEST + 1))
        asked = length if number % 7 == 0 else int(random.integers(1, min(length, 6) + 1))
        positions = np.sort(random.choice(length, asked, replace=False)).astype(np.int32)
        tokens, targets = (random.integers(0, vocabulary, n).astype(np.int32) for n in (length, asked))
        made.append(Row(tokens, positions, targets))
    return made


def scored(
    recipe: Recipe, devices: int, given: list[Row], longest: int = LONGEST, sharing: int = 1
) -> list[np.ndarray]:
    mesh = mesh_of(jax.devices()[:devices], sharing)
    return Scorer(recipe, mesh, longest).score(params(recipe, mesh), given)


def params(recipe: Recipe, mesh: Mesh) -> Any:
    at = param_shardings(recipe.model, mesh)
    return {name: jax.device_put(0.1 * value, at[name]) for name, value in random_params(recipe.model).items()}


def bits(found: list[np.ndarray]) -> list[bytes]:
    return [one.tobytes() for one in found]


RECIPE = small_recipe()


def test_scores_are_bit_by_bit_the_same_on_any_number_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "SHORTEST", LONGEST)  # one length: two programs
    given = rows(RECIPE.model.vocab_size)
    one = bits(scored(RECIPE, 1, given))
    assert len({*one}) == len(given)
    assert bits(scored(RECIPE, 4, given)) == one
    assert bits(scored(RECIPE, 2, given, sharing=2)) == one, "rows are whole though training shares sequences"


def test_scores_depend_neither_on_the_order_nor_on_what_else_is_asked() -> None:
    given = rows(RECIPE.model.vocab_size)
    one = bits(scored(RECIPE, 1, given))
    assert bits(scored(RECIPE, 1, given[::-1]))[::-1] == one
    assert bits(scored(RECIPE, 1, given[3:20])) == one[3:20]


def test_scores_hardly_depend_on_padding() -> None:
    """Other shapes are other programs: the last bits may differ, no more."""
    given = rows(RECIPE.model.vocab_size)
    for one, other in zip(scored(RECIPE, 1, given), scored(RECIPE, 1, given, 32), strict=True):
        np.testing.assert_allclose(one, other, atol=5e-6)


def test_scores_are_the_log_likelihoods_of_transformers_logits() -> None:
    golden = reference("yarn")
    source = open_hugging_face(str(TRANSFORMERS / "yarn")).unpadded()
    recipe = RECIPE.model_copy(update={"model": source.description.model})
    mesh = mesh_of(jax.devices()[:2])
    weights = load_params(source, param_shardings(recipe.model, mesh))
    tokens, logits = golden["tokens"], golden["logits"].astype(np.float64)
    likelihoods = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    given, expected = [], []
    for row, positions in ((0, [3, 4, 5]), (1, [0, 9]), (1, list(range(23)))):
        at = np.array(positions, np.int32)
        targets = tokens[row, at + 1]
        given.append(Row(tokens[row, : at[-1] + 1], at, targets))
        expected.append(likelihoods[row, at, targets])
    for ours, theirs in zip(Scorer(recipe, mesh, 24).score(weights, given), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_few_shapes_hold_every_row() -> None:
    assert length_buckets(100) == [16, 32, 64, 100]
    assert length_buckets(5) == [5]
    shapes = {shape_of(row, LONGEST) for row in rows(50, 500)}
    assert shapes <= {Shape(n, k) for n in (16, 24) for k in (n // 8, n)}
    for row in rows(50, 500):
        shape = shape_of(row, LONGEST)
        assert len(row.tokens) <= shape.length
        assert len(row.targets) <= shape.asked


def test_progress_is_told_before_each_batch_and_at_the_end() -> None:
    mesh = mesh_of(jax.devices()[:1])
    told: list[Any] = []
    given = [row for row in rows(RECIPE.model.vocab_size) if len(row.tokens) > 16]
    Scorer(RECIPE, mesh, LONGEST).score(params(RECIPE, mesh), given, lambda *now: told.append(now))
    assert told[0] == (0, True)
    assert told[-1] == (len(given), False)
    assert [compiles for _, compiles in told].count(True) == len({shape_of(row, LONGEST) for row in given})
