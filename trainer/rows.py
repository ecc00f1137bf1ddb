"""What the tokens of an instance say about themselves: which are targets, and where documents begin.

All of it is a function of the tokens and the recipe, computed where the tokens are. So nothing travels beside them that
could get out of step with them, and the hash of the tokens covers it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trainer.data.filter import keeps
from trainer.recipe import Data


class Rows(NamedTuple):
    """Instances as the loss takes them."""

    tokens: jax.Array  # int32 [batch, length]
    targets: jax.Array  # f32 [batch, length]: 1 where the next token is to be predicted, else 0
    documents: jax.Array | None  # int32 [batch, length]: attention stays within equal numbers; None: it may go anywhere
    counted: jax.Array  # int32 [batch]: what each instance adds to the denominator of the loss


def all_are_targets(data: Data) -> bool:
    """Whether every position but the last of every instance is one, so that nothing need be counted."""
    return data.packing is None and data.repetition_filter is None and not data.untrained_bit


def read_rows(tokens: jax.Array, data: Data, training: bool = True, real: jax.Array | None = None) -> Rows:
    """The rows of tokens int32 [batch, length]; with `real` bool [batch], those where it is false hold no instance.

    Padding is no target, nor is a token with the untrained bit, which is the sign here. An instance that the repetition filter refuses has no targets, but counts with all its tokens,
    as in OLMo-core's train module; the filter is for training only.
    """
    length, stored = tokens.shape[1], tokens
    targets = jnp.broadcast_to(jnp.arange(length) < length - 1, tokens.shape)
    if data.packing is not None:
        targets &= jnp.roll(tokens, -1, axis=1) != data.packing.pad_id
    if data.untrained_bit:
        targets &= jnp.roll(stored, -1, axis=1) >= 0
        tokens = stored & 0x7FFFFFFF
    counted = jnp.sum(targets, axis=1, dtype=jnp.int32)
    if data.repetition_filter is not None and training:
        kept = keeps(tokens, data.repetition_filter, jnp)
        targets &= kept[:, None]
        counted = jnp.where(kept, counted, length)
    if real is not None:
        targets, counted = targets & real[:, None], jnp.where(real, counted, 0)
    documents = None
    if data.mask_documents:
        is_end = (stored == data.eos_id).astype(jnp.int32)  # within a prompt it ends nothing
        documents = jnp.cumsum(is_end, axis=1) - is_end  # an eos_id is the last token of its own document
    return Rows(tokens, targets.astype(jnp.float32), documents, counted)
