"""The compiler's estimate of TensorCore cycles for one step, by kind of work.

XLA writes `estimated_cycles` to what it schedules. It makes none for Pallas kernels: those are taken at the peak of the
matrix units (without matrix products: of the vector units, or of HBM where that takes longer), so that the sum is a
floor of the step's time, and the MFU made of it a ceiling. Communication that the
schedule does not hide is not in it either.
"""

from collections import defaultdict
from dataclasses import dataclass

from trainer.preflight import kernels as pallas
from trainer.preflight.executions import Executions, contains_matmul
from trainer.preflight.hlo import Computation, Frame, Instruction, Module

CLOCK = {"tpu7x": 2.2e9, "v5p": 1.75e9}  # Hz of a TensorCore
# Per JAX device, cloud.google.com/tpu/docs: bytes per second of HBM (7.37e12 per chip of two, 2.765e12), and operations
# per cycle of the vector units: 4 of 8 × 128 lanes in each TensorCore, of which a v5p device has two.
BANDWIDTH = {"tpu7x": 3.69e12, "v5p": 2.765e12}
LANES = {"tpu7x": 4096, "v5p": 8192}

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
    "Weights.lookup": "embedding",
    "_sum_over_devices": "gradient sums",
    "ids_hash": "hashes",
    "data_hash": "hashes",
    "splash_attention": "around attention",
    "Weights.matmul": "split and join of weights",
    "layer": "elsewhere in the layer",
}
# The same for jax.named_scope, which also names the backward pass of a custom_vjp: its stack ends at the call.
SCOPES = {
    "norm": "norms",
    "rope": "rotary positions",
    "swiglu": "SwiGLU",
    "loss": "loss",
    "attention": "around attention",
    "embedding": "embedding",
}
STEP = "make_train_step.<locals>.train_step"


@dataclass(frozen=True)
class Work:
    """One scheduled instruction that takes TensorCore time."""

    instruction: Instruction
    kind: str
    cycles: float  # over the whole step


def of_kernel(kernel: pallas.Kernel, family: str, peak_flops: float) -> float:
    """The least cycles of one execution of a kernel."""
    if kernel.is_attention:
        return kernel.flops / peak_flops * CLOCK[family]
    return max(kernel.flops / LANES[family], kernel.bytes / BANDWIDTH[family] * CLOCK[family])


def work(executions: Executions, found: list[pallas.Kernel], family: str, peak_flops: float) -> list[Work]:
    """Everything that the TensorCore does in one step."""
    done = [
        Work(
            k.instruction,
            f"attention {k.direction}" if k.is_attention else f"norms and rotary positions, kernel {k.direction}",
            of_kernel(k, family, peak_flops) * k.times,
        )
        for k in found
    ]
    for computation, instruction, times in executions.scheduled():
        if computation.thread == "" and instruction.cycles:
            done.append(
                Work(instruction, kind_of(executions.module, computation, instruction), instruction.cycles * times)
            )
    return done


def by_kind(done: list[Work]) -> dict[str, float]:
    """Cycles by kind, most first."""
    total: defaultdict[str, float] = defaultdict(float)
    for item in done:
        total[item.kind] += item.cycles
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def kind_of(module: Module, computation: Computation, instruction: Instruction) -> str:
    """What an instruction is for, in words."""
    if contains_matmul(module, instruction):
        return "matmul"
    tail = instruction.op_name.rpartition("/")[2]
    if tail == "reduce_sum" and "splash" in instruction.op_name and _drops_leading(computation, instruction):
        return "dq partial sums"
    opcodes = {inner.opcode for _, inner in module.inside(instruction)} or {instruction.opcode}
    if tail in ("dynamic_slice", "dynamic_update_slice") or tail.startswith("while"):
        return "scan slices in and out"
    if opcodes <= {"copy", "bitcast", "transpose", "parameter", "tuple", "get-tuple-element", "reshape"}:
        return "copies and layout"
    purpose = _purpose(instruction, module.stack(instruction.frame))
    if tail.startswith("convert"):
        return f"conversions ({purpose})" if purpose else "conversions"
    if {"dynamic-slice", "dynamic-update-slice"} & opcodes and not opcodes & {"multiply", "reduce", "exponential"}:
        return "scan slices in and out"
    return purpose or f"other ({tail or instruction.opcode})"


def _purpose(instruction: Instruction, stack: list[Frame]) -> str | None:
    """By the innermost scope or function that has a name here. All is called by the step: that one must be the last."""
    scope = next((SCOPES[part] for part in reversed(instruction.op_name.split("/")) if part in SCOPES), None)
    if scope is not None:
        return scope
    if stack and stack[0].function == STEP:
        return "optimizer"
    return next((FUNCTIONS[f.function] for f in stack if f.function in FUNCTIONS), None)


def _drops_leading(computation: Computation, instruction: Instruction) -> bool:
    """Whether it sums over the parts of a kernel's result, […, parts, heads, length, head_dim]."""
    made = instruction.arrays[0].dims
    inputs = [array.dims for name in instruction.operands for array in computation.instructions[name].arrays]
    return any(len(dims) > len(made) >= 3 and dims[-2:] == made[-2:] for dims in inputs)
