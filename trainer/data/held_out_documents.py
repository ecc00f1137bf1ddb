"""A named held-out set: the documents of its token files, each by itself, as OLMo-core's padded datasets have them.

A document ends with its eos_id; what is longer than a sequence is cut there, what follows the last eos_id of a file is
none. OLMo-core (`NumpyPaddedFSLDataset`, `LMEvaluator`) divides the summed cross entropy by the number of tokens, the
first of each document included although nothing predicts it; so does `mean_loss`, or curves would not overlay. It
leaves out the tail that fills no batch of its device count; here every document counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.data.packing import documents
from trainer.data_root import DataRoot, read_whole
from trainer.errors import ConfigurationError
from trainer.recipe import UNTRAINED, Recipe
from trainer.scoring import F32, Row


@dataclass(frozen=True)
class Documents:
    """One set, ready to be scored. A row asks for all tokens of a document but its first."""

    rows: tuple[Row, ...]
    documents: int
    tokens: int  # that the loss is divided by
    cut: int  # documents longer than a sequence
    bytes: int


def read_documents(
    recipe: Recipe, root: DataRoot, name: str, files: Sequence[str], limit: int | None = None
) -> Documents:
    """The documents of set `name`, or the first `limit` of them. Raises ConfigurationError naming the file, StorageUnavailable."""
    dtype = np.dtype(recipe.data.dtype).newbyteorder("<")
    rows: list[Row] = []
    count = tokens = cut = size = 0
    for path in files:
        there = root.size(path)
        if there % dtype.itemsize:
            raise ConfigurationError(
                f"set {name}: {path} has {there} bytes, no whole number of {recipe.data.dtype} tokens; write it again"
            )
        raw = np.empty(there // dtype.itemsize, dtype)
        read_whole(root, path, memoryview(raw).cast("B"))
        size += there
        known = raw & np.uint32(UNTRAINED - 1) if recipe.data.untrained_bit else raw
        if raw.size and int(known.max()) >= recipe.model.vocab_size:
            raise ConfigurationError(
                f"set {name}: {path} holds token {int(known.max())}, and model.vocab_size is {recipe.model.vocab_size}; "
                f"give a file of {recipe.data.dtype} tokens of the recipe's tokenizer"
            )
        starts, whole = documents(raw, recipe.data.eos_id, len(raw))
        for start, length in zip(starts.tolist(), whole.tolist(), strict=True):
            if count == limit:
                break
            end = start + min(length, recipe.sequence_length)
            asked = raw[start:end] == known[start:end]  # a prompt's tokens are no targets
            positions = np.flatnonzero(asked[1:]).astype(np.int32)
            targets = known[start + 1 : end][positions].astype(np.int32)
            if len(positions):
                rows.append(Row(known[start : end - 1].astype(np.int32), positions, targets))
            count += 1
            tokens += int(np.count_nonzero(asked))
            cut += length > recipe.sequence_length
    if not count:
        raise ConfigurationError(f"set {name}: no document in {', '.join(files)} ends with eos_id {recipe.data.eos_id}")
    return Documents(tuple(rows), count, tokens, cut, size)


def mean_loss(found: Documents, scores: Sequence[F32]) -> float:
    """Mean cross entropy per token, in nats, from the log-likelihoods of `found.rows`."""
    return -math.fsum(float(np.sum(row, dtype=np.float64)) for row in scores) / max(found.tokens, 1)
