"""From a decision to the one call that carries it out. No decisions here, and no memory: a call repeated does nothing.

Every call may be made by an orchestrator that dies right after it, and made again by the next one; or by two at once.
Creations collide, swaps compare, deletions name a uid.
"""

from collections.abc import Callable

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from orchestrator.api import TrainingRun
from orchestrator.clusters.base import Cluster, ClusterUnavailable, GangRequest
from orchestrator.decisions import (
    Act,
    AppendEnding,
    DeleteGang,
    RecordSubmitted,
    RequestCommit,
    StopForPlanChange,
    SubmitGang,
    SwapHead,
    WriteRecipe,
    WriteSpec,
)
from orchestrator.environment import plain_environment
from trainer.rundir.records import Request, Submitted
from trainer.rundir.rundir import RunDirectory

PATIENCE_SECONDS = 2.0


def carry_out(act: Act, run: TrainingRun, cluster: Cluster, rundir: RunDirectory) -> None:
    """Do `act`. Done already, by us or by another orchestrator, is success.

    Raises Fenced when HEAD went on meanwhile, SubmitConflict when the gang's name is taken by another submission,
    StorageUnavailable and ClusterUnavailable when the outcome is unknown: observe again and decide again.
    """
    match act:
        case WriteRecipe(recipe):
            rundir.create_recipe(recipe)
        case WriteSpec(spec):
            rundir.adopt_spec(spec)
        case SwapHead(attempt, seen):
            rundir.swap_to_attempt(attempt, seen)
        case SubmitGang(spec):
            request = GangRequest(
                run=run.name,
                run_directory=rundir.uri,
                spec=spec,
                env=plain_environment(run) if spec.program is None else {},
                queue=run.spec.queue,
                priority_class=run.spec.priority_class,
                owner_uid=run.metadata.uid,
            )
            _patiently(lambda: cluster.submit(request))
        case RecordSubmitted(attempt, gang_uid):
            submitted = Submitted(cluster_uid=cluster.uid, namespace=cluster.namespace, gang_uid=gang_uid)
            rundir.record_submitted(attempt, submitted)
        case AppendEnding(ending):
            rundir.append_ending(ending)
        case RequestCommit(attempt, identifier, why):
            rundir.request(identifier, Request(kind="commit", attempt=attempt, reason=why, time=rundir.clock()))
        case DeleteGang(name, uid, grace_seconds) | StopForPlanChange(name, uid, grace_seconds):
            _patiently(lambda: cluster.delete(name, uid, grace_seconds))


def _patiently(call: Callable[[], object]) -> None:
    """Repeat one call while the cluster does not answer, for a moment; longer outages are for the loop."""
    retrying = Retrying(
        retry=retry_if_exception_type(ClusterUnavailable),
        stop=stop_after_delay(PATIENCE_SECONDS),
        wait=wait_random_exponential(multiplier=0.05, max=0.5),
        reraise=True,
    )
    retrying(call)
