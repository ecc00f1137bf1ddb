"""What `untildone run` shows while it works: a bar on a terminal, one line per change elsewhere."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import click

from orchestrator.api import TrainingRun
from orchestrator.commands.output import colour_wanted, duration, rate
from orchestrator.daemon import Look
from orchestrator.decisions import Done, GiveUp, Refused
from orchestrator.explain import explanation
from orchestrator.progressing import live_progress
from trainer.rundir.records import Ending

# What these words mean needs no sentence beside them.
SELF_EVIDENT = ("Starting", "Restoring", "Compiling", "Training", "Saving")


@dataclass(frozen=True)
class Shown:
    """One look, in the words and figures of a progress line."""

    status: str
    attempt: str  # attempt.start
    plan: str
    step: int
    target: int
    committed: int
    loss: float | None
    tokens_per_second: float | None
    eta: float | None  # seconds
    message: str
    endings: tuple[str, ...]
    alarms: tuple[str, ...] = ()
    mfu: float | None = None
    skipped: int = 0

    def line(self) -> str:
        """As one plain line: fixed names, no colour."""
        share = f" {100 * self.step / self.target:.1f}%" if self.target else ""
        figures = [f"{self.status:<12} attempt={self.attempt} plan={self.plan} step={self.step}/{self.target}{share}"]
        figures.append(f"committed={self.committed}")
        if self.loss is not None:
            figures.append(f"loss={self.loss:.4f}")
        if self.tokens_per_second:
            figures.append(f"tok/s={rate(self.tokens_per_second)}")
        if self.mfu is not None:
            figures.append(f"mfu={100 * self.mfu:.1f}%")
        if self.skipped:
            figures.append(f"skipped={self.skipped}")
        if self.eta is not None:
            figures.append(f"eta={duration(self.eta)}")
        return " ".join(figures) + (f"  {self.message}" if self.message else "")


def describe(run: TrainingRun, look: Look) -> Shown:
    """`look` for people, in the words of `explain`."""
    e = explanation(run, look.observation, look.decision, look.now)
    progress = live_progress(look.observation)
    step = max(e.step or 0, e.committed_step)
    return Shown(
        status=e.status,
        attempt=f"{e.attempt}.{e.start}" if e.attempt else "-",
        plan=(e.plan or "-").replace(" ", ""),
        step=step,
        target=e.target_step,
        committed=e.committed_step,
        loss=e.loss,
        tokens_per_second=progress.tokens_per_second if progress else None,
        mfu=progress.mfu if progress else None,
        skipped=progress.skipped_steps or 0 if progress else 0,
        eta=e.seconds_left,
        message="" if e.status in SELF_EVIDENT else e.what,
        endings=tuple(_ended(ending) for ending in look.observation.endings),
        alarms=tuple(f"alarm: {alarm.message}" for alarm in look.observation.alarms),
    )


def _ended(ending: Ending) -> str:
    name = f"start {ending.attempt}.{ending.start}" if ending.start is not None else f"attempt {ending.attempt}"
    return f"{name} ended: {ending.cause}, step {ending.last_committed_step} is committed"


def _new_alarms(before: Shown | None, now: Shown) -> list[str]:
    """Also at the first look: an alarm is open until somebody acknowledges it."""
    return [alarm for alarm in now.alarms if before is None or alarm not in before.alarms]


class Watch(Protocol):
    """Shows looks. `acted` is whether anything but an end was ever decided."""

    acted: bool

    def show(self, look: Look) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...


class PlainWatch(AbstractContextManager["PlainWatch"]):
    """One line when the status, the attempt, the start, the commit or the ledger changes; steps alone are no news."""

    def __init__(self, run: TrainingRun, write: Callable[[str], None]) -> None:
        self.acted = False
        self._run = run
        self._write = write
        self._last: Shown | None = None
        self._news: tuple[object, ...] = ()

    def show(self, look: Look) -> None:
        self.acted = self.acted or not isinstance(look.decision, (Done, GiveUp, Refused))
        now = describe(self._run, look)
        for ending in now.endings[len(self._last.endings) if self._last else len(now.endings) :]:
            self._write(f"{_clock()} {ending}")
        for alarm in _new_alarms(self._last, now):
            self._write(f"{_clock()} {alarm}")
        news = (now.status, now.attempt, now.plan, now.committed)
        if news != self._news:
            self._write(f"{_clock()} {now.line()}")
        self._last, self._news = now, news

    def __exit__(self, *_: object) -> None:
        return None


class TerminalWatch(AbstractContextManager["TerminalWatch"]):
    """A bar with the figures of the moment; endings and commits scroll by above it."""

    def __init__(self, run: TrainingRun) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self.acted = False
        self._run = run
        self._last: Shown | None = None
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[figures]}"),
            console=Console(no_color=not colour_wanted()),
            refresh_per_second=8,
            expand=True,
        )
        self._task = self._progress.add_task(run.name, total=1, figures="")

    def __enter__(self) -> "TerminalWatch":
        self._progress.__enter__()
        return self

    def __exit__(self, *trace: Any) -> None:
        self._progress.__exit__(*trace)

    def show(self, look: Look) -> None:
        self.acted = self.acted or not isinstance(look.decision, (Done, GiveUp, Refused))
        now = describe(self._run, look)
        print_ = self._progress.console.print
        for ending in now.endings[len(self._last.endings) if self._last else len(now.endings) :]:
            print_(f"{_clock()} {ending}", style="yellow", highlight=False)
        for alarm in _new_alarms(self._last, now):
            print_(f"{_clock()} {alarm}", style="red", highlight=False)
        if self._last is not None and now.attempt != self._last.attempt and not now.attempt.endswith((".0", "-")):
            print_(f"{_clock()} attempt {now.attempt} on {now.plan}", highlight=False)
        figures = [now.status, f"{now.attempt} {now.plan}"]
        if now.loss is not None:
            figures.append(f"loss {now.loss:.3f}")
        if now.tokens_per_second:
            figures.append(f"{rate(now.tokens_per_second)} tok/s")
        if now.mfu is not None:
            figures.append(f"MFU {100 * now.mfu:.1f} %")
        if now.skipped:
            figures.append(f"{now.skipped} skipped")
        if now.eta is not None:
            figures.append(f"eta {duration(now.eta)}")
        if now.message:
            figures.append(now.message)
        self._progress.update(self._task, completed=now.step, total=max(now.target, 1), figures=" · ".join(figures))
        self._last = now


def plain_watch(run: TrainingRun, quiet: bool = False) -> Watch:
    """For pipes; `quiet` shows nothing (--json)."""
    return PlainWatch(run, (lambda _: None) if quiet else click.echo)


def terminal_watch(run: TrainingRun) -> Watch:
    return TerminalWatch(run)


def _clock() -> str:
    return time.strftime("%H:%M:%S")
