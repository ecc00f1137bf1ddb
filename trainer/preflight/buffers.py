"""The largest arrays that a program makes in HBM, by the line of ours that makes them."""

from dataclasses import dataclass

from trainer.preflight.executions import Executions
from trainer.preflight.hlo import Computation, Instruction, Module

_MAKES_NOTHING = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "while", "constant", "optimization-barrier",
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
        if instruction.opcode == "custom-call" and '"AllocateBuffer"' in instruction.attributes:
            continue  # named where a loop writes into it
        for index, array in enumerate(instruction.arrays):
            if array.space == HBM and array.padded_bytes >= 2**20:
                key = (str(array), array.padded_bytes, _place(module, computation, instruction, index))
                groups[key] = groups.get(key, 0) + 1
    found = [Buffer(shape, size, count, place) for (shape, size, place), count in groups.items()]
    return sorted(found, key=lambda b: -b.bytes * b.count)[:limit]


def _place(module: Module, computation: Computation, instruction: Instruction, index: int) -> str:
    """Operation, file, line and function; of a stack that a loop writes, those of what is written."""
    written = _written(module, computation, instruction, index)
    stack = module.stack(written.frame)
    operation = written.op_name.rpartition("/")[2] or written.opcode
    saved = "saved " if written is not instruction else ""
    backward = ", backward" if "transpose(" in instruction.op_name else ""
    if not stack:
        return f"{saved}{operation}{backward} (XLA)"
    where = stack[0]
    return f"{saved}{operation}{backward} ({where.file}.py:{where.line} {where.function.rpartition('.')[2]})"


def _written(module: Module, computation: Computation, instruction: Instruction, index: int) -> Instruction:
    """What a dynamic-update-slice writes into its stack, for itself or as output `index` of a fusion; else the instruction."""
    inside = module.computations[instruction.called("calls")[0]] if instruction.opcode == "fusion" else computation
    update = inside.root if instruction.opcode == "fusion" else instruction
    if update.opcode == "tuple" and inside is not computation:
        update = inside.operand(update, index)
    while update.opcode == "bitcast":
        update = inside.operand(update, 0)
    if update.opcode != "dynamic-update-slice":
        return instruction
    value = inside.operand(update, 1)
    while value.opcode in ("bitcast", "copy", "reshape"):
        value = inside.operand(value, 0)
    if value.opcode == "parameter" and inside is not computation:
        value = computation.operand(instruction, int(value.arguments))
    while value.opcode in ("bitcast", "copy", "copy-done", "copy-start", "reshape"):
        value = computation.operand(value, 0)
    return value
