"""Watches, on process 0 and beside the training, what is trained on: two alarms that do not stop the run.

coverage       a step did not read the instances that the order gives it: compared for every step, by the hash that the
               devices made. The loader compares too, before the step; this is the second look, at what arrived.
memorisation   the training loss falls below what the held-out loss speaks for (trainer/metrics/memorisation.py): text is
               being read again, whatever the records say. In the first epoch only; after that, repeats are wanted.

An alarm is a line in the log, a document in the run directory (alarms/), and from there a condition and an Event. All of it
happens in a thread of its own: the loop appends to a list, and a failure here is a warning and nothing more.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from trainer.data.explain import Explainer
from trainer.data.hashes import hash_text, ids_hashes
from trainer.data.order import BatchOrder
from trainer.log import log
from trainer.metrics.memorisation import intervals_of, judge, tolerance_for
from trainer.rundir.alarms import Alarm, AlarmKind, Trend, TrendPoint, raise_alarm
from trainer.rundir.records import CommitRef, StepLine
from trainer.rundir.rundir import RunDirectory

EVERY_SECONDS = 10.0
STEPS_AT_A_TIME = 256
SEARCHED_COMMITS = 200  # back from the restored one, for the last evaluation's trend


@dataclass(frozen=True)
class Evaluated:
    """A held-out evaluation of the commit `ref`."""

    ref: CommitRef
    loss: float
    targets: int


class Guard:
    """Told of steps and evaluations in their order; `tell` hears the names of the open alarms when they change."""

    def __init__(
        self,
        rundir: RunDirectory,
        order: BatchOrder,
        attempt: int,
        start: int,
        restored: CommitRef | None,
        tell: Callable[[tuple[str, ...]], None],
        same_text: bool = False,
    ) -> None:
        self._rundir, self._order, self._attempt, self._start = rundir, order, attempt, start
        self._restored, self._tell, self._same_text = restored, tell, same_text
        self._explainer = Explainer(order)
        self._news: deque[StepLine | Evaluated] = deque()
        self._points: tuple[TrendPoint, ...] = ()
        self._first: int | None = None  # of the steps whose losses are summed up
        self._sum = 0.0
        self._open: tuple[str, ...] = ()
        self._last = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def stepped(self, line: StepLine) -> None:
        self._news.append(line)

    def evaluated(self, ref: CommitRef, loss: float, targets: int) -> None:
        self._news.append(Evaluated(ref, loss, targets))

    def committed(self) -> None:
        """Look now."""
        self._wake.set()

    def finish(self, seconds: float = 5.0) -> None:
        """Look once more, at what there is, and end."""
        self._last = True
        self._wake.set()
        self._thread.join(seconds)

    # -- in the thread

    def _run(self) -> None:
        self._try(self._resume)
        while True:
            last = self._last
            self._try(self._look)
            if last:
                return
            self._wake.wait(EVERY_SECONDS)
            self._wake.clear()

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            log().warning("what is trained on could not be watched; the training goes on", error=str(error))

    def _resume(self) -> None:
        self._hear()
        for record in islice(self._rundir.lineage(self._restored), SEARCHED_COMMITS):
            found = self._rundir.read(record.ref.trend, Trend)
            if found is not None:
                self._points = found.points
                return

    def _look(self) -> None:
        lines: list[StepLine] = []
        while self._news:
            item = self._news.popleft()
            if isinstance(item, StepLine):
                lines.append(item)
                continue
            self._audit(lines)
            lines = []
            self._judge(item)
        self._audit(lines)
        self._hear()

    def _hear(self) -> None:
        """Also of alarms that were raised before, and of those that somebody has acknowledged."""
        now = self._rundir.open_alarms()
        if now != self._open:
            self._open = now
            self._tell(now)

    def _audit(self, lines: list[StepLine]) -> None:
        for at in range(0, len(lines), STEPS_AT_A_TIME):
            part = lines[at : at + STEPS_AT_A_TIME]
            self._first = self._first or part[0].step
            self._sum += sum(line.loss for line in part)
            due = ids_hashes(self._order.block(part[0].step - 1, part[-1].step))
            wrong = [line for line, lanes in zip(part, due, strict=True) if line.ids != hash_text(lanes)]
            if wrong:
                self._wrong(wrong[0])

    def _wrong(self, line: StepLine) -> None:
        if self._is_open("coverage"):
            return
        found = self._explainer.explain(line.step - 1, line.ids)
        said = f"what it read is {found[0]}" if found else "which mistake that is, is not known"
        self._raise(
            "coverage",
            line.step,
            f"step {line.step} did not read the instances that the data order gives it: {said}. Some are read again and "
            f"others never; look at the loader, and at: untildone verify {self._rundir.uri} --so-far",
            {},
        )

    def _judge(self, item: Evaluated) -> None:
        ref, train = item.ref, None
        if self._first is not None:
            train = self._sum / (ref.step - self._first + 1)
        point = TrendPoint(step=ref.step, held_out=item.loss, first=self._first, train=train)
        self._points = (*(p for p in self._points if p.step < ref.step), point)
        self._first, self._sum = None, 0.0
        self._rundir.create(ref.trend, Trend(points=self._points))
        if ref.step > self._order.batches_per_epoch:
            return
        given = intervals_of(self._points)
        verdict = judge(given, self._same_text, tolerance=tolerance_for(item.targets))
        at = verdict.standing
        if at is None or self._is_open("memorisation"):
            return
        step, below = int(verdict.step[at]), float(verdict.expected[at] - given.train[at])
        figures = {
            "training_loss": float(given.train[at]),
            "expected": float(verdict.expected[at]),
            "held_out_loss": float(given.held_out[at]),
            "score": float(verdict.score[at]),
        }
        message = (
            f"up to step {step} the training loss has fallen {below:.3f} nats below what the held-out loss speaks for, over "
            "several evaluations: text seems to be read again. Compare with: "
            f"untildone verify {self._rundir.uri} --so-far; python -m trainer metrics alarm {self._rundir.uri}"
        )
        self._raise("memorisation", step, message, figures)

    def _is_open(self, kind: AlarmKind) -> bool:
        return any(name.startswith(f"{kind}-") for name in self._open)

    def _raise(self, kind: AlarmKind, step: int, message: str, figures: dict[str, float]) -> None:
        alarm = Alarm(
            kind=kind,
            step=step,
            attempt=self._attempt,
            start=self._start,
            message=message,
            figures=figures,
            time=time.time(),
        )
        if raise_alarm(self._rundir, alarm):
            log().error("alarm", alarm=alarm.name, reason=message, **figures)
            self._hear()
