"""The ledger: one entry per ending, written once, by whoever sees it first.

Entries of an attempt are numbered without gaps; two writers racing for a number collide at its creation, and the loser
looks whether the winner wrote the same ending before it takes the next number.
"""

from trainer.rundir.documents import Documents
from trainer.rundir.records import Ending


def ending_key(attempt: int, index: int) -> str:
    return f"attempts/{attempt}/endings/{index}.json"


class Ledger:
    """Reads and appends endings. Entries never change, so each is fetched once."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._known: dict[int, list[Ending]] = {}

    def endings(self, attempt: int) -> tuple[Ending, ...]:
        """The endings of one attempt, in the order they were recorded."""
        known = self._known.setdefault(attempt, [])
        while (entry := self._documents.read(ending_key(attempt, len(known) + 1), Ending)) is not None:
            if len(known) < entry.index:  # another thread may have been here
                known.append(entry)
        return tuple(known)

    def known(self, attempt: int) -> tuple[Ending, ...]:
        """Those that were read or written here: the store is not asked."""
        return tuple(self._known.get(attempt, ()))

    def append(self, ending: Ending) -> Ending:
        """Record `ending` (its index is chosen here) unless its key is recorded; returns the entry that counts."""
        while True:
            entries = self.endings(ending.attempt)
            same = next((entry for entry in entries if entry.key == ending.key), None)
            if same is not None:
                return same
            numbered = ending.model_copy(update={"index": len(entries) + 1})
            if self._documents.create(ending_key(ending.attempt, numbered.index), numbered):
                known = self._known[ending.attempt]
                if len(known) < numbered.index:
                    known.append(numbered)
                return numbered
