"""What `decide()` can answer: each is one idempotent act, a pause with its reason, or an end. Plain data.

Whoever carries a decision out observes again before the next one; a decision never outlives its observation.
"""

from dataclasses import dataclass
from typing import Literal

from trainer.plan import Plan
from trainer.recipe import Recipe
from trainer.rundir.records import AttemptSpec, Category, Ending, Evidence

StatusWord = Literal[
    "Queued",
    "Starting",
    "Compiling",
    "Restoring",
    "Training",
    "Saving",
    "Preempted",
    "BackingOff",
    "Switching",
    "Suspended",
    "TruthUnknown",
    "Completed",
    "BudgetExhausted",
    "Refused",
]


@dataclass(frozen=True)
class Freeze:
    """The truth is not known: nothing is done until it is. Look again by `until` (UNIX seconds)."""

    message: str
    sources: tuple[str, ...]
    until: float


@dataclass(frozen=True)
class Refused:
    """What is asked for contradicts what is there. Nothing was touched; only the user can go on."""

    message: str


@dataclass(frozen=True)
class Done:
    """A commit at or beyond the target exists, the ledger is complete, and no gang of the run is left running."""

    step: int
    message: str


@dataclass(frozen=True)
class GiveUp:
    """A budget is spent. The gang has ended; nothing runs any more."""

    message: str
    cause: Category | Literal["no-new-commit"]
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True)
class WriteRecipe:
    """Create recipe.json. AlreadyExists with the same fingerprint is success."""

    recipe: Recipe


@dataclass(frozen=True)
class WriteSpec:
    """Create attempts/<n>/spec.json (step 1 of a submission); if it exists, that one counts. `why` is for the log."""

    spec: AttemptSpec
    why: str


@dataclass(frozen=True)
class SwapHead:
    """Swap HEAD to `attempt`, start 0 (step 2), if it is still at generation `seen` (0: there was none)."""

    attempt: int
    seen: int


@dataclass(frozen=True)
class SubmitGang:
    """Create the gang of `spec` (step 3)."""

    spec: AttemptSpec


@dataclass(frozen=True)
class RecordSubmitted:
    """Create attempts/<n>/submitted.json (step 4)."""

    attempt: int
    gang_uid: str


@dataclass(frozen=True)
class AppendEnding:
    """Write one entry of the ledger. An entry with the same key is success."""

    ending: Ending


@dataclass(frozen=True)
class RequestCommit:
    """Ask the running start of `attempt` for a commit (requests/<identifier>.json, create-only): it will be stopped."""

    attempt: int
    identifier: str
    why: str


@dataclass(frozen=True)
class DeleteGang:
    """End the gang `name` if its uid is still `uid`: SIGTERM, and SIGKILL after the grace. Gone is success."""

    name: str
    uid: str
    grace_seconds: float
    why: str


@dataclass(frozen=True)
class StopForPlanChange:
    """As DeleteGang, because the next attempt is written down with another plan: the trainer commits on SIGTERM."""

    name: str
    uid: str
    grace_seconds: float
    why: str
    old: Plan
    new: Plan


@dataclass(frozen=True)
class Wait:
    """Nothing to do. `until` (UNIX seconds) is when something is due without any news; None: only news matter."""

    word: StatusWord
    message: str
    until: float | None = None


@dataclass(frozen=True)
class OwnedByOther(Wait):
    """Another orchestrator looks after the run, and is alive: nothing is done here. `owner` is its id."""

    owner: str = ""


Act = (
    WriteRecipe
    | WriteSpec
    | SwapHead
    | SubmitGang
    | RecordSubmitted
    | AppendEnding
    | RequestCommit
    | DeleteGang
    | StopForPlanChange
)
End = Refused | Done | GiveUp
Decision = Act | End | Wait | Freeze
