"""Alarms: what is wrong with the data a run trains on, said once, and open until somebody acknowledges it.

A start raises them (trainer/guard.py); orchestrators show them. Nothing is decided by them, and none is ever deleted.
A trend is what a start has to know to judge the next evaluation.
"""

import time
from typing import Literal

from pydantic import Field

from trainer.errors import ConfigurationError
from trainer.frozen import Frozen
from trainer.rundir.documents import Documents
from trainer.rundir.records import Report

FOLDER = "alarms"
SEEN = ".seen"


class TrendPoint(Frozen):
    """One held-out evaluation, and the training losses of the steps before it (trainer/metrics/memorisation.py)."""

    step: int = Field(description="the state after this step was evaluated")
    held_out: float = Field(description="its held-out loss")
    first: int | None = Field(default=None, description="the losses are those of steps first..step; None: not known")
    train: float | None = Field(default=None, description="their mean")


class Trend(Report):
    """trend/<n>.<k>/<step>.json: all points up to this commit, so that a start reads one object and no step logs."""

    points: tuple[TrendPoint, ...]


AlarmKind = Literal["memorisation", "coverage"]


class Alarm(Report):
    """alarms/<kind>-<step>.json: something is wrong with what is trained on. The run goes on; somebody must look."""

    kind: AlarmKind
    step: int
    attempt: int = Field(description="who raised it")
    start: int
    message: str
    figures: dict[str, float] = Field(default_factory=dict)
    time: float

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.step}"


class AlarmSeen(Report):
    """alarms/<name>.seen.json: somebody has looked at it."""

    why: str
    time: float


def key(name: str) -> str:
    return f"{FOLDER}/{name}.json"


def open_alarms(documents: Documents) -> tuple[str, ...]:
    """Names of the alarms that nobody has acknowledged, in the order of their names."""
    names = {k.removeprefix(f"{FOLDER}/").removesuffix(".json") for k in documents.patient(lambda: _keys(documents))}
    return tuple(sorted(n for n in names if not n.endswith(SEEN) and n + SEEN not in names))


def raise_alarm(documents: Documents, alarm: Alarm) -> bool:
    """Write it down; False when it is there already."""
    return documents.create(key(alarm.name), alarm)


def acknowledge(documents: Documents, name: str, why: str) -> None:
    """Close an alarm. Raises ConfigurationError where there is none of this name."""
    if documents.read(key(name), Alarm) is None:
        known = ", ".join(open_alarms(documents)) or "none"
        raise ConfigurationError(f"{documents.uri}: no alarm {name!r}; open alarms: {known}")
    documents.create(key(name + SEEN), AlarmSeen(why=why, time=time.time()))


def _keys(documents: Documents) -> list[str]:
    return documents.store.list(FOLDER)
