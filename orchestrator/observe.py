"""Everything that is known about one run at one moment, read from the cluster and the run directory.

`Observation` is all that `decide()` sees. A source that did not answer is named in `unknown`, and what came from it is
empty: nothing is guessed. How long a fact has held is not read but remembered, on our own clock (memory.py).
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from typing import Protocol

from orchestrator.api import TrainingRun
from orchestrator.clusters.base import Admission, Cluster, ClusterUnavailable, ClusterView, Gang
from orchestrator.memory import Mark as Mark
from orchestrator.memory import Memory as Memory
from orchestrator.planning import Rung, ladder
from trainer.errors import ConfigurationError, StorageUnavailable, TruthUnknown
from trainer.recipe import Recipe
from trainer.rundir.records import (
    AttemptSpec,
    Ending,
    ExitRecord,
    Head,
    InitRecord,
    Progress,
    RecipeRecord,
    StartRecord,
    Submitted,
)
from trainer.rundir.rundir import differences

CLUSTER, RUN_DIRECTORY = "cluster", "run directory"


@dataclass(frozen=True)
class StartFacts:
    """One claimed start of HEAD's attempt. `pod_uid` and `restart_attempt` come from its start.json or from HEAD."""

    start: int
    pod_uid: str | None
    restart_attempt: int
    record: StartRecord | None = None
    progress: Progress | None = None
    exit: ExitRecord | None = None


@dataclass(frozen=True)
class Observation:
    """One look at the world. Times in it belong to others' clocks and are for people; `marks` are ours."""

    # What is wanted.
    recipe: Recipe
    rungs: tuple[Rung, ...]
    image: str
    nonce: str  # fresh in each observation: entropy for an attempt that may be written now
    take_over: bool = False  # the user says that the cluster HEAD's attempt was submitted to is gone for good
    # What could not be read: source -> why. What was read and must not be touched: messages.
    unknown: Mapping[str, str] = field(default_factory=dict)
    refusals: tuple[str, ...] = ()
    # Run directory.
    recorded: RecipeRecord | None = None
    recipe_differences: tuple[str, ...] = ()  # recorded → wanted
    init: InitRecord | None = None
    head: Head | None = None
    generation: int = 0  # of HEAD; 0 when there is none
    spec: AttemptSpec | None = None  # of HEAD's attempt
    submitted: Submitted | None = None  # of HEAD's attempt
    next_spec: AttemptSpec | None = None  # of the attempt after HEAD's; of attempt 1 when there is no HEAD
    later_attempts: bool = (
        False  # attempts beyond next_spec exist, or next_spec was submitted: HEAD was lost or set back
    )
    starts: tuple[StartFacts, ...] = ()  # of HEAD's attempt, oldest first: the current one, and those not in the ledger
    pod_exits: Mapping[str, ExitRecord] = field(default_factory=dict)  # pod uid -> exit.json written before a claim
    endings: tuple[Ending, ...] = ()  # the ledger, by attempt and index
    highest_attempt: int = 0  # the highest that this process, or the run's status, ever saw in HEAD
    # Cluster.
    view: ClusterView | None = None
    # Our own clock: name of a fact -> how long and how often it held (see `marks_of`).
    marks: Mapping[str, Mark] = field(default_factory=dict)

    @property
    def attempt(self) -> int:
        """HEAD's attempt; 0 before the first."""
        return self.head.attempt if self.head else 0

    @property
    def committed_step(self) -> int:
        """From the commit record that HEAD names; 0 when there is none."""
        return self.head.commit.step if self.head and self.head.commit else 0

    @property
    def gang(self) -> Gang | None:
        """The gang of HEAD's attempt: same attempt, same nonce, and the uid that was recorded, if one was."""
        return next((gang for gang in self._gangs if self._is_own(gang)), None)

    @property
    def deleted_gang(self) -> Gang | None:
        """The gang of HEAD's attempt, when the cluster proves that it is gone and remembers how it ended."""
        gangs = self.view.deleted if self.view else ()
        return next((gang for gang in gangs if self._is_own(gang)), None)

    @property
    def stale(self) -> tuple[Gang, ...]:
        """Gangs of the run that may no longer exist: older attempts, and same-named ones with another uid."""
        return tuple(
            g for g in self._gangs if g.attempt < self.attempt or (g.attempt == self.attempt and self._replaced(g))
        )

    @property
    def foreign(self) -> tuple[Gang, ...]:
        """Gangs that HEAD cannot explain: a later attempt, or HEAD's attempt with another nonce."""
        own = self.spec.nonce if self.spec else None
        return tuple(
            g for g in self._gangs if g.attempt > self.attempt or (g.attempt == self.attempt and g.nonce != own)
        )

    @property
    def current_start(self) -> StartFacts | None:
        """The start that HEAD names, if one has claimed."""
        last = self.starts[-1] if self.starts else None
        return last if last is not None and self.head is not None and last.start == self.head.start else None

    @property
    def live_admission(self) -> Admission | None:
        """The admission of our gang that has not ended."""
        last = self.gang.admissions[-1] if self.gang and self.gang.admissions else None
        return last if last is not None and last.ended is None else None

    @property
    def rung(self) -> Rung | None:
        """The rung that HEAD's attempt was planned for, if the ladder still has it."""
        return self.rung_of(self.spec)

    def rung_of(self, spec: AttemptSpec | None) -> Rung | None:
        """The rung of the ladder with the hardware of `spec`; how the batch is split on it may have changed since."""
        same = ((rung, rung.plan) for rung in self.rungs)
        return next(
            (
                rung
                for rung, plan in same
                if spec and (plan.device_type, plan.slices) == (spec.plan.device_type, spec.plan.slices)
            ),
            None,
        )

    def fits(self, rung: Rung) -> bool | None:
        """Whether the quota allows `rung` now; None when the cluster cannot tell."""
        quota = self.view.quota_devices if self.view else None
        return None if quota is None else quota.get(rung.family, 0) >= rung.devices

    @property
    def _gangs(self) -> tuple[Gang, ...]:
        return self.view.gangs if self.view else ()

    def _is_own(self, gang: Gang) -> bool:
        return (
            self.spec is not None
            and gang.attempt == self.attempt
            and gang.nonce == self.spec.nonce
            and not self._replaced(gang)
        )

    def _replaced(self, gang: Gang) -> bool:
        """A gang of HEAD's attempt and nonce, but not the one that was recorded as submitted."""
        return (
            self.spec is not None
            and gang.nonce == self.spec.nonce
            and self.submitted is not None
            and gang.uid != self.submitted.gang_uid
        )


def marks_of(o: Observation) -> set[str]:
    """The facts of `o` whose age decides something. Each name holds the value that must not have changed.

    fits/<rung>            the quota allows the rung
    stale/<gang uid>       the gang is to be deleted
    gone/<attempt>…        it was submitted and the cluster does not show it; and its start has not reported since
    over/<attempt>/<n>     the attempt is over for good, with n entries in the ledger: the pause is counted from here
    phase/<gang uid>/<phase>/<admissions>   the gang is in this phase, after so many admissions
    beats/…, step/…        the start's heartbeat, and its step, are still the same
    """
    if o.view is None or o.unknown:
        return set()
    facts = {f"fits/{rung.index}" for rung in o.rungs if o.fits(rung)}
    facts |= {f"stale/{gang.uid}" for gang in o.stale}
    gang = o.gang
    if missing(o):
        facts |= set(gone_marks(o))
    if missing(o) or (gang is not None and gang.phase in (*OVER, "Deleting")):
        facts.add(over_mark(o))
    if gang is not None:
        facts.add(phase_mark(gang))
        facts |= set(beat_marks(o, gang))
    return facts


def missing(o: Observation) -> bool:
    """HEAD's attempt was accepted by a cluster (it is recorded, or a start of it claimed), and shows no gang now."""
    return o.head is not None and o.gang is None and (o.submitted is not None or o.head.start > 0)


OVER = ("Succeeded", "Failed", "Deactivated", "Deleted")


def gone_marks(o: Observation) -> tuple[str, str]:
    """Names of "the cluster does not show it", and of the same while its start did not report either."""
    progress = o.current_start.progress if o.current_start else None
    return f"gone/{o.attempt}", f"gone/{o.attempt}/{o.head.start if o.head else 0}/{progress.beats if progress else 0}"


def over_mark(o: Observation) -> str:
    return f"over/{o.attempt}/{len(o.endings)}"


def phase_mark(gang: Gang) -> str:
    return f"phase/{gang.uid}/{gang.phase}/{len(gang.admissions)}"


def beat_marks(o: Observation, gang: Gang) -> tuple[str, str]:
    """Names of "no new heartbeat" and "no new step" for the admission that is live now."""
    start, admission = o.current_start, o.live_admission
    live = f"{gang.uid}/{admission.key if admission else len(gang.admissions)}"
    if start is None or start.progress is None or not claimed_by(start, admission):
        return f"beats/{live}", f"step/{live}"
    progress = start.progress
    at = f"{live}/{start.start}"
    return f"beats/{at}/{progress.beats}", f"step/{at}/{progress.phase}/{progress.step}/{progress.committed_step}"


def claimed_by(start: StartFacts, admission: Admission | None) -> bool:
    """Whether `start` was claimed by a process of `admission`."""
    if admission is None:
        return False
    if admission.pod_uids:
        return start.pod_uid in admission.pod_uids
    return start.restart_attempt == admission.restart_attempt


class RunReader(Protocol):
    """What an observation reads of a run directory (trainer.rundir.rundir.RunDirectory).

    Missing objects are None; every call may raise StorageUnavailable, TruthUnknown or ConfigurationError.
    """

    def head(self, at_least: int = 0) -> tuple[Head, int] | None: ...
    def read_recipe(self) -> RecipeRecord | None: ...
    def read_init(self) -> InitRecord | None: ...
    def read_spec(self, attempt: int) -> AttemptSpec | None: ...
    def read_submitted(self, attempt: int) -> Submitted | None: ...
    def read_start(self, attempt: int, start: int) -> StartRecord | None: ...
    def read_progress(self, attempt: int, start: int) -> Progress | None: ...
    def read_exit(self, attempt: int, start: int) -> ExitRecord | None: ...
    def read_pod_exit(self, attempt: int, pod_uid: str) -> ExitRecord | None: ...
    def endings(self, attempt: int | None = None) -> tuple[Ending, ...]: ...


def image_of(run: TrainingRun) -> str:
    """What an attempt submitted now would run: the image, or this version of the trainer on the local cluster."""
    if run.spec.image is not None:
        return run.spec.image
    return _installed_version()


@cache
def _installed_version() -> str:
    """Looked up once: it searches the whole path, 1 ms, and would be a sixth of every look."""
    try:
        return f"untildone {metadata.version('untildone')}"
    except metadata.PackageNotFoundError:
        return "untildone (not installed)"


def read_observation(
    run: TrainingRun, recipe: Recipe, cluster: Cluster, rundir: RunReader, memory: Memory, *, take_over: bool = False
) -> Observation:
    """Look at everything once. Never raises for a source that does not answer; that source is in `unknown`.

    The cluster is read before HEAD: HEAD only grows, so a gang of a later attempt than the HEAD read afterwards cannot
    be explained by bad timing.
    """
    unknown: dict[str, str] = {}
    view: ClusterView | None = None
    try:
        view = cluster.observe(run.name)
    except ClusterUnavailable as error:
        unknown[CLUSTER] = str(error) or "no answer"
    observation = Observation(
        recipe=recipe,
        rungs=ladder(run, recipe),
        image=image_of(run),
        nonce=secrets.token_hex(8),
        take_over=take_over,
        view=view,
        highest_attempt=memory.highest_attempt,
    )
    try:
        observation = _with_run_directory(observation, rundir)
    except (StorageUnavailable, TruthUnknown) as error:
        unknown[RUN_DIRECTORY] = str(error) or "no answer"
    except ConfigurationError as error:
        observation = replace(observation, refusals=(str(error),))
    memory.highest_attempt = max(memory.highest_attempt, observation.attempt)
    observation = replace(observation, unknown=unknown)
    return replace(observation, marks=memory.note(marks_of(observation), unknown))


def _with_run_directory(o: Observation, rundir: RunReader) -> Observation:
    """`o` with what the run directory says. Any answer that is missing raises; half a picture is none."""
    head, generation = rundir.head(o.highest_attempt) or (None, 0)
    attempt = head.attempt if head else 0
    recorded = rundir.read_recipe()
    o = replace(
        o,
        recorded=recorded,
        recipe_differences=_differences(recorded.recipe, o.recipe) if recorded else (),
        init=rundir.read_init(),
        head=head,
        generation=generation,
        spec=rundir.read_spec(attempt) if head else None,
        submitted=rundir.read_submitted(attempt) if head else None,
        next_spec=rundir.read_spec(attempt + 1),
        later_attempts=rundir.read_submitted(attempt + 1) is not None or rundir.read_spec(attempt + 2) is not None,
        endings=tuple(e for a in range(1, attempt + 1) for e in rundir.endings(a)),
    )
    if head is None:
        return o
    starts = tuple(_start_facts(rundir, head, start) for start in _starts_of_interest(o, head))
    exits = {uid: record for a, uid in _pods_of_interest(o) if (record := rundir.read_pod_exit(a, uid)) is not None}
    return replace(o, starts=starts, pod_exits=exits)


def _differences(recorded: Recipe, wanted: Recipe) -> tuple[str, ...]:
    old, new = (recipe.model_dump(mode="json", exclude={"name"}) for recipe in (recorded, wanted))
    return tuple(differences(old, new))


def _starts_of_interest(o: Observation, head: Head) -> list[int]:
    """The current start, those that the ledger lacks, and the ones after those: they say what was restored."""
    entered = {ending.start for ending in o.endings if ending.attempt == head.attempt}
    missing = {start for start in range(1, head.start + 1) if start not in entered}
    return sorted(start for start in missing | {s + 1 for s in missing} | {head.start} if 1 <= start <= head.start)


def _pods_of_interest(o: Observation) -> list[tuple[int, str]]:
    """(attempt, pod uid) of ended admissions that the ledger does not have yet."""
    keys = {ending.key for ending in o.endings}
    gangs = [*o.view.gangs, *o.view.deleted] if o.view else []
    return sorted(
        (gang.attempt, uid)
        for gang in gangs
        for admission in gang.admissions
        if admission.ended is not None and ending_key(gang, admission) not in keys
        for uid in admission.pod_uids
    )


def _start_facts(rundir: RunReader, head: Head, start: int) -> StartFacts:
    record = rundir.read_start(head.attempt, start)
    current = start == head.start
    pod_uid = head.pod_uid if current else record.pod_uid if record else None
    restart_attempt = head.restart_attempt if current else record.restart_attempt if record else -1
    return StartFacts(
        start=start,
        pod_uid=pod_uid,
        restart_attempt=restart_attempt,
        record=record,
        progress=rundir.read_progress(head.attempt, start),
        exit=rundir.read_exit(head.attempt, start),
    )


def ending_key(gang: Gang, admission: Admission) -> str:
    """Key in the ledger of the end of one admission: the same for every orchestrator that sees it."""
    return f"{gang.uid}/{admission.key}"
