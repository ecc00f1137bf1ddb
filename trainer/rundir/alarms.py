"""Alarms: what is wrong with the data a run trains on, said once, and open until somebody acknowledges it.

A start raises them (trainer/guard.py); orchestrators show them. Nothing is decided by them, and none is ever deleted.
"""

import time

from trainer.errors import ConfigurationError
from trainer.rundir.documents import Documents
from trainer.rundir.records import Alarm, AlarmSeen

FOLDER = "alarms"
SEEN = ".seen"


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
