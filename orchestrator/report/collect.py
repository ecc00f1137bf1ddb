"""Reads a run directory into one value: every start with its steps, its commits and its ending, and the committed lineage.

What counts is read from HEAD and the commit records that it reaches. Listing is used only to find work that was thrown away, which
a report shows and nobody decides by.
"""

import json
from dataclasses import dataclass

from orchestrator.registry import RunNotFound
from trainer.recipe import Recipe
from trainer.rundir.records import (
    AttemptSpec,
    CommitRecord,
    CommitRef,
    Ending,
    ExitRecord,
    Head,
    Progress,
    SetAside,
    StartRecord,
    StepLine,
)
from trainer.rundir.rundir import RunDirectory


@dataclass(frozen=True)
class StartHistory:
    """One coming-up of a gang: what it did, and how it ended. `name` is attempt.start, as 7.2."""

    record: StartRecord
    progress: Progress | None
    exit: ExitRecord | None
    ending: Ending | None
    lines: tuple[StepLine, ...]  # every step it logged, committed or not
    commits: tuple[CommitRecord, ...]  # every commit record it wrote
    set_aside: tuple[SetAside, ...]

    @property
    def name(self) -> str:
        return f"{self.record.attempt}.{self.record.start}"

    @property
    def restored(self) -> CommitRef | None:
        """The commit it went on from: of its claim, or where that was damaged the first one before it that was not."""
        parents = {note.commit: note.parent for note in self.set_aside}
        commit = self.record.restored
        while commit in parents:
            commit = parents.pop(commit)
        return commit

    @property
    def first_step(self) -> int:
        """Steps completed when it began."""
        return self.restored.step if self.restored else 0

    @property
    def last_step(self) -> int:
        """Last step that it is known to have completed."""
        known = [self.first_step, *(line.step for line in self.lines), *(commit.ref.step for commit in self.commits)]
        if self.progress and self.progress.step is not None:
            known.append(self.progress.step)
        if self.ending and self.ending.last_step is not None:
            known.append(self.ending.last_step)
        return max(known)

    @property
    def began(self) -> float:
        """UNIX time at which it came up: of its admission if the ledger knows it, else of its claim."""
        return self.ending.began if self.ending and self.ending.began is not None else self.record.time

    @property
    def ended(self) -> float | None:
        """UNIX time of its end; None while it lives."""
        if self.ending:
            return self.ending.ended if self.ending.ended is not None else self.last_sign
        return self.exit.time if self.exit else None

    @property
    def last_sign(self) -> float:
        """UNIX time of the last thing it wrote."""
        times = [self.record.time, *(commit.time for commit in self.commits)]
        if self.progress:
            times.append(self.progress.time)
        if self.exit:
            times.append(self.exit.time)
        return max(times)

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Seconds per phase; what the ledger says, else the start's own last word."""
        own = dict(self.progress.phase_seconds) if self.progress else {}
        return {**own, **(self.ending.seconds if self.ending else {})}


@dataclass(frozen=True)
class RunHistory:
    """One run, as its run directory tells it."""

    uri: str
    recipe: Recipe
    head: Head
    lineage: tuple[CommitRecord, ...]  # committed, oldest first
    curve: dict[int, StepLine]  # step -> its line along the lineage
    held_out: dict[int, float]  # step -> held-out loss of that commit, nats per token
    specs: dict[int, AttemptSpec]
    starts: tuple[StartHistory, ...]  # by attempt, start
    endings: tuple[Ending, ...]  # the whole ledger, those without a claimed start included

    @property
    def name(self) -> str:
        """The run's name: its gangs are called <run>-a<attempt>."""
        if not self.specs:
            return self.uri.rstrip("/").rsplit("/", 1)[-1]
        newest = max(self.specs)
        return self.specs[newest].gang.removesuffix(f"-a{newest}")

    @property
    def target_step(self) -> int:
        return self.specs[max(self.specs)].settings.target_step if self.specs else 0

    @property
    def committed_step(self) -> int:
        return self.head.commit.step if self.head.commit else 0

    @property
    def done(self) -> bool:
        return 0 < self.target_step <= self.committed_step

    @property
    def began(self) -> float:
        """UNIX time of the first thing known to have happened."""
        times = [start.began for start in self.starts]
        times += [ending.began for ending in self.endings if ending.began is not None]
        times += [s.began - s.phase_seconds.get("queue", 0.0) for s in self.starts]
        return min(times, default=0.0)

    @property
    def ended(self) -> float:
        """UNIX time of the last thing known to have happened."""
        times = [start.ended or start.last_sign for start in self.starts]
        times += [ending.ended for ending in self.endings if ending.ended is not None]
        return max(times, default=self.began)

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def first_resize_step(self) -> int | None:
        """Steps completed when the number of devices first changed; None: it never did."""
        for before, after in zip(self.starts, self.starts[1:], strict=False):
            if after.record.plan.devices != before.record.plan.devices:
                return after.first_step
        return None

    @property
    def first_reordered_step(self) -> int | None:
        """Steps completed when bits were first allowed to differ from those of an undisturbed run; None: they never were.

        With `reduction: fast` another number of devices adds in another order; with `invariant` only another kind of
        device computes otherwise.
        """
        if self.recipe.reduction == "fast":
            return self.first_resize_step
        for before, after in zip(self.starts, self.starts[1:], strict=False):
            if after.record.device_kind != before.record.device_kind:
                return after.first_step
        return None


def collect(rundir: RunDirectory) -> RunHistory:
    """Read everything the report needs.

    Raises RunNotFound when nothing was ever submitted, TruthUnknown, Damaged or ConfigurationError when records contradict
    each other or are unreadable, StorageUnavailable when the store is silent.
    """
    found, recipe = rundir.head(), rundir.read_recipe()
    if found is None or recipe is None:
        raise RunNotFound(f"{rundir.uri}: no run was ever submitted here; is this a run directory?")
    head = found[0]
    lineage = tuple(rundir.lineage(head.commit))[::-1]
    curve: dict[int, StepLine] = {}
    for commit in lineage:
        for piece in commit.step_log:
            curve.update((line.step, line) for line in rundir.read_step_log(piece) if line.step <= commit.ref.step)
    found_held_out = {c.ref.step: _held_out(rundir, c) for c in lineage}
    endings = rundir.endings()
    specs = {n: spec for n in range(1, head.attempt + 1) if (spec := rundir.read_spec(n)) is not None}
    starts = [
        _start(rundir, record, endings)
        for attempt in specs
        for number in range(1, rundir.last_start(attempt) + 1)
        if (record := rundir.read_start(attempt, number)) is not None
    ]
    return RunHistory(
        uri=rundir.uri,
        recipe=recipe.recipe,
        head=head,
        lineage=lineage,
        curve=curve,
        held_out={step: loss for step, loss in found_held_out.items() if loss is not None},
        specs=specs,
        starts=tuple(starts),
        endings=endings,
    )


def _held_out(rundir: RunDirectory, commit: CommitRecord) -> float | None:
    """The held-out loss that was stored for `commit`; None when it was not due."""
    data = rundir.get(f"eval/{commit.ref.attempt}.{commit.ref.start}/{commit.ref.step}.json")
    loss = None if data is None else json.loads(data).get("loss")  # of an evaluation of tasks alone there is none
    return None if loss is None else float(loss)


def _start(rundir: RunDirectory, record: StartRecord, endings: tuple[Ending, ...]) -> StartHistory:
    attempt, start = record.attempt, record.start
    keys = rundir.patient(lambda: rundir.store.list(f"commits/{attempt}.{start}"))
    commits = [commit for key in keys if (commit := rundir.read(key, CommitRecord)) is not None]
    mine = [ending for ending in endings if (ending.attempt, ending.start) == (attempt, start)]
    return StartHistory(
        record=record,
        progress=rundir.read_progress(attempt, start),
        exit=rundir.read_exit(attempt, start),
        ending=mine[-1] if mine else None,
        lines=tuple(rundir.logged_steps(attempt, start)),
        commits=tuple(sorted(commits, key=lambda commit: commit.ref.step)),
        set_aside=tuple(rundir.set_asides(attempt, start)),
    )
