"""The memorisation alarm: training loss that falls below what the held-out loss says it should be.

Text that was never read before costs a model what held-out text costs it, up to the difference of the two kinds of text.
Text that is read again costs less. So the gap (training loss minus held-out loss, over the same steps) is predicted
at each evaluation from the evaluations before it, and the shortfalls are summed up:

1. Each evaluation closes an interval of steps. Its training loss is the mean over these steps; its held-out loss the mean
   over the same steps of the held-out curve, linear in log(step) between evaluations. Where both curves fall
   steeply, or the learning rate drops, both sides of the gap fall together.
2. The gap of the interval is predicted. Held-out text that was split off the training text (`same_text`): by the mean of all
   intervals so far. Held-out text of another kind, where the gap may well move as the model learns: by a straight line in
   the held-out loss through the intervals of the last three quarters of the run. The error, divided by its standard
   error, is about Student-t distributed where gaps scatter normally, and is turned into a normal deviate z.
3. A one-sided cumulative sum, score = min(0, score + z + SLACK), raises the alarm at -THRESHOLD (Page, Biometrika 1954). z is
   cut at ±CUT, so that no single interval can do it, and a tolerance in nats is part of the standard error, so that nobody
   is called for a gap that does not matter.

False alarms: with normal scatter one in about a million evaluations (`evaluations_between_false_alarms`), that is once in
700 runs with an evaluation every 1,000 of 1.41 million steps; scatter that hangs together is measured and allowed for. What
it cannot see: repeats that lower the loss by less than the tolerance; and against text of another kind also a gap that
grows evenly from the first evaluations on, which a slow change of the two kinds would look like.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from trainer.rundir.alarms import TrendPoint

F64 = npt.NDArray[np.float64]
Numbers = Sequence[float] | F64

SLACK = 0.5  # standard errors per evaluation that count as nothing: half of the shift that is found fastest
THRESHOLD = 12.0
CUT = 4.0
TOLERANCE = 0.005  # nats
BEND = 10.0  # times the tolerance more per nat that the held-out loss lies beyond the intervals remembered: lines bend
LAG = 4  # intervals after which scatter no longer hangs together
FEWEST = 12  # intervals before the first prediction
MOST_CORRELATED = 0.9
REACH = 4  # intervals from a quarter of the steps on are remembered
SUSPICIOUS = THRESHOLD / 2  # intervals below this score are not learnt from: the alarm must not get used to them


@dataclass(frozen=True)
class Intervals:
    """The steps between evaluations: all arrays are float64[n], in order."""

    step: F64  # the evaluation that closes it
    train: F64  # mean training loss over the steps of the interval, nats
    held_out: F64  # mean of the interpolated held-out loss over the same steps, nats
    steps: F64  # how many training losses that mean has


@dataclass(frozen=True)
class Verdict:
    """Float64[n] per interval; NaN where there was nothing to predict from."""

    step: F64
    expected: F64  # training loss that the held-out loss speaks for
    z: F64  # standard errors that the training loss lies above it
    score: F64  # the cumulative sum, at most 0; the alarm is at -THRESHOLD
    alarm: int | None  # index of the first interval with the alarm
    threshold: float

    @property
    def standing(self) -> int | None:
        """Index of the interval at which the alarm that stands at the end was raised; None: none stands."""
        over = np.flatnonzero(~(self.score <= -self.threshold))
        first = int(over[-1]) + 1 if over.size else 0
        return first if first < self.score.size else None

    @property
    def alarm_step(self) -> int | None:
        return None if self.alarm is None else int(self.step[self.alarm])


def intervals(steps: Numbers, train: Numbers, at: Numbers, held_out: Numbers) -> Intervals:
    """Pair the training losses at `steps` (all, or a sample of them) with the held-out losses of the states after steps `at`.

    Both in ascending order. Training losses outside of the held-out curve, and values that are not finite, are left out.
    """
    s, t = np.asarray(steps, np.float64), np.asarray(train, np.float64)
    e, h = np.asarray(at, np.float64), np.asarray(held_out, np.float64)
    s, t = s[np.isfinite(t)], t[np.isfinite(t)]
    e, h = e[np.isfinite(h) & (e > 0)], h[np.isfinite(h) & (e > 0)]
    inside = (s > e[0]) & (s <= e[-1]) if e.size else np.zeros(s.size, np.bool_)
    s, t = s[inside], t[inside]
    if not s.size:
        return Intervals(*(np.empty(0) for _ in range(4)))
    which = np.searchsorted(e, s, side="left")  # the evaluation that closes the interval of each step
    follows = np.interp(np.log(s), np.log(e), h)
    count = np.bincount(which, minlength=e.size).astype(np.float64)
    some = count > 0
    sums = [np.bincount(which, values, e.size)[some] / count[some] for values in (t, follows)]
    return Intervals(e[some], sums[0], sums[1], count[some])


def intervals_of(points: Sequence[TrendPoint]) -> Intervals:
    """The same from the points that a run keeps, of which each has the mean of consecutive steps."""
    rows = []
    for before, after in pairwise(points):
        first = after.first
        if after.train is not None and first is not None and 0 < before.step < first <= after.step:
            ends = (before.step, before.held_out), (after.step, after.held_out)
            follows = mean_between(first, after.step, *ends)
            rows.append((after.step, after.train, follows, after.step - first + 1))
    return Intervals(*np.array(rows, np.float64).reshape(-1, 4).T)


def tolerance_for(targets: int | None) -> float:
    """Nats: TOLERANCE, and how far a held-out set of so many targets may be off as the model changes (1 nat per target)."""
    return math.hypot(TOLERANCE, 1 / math.sqrt(targets)) if targets else TOLERANCE


def mean_between(first: int, last: int, before: tuple[int, float], after: tuple[int, float]) -> float:
    """Mean over steps first..last of the held-out loss, linear in log(step) from `before` to `after`: (step, loss)."""
    (s0, h0), (s1, h1) = before, after
    logs = (math.lgamma(last + 1) - math.lgamma(first)) / (last - first + 1)  # mean of log(step)
    return h0 + (h1 - h0) * (logs - math.log(s0)) / (math.log(s1) - math.log(s0))


def judge(
    given: Intervals, same_text: bool = False, threshold: float = THRESHOLD, tolerance: float = TOLERANCE
) -> Verdict:
    """The rule. Pure; the verdict on an interval depends on it and on earlier ones only.

    `same_text`: the held-out text was split off the training text at random, so the gap has no reason to move at all.
    """
    n = given.step.size
    expected, z, score = np.full(n, np.nan), np.full(n, np.nan), np.full(n, np.nan)
    gap, weight = given.train - given.held_out, given.steps / np.median(given.steps) if n else given.steps
    learnt = np.ones(n, np.bool_)
    total, alarm = 0.0, None
    for i in range(n):
        seen = np.flatnonzero(learnt[:i] & (same_text | (given.step[:i] >= given.step[i] / REACH)))
        if seen.size < FEWEST:
            continue
        line = (_Level if same_text else _Line)(given.held_out[seen], gap[seen], weight[seen])
        deviation = line.standard_error(given.held_out[i], weight[i])
        allowed = tolerance * (1 if same_text else 1 + BEND * abs(given.held_out[i] - line.mean_x))
        expected[i] = given.held_out[i] + line.at(given.held_out[i])
        t = (given.train[i] - expected[i]) / math.hypot(deviation, allowed)
        z[i] = normal_deviate(t, line.freedom)
        total = min(0.0, total + min(max(z[i], -CUT), CUT) + SLACK)
        score[i] = total
        learnt[i] = total > -SUSPICIOUS
        if alarm is None and total <= -threshold:
            alarm = i
    return Verdict(given.step, expected, z, score, alarm, threshold)


def evaluations_between_false_alarms(threshold: float = THRESHOLD, slack: float = SLACK) -> float:
    """Mean number of evaluations to a false alarm of the cumulative sum of independent normal deviates.

    Siegmund's approximation (Sequential Analysis, 1985, 2.6): the threshold corrected by 1.166 for the overshoot.
    """
    b = threshold + 1.166
    return (math.exp(2 * slack * b) - 1 - 2 * slack * b) / (2 * slack**2)


def normal_deviate(t: float, freedom: float) -> float:
    """The normal deviate with about the probability of Student's t (Wallace, Annals of Mathematical Statistics 1959)."""
    size = (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log1p(t * t / freedom))
    return math.copysign(size, t)


class _Line:
    """For held-out text of another kind: a weighted straight line. What does not lie on it counts as scatter."""

    def __init__(self, x: F64, y: F64, weight: F64) -> None:
        self.total = weight.sum()
        self.mean_x, self.mean_y = (weight * x).sum() / self.total, (weight * y).sum() / self.total
        self.spread = (weight * (x - self.mean_x) ** 2).sum()
        self.slope = (weight * (x - self.mean_x) * (y - self.mean_y)).sum() / self.spread if self.spread > 0 else 0.0
        self.freedom = float(x.size - 2)
        left = np.sqrt(weight) * (y - self.at(x))
        squares = (left**2).sum()
        self.variance = squares / self.freedom * _together((left[1:] * left[:-1]).sum() / squares if squares else 0.0)

    def at(self, x: F64 | float) -> F64 | float:
        return self.mean_y + self.slope * (x - self.mean_x)

    def standard_error(self, x: float, weight: float) -> float:
        """Of the difference between one more point, of this weight, and the line."""
        leverage = (x - self.mean_x) ** 2 / self.spread if self.spread > 0 else 0.0
        return math.sqrt(self.variance * (1 / weight + 1 / self.total + leverage))


class _Level:
    """For held-out text of the same kind: the weighted mean. Scatter is what changes within a few intervals, not drift."""

    def __init__(self, x: F64, y: F64, weight: F64) -> None:
        self.total = weight.sum()
        self.mean_x, self.mean_y = (weight * x).sum() / self.total, (weight * y).sum() / self.total
        near, far = (self._variance(y, weight, lag) for lag in (1, LAG))
        self.variance = far * _together(1 - near / far if far else 0.0)
        self.freedom = (y.size - LAG) / 2  # half: differences that overlap are not independent

    @staticmethod
    def _variance(y: F64, weight: F64, lag: int) -> float:
        differences = y[lag:] - y[:-lag]
        return float((differences**2 / (1 / weight[lag:] + 1 / weight[:-lag])).mean())

    def at(self, x: float) -> float:
        return float(self.mean_y)

    def standard_error(self, x: float, weight: float) -> float:
        """Of the difference between one more point, of this weight, and the mean."""
        return math.sqrt(self.variance * (1 / weight + 1 / self.total))


def _together(correlation: float) -> float:
    """How much larger the variance of sums is, per term, where neighbours are correlated."""
    correlation = min(max(correlation, 0.0), MOST_CORRELATED)
    return (1 + correlation) / (1 - correlation)
