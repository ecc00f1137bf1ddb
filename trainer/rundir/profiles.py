"""What has been asked of a run's profiles and what came of it, for whoever asks: one request, one answer, never two tries.

Their requests are named `profile-…`, so that they are found among the many that ask for commits.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trainer.errors import ConfigurationError
from trainer.rundir.records import Request, RequestBegun, RequestDone
from trainer.rundir.rundir import RunDirectory

PREFIX = "profile-"
Status = Literal["waiting", "begun", "done", "failed"]


def new_identifier(now: float) -> str:
    """A name for a request that sorts by time. `now` is UNIX seconds."""
    second = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now))
    return f"{PREFIX}{second}.{int(now % 1 * 1000):03d}-{secrets.token_hex(2)}"


def span(first: int, last: int) -> str:
    """Steps in words: "7–9", or "7"."""
    return f"{first}–{last}" if last > first else str(first)


@dataclass(frozen=True)
class Profile:
    """A request for a profile or a dump of the program, and how far it got."""

    identifier: str
    request: Request
    begun: RequestBegun | None = None
    done: RequestDone | None = None

    @property
    def status(self) -> Status:
        if self.done is not None:
            return "failed" if self.done.failed else "done"
        return "begun" if self.begun is not None else "waiting"

    @property
    def steps(self) -> str:
        """Which steps, as far as that is known: of a dump none."""
        if self.request.kind == "dump":
            return "-"
        traced = self.done if self.done is not None and self.done.first is not None else None
        if traced is not None and traced.first is not None:
            return span(traced.first, traced.step)
        if self.begun is not None:
            return span(self.begun.first, self.begun.last)
        at = self.request.at
        return f"the next {self.request.steps}" if at is None else span(at, at + self.request.steps - 1)

    @property
    def sentence(self) -> str:
        """Status, steps and outcome, for a line of text."""
        joint = {"waiting": "waits for ", "begun": "", "done": "in ", "failed": ""}[self.status]
        return f"{self.status}: {self.what}; {joint}{self.outcome}"

    @property
    def what(self) -> str:
        """What was asked for, or taken, in words."""
        if self.request.kind == "dump":
            return "the program"
        if self.steps.startswith("the next"):
            return "the next step" if self.request.steps == 1 else f"{self.steps} steps"
        return f"steps {self.steps}" if "–" in self.steps else f"step {self.steps}"

    @property
    def outcome(self) -> str:
        """Where it is, why it failed, or what it waits for."""
        if self.done is not None:
            return self.done.failed or self.done.place
        if self.begun is not None:
            return f"start {self.begun.attempt}.{self.begun.start} takes it"
        return "a start that trains" if self.request.at is None else f"step {self.request.at}"


def profiles(
    rundir: RunDirectory, newest: int | None = None, not_understood: Callable[[str], None] = lambda _: None
) -> list[Profile]:
    """All that were asked for, or the `newest` so many, oldest first.

    What a later version asked, or nobody can read, is left out: `not_understood` is told why, and the others are there.
    """
    names = rundir.asked(PREFIX)
    if newest is not None:
        names = names[-newest:]
    found = []
    for name in names:
        try:
            found.append(profile(rundir, name))
        except ConfigurationError as error:
            not_understood(f"profile {name}: {error}")
    return [one for one in found if one is not None]


def profile(rundir: RunDirectory, identifier: str) -> Profile | None:
    """One of them; None when there is no such request."""
    request = rundir.read_request(identifier)
    if request is None or request.kind == "commit":
        return None
    return Profile(identifier, request, rundir.read_begun(identifier), rundir.read_answer(identifier))
