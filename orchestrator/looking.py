"""One look at a run for `status` and `explain`: observe and decide, and carry nothing out.

The words are those of the explanation of the very decision an orchestrator would take now. Without the file that asked for the
run, only its run directory is left to say something, and whether anything is alive is then not known.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from orchestrator.api import load_run
from orchestrator.clusters.local import LocalCluster
from orchestrator.daemon import Caretaker
from orchestrator.explain import Explanation, explanation
from orchestrator.planning import shown
from orchestrator.preparing import STORE_PATIENCE_SECONDS, prepare
from orchestrator.registry import KnownRun
from trainer.errors import ConfigurationError, StorageUnavailable, TrainerError, TruthUnknown
from trainer.rundir.profiles import profiles
from trainer.rundir.rundir import RunDirectory
from trainer.rundir.store import StoreMissing

PROFILES_SHOWN = 3


@dataclass(frozen=True)
class Glance:
    """What a run does, and since when it exists (UNIX seconds of its first claim)."""

    explanation: Explanation
    began: float | None


def glance(known: KnownRun, local: Path) -> Glance:
    """Look once. What cannot be read makes the status TruthUnknown or Refused; nothing is raised for it."""
    try:
        rundir = RunDirectory.open(known.run_directory, patience_seconds=STORE_PATIENCE_SECONDS)
        first = rundir.read_start(1, 1)
        began = first.time if first else None
        found = _by_decision(known, rundir, local) if Path(known.file).is_file() else _by_records(known, rundir)
    except (StorageUnavailable, TruthUnknown) as error:
        return Glance(_unknown(known, str(error), "ask again"), None)
    except TrainerError as error:
        if isinstance(error, StoreMissing) and not known.file:
            raise  # nobody but the caller says that there is a run
        what = _unknown(known, str(error), "nothing, until the request is corrected")
        return Glance(what.model_copy(update={"status": "Refused"}), None)
    return Glance(found, began)


def with_profiles(found: Explanation, rundir: RunDirectory) -> Explanation:
    """The same with the newest profiles that were asked for: a person wants them, no decision does."""
    warnings = list(found.warnings)
    try:
        newest = profiles(rundir, PROFILES_SHOWN, warnings.append)
    except TrainerError as error:
        return found.model_copy(update={"warnings": (*found.warnings, f"profiles cannot be read: {error}")})
    lines = tuple(f"{one.identifier} {one.sentence}" for one in newest)
    return found.model_copy(update={"profiles": lines, "warnings": tuple(warnings)})


def _by_decision(known: KnownRun, rundir: RunDirectory, local: Path) -> Explanation:
    run = load_run(known.file)
    if run.name != known.name:
        raise ConfigurationError(f"{known.file}: now names run {run.name!r}, it was {known.name!r} when it was started")
    look = Caretaker(run, prepare(run), LocalCluster(local), rundir).look()
    return explanation(run, look.observation, look.decision, look.now)


def _by_records(known: KnownRun, rundir: RunDirectory) -> Explanation:
    """From the run directory alone: certain about commits, silent about what is alive."""
    found = rundir.head()
    if found is None:
        return _unknown(known, "nothing was submitted here yet", "nothing; `untildone run -f FILE` begins it")
    head = found[0]
    spec = rundir.read_spec(head.attempt)
    progress = rundir.read_progress(head.attempt, head.start) if head.start else None
    endings = rundir.endings()
    committed = head.commit.step if head.commit else 0
    target = spec.settings.target_step if spec else 0
    done = 0 < target <= committed
    what = (
        f"target step {target} is committed ({head.commit})"
        if done
        else f"step {committed} of {target} is committed; whether its processes live, only its cluster knows"
    )
    return Explanation(
        run=known.name,
        status="Completed" if done else "TruthUnknown",
        what=what,
        since=progress.time if progress else None,
        next_action=f"nothing; check it with: untildone verify {rundir.uri}" if done else "ask where it was started",
        attempt=head.attempt,
        start=head.start,
        plan=shown(spec.plan) if spec else None,
        micro_batch=spec.plan.micro_batch if spec else None,
        accumulation=spec.plan.accumulation if spec else None,
        step=progress.step if progress else None,
        committed_step=committed,
        target_step=target,
        loss=progress.loss if progress else None,
        seconds_left=progress.seconds_left(target) if progress and not done else None,
        last_ending=endings[-1] if endings else None,
    )


def _unknown(known: KnownRun, what: str, next_action: str) -> Explanation:
    return Explanation(run=known.name, status="TruthUnknown", what=what, next_action=next_action, target_step=0)


def age(glance: Glance) -> float | None:
    """Seconds since the first claim."""
    return None if glance.began is None else time.time() - glance.began
