"""The metrics of a run, by the names under which OLMo-core logs them, so that curves of both lie over each other.

Read in ai2-olmo-core 3.0.0: train/trainer.py, train/train_module/transformer/train_module.py, train/callbacks/speed_monitor.py
and checkpointer.py. Of those, "train/Z loss" is missing here: the step log has no z-loss. What OLMo-core takes as the maximum
over ranks (data loading) is process 0's here. Names that OLMo-core has not begin with "phases/" and "alarm/".
"""

import math
from dataclasses import dataclass

from trainer.flops import REPORTED, Counting, flops_per_token
from trainer.hardware import device_type
from trainer.plan import Plan
from trainer.recipe import Recipe
from trainer.rundir.records import CommitRecord, StepLine

CE_LOSS = "train/CE loss"
PPL = "train/PPL"
GRAD_NORM = "optim/total grad norm"
LR = "optim/LR (group 0)"
SKIPPED = "optim/step skipped"
TOTAL_TOKENS = "throughput/total tokens"
TOTAL_PETAFLOPS = "throughput/total petaflops"
TPS = "throughput/device/TPS"
BPS = "throughput/device/BPS"
MFU = "throughput/device/MFU"  # percent
LOADING = "throughput/device/data loading (s)"
LOADING_SHARE = "throughput/device/data loading (%)"
SAVE = "checkpoint/save_async_duration_s"
HELD_OUT = (
    "eval/lm/held_out/CE loss"  # the recipe's data.held_out, whatever it is; named sets come with their own names
)
HELD_OUT_PPL = "eval/lm/held_out/PPL"
SCORE = "alarm/memorisation score"  # trainer/metrics/memorisation.py: the alarm is at -12

OF_A_STEP = (CE_LOSS, PPL, GRAD_NORM, LR, SKIPPED, TOTAL_TOKENS, TOTAL_PETAFLOPS, TPS, BPS, MFU, LOADING, LOADING_SHARE)


@dataclass(frozen=True)
class Throughput:
    """What a step of this recipe on this plan is worth."""

    tokens: int  # per step
    flops: float  # per token
    devices: int
    peak: float | None  # FLOP/s of one device; None where there is no meaningful figure, and so no MFU

    @classmethod
    def of(cls, recipe: Recipe, plan: Plan, counting: Counting = REPORTED) -> "Throughput":
        kind = device_type(plan.device_type)
        tokens = recipe.global_batch * recipe.sequence_length
        flops = flops_per_token(recipe.model, recipe.sequence_length, counting)
        return cls(tokens, flops, plan.devices, kind.peak_flops_per_device)


def of_step(line: StepLine, throughput: Throughput) -> dict[str, float]:
    """The metrics of one step; what is not known is left out."""
    tokens = line.step * throughput.tokens
    found = {
        CE_LOSS: line.loss,
        PPL: perplexity(line.loss),
        GRAD_NORM: line.grad_norm,
        LR: line.lr,
        SKIPPED: float(line.skipped),
        TOTAL_TOKENS: float(tokens),
        TOTAL_PETAFLOPS: tokens * throughput.flops / 1e15,
    }
    if line.seconds > 0:
        per_device = throughput.tokens / line.seconds / throughput.devices
        found |= {TPS: per_device, BPS: 1 / line.seconds}
        if throughput.peak:
            found[MFU] = 100 * per_device * throughput.flops / throughput.peak
        if line.loading is not None:
            found |= {LOADING: line.loading, LOADING_SHARE: 100 * line.loading / line.seconds}
    elif line.loading is not None:
        found[LOADING] = line.loading
    return found


def of_commit(record: CommitRecord, before: CommitRecord | None) -> dict[str, float]:
    """Seconds of the save, and what each phase has taken since the commit before; a start counts its phases from 0."""
    same_start = before is not None and (before.ref.attempt, before.ref.start) == (record.ref.attempt, record.ref.start)
    earlier = before.phase_seconds if same_start and before is not None else {}
    spent = {phase: seconds - earlier.get(phase, 0.0) for phase, seconds in record.phase_seconds.items()}
    phases = {f"phases/{phase} (s)": round(seconds, 4) for phase, seconds in spent.items() if seconds > 0}
    return {SAVE: record.save_seconds, **phases}


def perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
