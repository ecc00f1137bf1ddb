"""The figures of a run as one flat document: summary.json, the same numbers that the page shows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.report.collect import RunHistory
from orchestrator.verify import Verdict


@dataclass(frozen=True)
class Agreement:
    """How far two runs of one recipe are the same run, by what they committed and by what they computed."""

    compared_commits: tuple[int, ...]  # steps that both committed
    digest_equal_until: int  # last such step before which no digest differs; 0: not even the first
    first_unequal_digest: int | None
    loss_equal_until: int  # last step up to which every loss and gradient norm has the same bits
    first_unequal_loss: int | None
    instances_equal_until: int  # last step up to which both read the same instances in the same order
    ends_equal: bool  # both committed the same last step, with the same state digest: parameters, moments, skip window


def agreement(run: RunHistory, reference: RunHistory) -> Agreement:
    """Compare committed state digests, and the float32 values in the step logs, bit for bit."""
    digests = {c.ref.step: c.digest for c in reference.lineage}
    common = [c for c in run.lineage if c.ref.step in digests]
    unequal = next((c.ref.step for c in common if c.digest != digests[c.ref.step]), None)
    equal = [c.ref.step for c in common if unequal is None or c.ref.step < unequal]
    steps = sorted(run.curve.keys() & reference.curve.keys())
    loss_until = ids_until = 0
    loss_unequal: int | None = None
    ids_same = True
    for step in steps:
        mine, other = run.curve[step], reference.curve[step]
        ids_same = ids_same and (mine.ids, mine.data) == (other.ids, other.data)
        ids_until = step if ids_same else ids_until
        if loss_unequal is None:
            if (mine.loss, mine.grad_norm) == (other.loss, other.grad_norm):
                loss_until = step
            else:
                loss_unequal = step
    return Agreement(
        compared_commits=tuple(c.ref.step for c in common),
        digest_equal_until=max(equal, default=0),
        first_unequal_digest=unequal,
        loss_equal_until=loss_until,
        first_unequal_loss=loss_unequal,
        instances_equal_until=ids_until,
        ends_equal=run.committed_step == reference.committed_step > 0 and unequal is None,
    )


def summary(run: RunHistory, verdict: Verdict, reference: RunHistory | None) -> dict[str, Any]:
    """The document. Figures that need a reference are null without one."""
    same = agreement(run, reference) if reference else None
    return {
        "run": run.name,
        "done": run.done,
        "done_step": run.committed_step,
        "target_step": run.target_step,
        "seconds": round(run.seconds, 1),
        "global_batch": run.recipe.global_batch,
        "endings": [_ending(run, index) for index in range(len(run.endings))],
        "causes": sorted({ending.cause for ending in run.endings}),
        "repeated_instances": verdict.figures.get("repeated_instances"),
        "missed_instances": verdict.figures.get("missed_instances"),
        "redone_steps": verdict.figures.get("redone_steps"),
        "redone_steps_bitwise_equal": verdict.figures.get("redone_steps_bitwise_equal"),
        "reduction": run.recipe.reduction,
        "first_resize_step": run.first_resize_step,
        "digest_equal_reference_until_step": same.digest_equal_until if same else None,
        "loss_equal_reference_until_step": same.loss_equal_until if same else None,
        "instances_equal_reference_until_step": same.instances_equal_until if same else None,
        "ends_as_reference": same.ends_equal if same else None,
        "verified": verdict.passed,
    }


def _ending(run: RunHistory, index: int) -> Mapping[str, Any]:
    ending = run.endings[index]
    plan = run.specs[ending.attempt].plan
    start = next((s for s in run.starts if (s.record.attempt, s.record.start) == (ending.attempt, ending.start)), None)
    first = ending.first_step if ending.first_step is not None else (start.first_step if start else None)
    return {
        "attempt": ending.attempt,
        "start": ending.start,
        "cause": ending.cause,
        "device_type": plan.device_type,
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "first_step": first,
        "last_committed_step": ending.last_committed_step,
    }
