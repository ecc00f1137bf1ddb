"""The audit of a run: what its step logs prove along the committed lineage, and whether steps done again are equal.

The lineage is the chain of commit records from HEAD back to the beginning; each names the log files of its steps. Logs
of starts that died uncommitted lie beside them: where such a start did steps that the lineage has too, both lines are
compared. Their ids and tokens must be equal whatever the hardware, loss and gradient norm bit for bit if both starts
ran the same plan on the same kind of device with the same versions.
"""

import re
import struct
from collections.abc import Callable, Iterator

from pydantic import Field

from trainer.data.coverage import Counter, Coverage
from trainer.data.order import open_order
from trainer.data.tokens import TokenCheck
from trainer.errors import Damaged
from trainer.frozen import Frozen
from trainer.recipe import Recipe
from trainer.rundir.records import CommitRecord, StepLine
from trainer.rundir.rundir import RunDirectory

_COMPARED = ("ids", "data", "loss", "grad_norm", "skipped")
_PIECE = re.compile(r"steps/(?P<start>\d+\.\d+)/(?P<first>\d+)-(?P<last>\d+)\.jsonl")


class NoSuchRun(Exception):
    """There is no run at this URI: no recipe was ever written there."""


class RunCoverage(Coverage):
    """Coverage of a run directory's committed lineage."""

    run: str
    recipe: str
    fingerprint: str
    order: str
    instances: int = Field(description="instances in the corpus")
    omitted_files: tuple[str, ...] = Field(description="files of the mix that the recipe leaves out on purpose")
    global_batch: int
    commits: int
    redone_steps: int = Field(description="log lines of other starts for steps that the lineage has too")
    redone_steps_compared: int = Field(description="of these, done on an equal plan: all their bits must agree")
    redone_steps_bitwise_equal: int = Field(description="of those compared, equal in ids, tokens, loss, norm")
    token_steps_compared: int = Field(description="steps whose tokens were compared with the corpus")
    token_steps_unequal: int
    tokens_unread: str = Field(description="why no tokens were compared; empty when they were")
    ok: bool


class Comparison(Frozen):
    """Two runs, step by step from the first common one: the last step up to which everything before is equal too."""

    run: str
    against: str
    steps_compared: int
    ids_equal_until_step: int
    data_equal_until_step: int
    loss_equal_until_step: int
    grad_norm_equal_until_step: int
    digests_compared: int = Field(description="steps that both runs committed")
    digest_equal_until_step: int
    first_unequal_digest_step: int | None


def audit(
    rundir: RunDirectory, progress: Callable[[int, int], None] | None = None, data_root: str | None = None
) -> RunCoverage:
    """Coverage of the committed steps of a run. `progress` is called with (steps done, steps in all).

    `data_root`: where the token files are, if not where the newest attempt had them.

    Raises NoSuchRun, ConfigurationError (the order's table is missing, a document is newer than this code),
    TruthUnknown (a commit record is missing), StorageUnavailable.
    """
    recipe = read_recipe(rundir)
    records = committed(rundir)
    first, last = first_step(rundir), records[-1].ref.step if records else first_step(rundir)
    order = open_order(recipe, rundir.store)
    counter = Counter(order, first, last)
    fingerprint = recipe.fingerprint()
    for record in records:
        if record.fingerprint != fingerprint:
            text = f"made with recipe {record.fingerprint[:12]}, the run's is {fingerprint[:12]}"
            counter.problem(record.ref.step, record.ref.key, text)
    redone = Redone(rundir, records, counter, first, last)
    tokens = TokenCheck(recipe, order, data_root or newest_data_root(rundir), counter)
    tokens.sample(records, first, last)
    for where, line in logged(rundir, records, counter):
        counter.add(where, line)
        redone.compare(where, line)
        tokens.add(where, line)
        if progress and line.step % 1000 == 0:
            progress(line.step - first, last - first)
    coverage = counter.finish()
    return RunCoverage(
        **dict(coverage),
        run=rundir.uri,
        recipe=recipe.name,
        fingerprint=fingerprint,
        order=f"{recipe.data.order.kind} v{recipe.data.order.version}, seed {recipe.data.order.seed}",
        instances=order.instances,
        omitted_files=recipe.data.omitted_files,
        global_batch=order.batch,
        commits=len(records),
        redone_steps=redone.lines,
        redone_steps_compared=redone.compared,
        redone_steps_bitwise_equal=redone.equal,
        token_steps_compared=tokens.compared,
        token_steps_unequal=tokens.unequal,
        tokens_unread=tokens.unread,
        ok=not coverage.problem_count and not coverage.repeated_instances and not coverage.missed_instances,
    )


def compare(rundir: RunDirectory, against: RunDirectory) -> Comparison:
    """How far two runs are equal, bit by bit, along their committed lineages. Raises as `audit`."""
    for one in (rundir, against):
        read_recipe(one)
    mine, theirs = committed(rundir), committed(against)
    until = dict.fromkeys(("ids", "data", "loss", "grad_norm"), max(first_step(rundir), first_step(against)))
    still, steps = set(until), 0
    for (_, a), (_, b) in _common(_in_order(rundir, mine), _in_order(against, theirs)):
        steps += 1
        still -= {name for name in still if _bits(getattr(a, name)) != _bits(getattr(b, name))}
        until.update(dict.fromkeys(still, a.step))
    digests = {record.ref.step: record.digest for record in theirs}
    common = [record for record in mine if record.ref.step in digests]
    unequal = next((r.ref.step for r in common if r.digest != digests[r.ref.step]), None)
    equal = [r.ref.step for r in common if unequal is None or r.ref.step < unequal]
    return Comparison(
        run=rundir.uri,
        against=against.uri,
        steps_compared=steps,
        **{f"{name}_equal_until_step": step for name, step in until.items()},
        digests_compared=len(common),
        digest_equal_until_step=max(equal, default=0),
        first_unequal_digest_step=unequal,
    )


def read_recipe(rundir: RunDirectory) -> Recipe:
    """The run's recipe. Raises NoSuchRun where none was written."""
    stored = rundir.read_recipe()
    if stored is None:
        raise NoSuchRun(f"{rundir.uri}: no run here (recipe.json is missing)")
    return stored.recipe


def newest_data_root(rundir: RunDirectory) -> str | None:
    """Where the newest attempt reads its token files; None before the first."""
    found = rundir.head()
    spec = rundir.read_spec(found[0].attempt) if found else None
    return spec.settings.data_root if spec else None


def committed(rundir: RunDirectory) -> list[CommitRecord]:
    """The lineage of HEAD, oldest first; empty before the first commit."""
    found = rundir.head()
    return list(rundir.lineage(found[0].commit))[::-1] if found else []


def first_step(rundir: RunDirectory) -> int:
    """The step the run began with: 0, or its parent's if the step counter was carried over."""
    init = rundir.read_init()
    return init.commit.step if init and init.source and init.source.step and init.commit else 0


def logged(rundir: RunDirectory, records: list[CommitRecord], counter: Counter) -> Iterator[tuple[str, StepLine]]:
    """(log file, line) of every step of the lineage, oldest first; unreadable or misnamed files become problems."""
    for record in records:
        for file in record.step_log:
            try:
                lines = rundir.read_step_log(file)
            except Damaged as error:
                counter.problem(file.first, file.key, str(error))
                continue
            if not lines or (lines[0].step, lines[-1].step) != (file.first, file.last):
                counter.problem(file.first, file.key, f"does not hold steps {file.first}..{file.last} as it was named")
            for line in lines:
                yield file.key, line


class Redone:
    """Log lines of starts that are not on the lineage, for steps that are: steps that were done again."""

    def __init__(
        self, rundir: RunDirectory, records: list[CommitRecord], counter: Counter, first: int, last: int
    ) -> None:
        """Reads those lines: memory is theirs, about 0.5 KB a step."""
        self.lines = self.compared = self.equal = 0
        self._rundir, self._counter = rundir, counter
        self._others: dict[int, list[tuple[str, StepLine]]] = {}
        self._conditions: dict[str, object] = {}
        on_lineage = {file.key for record in records for file in record.step_log}
        for key in rundir.store.list("steps"):
            name = _PIECE.fullmatch(key)
            if key in on_lineage or not name or int(name["first"]) > last:
                continue
            start = name["start"]
            for line in self._read(key):
                if first < line.step <= last:
                    self._others.setdefault(line.step, []).append((start, line))

    def compare(self, where: str, line: StepLine) -> None:
        """Compare the lineage's line of a step with those of other starts."""
        for start, other in self._others.get(line.step, ()):
            name = _PIECE.fullmatch(where)
            own = name["start"] if name else ""
            same = {f for f in _COMPARED if _bits(getattr(line, f)) == _bits(getattr(other, f))}
            if start == own:  # one execution, logged in two files because an answer of the store was lost
                if len(same) < len(_COMPARED):
                    self._counter.problem(line.step, where, f"start {start} logged step {line.step} twice, not alike")
                continue
            self.lines += 1
            alike = self._condition(start) == self._condition(own) is not None
            wanted = _COMPARED if alike else ("ids", "data")
            differing = [f for f in wanted if f not in same]
            self.compared += alike
            self.equal += alike and not differing
            if differing:
                self._counter.problem(
                    line.step,
                    where,
                    f"step {line.step} was done by start {start} and again by {own}, "
                    f"with other {' and '.join(differing)}: "
                    + ", ".join(f"{f} {getattr(other, f)} → {getattr(line, f)}" for f in differing),
                )

    def _read(self, key: str) -> list[StepLine]:
        data = self._rundir.get(key) or b""
        return [StepLine.parse(line, self._rundir.path(key)) for line in data.splitlines()]

    def _condition(self, start: str) -> object:
        """What must be equal for bits to be: plan, kind of device, versions. None when the start left no record."""
        if start not in self._conditions:
            attempt, _, number = start.partition(".")
            record = self._rundir.read_start(int(attempt), int(number)) if start else None
            found = record and (record.plan.canonical(), record.device_kind, tuple(sorted(record.versions.items())))
            self._conditions[start] = found
        return self._conditions[start]


def _in_order(rundir: RunDirectory, records: list[CommitRecord]) -> Iterator[tuple[str, StepLine]]:
    for record in records:
        for file in record.step_log:
            for line in rundir.read_step_log(file):
                yield file.key, line


def _common(
    mine: Iterator[tuple[str, StepLine]], theirs: Iterator[tuple[str, StepLine]]
) -> Iterator[tuple[tuple[str, StepLine], tuple[str, StepLine]]]:
    """Pairs of lines of the same step, both sides ascending."""
    a, b = next(mine, None), next(theirs, None)
    while a and b:
        if a[1].step == b[1].step:
            yield a, b
            a, b = next(mine, None), next(theirs, None)
        elif a[1].step < b[1].step:
            a = next(mine, None)
        else:
            b = next(theirs, None)


def _bits(value: float | str | bool) -> object:
    """Equal exactly when the values are, bit by bit: NaN equals itself, 0.0 is not -0.0."""
    return struct.pack("<d", value) if isinstance(value, float) else value
