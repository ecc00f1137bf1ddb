"""What the demo sees of its two runs, and what it shows of them. It reads what anybody may read: the run directory."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.clusters.local import LocalCluster
from trainer.errors import ConfigurationError
from trainer.rundir.records import Phase, Progress
from trainer.rundir.rundir import RunDirectory


@dataclass(frozen=True)
class Sight:
    """One run at one moment. `phase` is the trainer's own word, or what the gang does before it has one."""

    attempt: int = 0
    start: int = 0
    phase: str = "Queued"
    step: int = 0
    committed: int = 0
    loss: float | None = None
    rate: float | None = None
    plan: str = "-"

    @property
    def key(self) -> tuple[int, int]:
        return self.attempt, self.start

    @property
    def name(self) -> str:
        return f"{self.attempt}.{self.start}"


class Watched:
    """A run: where its records are, the cluster it is on, and how to look at it. A look takes about a millisecond."""

    def __init__(self, name: str, folder: Path, cluster: LocalCluster) -> None:
        self.name, self.folder, self.cluster = name, folder, cluster
        self._rundir: RunDirectory | None = None
        self._plans: dict[int, str] = {}

    @property
    def gang(self) -> str:
        return f"{self.name}-a{self.look().attempt}"

    def look(self) -> Sight:
        """HEAD and the current start's progress."""
        try:
            self._rundir = self._rundir or RunDirectory.open(str(self.folder))
        except ConfigurationError:  # not made yet
            return Sight()
        found = self._rundir.head()
        if found is None:
            return Sight()
        head = found[0]
        if head.attempt not in self._plans:
            spec = self._rundir.read_spec(head.attempt)
            self._plans[head.attempt] = spec.plan.device_type if spec else "-"
        committed = head.commit.step if head.commit else 0
        progress = self._rundir.read_progress(head.attempt, head.start) if head.start else None
        # A start that has ended leaves its last word behind.
        over = progress is None or self.ended(head.attempt, head.start)
        return Sight(
            attempt=head.attempt,
            start=head.start,
            phase=_phase(progress, over),
            step=max(committed, _step(progress)) if not over else committed,
            committed=committed,
            loss=progress.loss if progress else None,
            rate=progress.tokens_per_second if progress and not over else None,
            plan=self._plans[head.attempt],
        )

    def ended(self, attempt: int, start: int) -> bool:
        """Whether the ledger has an ending of this start."""
        assert self._rundir is not None
        return any(e.start == start for e in self._rundir.endings(attempt))

    def cause(self, sight: Sight) -> str | None:
        """The cause that the ledger gives for the end of the start that was seen; None while it has none."""
        if self._rundir is None:
            return None
        return next((e.cause for e in self._rundir.endings(sight.attempt) if e.start == sight.start), None)

    def pids(self) -> dict[int, int]:
        """Rank -> pid of the living processes of the current start."""
        return self.cluster.pids(self.gang)

    def torn_save(self, sight: Sight) -> int | None:
        """The step of a checkpoint that this start is writing at this moment: files, and no commit record."""
        saves = self.folder / "checkpoints" / sight.name
        for path in saves.iterdir() if saves.is_dir() else ():
            step = path.name.split(".")[0]
            if step.isdigit() and not (self.folder / "commits" / sight.name / f"{step}.json").exists():
                return int(step)
        return None


def _phase(progress: Progress | None, over: bool) -> Phase:
    """What a start does; between two of them the next one is on its way."""
    if progress is None or (over and progress.phase != "Done"):
        return "Starting"
    return progress.phase


def _step(progress: Progress | None) -> int:
    return progress.step or 0 if progress else 0


class Plain:
    """One line per thing that is done or seen."""

    def __init__(self, target: int) -> None:
        self._target, self._began = target, time.monotonic()
        self._last: dict[str, tuple[str, str]] = {}

    def __enter__(self) -> "Plain":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)

    def doing(self, text: str) -> None:
        return None  # what has been done is enough for a log

    def show(self, name: str, sight: Sight) -> None:
        news = (sight.name, "done" if sight.phase == "Done" else "trains")
        if sight.phase in ("Training", "Done") and news != self._last.get(name):
            self._last[name] = news
            what = f"{news[1]} as {sight.name} on {sight.plan}, step {sight.step} of {self._target}"
            self.say(f"{name} {what}" + (f", loss {sight.loss:.3f}" if sight.loss is not None else ""))


class Fancy:
    """Two bars, what is being done to the run below them, and what has been done above."""

    def __init__(self, target: int) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.text import Text

        self._began = time.monotonic()
        self._bars = Progress(
            TextColumn("[bold]{task.description:<10}"),
            BarColumn(bar_width=36),
            TextColumn("{task.completed:>3.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[figures]}"),
        )
        self._text = Text
        self._now = Text("")
        self._group = Group
        self._live = Live(self._render(), console=Console(), refresh_per_second=8)
        self._target = target
        self._tasks: dict[str, Any] = {}

    def _render(self) -> Any:
        return self._group(self._bars, self._now)

    def __enter__(self) -> "Fancy":
        self._live.__enter__()
        return self

    def __exit__(self, *trace: Any) -> None:
        self._live.__exit__(*trace)

    def say(self, text: str) -> None:
        self._live.console.print(f"[dim]{time.monotonic() - self._began:6.1f} s[/dim]  {text}", highlight=False)

    def doing(self, text: str) -> None:
        self._now = self._text(f"→ {text}" if text else "", style="yellow")
        self._live.update(self._render())

    def show(self, name: str, sight: Sight) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=self._target, figures="")
        figures = [sight.phase, f"{sight.name} {sight.plan}", f"committed {sight.committed}"]
        if sight.loss is not None:
            figures.append(f"loss {sight.loss:.3f}")
        if sight.rate:
            figures.append(f"{sight.rate / 1000:.0f}k tok/s")
        self._bars.update(self._tasks[name], completed=sight.step, figures=" · ".join(figures))


def display(target: int) -> Plain | Fancy:
    """Bars on a terminal, lines anywhere else."""
    return Fancy(target) if sys.stdout.isatty() else Plain(target)
