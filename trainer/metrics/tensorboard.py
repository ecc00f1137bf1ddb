"""A run in TensorBoard: event files derived from what is committed, brought up to date as often as one likes.

Each call writes what is new into files of its own, under a name that says which commit they reach. A file appears whole or
not at all and is never changed, so that the exporter can be killed anywhere and started again: nothing is lost and
nothing there twice. Where a commit was set aside as damaged, the files that reach it are removed, and the next one
tells a TensorBoard that is running to forget the steps after its first.
"""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import ConfigurationError
from trainer.metrics.committed import Committed, Folder, Point, RolledBack
from trainer.metrics.event_files import EventWriter
from trainer.rundir.records import CommitRecord, CommitRef

# TensorBoard reads the files of a folder in the order of their names, and none that comes before one it has finished.
NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\.untildone\.(steps|eval|trend)\.(\d+)-(\d+)\.(\d+)")


@dataclass(frozen=True)
class Written:
    """One event file: the steps up to a commit, or its evaluation, or the score of the alarm's rule there."""

    number: int
    kind: str
    ref: CommitRef

    @property
    def name(self) -> str:
        ref = self.ref
        return f"events.out.tfevents.{self.number:010d}.untildone.{self.kind}.{ref.step}-{ref.attempt}.{ref.start}"

    @classmethod
    def of(cls, name: str) -> "Written | None":
        match = NAME.fullmatch(name)
        if match is None:
            return None
        number, kind, step, attempt, start = match.groups()
        return cls(int(number), kind, CommitRef(attempt=int(attempt), start=int(start), step=int(step)))


class Export:
    """The folder `out` for one run. Raises ConfigurationError when another program's event files are in it."""

    def __init__(self, run: Committed, out: Path) -> None:
        self._run, self._out = run, out
        out.mkdir(parents=True, exist_ok=True)
        mark = out / "untildone-run"  # two runs in one folder would be one curve with two values a step
        if mark.exists() and mark.read_text().strip() != run.rundir.uri:
            raise ConfigurationError(
                f"--out {out}: it holds the curves of {mark.read_text().strip()}; give another folder"
            )
        foreign = [p.name for p in out.iterdir() if "tfevents" in p.name and Written.of(p.name) is None]
        if foreign:
            raise ConfigurationError(f"--out {out}: {foreign[0]} was not written by this command; give another folder")
        mark.write_text(run.rundir.uri + "\n")
        for left in out.glob(".untildone-*"):
            left.unlink()
        self._nothing: set[tuple[Folder, CommitRef]] = set()  # documents that say nothing, and never will
        self._line: list[CommitRef] = []  # the run's commits, oldest first, as far as they were read
        self._files = sorted(
            (found for p in out.iterdir() if (found := Written.of(p.name)) is not None), key=lambda f: f.number
        )

    @property
    def committed(self) -> int:
        """The last step that is in the files."""
        return max((file.ref.step for file in self._files if file.kind == "steps"), default=0)

    def update(self, advance: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Write what is new; returns how many points. `advance` is called with commits (done, in all)."""
        written = 0
        records = self._new_commits()
        if records:
            written += self._write_steps(records, advance)
        written += self._write_documents("eval", self._run.evaluation)
        return written + self._write_documents("trend", self._run.score)

    def _new_commits(self) -> list[CommitRecord]:
        """The commits after the last one that is in the files; files of commits that were set aside are removed."""
        try:
            records = self._run.since(self._line[-1] if self._line else None)
        except RolledBack:
            self._line, records = [], self._run.since(None)
        self._line += [record.ref for record in records]
        there = set(self._line)
        gone = [file for file in self._files if file.ref not in there]
        for file in gone:
            (self._out / file.name).unlink(missing_ok=True)
        self._files = [file for file in self._files if file.ref in there]
        return [record for record in records if record.ref.step > self.committed]

    def _write_steps(self, records: list[CommitRecord], advance: Callable[[int, int], None]) -> int:
        def points() -> Iterable[Point]:
            before = self._run.parent(records[0])
            for done, record in enumerate(records, 1):
                yield from self._run.steps(record, before)
                before = record
                advance(done, len(records))

        first = (records[0].parent.step if records[0].parent else 0) + 1
        return self._write("steps", records[-1].ref, points(), first)

    def _write_documents(self, kind: Folder, read: Callable[[CommitRef], Point | None]) -> int:
        """Those of commits on the run's line that have none here yet. They may come later than the steps after them."""
        known = {file.ref for file in self._files if file.kind == kind}
        there, written = self._run.evaluated(kind) - known, 0
        for ref in self._line if there else ():
            if ref not in there or (kind, ref) in self._nothing:
                continue
            point = read(ref)
            if point is None:
                self._nothing.add((kind, ref))
            else:
                written += self._write(kind, ref, [point], None)
        return written

    def _write(self, kind: str, ref: CommitRef, points: Iterable[Point], from_step: int | None) -> int:
        file = Written(max((f.number for f in self._files), default=0) + 1, kind, ref)
        temporary = self._out / f".untildone-{os.getpid()}"
        count = 0
        with temporary.open("wb") as stream:
            writer = None
            for point in points:
                writer = writer or EventWriter(stream, point.time, from_step)
                writer.add(point)
                count += 1
        temporary.rename(self._out / file.name)
        self._files.append(file)
        return count
