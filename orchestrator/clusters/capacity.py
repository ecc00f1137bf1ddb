"""Who may take quota, and who has to give it back: Kueue's part of the local cluster, as pure functions.

First come, first served by the time of submission. An eviction does not change that time, so the queue place is kept.
A gang that waits and could fit holds back younger ones (no starving behind a stream of small gangs); one that is larger
than the whole quota holds back nobody.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

UNLIMITED = 1_000_000


@dataclass(frozen=True)
class Claimant:
    """A gang that has quota (`reserved`) or waits for it."""

    uid: str
    created: float
    family: str
    devices: int
    reserved: bool


def limits(capacity: Mapping[str, int] | None) -> Mapping[str, int]:
    """Devices per family. No capacity file means cpu devices without limit; a family that is not listed has none."""
    return {"cpu": UNLIMITED} if capacity is None else capacity


def in_use(claimants: Iterable[Claimant], family: str) -> int:
    """Devices of `family` that are reserved now."""
    return sum(c.devices for c in claimants if c.reserved and c.family == family)


def admissible(capacity: Mapping[str, int] | None, claimants: Iterable[Claimant]) -> set[str]:
    """Uids of the waiting gangs that may take their quota now. All of them fit at the same time."""
    everyone = sorted(claimants, key=lambda c: (c.created, c.uid))
    quota = limits(capacity)
    free = {family: total - in_use(everyone, family) for family, total in quota.items()}
    chosen: set[str] = set()
    for claimant in everyone:
        if claimant.reserved or claimant.devices > quota.get(claimant.family, 0):
            continue
        if claimant.devices <= free[claimant.family]:
            chosen.add(claimant.uid)
        free[claimant.family] -= claimant.devices
    return chosen


def to_evict(capacity: Mapping[str, int] | None, claimants: Iterable[Claimant]) -> set[str]:
    """Uids of the admitted gangs that no longer fit, youngest first as far as sizes allow."""
    left = dict(limits(capacity))
    losers: set[str] = set()
    for claimant in sorted(claimants, key=lambda c: (c.created, c.uid)):
        if not claimant.reserved:
            continue
        if claimant.devices <= left.get(claimant.family, 0):
            left[claimant.family] -= claimant.devices
        else:
            losers.add(claimant.uid)
    return losers
