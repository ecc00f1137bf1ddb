"""The n-gram repetition filter: instances in which a short pattern repeats too often are read, but not trained on.

OLMo-core's InstanceFilterConfig. AI2 did not use it for OLMo 3 7B; it is off unless a recipe asks for it. The decision is
a function of the instance's tokens alone, so it is taken where they are: on the devices, by this same code.
"""

from types import ModuleType
from typing import Any

import numpy as np

from trainer.recipe import RepetitionFilter


def keeps(tokens: Any, rule: RepetitionFilter, xp: ModuleType | Any = np) -> Any:
    """bool [...]: whether no pattern of min_period..max_period tokens stands max_count times in a row.

    tokens int [..., S]; `xp` is numpy or jax.numpy. A pattern of p tokens stands n times in a row where (n - 1)·p tokens
    in a row equal the one p before them. OLMo-core (find_periodic_sequences) looks for whole rows of p columns that equal
    the row above and extends them at both ends: the same stretches, for max_count of 3 or more.
    """
    kept = xp.ones(tokens.shape[:-1], bool)
    for period in range(rule.min_period, rule.max_period + 1):
        same = tokens[..., period:] == tokens[..., :-period]
        run = (rule.max_count - 1) * period
        if run > same.shape[-1]:
            break
        before = xp.concatenate(
            [xp.zeros((*same.shape[:-1], 1), np.int32), xp.cumsum(same, axis=-1, dtype=np.int32)], axis=-1
        )
        kept = kept & ~xp.any(before[..., run:] - before[..., :-run] == run, axis=-1)
    return kept
