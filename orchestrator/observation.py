"""Everything that is known about one run at one moment. `Observation` is all that `decide()` sees. Pure.

A source that did not answer is named in `unknown`, and what came from it is empty: nothing is guessed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.clusters.base import Admission, ClusterView, Gang
from orchestrator.memory import Mark
from orchestrator.planning import Rung
from trainer.recipe import Recipe
from trainer.rundir.alarms import Alarm
from trainer.rundir.records import (
    AttemptSpec,
    Ending,
    ExitRecord,
    Head,
    InitRecord,
    Program,
    Progress,
    RecipeRecord,
    StartRecord,
    Submitted,
)

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
    program: Program | None = None  # what an attempt planned now would run; None on the local cluster
    next_spec: AttemptSpec | None = None  # of the attempt after HEAD's; of attempt 1 when there is no HEAD
    later_attempts: bool = (
        False  # attempts beyond next_spec exist, or next_spec was submitted: HEAD was lost or set back
    )
    asked: bool = False  # the current start was asked for a commit, before it is stopped
    answered: bool = False  # and it has answered
    request: int = 1  # number of that request: a stop that did not come to pass may be wanted again much later
    starts: tuple[StartFacts, ...] = ()  # of HEAD's attempt, oldest first: the current one, and those not in the ledger
    pod_exits: Mapping[str, ExitRecord] = field(default_factory=dict)  # pod uid -> exit.json written before a claim
    endings: tuple[Ending, ...] = ()  # the ledger, by attempt and index
    alarms: tuple[Alarm, ...] = ()  # about the data that is trained on, as the current start reports them
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
    def ahead(self) -> Gang | None:
        """The gang of the attempt after HEAD's: it queues for other hardware while HEAD's still trains."""
        new = self.next_spec
        return next((g for g in self._gangs if new and (g.attempt, g.nonce) == (new.attempt, new.nonce)), None)

    @property
    def foreign(self) -> tuple[Gang, ...]:
        """Gangs that HEAD cannot explain: a later attempt that is not planned, or HEAD's with another nonce."""
        own = self.spec.nonce if self.spec else None
        return tuple(
            g
            for g in self._gangs
            if (g.attempt > self.attempt and g is not self.ahead) or (g.attempt == self.attempt and g.nonce != own)
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
        if quota is None:
            return None
        # Of this very device type, where the cluster tells slices of different shapes apart; else of its family.
        return quota.get(rung.plan.device_type, quota.get(rung.family, 0)) >= rung.devices

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


def request_name(head: Head, number: int = 1) -> str:
    """Of the request for a commit that a start gets before it is stopped: the same for every orchestrator."""
    return f"stop-{head.attempt}.{head.start}" + (f"-{number}" if number > 1 else "")


def ending_key(gang: Gang, admission: Admission) -> str:
    """Key in the ledger of the end of one admission: the same for every orchestrator that sees it."""
    return f"{gang.uid}/{admission.key}"
