"""What rank 0 tells the outside while it runs: the phase clock, progress.json, and a line for people.

`beats` counts up with every write, so that a reader judges liveness on its own clock.
"""

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trainer.log import log
from trainer.rundir.records import Phase, Progress

SHOWN = {"phase", "step", "target_step", "committed_step", "loss", "tokens_per_second", "step_seconds", "mfu"}


@dataclass
class PhaseClock:
    """Seconds spent in each phase since `began` (monotonic); the phases follow each other without gaps."""

    began: float
    phase: Phase = "Starting"
    _entered: float = field(init=False)
    _spent: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._entered = self.began

    def enter(self, phase: Phase) -> None:
        now = time.monotonic()
        self._spent[self.phase] = self._spent.get(self.phase, 0.0) + now - self._entered
        self.phase, self._entered = phase, now

    def seconds(self) -> dict[str, float]:
        """Seconds by phase up to now; they sum to the time since `began`."""
        now = time.monotonic()
        spent = dict(self._spent)
        spent[self.phase] = spent.get(self.phase, 0.0) + now - self._entered
        return {phase: round(seconds, 4) for phase, seconds in spent.items()}


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
    step: int | None = None
    committed_step: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    mfu: float | None = None
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
        self._beats += 1
        return Progress(
            phase=self.clock.phase,
            step=self.step,
            committed_step=self.committed_step,
            target_step=self.target_step,
            loss=self.loss,
            tokens_per_second=self.tokens_per_second,
            mfu=self.mfu,
            step_seconds=self.step_seconds,
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
        while True:
            changed = self._wake.wait(self.every_seconds)
            self._wake.clear()
            self.write_now()
            if self.line and not changed and self.step is not None and not sys.stderr.isatty():
                self._say()

    def _say(self) -> None:
        if not sys.stderr.isatty():
            now = self.record()
            log().info("progress", **now.model_dump(include=SHOWN))
            return
        left = self.target_step - (self.step or 0)
        parts = [f"{100 * (self.step or 0) / self.target_step:5.1f} %", f"step {self.step}/{self.target_step}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.tokens_per_second:
            parts.append(f"{self.tokens_per_second:,.0f} tok/s")
        if self.step_seconds:
            parts.append(f"eta {_duration(left * self.step_seconds)}")
        parts.append(self.clock.phase)
        print("\r\x1b[2K" + "  ".join(parts), end="", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds) // 60 % 60, int(seconds) // 3600
    if hours:
        return f"{hours} h {minutes:02d} m"
    return f"{minutes} m {int(seconds) % 60:02d} s" if minutes else f"{seconds:.0f} s"
