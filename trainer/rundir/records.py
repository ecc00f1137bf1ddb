"""The documents of the run directory, one model each (docs/run-directory.md says who writes which, and when).

Every document carries `version`. A reader that meets a higher one stops: it may not guess what it does not know.
Of what a trainer reports, fields that the reader does not know are left out: trainer and orchestrator are upgraded one
after the other. An order (HEAD, a spec, a recipe) is obeyed as a whole or refused.
Times are UNIX seconds, for people; nothing is ever decided by comparing them.
"""

import hashlib
from typing import Any, Literal, Self

from pydantic import Field

from trainer.errors import ConfigurationError
from trainer.frozen import Frozen
from trainer.plan import Plan
from trainer.recipe import Recipe
from trainer.settings import InitFrom, Settings

VERSION = 1


class Record(Frozen):
    """A versioned document."""

    version: int = VERSION

    @classmethod
    def read(cls, data: bytes, source: str) -> Self:
        """Parse `data`; ConfigurationError names `source` and, for a newer version, says to upgrade."""
        newer = newer_version(data)
        if newer is not None:
            raise ConfigurationError(
                f"{source}: written by a newer untildone (document version {newer}, this one reads up to {VERSION}); "
                "upgrade untildone, nothing was changed"
            )
        return cls.parse(data, source)


def newer_version(data: bytes) -> int | None:
    """The version of a document that this code is too old to read; None when it is readable or no document at all."""
    import json

    try:
        version = json.loads(data).get("version")
    except (ValueError, AttributeError):
        return None
    return version if isinstance(version, int) and version > VERSION else None


class Report(Record):
    """A document in which a trainer tells what it did."""

    unknown_fields = "ignore"


class CommitRef(Frozen):
    """Names commits/<attempt>.<start>/<step>.json."""

    attempt: int = Field(ge=0)
    start: int = Field(ge=0)
    step: int = Field(ge=0)

    @property
    def key(self) -> str:
        return f"commits/{self.attempt}.{self.start}/{self.step}.json"

    @property
    def checkpoint(self) -> str:
        return f"checkpoints/{self.attempt}.{self.start}/{self.step}"

    @property
    def trend(self) -> str:
        return f"trend/{self.attempt}.{self.start}/{self.step}.json"

    def __str__(self) -> str:
        return f"step {self.step} of start {self.attempt}.{self.start}"


class Head(Record):
    """Who may commit, and which commit is current. Changed by compare-and-swap only, never deleted."""

    attempt: int = Field(ge=1)
    start: int = Field(ge=0, description="0: submitted, not yet claimed")
    pod_uid: str | None = Field(default=None, description="rank 0 of the start that claimed")
    restart_attempt: int = Field(
        default=-1, description="gang restarts of the attempt when it claimed; -1 before any claim"
    )
    commit: CommitRef | None = None
    op_id: str = Field(description="fresh for every swap: how a writer recognises its own write")


class InitRecord(Record):
    """Where the weights came from."""

    source: InitFrom | None
    commit: CommitRef | None = None
    checkpoint_uri: str | None = None
    digest: dict[str, int] | None = None


class RecipeRecord(Record):
    """recipe.json: the frozen recipe, and its fingerprint as the version that wrote it computed it."""

    fingerprint: str
    recipe: Recipe


class Owner(Record):
    """owner.json: who looks after this run. Liveness is `beats` changing, on the reader's own clock."""

    owner: str = Field(description="TrainingRun uid at its cluster, or a daemon's id; replicas share it")
    cluster_uid: str
    beats: int
    released: bool = Field(default=False, description="its owner left in order: nobody has to wait")
    op_id: str
    time: float


PROFILED_STEPS, MOST_PROFILED_STEPS = 5, 20  # a trace of one step of a large model is tens of megabytes per process


class Request(Record):
    """requests/<id>.json: somebody asks the running start for something. Rank 0 looks for it every 10 s.

    `commit` now; `profile`: a trace of some steps, and the program; `dump`: the program alone.
    """

    kind: Literal["commit", "profile", "dump"]
    attempt: int = Field(
        description="of a commit: the attempt that is asked, no other one answers; else the newest one when it was asked"
    )
    at: int | None = Field(default=None, ge=1, description="of a profile: its first step; None, or passed: the next")
    steps: int = Field(default=PROFILED_STEPS, ge=1, le=MOST_PROFILED_STEPS, description="of a profile")
    everybody: bool = Field(default=False, description="of a profile: a trace of each process, not of process 0 alone")
    reason: str = ""
    time: float


class RequestBegun(Report):
    """requests/<id>.begun.json: a start begins a profile. Written before the profiler starts: none is begun twice."""

    attempt: int
    start: int
    first: int
    last: int
    time: float


class RequestDone(Report):
    """requests/<id>.done.json: rank 0's answer."""

    attempt: int
    start: int
    step: int = Field(description="the step that is committed now; of a profile the last one traced")
    first: int | None = Field(default=None, description="of a profile: the first step traced")
    place: str = Field(default="", description="of a profile or a dump: key of the folder in the run directory")
    failed: str = Field(default="", description="of a profile or a dump: what went wrong")
    time: float


class Pin(Record):
    """pins/<id>.json: a reader's wish that garbage collection leaves a commit, until it expires."""

    commit: CommitRef
    expires: float
    reader: str = ""


class Program(Frozen):
    """What the processes of an attempt are, where a cluster builds their pods: never a secret, only references to it."""

    image: str
    command: tuple[str, ...]
    env: tuple[dict[str, Any], ...] = Field(default=(), description="Kubernetes EnvVars: value, or valueFrom")
    service_account: str | None = None
    pod_template: dict[str, Any] = Field(default_factory=dict, description="merged into the pod template we write")

    @property
    def digest(self) -> str:
        """Equal programs have equal digests."""
        return hashlib.sha256(self.canonical()).hexdigest()[:16]


class AttemptSpec(Record):
    """attempts/<n>/spec.json: everything a gang needs besides the recipe."""

    attempt: int = Field(ge=1)
    nonce: str
    gang: str = Field(description="name of the JobSet or local gang")
    plan: Plan
    settings: Settings
    image: str = Field(description="image digest, or the trainer's version on the local cluster")
    submitted_by: str = Field(
        default="",
        description="the process that trains without an orchestrator; nobody writes such an attempt's ledger",
    )
    program: Program | None = Field(default=None, description="None on the local cluster, which runs this installation")
    fallback: Program | None = Field(
        default=None, description="to return to when `program` is new and ends before its first commit"
    )
    rejected: str | None = Field(
        default=None, description="digest of a program that was tried and failed at once; not tried again"
    )


class Submitted(Record):
    """attempts/<n>/submitted.json: the cluster accepted the gang."""

    cluster_uid: str
    namespace: str
    gang_uid: str


class StartRecord(Report):
    """attempts/<n>/<k>/start.json: written by rank 0 right after its claim."""

    attempt: int
    start: int
    pod_uid: str
    restart_attempt: int
    processes: int
    devices: int
    device_kind: str
    restored: CommitRef | None
    versions: dict[str, str]
    fingerprint: str
    settings: Settings
    plan: Plan
    time: float


class SetAside(Record):
    """attempts/<n>/<k>/set-aside-<step>.json: a damaged commit that this start refused; its parent was used."""

    commit: CommitRef
    parent: CommitRef | None
    reason: str
    time: float


Phase = Literal["Starting", "Restoring", "Compiling", "Training", "Evaluating", "Saving", "Exiting", "Done"]


class Progress(Report):
    """attempts/<n>/<k>/progress.json, or before the claim attempts/<n>/pods/<uid>/progress.json. Overwritten."""

    phase: Phase
    step: int | None = None
    committed_step: int | None = None
    target_step: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = Field(default=None, description="of the last step, 0 to 1; causal (trainer/flops.py)")
    step_seconds: float | None = None
    pace_seconds: float | None = Field(
        default=None, description="per step: median of the last ones, and its share of saves and evaluations"
    )
    skipped_steps: int | None = Field(default=None, description="steps of this start that the spike rule left out")
    phase_seconds: dict[str, float] = Field(
        default_factory=dict, description="seconds spent in each phase by this start"
    )
    host_step_seconds: list[float] = Field(default_factory=list, description="last step per process")
    alarms: tuple[str, ...] = Field(default=(), description="names of the alarms that nobody has acknowledged")
    beats: int = Field(description="counts up with every write: a reader watches it change on its own clock")
    time: float

    def seconds_left(self, target_step: int) -> float | None:
        """To `target_step` if nothing interrupts; None before the pace is known. Every ETA that is shown is this one."""
        if self.step is None or self.pace_seconds is None:
            return None
        return max(0, target_step - self.step) * self.pace_seconds


class ExitRecord(Report):
    """attempts/<n>/<k>/exit.json (or under pods/<uid>/ before the claim): why a process ended, as it saw it."""

    code: int
    reason: str
    error: str = ""
    traceback: str = ""
    phase: Phase | None = None
    step: int | None = None
    signal_seen: bool = False
    rank: int | None = None
    time: float


class FileEntry(Frozen):
    """One file of a checkpoint, as it was when the commit was made."""

    path: str
    bytes: int
    crc32c: int


class StepLogFile(Frozen):
    """One immutable piece of the step log: steps first..last, one JSON line each."""

    key: str
    first: int
    last: int
    crc32c: int


class CommitRecord(Report):
    """commits/<n>.<k>/<step>.json: a checkpoint exists for readers only if HEAD reaches this."""

    ref: CommitRef
    parent: CommitRef | None
    checkpoint: str = Field(description="key of the checkpoint folder in the run directory")
    files: tuple[FileEntry, ...]
    digest: dict[str, int] = Field(description="state digest per leaf; mesh independent")
    step_log: tuple[StepLogFile, ...] = Field(description="the log of the steps parent.step+1 .. ref.step")
    fingerprint: str
    versions: dict[str, str]
    save_seconds: float
    phase_seconds: dict[str, float] = Field(
        default_factory=dict, description="seconds that the start had spent in each phase when it began this save"
    )
    time: float


class StepLine(Frozen):
    """One line of the step log, written when step `step` completed (it used batch step-1)."""

    unknown_fields = "ignore"

    step: int
    loss: float = Field(description="cross entropy, mean over the global batch, exactly the float32 that was computed")
    grad_norm: float
    lr: float
    skipped: bool
    ids: str = Field(description="hash of the instance ids that reached the devices, in batch order")
    data: str = Field(description="hash of the tokens that reached the devices")
    seconds: float
    loading: float | None = Field(default=None, description="seconds that process 0 waited for the batch")


Category = Literal[
    "preempted",
    "host-failure",
    "maintenance",
    "hang",
    "application-error",
    "bad-configuration",
    "storage",
    "fenced",
    "non-finite",
    "mixed-gang",
    "plan-change",
    "deactivated",
    "gone",
    "completed",
    "unknown",
    "unknown-while-absent",
]


class Evidence(Frozen):
    """One fact that decided a cause, verbatim."""

    source: str = Field(description="object it was read from, e.g. pod demo-a1-0 or Workload jobset-demo-a1")
    field: str
    value: str


class Ending(Record):
    """attempts/<n>/endings/<i>.json: one entry of the ledger, written once."""

    attempt: int
    start: int | None = Field(description="None: it ended before a start was claimed")
    index: int = Field(ge=1)
    key: str = Field(description="identifies the ending in the cluster, so that nobody charges it twice")
    cause: Category
    evidence: tuple[Evidence, ...]
    charged: bool = Field(description="whether it counts against the budget of its cause")
    first_step: int | None = Field(default=None, description="steps completed when the start began training")
    last_step: int | None = Field(default=None, description="last step known to be completed")
    last_committed_step: int = 0
    seconds: dict[str, float] = Field(
        default_factory=dict, description="by phase: queue, Starting, Restoring, Compiling, Training, …"
    )
    began: float | None = None
    ended: float | None = None


def describe(record: Record) -> dict[str, Any]:
    """Plain JSON form, for --json outputs."""
    return record.model_dump(mode="json")
