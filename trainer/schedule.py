"""Learning rate as a function of the step, in pieces, with OLMo-core's formulas (src/olmo_core/optim/scheduler.py).

The update from step N to N + 1 uses `learning_rate(schedule, N + 1)`: OLMo-core advances its counter before the update,
so that the first one is not wasted on a rate of zero.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from trainer.recipe import SchedulePiece


def learning_rate(schedule: Sequence[SchedulePiece], step: Any) -> Any:
    """Float32 learning rate at `step`: an int (gives np.float32), a numpy array, or a JAX array inside or outside jit.

    The piece in force at `step` is the first one with `step < until_step`; after the last one, the last one. On devices
    the arithmetic is float32 too: a few units in the last place from `exact_rate`.
    """
    if isinstance(step, (int, float, np.ndarray, np.generic)):
        return np.asarray(exact_rate(schedule, step), np.float32)[()]
    import jax.numpy as jnp

    return _pieces(schedule, jnp.asarray(step).astype(jnp.float32), jnp)


def exact_rate(schedule: Sequence[SchedulePiece], step: Any) -> Any:
    """The same in float64, on the host."""
    return _pieces(schedule, np.asarray(step, np.float64), np)


def _pieces(schedule: Sequence[SchedulePiece], step: Any, xp: ModuleType | Any) -> Any:
    *earlier, last = schedule
    rate = _piece(last, step, xp)
    for piece in reversed(earlier):
        limit = np.inf if piece.until_step is None else piece.until_step
        rate = xp.where(step < limit, _piece(piece, step, xp), rate)
    return rate


def _piece(piece: SchedulePiece, step: Any, xp: ModuleType | Any) -> Any:
    """A half cosine begins halfway down, so it warms up to there.

    Written with what is left, not with what is done: the difference of two whole numbers is exact in float32 below
    2^24, and (1 + cos πx) / 2 = sin²(π(1 - x) / 2) loses nothing where the cosine nears -1.
    """
    low = piece.alpha_f * piece.peak
    top = (piece.peak + low) / 2 if piece.shape == "half_cosine" else piece.peak
    warm = top * step / max(piece.warmup_steps, 1)
    length = max(piece.total_steps - piece.warmup_steps, 1)
    left = xp.clip((piece.total_steps - step) / length, 0, 1)
    if piece.shape == "cosine":
        after = low + (piece.peak - low) * xp.sin(np.pi / 2 * left) ** 2
    elif piece.shape == "half_cosine":
        after = low + (piece.peak - low) * xp.sin(np.pi / 4 * left) ** 2
    elif piece.shape == "linear":
        after = low + (piece.peak - low) * left
    else:
        after = piece.peak
    return xp.where(step < piece.warmup_steps, warm, after)
