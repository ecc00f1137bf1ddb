"""What a start begins from: the commit of its claim, checked twice; else that commit's parents; else the initial state.

Before anything is read, each process compares its share of the checkpoint's files with the commit record; after the
restore the state digest is computed again. Rank 0 sets a damaged commit aside (HEAD goes to its parent) and all try
that one.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer import beginning
from trainer.checkpoint import Checkpoints, DamagedCheckpoint, compare_digest, compare_files
from trainer.departure import is_peer_loss
from trainer.distributed import Gang
from trainer.errors import ConfigurationError, StorageUnavailable, TrainerError
from trainer.log import log
from trainer.recipe import Recipe
from trainer.rundir.claims import Claim
from trainer.rundir.records import CommitRecord, InitRecord
from trainer.rundir.rundir import RunDirectory
from trainer.rundir.store import AlreadyExists
from trainer.settings import InitFrom

# What storage clients say when trying again later may help: no reason to give up a commit.
_PASSING = ("unavailable", "deadline_exceeded", "resource_exhausted", "timed out", "timeout", "too many open files")


@dataclass(frozen=True)
class Restored:
    """The state to train on from. `commit` is None when it is the initial state, which comes from where `init` says."""

    state: Any
    step: int
    commit: CommitRecord | None
    init: InitRecord | None = None


@dataclass(frozen=True)
class Restorer:
    """All processes of a gang call `restore` together; only rank 0 has a claim."""

    rundir: RunDirectory
    claim: Claim | None
    gang: Gang
    checkpoints: Checkpoints
    recipe: Recipe
    mesh: Any
    before_tracing: Callable[[], None]  # what has to be over before anything is traced here

    def restore(self, record: CommitRecord | None, init_from: InitFrom | None) -> Restored:
        """The newest undamaged state at or above `record` in its lineage."""
        tries = 0
        while record is not None:
            if record.fingerprint != self.recipe.fingerprint():
                raise ConfigurationError(
                    f"{record.ref} was trained with recipe {record.fingerprint[:12]}, this run's recipe.json is "
                    f"{self.recipe.fingerprint()[:12]}: one of the two was changed; put the original back"
                )
            reason, state = self._try(record, f"restore/{tries}")
            if not reason:
                return Restored(state, record.ref.step, record)
            record = self._set_aside(record, reason, f"aside/{tries}")
            tries += 1
        return self._initial(init_from)

    def _try(self, record: CommitRecord, key: str) -> tuple[str, Any]:
        """(what is wrong with the checkpoint, None) or ("", state)."""
        damage = compare_files(self.rundir.store, record, self.gang.rank, self.gang.processes)
        reason = self._agree(f"{key}/files", damage)
        if reason:
            return reason, None
        self.before_tracing()
        state: Any = None
        damage = ""
        try:
            state = self._read(record)
        except DamagedCheckpoint as error:
            damage = str(error)
        return self._agree(f"{key}/state", damage), state

    def _read(self, record: CommitRecord) -> Any:
        from trainer.digest import state_digest
        from trainer.step import abstract_state

        path = self.rundir.path(record.checkpoint)
        try:
            state = self.checkpoints.restore(path, abstract_state(self.recipe, self.mesh))
        except Exception as error:
            if isinstance(error, TrainerError) or is_peer_loss(error):
                raise
            text = f"{type(error).__name__}: {error}"
            if any(sign in text.lower() for sign in _PASSING):
                raise StorageUnavailable(f"checkpoint {path} could not be read: {text}") from error
            raise DamagedCheckpoint(f"unreadable: {text}") from error
        wrong = compare_digest(state_digest(state), record.digest)
        if not wrong and int(state.step) != record.ref.step:
            wrong = f"its state says step {int(state.step)}"
        if wrong:
            raise DamagedCheckpoint(wrong)
        return state

    def _agree(self, key: str, damage: str) -> str:
        """What any process found wrong; the same answer on all."""
        said = self.gang.gather(key, damage)
        return self.gang.decide(f"{key}/all", "; ".join(filter(None, said)) if said is not None else None)

    def _set_aside(self, record: CommitRecord, reason: str, key: str) -> CommitRecord | None:
        """Rank 0 moves HEAD to the parent; all return the parent's record."""
        parent: str | None = None
        if self.claim is not None:
            self.claim.set_aside(reason)
            ref = self.claim.commit_ref
            log().error(
                f"{record.ref} is damaged and was set aside; going on from {ref if ref else 'the initial state'}",
                event_kind="set-aside",
                commit=record.ref.key,
                parent=ref.key if ref else None,
                reason=reason,
            )
            found = self.rundir.read_commit(ref) if ref else None
            parent = json.dumps(found.model_dump(mode="json") if found else None)
        body = json.loads(self.gang.decide(key, parent))
        return CommitRecord.parse(body, "commit record from process 0") if body else None

    def _initial(self, wanted: InitFrom | None) -> Restored:
        """The initial state as init.json says; written first if this is the first start that needs it."""
        from trainer.digest import state_digest

        known, expected, told = False, None, None
        if self.claim is not None:
            init = self.rundir.read_init()
            known = init is not None
            if init is None:
                init, expected = beginning.resolve(wanted)
            elif wanted is not None and wanted != init.source:
                log().warning("settings.init_from differs from init.json, which this run began with and keeps")
            beginning.pin(init, self.rundir.uri)
            told = json.dumps({"init": init.model_dump(mode="json"), "known": known})
        said = json.loads(self.gang.decide("init", told))
        init = InitRecord.parse(said["init"], "init.json")
        self.before_tracing()
        state = beginning.build(init, self.recipe, self.mesh, self.checkpoints)
        found = state_digest(state)
        if said["known"]:
            wrong = beginning.check_again(init, found)
            if wrong and self.gang.rank == 0:
                log().warning(f"the initialiser gives other bits than at the first start: {wrong}")
        elif self.claim is not None:
            if expected is not None:
                beginning.check_source(init, expected, found)
            try:
                self.rundir.create_init(init.model_copy(update={"digest": found}))
            except AlreadyExists:
                beginning.check_again(self.rundir.read_init() or init, found)
        return Restored(state, int(state.step), None, init)
