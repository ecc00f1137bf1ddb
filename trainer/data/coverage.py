"""Which instances were read how often: counted from a step log alone, exactly, at any size.

A log line holds a hash of the ids that reached the devices at that step. Where it equals the hash of the batch that
the order has for the step, those ids were read: 64 bits of agreement, in row order. Where it does not, the step is
named and its ids count as unread, unless a known mistake explains the hash (explain.py): then those ids count.

Memory: one byte per instance of the corpus (7 bits of count, one for "due"), whatever the number of steps and epochs.
Time: about 0.2 µs per instance and step: some minutes for OLMo 3's stage 1 (724 million) with `feistel`, on one core.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from pydantic import Field

from trainer.data.explain import Explainer
from trainer.data.hashes import U64, hash_text, ids_hash, ids_hashes
from trainer.data.order import BatchOrder
from trainer.frozen import Frozen
from trainer.rundir.records import StepLine

BLOCK_IDS = 1 << 18  # ids checked at a time; 2^17 and 2^20 were slower
KEPT_PROBLEMS = 50
_DUE, _COUNT = np.uint8(0x80), np.uint8(0x7F)


class Problem(Frozen):
    """One thing that should not be."""

    step: int | None = Field(default=None, description="the first step concerned")
    where: str = Field(description="log file or document")
    text: str


class EpochCoverage(Frozen):
    """One epoch, as far as the steps audited went."""

    epoch: int
    steps: int = Field(description="steps of this epoch in the audited range")
    whole: bool = Field(description="whether the range holds all batches of the epoch")
    read: int = Field(description="different instances read")
    repeated: int = Field(description="instances read more than once")
    missed: int = Field(description="instances that the order has in these steps, and that were not read")


class Coverage(Frozen):
    """What the log of steps first_step+1 .. last_step proves."""

    first_step: int
    last_step: int
    steps: int = Field(description="steps in the range with a log line")
    epochs: tuple[EpochCoverage, ...]
    read_instances: int
    repeated_instances: int
    missed_instances: int
    problems: tuple[Problem, ...] = Field(description=f"the first {KEPT_PROBLEMS}")
    problem_count: int


def cover(order: BatchOrder, lines: Iterable[tuple[str, StepLine]], first_step: int, last_step: int) -> Coverage:
    """Coverage of steps first_step+1 .. last_step by `lines`: (where it stands, line), in the order of the log.

    Step s used batch s-1. Lines may be missing, doubled, out of order or wrong: all of that is what is looked for.
    """
    count = Counter(order, first_step, last_step)
    for where, line in lines:
        count.add(where, line)
    return count.finish()


class Counter:
    """Takes log lines one by one; `finish` gives the coverage."""

    def __init__(self, order: BatchOrder, first_step: int, last_step: int) -> None:
        self._order, self._first, self._last = order, first_step, last_step
        self._explainer = Explainer(order)
        self._block_steps = max(1, BLOCK_IDS // order.batch)
        self._pending: list[tuple[str, StepLine]] = []  # consecutive steps, from self._done + 1 on
        self._done = first_step  # steps accounted for, read or missing
        self._logged = 0
        self._counts = np.zeros(order.instances, np.uint8)
        self._epoch = order.epoch_of(first_step)
        self._epoch_steps = 0
        self._gaps: list[tuple[int, int]] = []  # steps without a line where it belongs
        self._earlier_seen: set[int] = set()  # of these, the ones that came after all
        self._late: dict[int, int] = {}  # epoch -> instances read in lines that came after its end: all "repeated"
        self._epochs: list[EpochCoverage] = []
        self.problems: list[Problem] = []
        self.problem_count = 0

    def add(self, where: str, line: StepLine) -> None:
        """The next line of the log."""
        due = self._done + len(self._pending) + 1
        if line.step != due:
            self._flush()
            if line.step > self._last or line.step <= self._first:
                span = f"{self._first + 1}..{self._last}"
                self.problem(line.step, where, f"step {line.step} is logged, outside of the committed steps {span}")
                return
            if line.step < due:
                self._earlier(where, line)
                return
            self._gap(where, line.step - 1)
        elif line.step > self._last:
            self.problem(line.step, where, f"step {line.step} is logged, beyond the committed step {self._last}")
            return
        self._pending.append((where, line))
        if len(self._pending) >= self._block_steps:
            self._flush()

    def finish(self) -> Coverage:
        """Account for the rest, and sum up."""
        self._flush()
        if self._done < self._last:
            self._gap("step log", self._last)
        self._close_epoch()
        late = [e.model_copy(update={"repeated": e.repeated + self._late.get(e.epoch, 0)}) for e in self._epochs]
        return Coverage(
            first_step=self._first,
            last_step=self._last,
            steps=self._logged,
            epochs=tuple(late),
            read_instances=sum(e.read for e in late),
            repeated_instances=sum(e.repeated for e in late),
            missed_instances=sum(e.missed for e in late),
            problems=tuple(self.problems),
            problem_count=self.problem_count,
        )

    def problem(self, step: int | None, where: str, text: str) -> None:
        self.problem_count += 1
        if len(self.problems) < KEPT_PROBLEMS:
            self.problems.append(Problem(step=step, where=where, text=text))

    def _flush(self) -> None:
        """Check the pending lines against the order, epoch by epoch."""
        while self._pending:
            room = self._order.batches_per_epoch - self._done % self._order.batches_per_epoch
            part, self._pending = self._pending[:room], self._pending[room:]
            ids = self._due_ids(len(part))
            right = np.ones(len(part), np.bool_)
            for k, ((where, line), lanes) in enumerate(zip(part, ids_hashes(ids), strict=True)):
                if line.ids != hash_text(lanes):
                    right[k] = False
                    self._mark(self._ids_of(where, line), read=True)
            if not right.all():
                self._mark(ids[~right], due=True)
                ids = ids[right]
            self._mark(ids, due=True, read=True)
            self._done += len(part)
            self._logged += len(part)

    def _due_ids(self, steps: int) -> U64:
        """uint64[steps, B]: the ids due in the next steps, all of one epoch; a new epoch is begun if it is another."""
        epoch = self._order.epoch_of(self._done)
        if epoch != self._epoch:
            self._close_epoch()
            self._epoch = epoch
        self._epoch_steps += steps
        return self._order.block(self._done, self._done + steps)

    def _mark(self, ids: U64, due: bool = False, read: bool = False) -> None:
        """Note that `ids` (uint64[...], the same one may be there twice) are due, or were read, or both.

        Sorted, so that doubles stand side by side and the counts are walked through in one direction.
        """
        ids = np.sort(ids, axis=None)
        again = ids[1:][ids[1:] == ids[:-1]] if read else ids[:0]
        counts = self._counts[ids]
        if due:
            counts |= _DUE
        if read:
            counts += (counts & _COUNT) < _COUNT  # 127 times is the most that is told apart
        self._counts[ids] = counts
        if again.size:
            self._mark(again, read=True)

    def _ids_of(self, where: str, line: StepLine) -> U64:
        """The ids that a line proves were read: its batch's, else those of the mistake that explains it, else none."""
        due = self._order.batch_ids(line.step - 1)
        expected = ids_hash(due)
        if line.ids == expected:
            return due
        found = self._explainer.explain(line.step - 1, line.ids)
        said = f"it is {found[0]}" if found else "known mistakes do not explain it, so its ids are not known"
        self.problem(
            line.step,
            where,
            f"step {line.step} did not read batch {line.step - 1}: "
            f"ids hash {line.ids}, the order gives {expected}; {said}",
        )
        return found[1] if found else np.empty(0, np.uint64)

    def _earlier(self, where: str, line: StepLine) -> None:
        """A line of a step that was accounted for: out of its place, or a second one, whose batch was read again."""
        step = line.step
        if step in self._earlier_seen or not any(first <= step <= last for first, last in self._gaps):
            self.problem(step, where, f"step {step} is logged twice, so its batch was trained on twice")
        else:
            self.problem(step, where, f"step {step} is logged out of its place, after later steps")
            self._earlier_seen.add(step)
            self._logged += 1
        ids = self._ids_of(where, line)
        epoch = self._order.epoch_of(step - 1)
        if epoch == self._epoch:
            self._mark(ids, read=True)
        else:
            self._late[epoch] = self._late.get(epoch, 0) + ids.size

    def _gap(self, where: str, end: int) -> None:
        """Steps self._done+1 .. end have no line: what they should have read counts as missed."""
        self._gaps.append((self._done + 1, end))
        steps = f"step {end} is" if end == self._done + 1 else f"steps {self._done + 1}..{end} are"
        self.problem(self._done + 1, where, f"{steps} not in the log, so nothing proves what was read")
        while self._done < end:
            room = self._order.batches_per_epoch - self._done % self._order.batches_per_epoch
            count = min(room, end - self._done, self._block_steps)
            self._mark(self._due_ids(count), due=True)
            self._done += count

    def _close_epoch(self) -> None:
        """Sum up the epoch that was counted, and clear the counts."""
        if self._epoch_steps:
            read = repeated = missed = 0
            for part in _parts(self._counts):
                count = part & _COUNT
                read += int(np.count_nonzero(count))
                repeated += int(np.count_nonzero(count > 1))
                missed += int(np.count_nonzero(part == _DUE))
            whole = self._epoch_steps == self._order.batches_per_epoch
            self._epochs.append(
                EpochCoverage(
                    epoch=self._epoch,
                    steps=self._epoch_steps,
                    whole=whole,
                    read=read,
                    repeated=repeated,
                    missed=missed,
                )
            )
        self._counts = np.zeros(self._order.instances, np.uint8)
        self._epoch_steps = 0


def _parts(array: npt.NDArray[np.uint8]) -> Iterable[npt.NDArray[np.uint8]]:
    """Pieces of 16 MiB, so that temporary arrays stay small beside the counts."""
    for start in range(0, array.size, 1 << 24):
        yield array[start : start + (1 << 24)]
