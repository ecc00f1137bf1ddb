"""The tokenizer that a recipe's token files were written with, for the texts of downstream tasks."""

from collections.abc import Sequence

from trainer.data.tokenizer import DOLMA2, Encoder, find_tokenizer
from trainer.downstream.choices import Encode
from trainer.errors import ConfigurationError
from trainer.recipe import Recipe

BYTES = "bytes"
OF_EOS = {100_257: DOLMA2, 256: BYTES}  # the id that ends a document says which tokenizer it is


def encoder_for(recipe: Recipe, name: str | None = None) -> Encode:
    """Texts to ids by tokenizer `name` (dolma2, bytes, a tokenizer.json), by default the one of data.eos_id.

    Special tokens in a text are those tokens, as in AI2's evaluation code. Raises ConfigurationError when no tokenizer
    is known for the recipe, or when it has ids that the model has no row for.
    """
    name = name or OF_EOS.get(recipe.data.eos_id)
    if name is None:
        raise ConfigurationError(
            f"downstream tasks: no tokenizer is known whose documents end with data.eos_id {recipe.data.eos_id}; "
            "set evaluation.tokenizer (--tokenizer) to a tokenizer.json"
        )
    if name == BYTES:
        _check(name, 256, recipe)
        return _bytes
    file = find_tokenizer(name, recipe.data.eos_id)
    _check(name, file.vocab_size, recipe)
    return Encoder(file, special_tokens="ids")


def _bytes(texts: Sequence[str]) -> list[list[int]]:
    return [list(text.encode()) for text in texts]


def _check(name: str, size: int, recipe: Recipe) -> None:
    if size > recipe.model.vocab_size:
        raise ConfigurationError(
            f"tokenizer {name} has {size} ids, and model.vocab_size is {recipe.model.vocab_size}: it is not the one "
            "that the recipe's token files were written with; set evaluation.tokenizer (--tokenizer)"
        )
