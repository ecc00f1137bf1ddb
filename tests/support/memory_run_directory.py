"""The documents of a run directory in memory, for model tests: one answer for all, or an outage."""

from trainer.errors import StorageUnavailable, TruthUnknown
from trainer.rundir.alarms import Alarm
from trainer.rundir.records import (
    AttemptSpec,
    Ending,
    ExitRecord,
    Head,
    InitRecord,
    Progress,
    RecipeRecord,
    Request,
    RequestDone,
    StartRecord,
    Submitted,
)


class MemoryRunDirectory:
    """The documents of a run directory, with the promises of PROTOCOL: create-only, and HEAD by generation."""

    def __init__(self) -> None:
        self.down = False
        self.head_: Head | None = None
        self.generation = 0
        self.recipe: RecipeRecord | None = None
        self.specs: dict[int, AttemptSpec] = {}
        self.submitted: dict[int, Submitted] = {}
        self.starts: dict[tuple[int, int], StartRecord] = {}
        self.progress: dict[tuple[int, int], Progress] = {}
        self.exits: dict[tuple[int, int], ExitRecord] = {}
        self.pod_exits: dict[str, ExitRecord] = {}
        self.ledger: dict[int, list[Ending]] = {}
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, RequestDone] = {}
        self.alarms: dict[str, Alarm] = {}

    def _ask(self) -> None:
        if self.down:
            raise StorageUnavailable("the store does not answer")

    def head(self, at_least: int = 0) -> tuple[Head, int] | None:
        self._ask()
        if at_least > (self.head_.attempt if self.head_ else 0):
            raise TruthUnknown("HEAD was set back")
        return (self.head_, self.generation) if self.head_ else None

    def read_recipe(self) -> RecipeRecord | None:
        self._ask()
        return self.recipe

    def read_init(self) -> InitRecord | None:
        self._ask()
        return None

    def read_spec(self, attempt: int) -> AttemptSpec | None:
        self._ask()
        return self.specs.get(attempt)

    def read_submitted(self, attempt: int) -> Submitted | None:
        self._ask()
        return self.submitted.get(attempt)

    def read_start(self, attempt: int, start: int) -> StartRecord | None:
        self._ask()
        return self.starts.get((attempt, start))

    def read_progress(self, attempt: int, start: int) -> Progress | None:
        self._ask()
        return self.progress.get((attempt, start))

    def read_exit(self, attempt: int, start: int) -> ExitRecord | None:
        self._ask()
        return self.exits.get((attempt, start))

    def read_pod_exit(self, attempt: int, pod_uid: str) -> ExitRecord | None:
        self._ask()
        return self.pod_exits.get(pod_uid)

    def read_request(self, identifier: str) -> Request | None:
        self._ask()
        return self.requests.get(identifier)

    def read_answer(self, identifier: str) -> RequestDone | None:
        self._ask()
        return self.answers.get(identifier)

    def read_alarm(self, name: str) -> Alarm | None:
        self._ask()
        return self.alarms.get(name)

    def endings(self, attempt: int | None = None) -> tuple[Ending, ...]:
        self._ask()
        chosen = self.ledger if attempt is None else {attempt: self.ledger.get(attempt, [])}
        return tuple(ending for number in sorted(chosen) for ending in chosen[number])

    def append_ending(self, ending: Ending) -> None:
        self._ask()
        entries = self.ledger.setdefault(ending.attempt, [])
        if all(entry.key != ending.key for entry in entries):
            entries.append(ending.model_copy(update={"index": len(entries) + 1}))

    def swap(self, head: Head) -> None:
        self.head_, self.generation = head, self.generation + 1

    @property
    def entries(self) -> tuple[Ending, ...]:
        """The whole ledger, whether or not the store answers."""
        return tuple(ending for number in sorted(self.ledger) for ending in self.ledger[number])

    @property
    def committed(self) -> int:
        return self.head_.commit.step if self.head_ and self.head_.commit else 0
