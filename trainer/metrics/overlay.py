"""Two curves over each other: where they differ, by how much, and from where on they do not come together again. Pure.

Single steps scatter more than curves differ, and both runs saw the same batches only if their orders are equal. So what is judged
is the difference of means over a window of steps.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.errors import ConfigurationError
from trainer.metrics.curves import Curve

F64 = npt.NDArray[np.float64]
PARTS = 10


@dataclass(frozen=True)
class Part:
    """One stretch of the common steps."""

    first: int
    last: int
    steps: int  # that both have
    ours: float  # means
    reference: float
    difference: float
    largest: float | None  # windowed difference of largest size in it, with its sign; None before the first window
    at: int | None  # where that is


@dataclass(frozen=True)
class Overlay:
    """The difference ours - reference at the steps that both have."""

    steps: F64
    ours: F64
    reference: F64
    window: int  # steps of the runs, not rows of the tables
    smooth: F64  # mean difference over the window that ends at each step; NaN where it would reach before the first

    @property
    def mean(self) -> float:
        return float((self.ours - self.reference).mean())

    @property
    def largest(self) -> tuple[float, int]:
        """(windowed difference of largest size, the step where it is)."""
        at = int(np.nanargmax(np.abs(self.smooth)))
        return float(self.smooth[at]), int(self.steps[at])

    def leaves(self, tolerance: float) -> int | None:
        """The first step at which the windowed difference is larger than `tolerance`; None: nowhere."""
        over = np.flatnonzero(np.abs(self.smooth) > tolerance)
        return int(self.steps[over[0]]) if over.size else None

    def beyond(self, tolerance: float) -> float:
        """Share of the windows in which it is."""
        return float((np.abs(self.smooth) > tolerance).sum() / np.isfinite(self.smooth).sum())

    def parts(self) -> list[Part]:
        """The common steps in up to ten stretches of equal length."""
        found = []
        for index in np.array_split(np.arange(self.steps.size), min(PARTS, self.steps.size)):
            ours, reference, smooth = self.ours[index], self.reference[index], self.smooth[index]
            size = np.nan_to_num(np.abs(smooth), nan=-1.0)
            at = int(np.argmax(size))
            found.append(
                Part(
                    first=int(self.steps[index[0]]),
                    last=int(self.steps[index[-1]]),
                    steps=index.size,
                    ours=float(ours.mean()),
                    reference=float(reference.mean()),
                    difference=float((ours - reference).mean()),
                    largest=None if size[at] < 0 else float(smooth[at]),
                    at=None if size[at] < 0 else int(self.steps[index[at]]),
                )
            )
        return found


def overlay(ours: Curve, reference: Curve, window: int, first: int = 0) -> Overlay:
    """Compare at the common steps from `first` on. Raises ConfigurationError when there are none.

    Where the common steps are fewer than a window, all of them are one.
    """
    steps, a, b = np.intersect1d(ours.steps, reference.steps, return_indices=True)
    chosen = steps >= first
    steps, a, b = steps[chosen], a[chosen], b[chosen]
    if not steps.size:
        spans = [
            f"{c.source} has {c.steps.size:,} steps, {c.steps[0]:.0f}..{c.steps[-1]:.0f}" for c in (ours, reference)
        ]
        raise ConfigurationError(f"no step from {first} on is in both curves: {'; '.join(spans)}")
    mine, theirs = ours.values[a], reference.values[b]
    begin = np.searchsorted(steps, steps - window, side="right")
    sums = np.concatenate(([0.0], np.cumsum(mine - theirs)))
    end = np.arange(1, steps.size + 1)
    smooth = (sums[end] - sums[begin]) / (end - begin)
    smooth[:-1][steps[:-1] < steps[0] + window - 1] = np.nan
    return Overlay(steps, mine, theirs, window, smooth)
