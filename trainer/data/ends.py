"""Do documents end as the recipe says? Files of another tokenizer often have no id that is too large, so that nothing is refused."""

import numpy as np

from trainer.data.held_out import sample
from trainer.data.mix import Mix
from trainer.recipe import Recipe

LOOKED_AT_BYTES = 4 << 20  # a million tokens of uint32, in which documents end some hundred times


def unended(recipe: Recipe, data_root: str) -> str | None:
    """What to say if data.eos_id is nowhere in instances spread over the training files of a frozen recipe; else None.

    Not certain, so a warning: a small corpus may be one document. Raises ConfigurationError for ids above the vocabulary.
    """
    mix = Mix(recipe, data_root)
    ids = sample(mix, LOOKED_AT_BYTES)
    fitting = max(64, LOOKED_AT_BYTES // (recipe.sequence_length * mix.token_bytes))
    ids = ids[np.unique(np.linspace(0, len(ids) - 1, fitting).astype(np.int64))]  # at least two of every file are many
    if any((mix.instance(instance) == recipe.data.eos_id).any() for instance in ids.tolist()):
        return None
    return (
        f"data.eos_id {recipe.data.eos_id}, which ends documents, is nowhere in the {len(ids):,} training instances looked "
        "at; were the files written with another tokenizer? (what `data tokenize` wrote is said in its tokens.json)"
    )
