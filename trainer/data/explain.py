"""What was read instead: known ways of reading the wrong batch, tried until one gives the hash that was logged.

A nicety on top of the audit, which has found the step already. Each rule is a mistake that has been made: resuming
one step off, rewinding to step / H, another epoch, every process reading each P-th element of its own share, rows
handed to processes in strides instead of blocks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trainer.data.hashes import U64, hash_text, ids_hash, ids_hashes
from trainer.data.order import BatchOrder

SHIFTS = 64  # batches before and after that are tried
PROCESSES = (2, 4, 8, 16, 32, 64, 128)
FACTORS = (1, 2, 4, 8, 16, 32, 64, 128)  # accumulation, and rewinds
FAILED_SEARCHES = 20  # then only rules that fitted before are tried: a search costs up to 0.1 s


@dataclass(frozen=True)
class Rule:
    """A way of choosing the ids of batch t, and how to say that it happened."""

    text: str
    read: Callable[[int], U64]


class Explainer:
    """Finds the rule behind a wrong hash; remembers rules that fitted, for the steps that follow."""

    def __init__(self, order: BatchOrder) -> None:
        self._order = order
        self._fitted: list[Rule] = []
        self._failed = 0

    def explain(self, t: int, logged: str) -> tuple[str, U64] | None:
        """(what happened, uint64[B] the ids that were read) for the hash logged where batch `t` was due, or None."""
        for rule in self._fitted:
            ids = self._read(rule, t)
            if ids is not None and ids_hash(ids) == logged:
                return rule.text, ids
        if self._failed >= FAILED_SEARCHES:
            return None
        shift = self._find_shift(t, logged)
        for rule in [shift] if shift else self._rules():
            ids = self._read(rule, t)
            if ids is not None and ids_hash(ids) == logged:
                self._fitted.append(rule)
                return rule.text, ids
        self._failed += 1
        return None

    @staticmethod
    def _read(rule: Rule, t: int) -> U64 | None:
        try:
            return rule.read(t)
        except IndexError:  # a batch before the first
            return None

    def _find_shift(self, t: int, logged: str) -> Rule | None:
        """All nearby batches at once; the common mistake by far."""
        first = max(0, t - SHIFTS)
        hashes = ids_hashes(self._order.block(first, t + SHIFTS + 1))
        for other, lanes in enumerate(hashes, first):
            if hash_text(lanes) == logged:
                by = other - t
                again = "read before" if by < 0 else "due later"
                return Rule(f"the batch {abs(by)} {'before' if by < 0 else 'after'} ({again})", self._shifted(by))
        return None

    def _shifted(self, by: int) -> Callable[[int], U64]:
        return lambda t: self._order.batch_ids(t + by)

    def _rules(self) -> Iterator[Rule]:
        order, batch = self._order, self._order.batch
        for factor in FACTORS[1:]:
            yield Rule(f"the batch at step / {factor}", lambda t, f=factor: order.batch_ids(t // f))
        for epochs in (-1, 1):
            by = epochs * order.batches_per_epoch
            yield Rule(f"the batch of the epoch {'before' if by < 0 else 'after'}", self._shifted(by))
        for processes in PROCESSES:
            for accumulation in FACTORS:
                if batch % (accumulation * processes):
                    continue
                layout = (accumulation, processes, batch // accumulation // processes)
                yield Rule(
                    f"double sharding over {processes} processes (each read every {processes}th element of its share)",
                    lambda t, s=layout: double_sharded(order, t, s),
                )
                yield Rule(
                    f"the right instances, dealt to {processes} processes in strides instead of blocks",
                    lambda t, s=layout: order.batch_ids(t).reshape(s[0], s[2], s[1]).swapaxes(1, 2).reshape(-1),
                )


def double_sharded(order: BatchOrder, t: int, layout: tuple[int, int, int]) -> U64:
    """uint64[B]: what is read for batch `t` where processes slice their share twice.

    `layout`: accumulation, processes, rows of one process in one forward pass.
    """
    accumulation, processes, share = layout
    ids = order.block(t * processes, (t + 1) * processes)
    ids = ids.reshape(processes, accumulation, processes, share)
    out = order.batch_ids(t).reshape(layout).copy()
    for p in range(processes):
        out[:, p] = ids[p, :, p]
    return out.reshape(-1)
