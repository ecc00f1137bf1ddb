"""How many endings are tolerated, and how long to pause. Computed from the ledger alone. Pure.

A budget is per cause and is full again after every new commit: a run that keeps advancing is never given up because it
was interrupted often. What stops a hopeless run is `noNewCommit`, endings in a row that brought no commit.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from orchestrator.api import Backoff, Budgets
from trainer.rundir.records import Category, Ending

NO_NEW_COMMIT: Literal["no-new-commit"] = "no-new-commit"

# Not counted in noNewCommit: somebody else took the machines, or the store was away (it has its own budget).
_OUTSIDE: frozenset[Category] = frozenset({"storage"})
# After these nothing failed, so there is nothing to wait for, unless the ending was charged: `deactivated` is not where
# spec.suspend asked for it.
_NO_PAUSE: frozenset[Category] = frozenset({"preempted", "maintenance", "plan-change", "completed", "deactivated"})


@dataclass(frozen=True)
class Account:
    """The ledger since the last new commit."""

    charged: dict[Category, int]  # endings per cause that count against its budget
    without_commit: int  # endings that count towards noNewCommit
    failures: int  # endings that call for a pause
    last: Ending | None  # the newest ending of all

    @property
    def needs_pause(self) -> bool:
        """Whether the newest ending is a failure: taken away by the queue, or moved by us, nothing is waited for."""
        return self.failures > 0 and self.last is not None and _is_failure(self.last)


@dataclass(frozen=True)
class Spent:
    """A budget that is spent: `count` endings by `cause`, where `limit` are tolerated."""

    cause: Category | Literal["no-new-commit"]
    count: int
    limit: int
    endings: tuple[Ending, ...]


def account(endings: Iterable[Ending], committed_step: int) -> Account:
    """Counts since the last committed progress. `committed_step` is HEAD's.

    Each ending carries the step committed when it ended: where that is higher than ever before, the counts start
    again, with this ending as the first. One ending is counted once, by key and by start.
    """
    endings = tuple(endings)
    since = _since_progress(endings, committed_step)
    charged: Counter[Category] = Counter(ending.cause for ending in since if ending.charged)
    return Account(
        charged=dict(charged),
        without_commit=sum(_counts(ending) for ending in since),
        failures=sum(_is_failure(ending) for ending in since),
        last=_newest(endings),
    )


def spent(endings: Iterable[Ending], committed_step: int, budgets: Budgets) -> Spent | None:
    """The first budget that is spent, or None. Causes first: they say more than "no new commit"."""
    since = _since_progress(endings, committed_step)
    causes: list[Category] = [ending.cause for ending in since]
    for cause in dict.fromkeys(causes):
        limit = budgets.of(cause)
        counted = tuple(ending for ending in since if ending.cause == cause and ending.charged)
        if limit is not None and len(counted) > limit:
            return Spent(cause, len(counted), limit, counted)
    counted = tuple(ending for ending in since if _counts(ending))
    if len(counted) >= budgets.no_new_commit:
        return Spent(NO_NEW_COMMIT, len(counted), budgets.no_new_commit, counted)
    return None


def pause(backoff: Backoff, failures: int, run: str, seed: int) -> float:
    """Seconds to wait before the next attempt after `failures` endings in a row (0: none), at most `backoff.max`.

    Doubles each time; the jitter takes off up to its share and depends on (run, failures, seed) alone, so that asking
    again gives the same answer and two runs do not return together.
    """
    if failures <= 0 or backoff.initial <= 0:
        return 0.0
    full = min(backoff.max, backoff.initial * 2.0 ** min(failures - 1, 60))
    digest = hashlib.sha256(f"{run}/{failures}/{seed}".encode()).digest()
    fraction = int.from_bytes(digest[:8], "big") / 2**64
    return full * (1.0 - backoff.jitter * fraction)


def camel(cause: str) -> str:
    """Name of a budget in documents: application-error → applicationError."""
    first, *rest = cause.split("-")
    return first + "".join(part.capitalize() for part in rest)


def _since_progress(endings: Iterable[Ending], committed_step: int) -> list[Ending]:
    """Endings since the last new commit, oldest first, without duplicates."""
    since: list[Ending] = []
    highest = 0
    keys: set[str] = set()
    starts: set[tuple[int, int]] = set()
    for ending in sorted(endings, key=lambda e: (e.attempt, e.index)):
        start = None if ending.start is None else (ending.attempt, ending.start)
        if ending.key in keys or start in starts:
            continue
        keys.add(ending.key)
        if start is not None:
            starts.add(start)
        if ending.last_committed_step > highest:
            highest = ending.last_committed_step
            since = []
        since.append(ending)
    return [] if committed_step > highest else since


def _counts(ending: Ending) -> bool:
    """Whether an ending counts towards noNewCommit. One that nobody saw does: it may be the same failure each time."""
    if ending.cause in _OUTSIDE:
        return False
    return ending.charged or ending.cause == "unknown-while-absent"


def _is_failure(ending: Ending) -> bool:
    """Something broke. So it may be where a preemption is only inferred from an exit code: that can repeat at once."""
    return ending.charged or ending.cause not in _NO_PAUSE


def _newest(endings: Iterable[Ending]) -> Ending | None:
    return max(endings, key=lambda e: (e.attempt, e.index), default=None)
