"""Every tensor of a model as others store it: one per parameter and layer, [out, in], the vocabulary without padding.

All of it follows from the one definition per parameter (trainer.params.param_specs): 355 tensors for OLMo 3 7B.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np

from trainer.errors import ConfigurationError
from trainer.params import param_specs
from trainer.recipe import Model

Naming = Literal["hf", "olmo_core"]
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
SHOWN_PROBLEMS = 20


class Slot(NamedTuple):
    """The place of one tensor: `layer` of `parameter` (None: it has no layers)."""

    parameter: str
    layer: int | None
    hf: str
    olmo_core: str
    shape: tuple[int, ...]
    turned: bool  # [in, out] here, [out, in] there
    vocabulary: bool  # its first dimension there is the vocabulary

    def name(self, naming: Naming) -> str:
        """What the tensor is called there."""
        return self.hf if naming == "hf" else self.olmo_core


def slots(model: Model) -> list[Slot]:
    """All tensors of `model`: embedding, the layers in order, final norm, head."""
    specs = param_specs(model)
    found: dict[int, list[Slot]] = {}
    for name, spec in specs.items():
        layered = spec.axes[0] == "layer"
        own, axes = (spec.shape[1:], spec.axes[1:]) if layered else (spec.shape, spec.axes)
        vocabulary = "vocab" in axes
        turned = len(own) == 2 and axes[0] != "vocab"
        shape = tuple(model.vocab_size if axis == "vocab" else size for size, axis in zip(own, axes, strict=True))
        for i in range(model.n_layers) if layered else (None,):
            names = spec.hf.format(i=i), spec.olmo_core.format(i=i)
            slot = Slot(name, i, *names, shape[::-1] if turned else shape, turned, vocabulary)
            place = i if i is not None else -1 if name == "embedding" else model.n_layers
            found.setdefault(place, []).append(slot)
    return [slot for place in sorted(found) for slot in found[place]]


def check_tensors(
    found: Mapping[str, tuple[str, tuple[int, ...]]], wanted: Sequence[Slot], model: Model, naming: Naming, source: str
) -> None:
    """Compare the tensors of `source`, name → (dtype, shape), with those of the model.

    Raises ConfigurationError naming each tensor that is missing, unknown, mis-shaped or of a dtype that is no weight's,
    with what was expected.
    """
    expected = {slot.name(naming): slot for slot in wanted}
    problems = []
    for name, slot in expected.items():
        shapes = [slot.shape]
        if slot.vocabulary and model.padded_vocab_size != model.vocab_size:
            shapes.append((model.padded_vocab_size, *slot.shape[1:]))
        if name not in found:
            problems.append(f"{name} is missing, expected {list(slot.shape)}")
            continue
        dtype, shape = found[name]
        if shape not in shapes:
            problems.append(f"{name} is {list(shape)}, expected {' or '.join(str(list(s)) for s in shapes)}")
        if dtype not in DTYPES:
            problems.append(f"{name} is {dtype}, expected one of {', '.join(DTYPES)}")
    for name, (_, shape) in found.items():
        if name not in expected:
            near = difflib.get_close_matches(name, expected, n=1, cutoff=0.8)
            hint = f"; did you mean {near[0]}?" if near else ""
            problems.append(f"{name} {list(shape)} is no tensor of this model{hint}")
    if problems:
        more = len(problems) - SHOWN_PROBLEMS
        shown = problems[:SHOWN_PROBLEMS] + ([f"… and {more} more"] if more > 0 else [])
        raise ConfigurationError(
            f"{source}: its {len(found)} tensors are not the {len(wanted)} of this model: {'; '.join(shown)}"
        )


def to_ours(slot: Slot, tensor: np.ndarray, model: Model) -> np.ndarray:
    """The slice of our parameter, float32, from the tensor as others store it.

    Missing rows of the vocabulary: the embedding's are zero, as they are never looked up. The head's are the mean of its
    rows, so that their logits are the mean logit: together they then take at most padding ÷ vocabulary of the
    probability (the exponential is convex), 0.07 % at OLMo 3's sizes. With zeros it could be nearly all of it, since
    nothing but the z-loss says where the logits lie.
    """
    wide = tensor.astype(np.float32, copy=False)
    missing = model.padded_vocab_size - len(wide) if slot.vocabulary else 0
    if missing:
        row = np.mean(wide, axis=0, dtype=np.float64).astype(np.float32) if slot.turned else np.float32(0)
        wide = np.concatenate([wide, np.broadcast_to(row, (missing, wide.shape[1]))])
    return wide.T if slot.turned else wide


def from_ours(slot: Slot, value: np.ndarray, dtype: np.dtype, padded: bool = False) -> np.ndarray:
    """The tensor as others store it, from the slice of our parameter; `padded` keeps the padding of the vocabulary.

    Rounds to the nearest even where `dtype` is narrower.
    """
    tensor = value.T if slot.turned else value
    if slot.vocabulary and not padded:
        tensor = tensor[: slot.shape[0]]
    # Casting first halves what transposing has to move.
    return np.ascontiguousarray(tensor.astype(dtype, order="K", copy=False))


def own_shape(slot: Slot, model: Model) -> tuple[int, ...]:
    """The shape of the slice of our parameter."""
    shape = param_specs(model)[slot.parameter].shape
    return shape if slot.layer is None else shape[1:]
