"""Floating-point operations of attention kernels: by the blocks that their masks leave, as the kernel's grid runs them.

jax's splash kernels (jax/experimental/pallas/ops/tpu/splash_attention) skip a block when its entry of `block_mask` is 0.
The mask is a constant of the program, so the blocks can be counted in it. Other kernels say their operations themselves
(pallas_call's cost_estimate). tokamax's splash kernels (0.0.17) say them as if their grid were all blocks, also where it has only
those that run; their first operands list it.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

from trainer.preflight.executions import Executions
from trainer.preflight.hlo import Computation, HloError, Instruction

# Matrix products per pair of a query and a key. Backward: the scores again, dP, dV, dK, dQ, or those that one kernel has.
PRODUCTS = {"mha_fwd": 2, "mqa_fwd": 2, "mha_dkv": 4, "mqa_dkv": 4, "mha_dq": 3, "mqa_dq": 3}
FUSED_BACKWARD = 5
BLOCK_MASK = 1  # position among the kernel's operands
VECTOR = ("norm_rope",)  # kernels without matrix products, by the beginning of their names
_COST = re.compile(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')
_BYTES = re.compile(r'"cost_estimate":\{[^}]*"bytes_accessed":"?(\d+)')
Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Kernel:
    """One Pallas kernel, executed `times` a step."""

    instruction: Instruction
    direction: Direction
    flops: int  # of one execution
    times: int
    blocks: int | None  # executed per head; None where the kernel states its operations

    @property
    def is_attention(self) -> bool:
        """Whether its operations are matrix products, as opposed to those of vector registers."""
        return not any(name in self.instruction.name for name in VECTOR)

    @property
    def bytes(self) -> int:
        """That one execution reads and writes by its own account."""
        stated = _BYTES.search(self.instruction.attributes)
        return int(stated[1]) if stated else 0


def is_kernel(instruction: Instruction) -> bool:
    """Whether it is a Pallas kernel for the TensorCore."""
    return instruction.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in instruction.attributes


def direction(instruction: Instruction) -> Direction:
    """By the kernel's name; a forward kernel that the backward pass runs again is one all the same."""
    if "_fwd" in instruction.name:
        return "forward"
    backward = ("_dkv", "_dq", "_bwd")
    return (
        "backward" if "transpose(" in instruction.op_name or any(n in instruction.name for n in backward) else "forward"
    )


def kernels(executions: Executions) -> list[Kernel]:
    """All of the step. Raises HloError for a kernel whose operations cannot be known."""
    found = []
    for computation, instruction, times in executions.scheduled():
        if is_kernel(instruction):
            flops, blocks = _flops(executions, computation, instruction)
            found.append(Kernel(instruction, direction(instruction), flops, times, blocks))
    return found


def _flops(executions: Executions, computation: Computation, kernel: Instruction) -> tuple[int, int | None]:
    stated = _COST.search(kernel.attributes)
    if stated and int(stated[1]):
        return round(int(stated[1]) * _grid_share(computation, kernel)), None
    name = next((n for n in PRODUCTS if f"splash_{n}" in kernel.name), None)
    if name is None:
        raise HloError(
            f"kernel {kernel.name}: no cost_estimate and not one of splash attention's; give its pallas_call a cost_estimate"
        )
    backward = not name.endswith("fwd")
    q = _queries(computation, kernel)
    heads, head_dim = math.prod(q[:-2]), q[-1]
    by_name = _block_sizes(kernel)
    suffix = f"_{name.rpartition('_')[2]}" if backward else ""
    block_q, block_kv = by_name[f"block_q{suffix}"], by_name[f"block_kv{suffix}"]
    products = PRODUCTS[name]
    if name.endswith("dkv") and len(kernel.arrays) == 3:  # dq beside dk and dv
        products = FUSED_BACKWARD
    mask = executions.source(computation, computation.operand(kernel, BLOCK_MASK))
    blocks = _nonzero(mask)
    masked_heads = mask.arrays[0].dims[0]  # 1: one mask for all heads
    per_head = blocks / masked_heads
    return round(products * 2 * head_dim * heads * per_head * block_q * block_kv), round(per_head)


def _block_sizes(kernel: Instruction) -> dict[str, int]:
    """block_q, block_kv, block_q_dkv, … as both splash libraries write them into their metadata."""
    sizes = re.findall(r'\\"(block_[a-z_]+)\\": (\d+|null)', kernel.attributes)
    return {n: int(v) for n, v in sizes if v != "null"}


def _grid_share(computation: Computation, kernel: Instruction) -> float:
    """Blocks of a tokamax kernel's grid ÷ all blocks of queries and keys of the same length; 1 for any other kernel."""
    rows = next((name for name in kernel.operands if name.endswith(".active_rows_ref")), None)
    if rows is None:
        return 1.0
    sizes, suffix = _block_sizes(kernel), "_dkv" if "_dkv" in kernel.name else ""
    block = sizes[f"block_q{suffix}"] * sizes[f"block_kv{suffix}"]
    length = kernel.arrays[0].dims[-2]  # of the output, or of dq: […, length, head_dim]
    return computation.instructions[rows].arrays[0].dims[-1] * block / length**2


def _queries(computation: Computation, kernel: Instruction) -> tuple[int, ...]:
    """[…, heads, length, head_dim]: the first operand of floating-point numbers; the kernel's masks come before it."""
    for operand in kernel.operands:
        array = computation.instructions[operand].arrays[0]
        if array.dtype in ("bf16", "f32", "f16") and len(array.dims) >= 3:
            return array.dims
    raise HloError(f"kernel {kernel.name}: no operand [heads, length, head_dim]")


def _nonzero(mask: Instruction) -> int:
    if mask.opcode != "constant" or "..." in mask.arguments:
        raise HloError(f"block mask {mask.name} is no constant written out, but {mask.opcode} {mask.arguments[:40]}")
    return sum(int(v) != 0 for v in re.findall(r"-?\d+", mask.arguments))
