"""What must be certain before anything is decided about a run. Pure.

A request that contradicts what is there is refused; what is not known, or cannot be true, freezes everything. In both
cases nothing is touched, least of all a training that is healthy.
"""

from orchestrator.api import TrainingRun
from orchestrator.decisions import Done, Freeze, Refused
from orchestrator.observation import CLUSTER, RUN_DIRECTORY, Observation
from orchestrator.planning import settings

FREEZE_SECONDS = 10.0


def refusal(run: TrainingRun, o: Observation) -> Refused | None:
    """What is asked for does not go with what is there."""
    if o.refusals:
        return Refused("; ".join(o.refusals))
    if o.spec is not None and o.spec.gang != run.gang(o.spec.attempt) and o.spec.gang.endswith(f"-a{o.spec.attempt}"):
        owner = o.spec.gang.removesuffix(f"-a{o.spec.attempt}")
        return Refused(
            f"run directory {run.spec.run_directory} belongs to run {owner!r}, whose attempts are seen under that name "
            f"only; set metadata.name to {owner!r} to go on with it, or give spec.runDirectory another folder"
        )
    if o.recipe_differences:
        listed = "; ".join(o.recipe_differences[:5]) + (" …" if len(o.recipe_differences) > 5 else "")
        return Refused(
            f"spec.recipe, or a file under spec.data.root, differs from what run directory {run.spec.run_directory} "
            f"began with: {listed}. Restore these values to continue the run, or give spec.runDirectory another folder"
        )
    wanted = settings(run).init_from
    if o.init is not None and o.init.source != wanted:
        return Refused(
            f"spec.initFrom differs from what the run began with ({o.init.source} → {wanted}); restore it to continue "
            "the run, or give spec.runDirectory another folder to begin a new one"
        )
    # An attempt that was planned for this very target says that it was possible then: training went beyond it meanwhile.
    planned = (spec.settings.target_step for spec in (o.spec, o.next_spec) if spec is not None)
    if o.committed_step > run.spec.target_step and run.spec.target_step not in planned:
        return Refused(
            f"spec.targetStep {run.spec.target_step} is lower than the committed step {o.committed_step} in "
            f"{run.spec.run_directory}; set it to {o.committed_step} or more. Nothing was changed"
        )
    return None


def freeze(run: TrainingRun, o: Observation, now: float) -> Freeze | Done | None:
    """What is not known, or what cannot be true. Nothing is done, and nothing deleted, until it clears."""
    until = now + FREEZE_SECONDS

    def because(source: str, message: str) -> Freeze:
        return Freeze(message, (source,), until)

    if set(o.unknown) == {CLUSTER} and reached(run, o) and _ledger_is_complete(o):
        return Done(o.committed_step, done_message(run, o))
    if o.unknown:
        what = "; ".join(f"{source}: {why}" for source, why in sorted(o.unknown.items()))
        return Freeze(f"no certain answer from {what}", tuple(sorted(o.unknown)), until)
    if o.later_attempts:
        return because(
            RUN_DIRECTORY,
            f"HEAD names attempt {o.attempt}, but attempt {o.attempt + 1} was submitted or a later one was planned: "
            "HEAD was lost or set back. When no trainer of this run is alive: "
            f"untildone recover {run.spec.run_directory}",
        )
    if o.head is not None and o.spec is None:
        return because(RUN_DIRECTORY, f"HEAD names attempt {o.attempt}, but attempts/{o.attempt}/spec.json is missing")
    if o.foreign:
        names = ", ".join(f"{gang.name} (attempt {gang.attempt})" for gang in o.foreign)
        return because(
            CLUSTER,
            f"{names}: not from this run directory, whose HEAD names attempt {o.attempt}. Another run has this name, "
            "or the run directory was replaced. Rename this run (metadata.name), or end that gang first: on the local cluster, "
            "remove gangs/NAME below the --local folder, and its processes end",
        )
    if o.submitted and o.view and o.submitted.cluster_uid != o.view.cluster_uid and not o.take_over:
        return because(
            CLUSTER,
            f"attempt {o.attempt} was submitted to cluster {o.submitted.cluster_uid}, this is {o.view.cluster_uid}; "
            "run untildone there, or, when that cluster is gone for good, take the run over with --take-over",
        )
    return None


def reached(run: TrainingRun, o: Observation) -> bool:
    return o.head is not None and o.head.commit is not None and o.committed_step >= run.spec.target_step


def _ledger_is_complete(o: Observation) -> bool:
    assert o.head is not None
    return any(ending.attempt == o.attempt and ending.start == o.head.start for ending in o.endings)


def done_message(run: TrainingRun, o: Observation) -> str:
    commit = o.head.commit if o.head else None
    return f"target step {run.spec.target_step} is committed ({commit})"
