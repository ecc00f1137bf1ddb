"""What `untildone run` shows while it works: a bar on a terminal, one line per change elsewhere."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import click

from orchestrator.commands.output import colour_wanted, duration, rate
from orchestrator.daemon import Look
from orchestrator.decisions import Done, Freeze, GiveUp, Refused, StopForPlanChange, Wait, WriteSpec
from orchestrator.planning import shown


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

    def line(self) -> str:
        """As one plain line: fixed names, no colour."""
        share = f" {100 * self.step / self.target:.1f}%" if self.target else ""
        figures = [f"{self.status:<12} attempt={self.attempt} plan={self.plan} step={self.step}/{self.target}{share}"]
        figures.append(f"committed={self.committed}")
        if self.loss is not None:
            figures.append(f"loss={self.loss:.4f}")
        if self.tokens_per_second:
            figures.append(f"tok/s={rate(self.tokens_per_second)}")
        if self.eta is not None:
            figures.append(f"eta={duration(self.eta)}")
        return " ".join(figures) + (f"  {self.message}" if self.message else "")


def describe(look: Look, before: str = "Starting") -> Shown:
    """`look` for people. An act in progress keeps the status word that was shown before it."""
    o, decision = look.observation, look.decision
    start = o.current_start
    progress = start.progress if start else None
    spec = o.spec
    target = spec.settings.target_step if spec else (progress.target_step or 0 if progress else 0)
    step = max(progress.step or 0 if progress else 0, o.committed_step)
    live = progress is not None and o.live_admission is not None
    word, message = before, ""
    if isinstance(decision, Wait):
        word, message = decision.word, decision.message
    elif isinstance(decision, Freeze):
        word, message = "TruthUnknown", decision.message
    elif isinstance(decision, Done):
        word, message, step = "Completed", decision.message, o.committed_step
    elif isinstance(decision, GiveUp):
        word, message = "BudgetExhausted", decision.message
    elif isinstance(decision, Refused):
        word, message = "Refused", decision.message
    elif isinstance(decision, (StopForPlanChange, WriteSpec)):
        word, message = "Switching" if o.head else before, decision.why
    eta = None
    if live and progress and progress.step_seconds and target:
        eta = max(0, target - step) * progress.step_seconds
    return Shown(
        status=word,
        attempt=f"{o.attempt}.{start.start if start else 0}" if o.head else "-",
        plan=shown(spec.plan).replace(" ", "") if spec else "-",
        step=step,
        target=target,
        committed=o.committed_step,
        loss=progress.loss if progress else None,
        tokens_per_second=progress.tokens_per_second if live and progress else None,
        eta=eta,
        message=message,
        endings=tuple(
            f"start {e.attempt}.{e.start or '–'} ended: {e.cause}, step {e.last_committed_step} is committed"
            for e in o.endings
        ),
    )


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

    def __init__(self, write: Callable[[str], None]) -> None:
        self.acted = False
        self._write = write
        self._last: Shown | None = None
        self._news: tuple[object, ...] = ()

    def show(self, look: Look) -> None:
        self.acted = self.acted or not isinstance(look.decision, (Done, GiveUp, Refused))
        now = describe(look, self._last.status if self._last else "Starting")
        for ending in now.endings[len(self._last.endings) if self._last else len(now.endings) :]:
            self._write(f"{_clock()} {ending}")
        news = (now.status, now.attempt, now.plan, now.committed)
        if news != self._news:
            self._write(f"{_clock()} {now.line()}")
        self._last, self._news = now, news

    def __exit__(self, *_: object) -> None:
        return None


class TerminalWatch(AbstractContextManager["TerminalWatch"]):
    """A bar with the figures of the moment; endings and commits scroll by above it."""

    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self.acted = False
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
        self._task = self._progress.add_task(name, total=1, figures="")

    def __enter__(self) -> "TerminalWatch":
        self._progress.__enter__()
        return self

    def __exit__(self, *trace: Any) -> None:
        self._progress.__exit__(*trace)

    def show(self, look: Look) -> None:
        self.acted = self.acted or not isinstance(look.decision, (Done, GiveUp, Refused))
        now = describe(look, self._last.status if self._last else "Starting")
        print_ = self._progress.console.print
        for ending in now.endings[len(self._last.endings) if self._last else len(now.endings) :]:
            print_(f"{_clock()} {ending}", style="yellow", highlight=False)
        if self._last is not None and now.attempt != self._last.attempt and now.attempt != "-":
            print_(f"{_clock()} attempt {now.attempt} on {now.plan}", highlight=False)
        figures = [now.status, f"{now.attempt} {now.plan}"]
        if now.loss is not None:
            figures.append(f"loss {now.loss:.3f}")
        if now.tokens_per_second:
            figures.append(f"{rate(now.tokens_per_second)} tok/s")
        if now.eta is not None:
            figures.append(f"eta {duration(now.eta)}")
        if now.message and now.tokens_per_second is None:
            figures.append(now.message)
        self._progress.update(self._task, completed=now.step, total=max(now.target, 1), figures=" · ".join(figures))
        self._last = now


def plain_watch(quiet: bool = False) -> Watch:
    """For pipes; `quiet` shows nothing (--json)."""
    return PlainWatch((lambda _: None) if quiet else click.echo)


def terminal_watch(name: str) -> Watch:
    return TerminalWatch(name)


def _clock() -> str:
    return time.strftime("%H:%M:%S")
