"""What the start that is live now reports of itself, in the words of statuses. Pure."""

from orchestrator.decisions import StatusWord
from orchestrator.marks import claimed_by
from orchestrator.observation import Observation
from orchestrator.planning import shown
from trainer.rundir.records import Phase, Progress

WORDS: dict[Phase, StatusWord] = {
    "Starting": "Starting",
    "Restoring": "Restoring",
    "Compiling": "Compiling",
    "Training": "Training",
    "Evaluating": "Training",
    "Saving": "Saving",
    "Exiting": "Saving",
    "Done": "Saving",
}


def live_progress(o: Observation) -> Progress | None:
    """What the start reports that is live now."""
    start = o.current_start
    return start.progress if start is not None and claimed_by(start, o.live_admission) else None


def training(o: Observation, progress: Progress | None) -> str:
    """One clause about HEAD's attempt: where it runs, its phase, its step."""
    assert o.spec is not None
    where = f"attempt {o.attempt} on {shown(o.spec.plan)}"
    if progress is None:
        blocked = o.gang.cannot_start if o.gang else ()
        if blocked:
            return f"{where}: its pods cannot start ({blocked[0].source}: {blocked[0].value})"
        return f"{where}: its processes start and find each other"
    step = (
        f"step {progress.step} of {o.spec.settings.target_step}"
        if progress.step is not None
        else "before its first step"
    )
    return f"{where}: {progress.phase}, {step}, step {o.committed_step} committed"
