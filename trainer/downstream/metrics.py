"""Metrics of log-likelihoods, as `olmo_eval.metrics.ICLMetric` computes them; names as OLMo-core logs them.

Per choice in float32, as theirs, so that what is a tie there is one here; means over documents in float64. "v1" takes
lengths of continuations without their first character, mostly a space; "v2" with it (OLMo-in-loop-evals, PR 6).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.downstream.choices import Choice

BITS = np.float32(1.44269504089)  # their LOG_2_OF_E

LABELS = {  # olmo_core.train.callbacks.evaluator_callback.DownstreamEvaluator.metric_type_to_label
    "f1": "F1 score",
    "acc": "accuracy",
    "len_norm": "length-normalized accuracy",
    "pmi_dc": "PMI-DC accuracy",
    "ce_loss": "CE loss",
    "bpb": "BPB",
    "soft": "soft loss",
    "soft_log": "log soft loss",
}

F32 = npt.NDArray[np.float32]


class Scores(NamedTuple):
    """Of the choices of one document, f32[n] each: what is compared, cross entropy per character, bits per byte."""

    likelihood: F32
    ce: F32
    bits: F32


def metrics(
    metric: str, choices: Sequence[Choice], likelihoods: Sequence[float], domain: Sequence[float] | None = None
) -> dict[str, float]:
    """{metric name with _v1 or _v2: value} of one task.

    `likelihoods[i]` is the log-likelihood in nats of `choices[i]`; `domain[i]` that of the same text after its domain's
    context, for pmi_dc. A document whose choices are not numbered 0..n-1 is left out, as theirs are.
    """
    documents: dict[int, list[int]] = {}
    for i, choice in enumerate(choices):
        documents.setdefault(choice.document, []).append(i)
    found: dict[str, list[float]] = {}
    judged: dict[str, list[tuple[int, int]]] = {"v1": [], "v2": []}  # for f1: (right choice, chosen one)
    for numbers in documents.values():
        chosen = sorted(numbers, key=lambda i: choices[i].choice)
        if [choices[i].choice for i in chosen] != list(range(len(chosen))):
            continue
        label = choices[chosen[0]].label
        of_document = [choices[i] for i in chosen]
        given = np.array([likelihoods[i] for i in chosen], np.float32)
        less = np.array([domain[i] for i in chosen], np.float32) if domain is not None else None
        for version in ("v1", "v2"):
            scores = _scores(metric, of_document, given, less, version)
            judged[version].append((label, int(np.argmax(scores.likelihood))))
            for name, value in _of_document(metric, scores, label).items():
                found.setdefault(f"{name}_{version}", []).append(value)
    if metric == "f1":
        return {f"f1_{version}": _f1(pairs) for version, pairs in judged.items()}
    if metric not in ("ce_loss", "bpb"):
        found[f"{metric}_v1"] = found[f"{metric}_v2"]  # there, both are of the lengths with the first character
    return {name: math.fsum(values) / len(values) for name, values in found.items()}


def likelihoods(choices: Sequence[Choice], scores: Sequence[F32]) -> tuple[list[float], list[float] | None]:
    """(log-likelihood of each choice, that after its domain's context or None), from the scores of their rows."""

    def total(row: int, first: int, end: int) -> float:
        return float(np.sum(scores[row][first:end], dtype=np.float64))

    given = [total(choice.row, choice.first, choice.end) for choice in choices]
    if not choices or choices[0].domain_row < 0:
        return given, None
    return given, [total(choice.domain_row, 0, choice.end - choice.first) for choice in choices]


def labelled(task: str, values: dict[str, float]) -> dict[str, float]:
    """The same by the names of OLMo-core's logs: `hellaswag_rc_5shot (length-normalized accuracy v2)`."""
    named = {}
    for name, value in values.items():
        metric, _, version = name.rpartition("_")
        named[f"{task} ({LABELS[metric]}{'' if version == 'v1' else f' {version}'})"] = value
    return named


def _scores(metric: str, choices: Sequence[Choice], given: F32, less: F32 | None, version: str) -> Scores:
    if metric == "pmi_dc":
        assert less is not None, "pmi_dc compares with the likelihood after the domain's context"
        ratio = given / less
        return Scores(ratio, -ratio, -ratio)
    short = version == "v1"
    characters = np.array([c.characters_without_space if short else c.characters for c in choices], np.float32)
    size = np.array([c.bytes_without_space if short else c.bytes for c in choices], np.float32)
    with np.errstate(divide="ignore"):  # a continuation of one character has none without it
        likelihood = given if metric in ("acc", "f1") else given / characters
        return Scores(likelihood, -given / characters, -given / size * BITS)


def _of_document(metric: str, scores: Scores, label: int) -> dict[str, float]:
    """What one document adds to each mean."""
    if metric == "f1":
        return {}
    if metric == "ce_loss":
        return {"ce_loss": float(scores.ce[0])}  # one answer is scored
    if metric == "bpb":
        return {"bpb": float(scores.bits[0])}
    chances = _log_softmax(scores.likelihood)
    return {
        metric: float(int(np.argmax(scores.likelihood)) == label),
        "ce_loss": float(scores.ce[label]),
        "bpb": float(scores.bits[label]),
        "soft": float(np.exp(chances[label])),
        "soft_log": float(chances[label]),
    }


def _log_softmax(values: F32) -> npt.NDArray[np.float64]:
    wide = values.astype(np.float64)
    shifted = wide - wide.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def _f1(pairs: Sequence[tuple[int, int]]) -> float:
    """F1 of (right choice, chosen one), choice 0 being the positive one: "yes" of the tasks that use it."""
    both = sum(label == 0 and chosen == 0 for label, chosen in pairs)
    only_chosen = sum(label != 0 and chosen == 0 for label, chosen in pairs)
    only_right = sum(label == 0 and chosen != 0 for label, chosen in pairs)
    return 2 * both / (2 * both + only_chosen + only_right) if both else 0.0
