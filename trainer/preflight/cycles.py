"""The compiler's estimate of TensorCore cycles for one step, by kind of work.

XLA writes `estimated_cycles` to what it schedules. It makes none for Pallas kernels: those are taken at the peak of the
matrix units, so that the sum is a floor of the step's time, and the MFU made of it a ceiling. Communication that the
schedule does not hide is not in it either.
"""

from collections import Counter
from dataclasses import dataclass

from trainer.preflight import kernels as pallas
from trainer.preflight.executions import Executions, contains_matmul
from trainer.preflight.hlo import Frame, Instruction, Module

CLOCK = {"tpu7x": 2.2e9, "v5p": 1.75e9}  # Hz of a TensorCore

# What a function of ours is for; the innermost frame that is named here decides.
FUNCTIONS = {
    "_rms_norm": "norms",
    "_rms_norm_backward": "norms",
    "_turn": "rotary positions",
    "rope_table": "rotary positions",
    "swiglu": "SwiGLU",
    "_swiglu_backward": "SwiGLU",
    "_logits_loss": "loss",
    "_forward.<locals>.chunk": "loss",
    "head_loss": "loss",
    "adamw": "optimizer",
    "adamw.<locals>.update": "optimizer",
    "clip_coefficient": "optimizer",
    "make_train_step.<locals>.train_step": "optimizer",
    "Weights.lookup": "embedding",
    "_sum_over_devices": "gradient sums",
    "ids_hash": "hashes",
    "data_hash": "hashes",
    "splash_attention": "around attention",
}


@dataclass(frozen=True)
class Work:
    """One scheduled instruction that takes TensorCore time."""

    instruction: Instruction
    kind: str
    cycles: float  # over the whole step


def work(executions: Executions, found: list[pallas.Kernel], peak_flops: float, clock: float) -> list[Work]:
    """Everything that the TensorCore does in one step."""
    done = [Work(k.instruction, f"attention {k.direction}", k.flops * k.times / peak_flops * clock) for k in found]
    for computation, instruction, times in executions.scheduled():
        if computation.thread == "" and instruction.cycles:
            done.append(Work(instruction, kind_of(executions.module, instruction), instruction.cycles * times))
    return done


def by_kind(done: list[Work]) -> dict[str, float]:
    """Cycles by kind, most first."""
    total: Counter[str] = Counter()
    for item in done:
        total[item.kind] += item.cycles
    return dict(total.most_common())


def kind_of(module: Module, instruction: Instruction) -> str:
    """What an instruction is for, in words."""
    if contains_matmul(module, instruction):
        return "matmul"
    tail = instruction.op_name.rpartition("/")[2]
    if "splash_mha_dkv" in instruction.op_name and tail == "reduce_sum":
        return "dq partial sums"
    opcodes = {inner.opcode for _, inner in module.inside(instruction)} or {instruction.opcode}
    if tail in ("dynamic_slice", "dynamic_update_slice") or tail.startswith("while"):
        return "scan slices in and out"
    if opcodes <= {"copy", "bitcast", "transpose", "parameter", "tuple", "get-tuple-element", "reshape"}:
        return "copies and layout"
    stack = module.stack(instruction.frame)
    if tail.startswith("convert"):
        return f"conversions ({_purpose(stack)})" if _purpose(stack) else "conversions"
    if {"dynamic-slice", "dynamic-update-slice"} & opcodes and not opcodes & {"multiply", "reduce", "exponential"}:
        return "scan slices in and out"
    return _purpose(stack) or f"other ({tail or instruction.opcode})"


def _purpose(stack: list[Frame]) -> str | None:
    return next((FUNCTIONS[f.function] for f in stack if f.function in FUNCTIONS), None)
