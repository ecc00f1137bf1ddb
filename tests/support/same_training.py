"""The same training on devices that are laid out in another way: a recipe with all that masks, its batches, and what must agree."""

from typing import Any

import numpy as np

from trainer.digest import hash_text
from trainer.recipe import Recipe, RepetitionFilter


def masked(recipe: Recipe) -> Recipe:
    """With documents kept apart, and instances that repeat themselves left out of the loss."""
    repetition = RepetitionFilter(min_period=1, max_period=3, max_count=4)
    data = recipe.data.model_copy(update={"mask_documents": True, "repetition_filter": repetition})
    return recipe.model_copy(update={"data": data})


def rows_of(recipe: Recipe, t: int) -> dict[str, np.ndarray]:
    """Batch t of a small recipe. Token 0 ends documents; one instance of batch 1 repeats itself."""
    random, shape = np.random.default_rng(t), (recipe.global_batch, recipe.sequence_length)
    tokens = random.integers(0, 30, shape).astype(np.int32)
    tokens[:, [5, 12, 13]] = 0
    if t == 1:
        tokens[2] = 7
    return {"tokens": tokens, "ids": random.integers(0, 2**32, (recipe.global_batch, 2)).astype(np.uint32)}


def assert_same_training(
    metrics: list[Any], wanted_metrics: list[Any], moments: dict[str, Any], wanted_moments: dict[str, Any]
) -> None:
    """Metrics of each step, and the first moments after the last: these hold the gradients of all steps, clipped by the norm."""
    for found, other in zip(metrics, wanted_metrics, strict=True):
        assert hash_text(found["ids_hash"]) == hash_text(other["ids_hash"])
        assert hash_text(found["data_hash"]) == hash_text(other["data_hash"])
        np.testing.assert_allclose(found["loss"], other["loss"], rtol=2e-6)
        np.testing.assert_allclose(found["grad_norm"], other["grad_norm"], rtol=2e-5)
        assert found["lr"] == other["lr"]
    assert moments.keys() == wanted_moments.keys()
    for leaf, value in moments.items():
        scale = np.abs(wanted_moments[leaf]).max()
        np.testing.assert_allclose(value, wanted_moments[leaf], atol=1e-4 * scale, err_msg=leaf)
