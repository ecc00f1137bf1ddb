"""Who looks after a run: owner.json, claimed by compare-and-swap and renewed as long as somebody does.

Saves double work between an operator, a daemon and a command that know nothing of each other: exactly one of them acts.
Safety never rests on it, HEAD alone gives that; an owner that was stopped for long and wakes up meets the fence.
Liveness is "the document changes", on the reader's own monotonic clock: clocks are never compared.
"""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from trainer.errors import StorageUnavailable
from trainer.rundir.records import Owner
from trainer.rundir.swap import new_op_id

BEAT_SECONDS = 30.0
READ_SECONDS = 10.0  # owner.json is read at most this often
STALE_SECONDS = 180.0  # unchanged for this long: its owner is gone
TRIES = 5


def local_owner() -> str:
    """Every command on this machine: two of them on one run share the work and do no harm."""
    return f"local/{socket.gethostname()}"


def daemon_owner(namespace: str, run: str) -> str:
    """`untildone resume-until-done` on this host, for a run in a cluster."""
    return f"daemon/{socket.gethostname()}/{namespace}/{run}"


class OwnerDocument(Protocol):
    """What is needed of a run directory (trainer.rundir.rundir.RunDirectory)."""

    def owner(self) -> tuple[Owner, int] | None: ...
    def swap_owner(self, owner: Owner, generation: int) -> int | None: ...


@dataclass(frozen=True)
class Other:
    """Somebody else looks after the run. `still` is for how long we have seen no new heartbeat, in seconds."""

    owner: str
    cluster_uid: str
    still: float


class Ownership:
    """Our claim on one run. For one thread at a time.

    `take_over` takes the run from whoever has it, once; `take_over_from` from that owner, or that cluster, only. `how` tells a
    user how to do either.
    """

    def __init__(
        self,
        documents: OwnerDocument,
        owner: str,
        cluster_uid: str,
        *,
        take_over: bool = False,
        take_over_from: str | None = None,
        how: str = "",
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.owner = owner
        self.cluster_uid = cluster_uid
        self.take_over_from = take_over_from
        self.how = how
        self._documents = documents
        self._take_over = take_over
        self._monotonic = monotonic
        self._clock = clock
        self._found: Owner | None = None  # as last read or written
        self._since = 0.0  # when `_found` was first seen like that
        self._read_at: float | None = None  # None: must be read now

    @property
    def held(self) -> bool:
        """Whether the run was ours when we last looked."""
        return self._found is not None and self._found.owner == self.owner and not self._found.released

    def hold(self) -> Other | None:
        """Claim or renew where that is due; None when the run is ours, else who has it.

        Raises StorageUnavailable when the store does not say, ConfigurationError when it may not be written.
        """
        now = self._monotonic()
        if self._read_at is not None and now - self._read_at < READ_SECONDS:
            return self._verdict(now)
        try:
            for _ in range(TRIES):
                if self._read_and_claim(now):
                    self._read_at = now
                    return self._verdict(now)
        except StorageUnavailable:
            # Nobody could beat while the store was away: a silence across that gap proves nothing.
            self._found, self._read_at = None, None
            raise
        self._read_at = None
        raise StorageUnavailable("owner.json changes each time it is to be written")

    def told(self, other: Other) -> str:
        """That, and until when, nothing is done because of `other`: for a user."""
        how = self.how.replace("OWNER", other.owner)
        return (
            f"{other.owner} (cluster {other.cluster_uid}) looks after this run, and its heartbeat in owner.json goes on; "
            f"nothing is done here. The run is taken over when that heartbeat has stood still for {STALE_SECONDS:.0f} s, "
            f"or now: {how}"
        )

    def release(self) -> None:
        """Leave in order: nobody has to wait. Does nothing when the run is not ours. Raises as `hold`."""
        found = self._documents.owner()
        if found is not None and found[0].owner == self.owner and not found[0].released:
            self._documents.swap_owner(self._document(found[0].beats + 1, released=True), found[1])
        self._found, self._read_at = None, None

    def _read_and_claim(self, now: float) -> bool:
        """One reading, and one write where it is due. False: somebody wrote in between, read again."""
        read = self._documents.owner()
        if read is None:
            return self._claim(1, 0, now)
        found, generation = read
        first = self._found is None
        if found != self._found:
            self._found, self._since = found, now
        if not self._due(found, first, now):
            return True
        return self._claim(found.beats + 1, generation, now)

    def _due(self, found: Owner, first: bool, now: float) -> bool:
        """Whether to write our name: a beat that is due, or a run that is free to take."""
        still = now - self._since
        if found.released:
            return True
        if found.owner == self.owner:
            return first or still >= BEAT_SECONDS
        named = self.take_over_from in (found.owner, found.cluster_uid)
        return self._take_over or named or still >= STALE_SECONDS

    def _claim(self, beats: int, generation: int, now: float) -> bool:
        document = self._document(beats)
        if self._documents.swap_owner(document, generation) is None:
            return False
        self._found, self._since, self._take_over = document, now, False
        return True

    def _document(self, beats: int, released: bool = False) -> Owner:
        return Owner(
            owner=self.owner,
            cluster_uid=self.cluster_uid,
            beats=beats,
            released=released,
            op_id=new_op_id(),
            time=self._clock(),
        )

    def _verdict(self, now: float) -> Other | None:
        found = self._found
        if found is None or found.owner == self.owner:
            return None
        return Other(found.owner, found.cluster_uid, now - self._since)
