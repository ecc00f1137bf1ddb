"""The largest arrays that a program makes in HBM, by the line of ours that makes them."""

from dataclasses import dataclass

from trainer.preflight.executions import Executions
from trainer.preflight.hlo import Computation, Instruction, Module

_MAKES_NOTHING = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "while", "constant", "optimization-barrier",
    "broadcast",  # of zeros, for a loop to write into
    "copy-start", "slice-start", "call-start", "async-start",  # on their way to VMEM, or named at their end
}  # fmt: skip
HBM = 0


@dataclass(frozen=True)
class Buffer:
    """`count` arrays of one shape made at one place. Not all need be alive at once."""

    shape: str
    bytes: int  # of one, padded as it lies in memory
    count: int
    made_by: str


def largest(executions: Executions, limit: int = 20) -> list[Buffer]:
    """By the bytes of all arrays of one shape and place. Those handed in place from turn to turn of a loop count once."""
    module = executions.module
    groups: dict[tuple[str, int, str], int] = {}
    for computation, instruction, _ in executions.scheduled():
        if (
            computation.thread
            or instruction.opcode in _MAKES_NOTHING
            or instruction.opcode.endswith(("-done", "-update"))
        ):
            continue
        for array in instruction.arrays:
            if array.space == HBM and array.padded_bytes >= 2**20:
                key = (str(array), array.padded_bytes, _place(module, computation, instruction))
                groups[key] = groups.get(key, 0) + 1
    found = [Buffer(shape, size, count, place) for (shape, size, place), count in groups.items()]
    return sorted(found, key=lambda b: -b.bytes * b.count)[:limit]


def _place(module: Module, computation: Computation, instruction: Instruction) -> str:
    stack = module.stack(instruction.frame)
    operation = instruction.op_name.rpartition("/")[2] or instruction.opcode
    backward = ", backward" if "transpose(" in instruction.op_name else ""
    if not stack:
        return f"{operation}{backward} (XLA)"
    where = stack[0]
    return f"{operation}{backward} ({where.file}.py:{where.line} {where.function.rpartition('.')[2]})"
