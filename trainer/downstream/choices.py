"""Requests as token rows: what is asked of the model, and which scores belong to which choice.

Tokens are those of `olmo_eval.tasks`: context and continuation tokenised apart, then joined; a row longer than the
sequence length loses its beginning. A continuation that is longer itself is scored over what is left of it, where AI2's
code fails, and counted (`Choices.cut`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trainer.downstream.catalog import Task
from trainer.downstream.requests import Request
from trainer.scoring import Row

Encode = Callable[[Sequence[str]], list[list[int]]]
ENCODED_AT_ONCE = 4096


class Choice(NamedTuple):
    """One choice. Its log-likelihood is the sum of scores[first:end] of its row, given the context; `domain`: given that."""

    document: int
    choice: int
    label: int
    characters: int
    bytes: int
    characters_without_space: int  # AI2's "v1" leaves the first character out, mostly a space
    bytes_without_space: int
    row: int
    first: int
    end: int
    domain_row: int = -1


@dataclass(frozen=True)
class Choices:
    """A task ready to be scored."""

    choices: tuple[Choice, ...]
    rows: tuple[Row, ...]
    truncated: int  # rows that lost the beginning of their context
    cut: int  # continuations that lost their own beginning


def tokenize(task: Task, requests: Sequence[Request], encode: Encode, longest: int) -> Choices:
    """The rows of `requests`, at most `longest` tokens each."""
    contexts = _encoded(encode, [request.context for request in requests])
    continuations = _encoded(encode, [request.continuation for request in requests])
    domains = _encoded(encode, [request.domain for request in requests]) if task.metric == "pmi_dc" else {}
    rows: list[Row] = []
    choices: list[Choice] = []
    asked_together: dict[tuple[int, str], list[tuple[Request, int]]] = {}
    truncated = cut = 0
    for request in requests:
        continuation = continuations[request.continuation]
        if task.fast and len(continuation) == 1:
            asked_together.setdefault((request.document, request.context), []).append((request, continuation[0]))
            continue
        row, lost = _row(contexts[request.context], continuation, longest)
        truncated += lost > 0
        cut += len(row.targets) < len(continuation)
        domain_row = -1
        if task.metric == "pmi_dc":
            domain_row = len(rows) + 1
        choices.append(_choice(request, len(rows), 0, len(row.targets), domain_row))
        rows.append(row)
        if task.metric == "pmi_dc":
            rows.append(_row(domains[request.domain], continuation, longest)[0])
    for (_, context), asked in asked_together.items():
        tokens = np.asarray(contexts[context][-longest:], np.int32)
        truncated += len(contexts[context]) > longest
        last = np.full(len(asked), len(tokens) - 1, np.int32)
        for at, (request, _) in enumerate(asked):
            choices.append(_choice(request, len(rows), at, at + 1))
        rows.append(Row(tokens, last, np.asarray([token for _, token in asked], np.int32)))
    return Choices(tuple(choices), tuple(rows), truncated, cut)


def _row(context: list[int], continuation: list[int], longest: int) -> tuple[Row, int]:
    """(the row of one continuation, tokens lost at its beginning)."""
    tokens = context + continuation[:-1]
    lost = max(0, len(tokens) - longest)
    positions = np.arange(len(context) - 1, len(context) - 1 + len(continuation), dtype=np.int32) - lost
    there = positions >= 0
    targets = np.asarray(continuation, np.int32)
    return Row(np.asarray(tokens[lost:], np.int32), positions[there], targets[there]), lost


def _choice(request: Request, row: int, first: int, end: int, domain_row: int = -1) -> Choice:
    text = request.continuation
    return Choice(
        request.document,
        request.choice,
        request.label,
        len(text),
        len(text.encode()),
        len(text) - 1,
        len(text[1:].encode()),
        row,
        first,
        end,
        domain_row,
    )


def _encoded(encode: Encode, texts: Sequence[str]) -> dict[str, list[int]]:
    """Ids of each distinct text: the choices of a document share its context."""
    distinct = list(dict.fromkeys(texts))
    found: dict[str, list[int]] = {}
    for first in range(0, len(distinct), ENCODED_AT_ONCE):
        part = distinct[first : first + ENCODED_AT_ONCE]
        found.update(zip(part, encode(part), strict=True))
    return found
