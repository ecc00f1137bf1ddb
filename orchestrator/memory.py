"""What one orchestrator process remembers between observations: since when, and how often in a row, a fact has held.

On its own monotonic clock, because the clocks of clusters and trainers are not to be compared with it. It holds no
truth; losing it costs time, never safety.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Mark:
    """A fact that held in each of the last `count` observations, for `seconds` of our own monotonic clock."""

    count: int
    seconds: float


class Memory:
    """Since when facts hold, on this process's monotonic clock, and the highest attempt it saw."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.highest_attempt = 0
        self.compared: tuple[object, object, tuple[str, ...]] | None = None  # two objects, and how they differ
        self._clock = clock
        self._noted = clock()
        self._held: dict[str, tuple[float, int]] = {}  # fact -> (since, observations)

    def note(self, facts: Iterable[str], unknown: Iterable[str] = ()) -> dict[str, Mark]:
        """The marks after an observation in which exactly `facts` held.

        When sources were `unknown`, facts that name a value ("same beats as before") cannot have been refuted and are
        kept as they are; facts that have to be seen without a break (`UNBROKEN`) are dropped, as they are after a long
        time without observations.
        """
        now, held = self._clock(), set(facts)
        blind = bool(set(unknown))
        if now - self._noted > GAP_SECONDS:  # stopped, or another replica did the work
            self.forget(UNBROKEN)
        self._noted = now
        kept = {
            fact: (since, count + (fact in held))
            for fact, (since, count) in self._held.items()
            if fact in held or (blind and not fact.startswith(UNBROKEN))
        }
        self._held = dict.fromkeys(held, (now, 1)) | kept
        return {fact: Mark(count, now - since) for fact, (since, count) in self._held.items()}

    def forget(self, facts: tuple[str, ...]) -> None:
        """Facts whose names begin like this mean something else from now on."""
        self._held = {fact: held for fact, held in self._held.items() if not fact.startswith(facts)}


# Facts that must be seen in every observation in between to count; and how far apart observations may be for that.
UNBROKEN = ("fits/", "stale/", "gone/")
GAP_SECONDS = 120.0
