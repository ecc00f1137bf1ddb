"""The committed history of a run as points of curves: each step once, and none that was rolled back.

Everything comes from the commit records that HEAD reaches. A start that died after its last commit has logged steps that
are not among them; they were done again, and only the second time counts.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trainer.errors import ConfigurationError
from trainer.flops import REPORTED, Counting
from trainer.metrics import names
from trainer.metrics.memorisation import intervals_of, judge
from trainer.metrics.names import Throughput
from trainer.rundir.alarms import Trend
from trainer.rundir.records import CommitRecord, CommitRef
from trainer.rundir.rundir import RunDirectory

DOCUMENT = re.compile(r"\w+/(\d+)\.(\d+)/(\d+)\.json")
Folder = Literal["eval", "trend"]


@dataclass(frozen=True)
class Point:
    """Metrics of the state after `step`; `time` is UNIX seconds."""

    step: int
    time: float
    values: dict[str, float]


class RolledBack(Exception):
    """The commit that was read last is not part of the run any more: it was damaged, and set aside."""


class Committed:
    """One run, read commit by commit. Raises ConfigurationError where there is none, StorageUnavailable, Damaged."""

    def __init__(self, rundir: RunDirectory, counting: Counting = REPORTED) -> None:
        stored = rundir.read_recipe()
        if stored is None:
            raise ConfigurationError(f"{rundir.uri}: no run here (recipe.json is missing)")
        self.rundir, self.recipe, self._counting = rundir, stored.recipe, counting
        self._throughput: dict[tuple[int, int], Throughput] = {}

    def since(self, last: CommitRef | None) -> list[CommitRecord]:
        """The commits after `last`, oldest first; all of them for None. Raises RolledBack."""
        found = self.rundir.head()
        records: list[CommitRecord] = []
        for record in self.rundir.lineage(found[0].commit if found else None):
            if record.ref == last:
                return records[::-1]
            records.append(record)
        if last is not None:
            raise RolledBack(str(last))
        return records[::-1]

    def steps(self, record: CommitRecord, before: CommitRecord | None) -> Iterator[Point]:
        """The steps of one commit in order; the last one has the commit's own metrics too. `before` is its parent."""
        lines = [line for file in record.step_log for line in self.rundir.read_step_log(file)]
        throughput = self._on(record.ref)
        time = record.time - record.save_seconds - sum(line.seconds for line in lines)  # as if nothing came between
        for line in lines:
            time += line.seconds
            values = names.of_step(line, throughput)
            if line.step == record.ref.step:
                values |= names.of_commit(record, before)
            yield Point(line.step, time, values)

    def parent(self, record: CommitRecord) -> CommitRecord | None:
        return self.rundir.read_commit(record.parent) if record.parent else None

    def evaluated(self, folder: Folder = "eval") -> set[CommitRef]:
        """Commits, of this run's line or not, that have a document in `folder`: an evaluation, or a trend."""
        keys = self.rundir.patient(lambda: self.rundir.store.list(folder))
        found = [match for key in keys if (match := DOCUMENT.fullmatch(key)) is not None]
        return {CommitRef(attempt=int(m[1]), start=int(m[2]), step=int(m[3])) for m in found}

    def evaluation(self, ref: CommitRef) -> Point | None:
        """The evaluation of a commit; None where there is none (yet)."""
        data = self.rundir.get(f"eval/{ref.attempt}.{ref.start}/{ref.step}.json")
        if data is None:
            return None
        body = json.loads(data)
        values = {str(name): float(value) for name, value in (body.get("metrics") or {}).items()}
        if "loss" in body:  # of the recipe's own held-out text; an evaluation of tasks alone has none
            loss = float(body["loss"])
            values |= {names.HELD_OUT: loss, names.HELD_OUT_PPL: names.perplexity(loss)}
        return Point(ref.step, float(body.get("time", 0.0)), values)

    def score(self, ref: CommitRef) -> Point | None:
        """The score of the memorisation rule at a commit; None where the rule has nothing to judge (yet)."""
        trend, record = self.rundir.read(ref.trend, Trend), self.rundir.read_start(ref.attempt, ref.start)
        if trend is None or record is None:
            return None
        score = judge(intervals_of(trend.points), record.settings.held_out_same_text).score
        if not score.size or not math.isfinite(score[-1]):
            return None
        return Point(ref.step, self.rundir.read_commit(ref).time, {names.SCORE: float(score[-1])})

    def _on(self, ref: CommitRef) -> Throughput:
        start = (ref.attempt, ref.start)
        if start not in self._throughput:
            record = self.rundir.read_start(*start)
            if record is None:
                raise ConfigurationError(f"{self.rundir.uri}: attempts/{start[0]}/{start[1]}/start.json is missing")
            self._throughput[start] = Throughput.of(self.recipe, record.plan, self._counting)
        return self._throughput[start]
