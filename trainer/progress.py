"""What rank 0 tells the outside while it runs: the phase clock, progress.json, and a line for people.

`beats` counts up with every write, so that a reader judges liveness on its own clock.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from trainer.flops import REPORTED
from trainer.log import log
from trainer.rundir.records import Phase, Progress

SHOWN = {
    "phase",
    "step",
    "target_step",
    "committed_step",
    "loss",
    "tokens_per_second",
    "step_seconds",
    "mfu",
    "skipped_steps",
}
PACED_STEPS = 129  # the median of so many steps does not notice the few that wait for a store or a neighbour
FEWEST_STEPS = 3  # before that no pace is given: the first steps still warm up
KEPT_VISITS = 9


@dataclass
class PhaseClock:
    """Seconds spent in each phase since `began` (monotonic); the phases follow each other without gaps."""

    began: float
    phase: Phase = "Starting"
    _entered: float = field(init=False)
    _spent: dict[str, float] = field(default_factory=dict)
    _visits: dict[str, deque[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._entered = self.began

    def enter(self, phase: Phase) -> None:
        now = time.monotonic()
        self._spent[self.phase] = self._spent.get(self.phase, 0.0) + now - self._entered
        self._visits.setdefault(self.phase, deque(maxlen=KEPT_VISITS)).append(now - self._entered)
        self.phase, self._entered = phase, now

    def usual(self, phase: Phase) -> float:
        """Seconds that a visit to `phase` took, as a median of the last ones; 0 before the first has ended."""
        visits = self._visits.get(phase)
        return median(visits) if visits else 0.0

    def seconds(self) -> dict[str, float]:
        """Seconds by phase up to now; they sum to the time since `began`."""
        now = time.monotonic()
        spent = dict(self._spent)
        spent[self.phase] = spent.get(self.phase, 0.0) + now - self._entered
        return {phase: round(seconds, 4) for phase, seconds in spent.items()}


@dataclass
class Pace:
    """How fast a start gets on: the usual step, and what saves and evaluations add to it.

    Neither one slow step nor a long evaluation at the beginning moves it: it knows how often these come.
    """

    commit_every: int | None = None
    evaluate_every: int | None = None
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=PACED_STEPS))

    def stepped(self, seconds: float) -> None:
        self._steps.append(seconds)

    def seconds_per_step(self, clock: PhaseClock) -> float | None:
        """None before FEWEST_STEPS steps."""
        steps = tuple(self._steps)  # the loop appends meanwhile
        if len(steps) < FEWEST_STEPS:
            return None
        save = clock.usual("Saving") / self.commit_every if self.commit_every else 0.0
        evaluation = clock.usual("Evaluating") / self.evaluate_every if self.evaluate_every else 0.0
        return round(median(steps) + save + evaluation, 6)


@dataclass
class Monitor:
    """Holds the current numbers and writes them every `every_seconds` and at each change of phase.

    `write` stores a Progress; its failures are counted, not raised: a lost heartbeat must not end a run.
    """

    clock: PhaseClock
    every_seconds: float
    write: Callable[[Progress], None]
    target_step: int
    line: bool = False
    peers: Callable[[], list[float]] | None = None
    pace: Pace = field(default_factory=Pace)
    step: int | None = None
    committed_step: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    mfu: float | None = None
    skipped_steps: int = 0
    alarms: tuple[str, ...] = ()
    failures: int = 0
    _beats: int = 0
    _stepped: bool = False
    _wake: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def stepped(self) -> None:
        """A step's numbers are in. On a terminal the line follows every step."""
        if not self.line:
            return
        if sys.stderr.isatty():
            self._say()
        elif not self._stepped:
            phases = self.clock.seconds()
            log().info("first step completed", seconds=round(sum(phases.values()), 3), phases=phases)
        self._stepped = True

    def start(self) -> None:
        threading.Thread(target=self._run, name="progress", daemon=True).start()

    def enter(self, phase: Phase) -> None:
        """The phase changes now; written soon, by the monitor's own thread."""
        self.clock.enter(phase)
        self._wake.set()

    def record(self) -> Progress:
        """What is to be written now: one beat more."""
        self._beats += 1
        return self._now()

    def _now(self) -> Progress:
        return Progress(
            phase=self.clock.phase,
            step=self.step,
            committed_step=self.committed_step,
            target_step=self.target_step,
            loss=self.loss,
            tokens_per_second=self.tokens_per_second,
            mfu=self.mfu,
            step_seconds=self.step_seconds,
            pace_seconds=self.pace.seconds_per_step(self.clock),
            skipped_steps=self.skipped_steps,
            alarms=self.alarms,
            phase_seconds=self.clock.seconds(),
            host_step_seconds=self.peers() if self.peers else [],
            beats=self._beats,
            time=time.time(),
        )

    def write_now(self) -> None:
        """Write once, from any thread."""
        with self._lock:
            try:
                self.write(self.record())
            except Exception as error:
                self.failures += 1
                if self.failures in (1, 10, 100):
                    print(f"progress could not be written ({self.failures} times): {error}", file=sys.stderr)

    def _run(self) -> None:
        said = time.monotonic()
        while True:
            self._wake.wait(self.every_seconds)
            self._wake.clear()
            self.write_now()
            due = time.monotonic() - said >= self.every_seconds
            if self.line and due and self.step is not None and not sys.stderr.isatty():
                said = time.monotonic()
                self._say()

    def _say(self) -> None:
        now = self._now()
        if sys.stderr.isatty():
            print("\r\x1b[2K" + progress_line(now), end="", file=sys.stderr, flush=True)
            return
        left = now.seconds_left(self.target_step)
        percent = round(100 * (now.step or 0) / self.target_step, 2)
        eta = None if left is None else round(left)
        alarms = {"alarms": now.alarms} if now.alarms else {}
        log().info("progress", **now.model_dump(include=SHOWN), percent=percent, eta_seconds=eta, **alarms)


def progress_line(now: Progress) -> str:
    """One line for a person; what is not known is left out."""
    step, target = now.step or 0, now.target_step or 0
    parts = [f"{100 * step / target:5.1f} %" if target else "", f"step {step:,}/{target:,}"]
    if now.loss is not None:
        parts.append(f"loss {now.loss:.4f}")
    if now.tokens_per_second:
        parts.append(f"{now.tokens_per_second:,.0f} tok/s")
    if now.mfu is not None:
        parts.append(f"MFU {100 * now.mfu:.1f} % ({REPORTED})")
    if now.skipped_steps:
        parts.append(f"{now.skipped_steps:,} skipped")
    left = now.seconds_left(target)
    if left is not None:
        parts.append(f"eta {_duration(left)}")
    parts.append(now.phase)
    if now.alarms:
        parts.append(f"ALARM {', '.join(now.alarms)}")
    return "  ".join(part for part in parts if part)


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds) // 60 % 60, int(seconds) // 3600
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02d} h"
    if hours:
        return f"{hours} h {minutes:02d} m"
    return f"{minutes} m {int(seconds) % 60:02d} s" if minutes else f"{seconds:.0f} s"
