"""Communication between devices in one step: kinds, bytes, and what the schedule does meanwhile."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.preflight.executions import Executions
from trainer.preflight.hlo import Computation, Instruction

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all")
# What goes between slices is in the program as a transfer to the host, whose runtime adds it up and sends it back.
BETWEEN_SLICES = "between slices"
_RUNTIME = "xla_megascale_runtime"


@dataclass(frozen=True)
class Collective:
    """One collective, executed `times` a step."""

    kind: str
    dtype: str
    bytes: int  # of one execution and device: the whole array that is gathered, or that is summed
    times: int
    asynchronous: bool
    cycles_meanwhile: float  # TensorCore work that the schedule puts between its start and its end, per execution
    sent: int  # bytes of one execution that a device sends over its slice's links when nothing goes twice
    place: tuple[str, str]  # computation and scheduled instruction


def collectives(executions: Executions, cycles_of: dict[str, float]) -> list[Collective]:
    """All of the step. `cycles_of` is the TensorCore's work of one execution of each scheduled instruction."""
    found = []
    offloaded = _starts(executions)
    for computation, scheduled, times in executions.scheduled():
        if scheduled.opcode == "send" and _RUNTIME in scheduled.attributes:
            found.append(_between_slices(computation, scheduled, times, cycles_of))
        asynchronous, meanwhile = scheduled.opcode.endswith("-start"), 0.0
        for home, instruction in _communicating(executions, computation, scheduled):
            if asynchronous:
                meanwhile = _between(computation, scheduled, cycles_of)
            elif computation.thread:
                asynchronous = True
                caller = offloaded.get(computation.name)
                meanwhile = _between(*caller, cycles_of) if caller else 0.0
            kind = _kind(home, instruction, home is not computation)
            dtype, size = _whole(home, instruction, kind)
            sent, place = _sent(home, instruction, kind, size), (computation.name, scheduled.name)
            found.append(Collective(_as(kind, instruction), dtype, size, times, asynchronous, meanwhile, sent, place))
    return found


def _between_slices(computation: Computation, send: Instruction, times: int, cycles_of: dict[str, float]) -> Collective:
    """Takes none of the slice's links; how long the network between slices takes is not reckoned."""
    array = computation.operand(send, 0).arrays[0]
    kind = "all-reduce" if "_xla_megascale_reduce_operation" in send.attributes else "transfer"
    meanwhile, place = _between(computation, send, cycles_of), (computation.name, send.name)
    return Collective(f"{kind} {BETWEEN_SLICES}", array.dtype, array.bytes, times, True, meanwhile, 0, place)


def _communicating(
    executions: Executions, computation: Computation, scheduled: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    """The collective that an instruction is, or those that are fused into it."""
    for home, instruction in [(computation, scheduled), *executions.module.inside(scheduled)]:
        if instruction.opcode.removesuffix("-start") in KINDS:
            yield home, instruction


def _kind(computation: Computation, instruction: Instruction, is_fused: bool) -> str:
    """By what arrives. XLA writes some reduce-scatters as an all-reduce of which each device takes its part, the two
    fused to one instruction (all-reduce-scatter): no device gets the whole sum."""
    kind = instruction.opcode.removesuffix("-start")
    if kind == "all-reduce" and is_fused:
        users = _users(computation, instruction)
        if users and all(user.opcode == "dynamic-slice" for user in users):
            return "reduce-scatter"
    return kind


def _users(computation: Computation, instruction: Instruction) -> list[Instruction]:
    """What reads its results."""
    found = []
    for user in computation.instructions.values():
        if instruction.name in user.operands:
            found += _users(computation, user) if user.opcode == "get-tuple-element" else [user]
    return found


def _as(kind: str, instruction: Instruction) -> str:
    """The kind, and what was asked for where XLA does something else: a gather may become an all-reduce of zeros."""
    asked = instruction.op_name.rpartition("/")[2].replace("_", "-")
    return f"{kind} for {asked}" if asked in KINDS and asked != kind else kind


def _whole(computation: Computation, instruction: Instruction, kind: str) -> tuple[str, int]:
    """dtype and bytes of the arrays: outputs of what gathers, inputs of what sums or moves."""
    if kind == "all-gather" and not instruction.opcode.endswith("-start"):
        arrays = instruction.arrays
    elif kind == "all-gather":
        arrays = instruction.arrays[len(instruction.arrays) // 2 :]  # (inputs, outputs)
    else:
        inputs = [computation.operand(instruction, i) for i in range(len(instruction.operands))]
        # An all-reduce-scatter pads its inputs within.
        inputs = [computation.operand(x, 0) if x.opcode == "pad" else x for x in inputs]
        arrays = tuple(array for x in inputs for array in x.arrays)
    return arrays[0].dtype, sum(a.bytes for a in arrays)


def _sent(computation: Computation, instruction: Instruction, kind: str, whole: int) -> int:
    """All but a device's own part; of a sum that every device gets, twice: to be summed, and summed."""
    inputs = sum(array.bytes for name in instruction.operands for array in computation.instructions[name].arrays)
    if kind == "all-gather":
        return whole - inputs
    if kind == "reduce-scatter":
        parts = _users(computation, instruction) if instruction.opcode == "all-reduce" else [instruction]
        return whole - sum(array.bytes for part in parts for array in part.arrays)
    return 2 * whole if kind == "all-reduce" else whole


def _starts(executions: Executions) -> dict[str, tuple[Computation, Instruction]]:
    """The instruction that starts each offloaded computation, and where it stands."""
    return {
        name: (computation, instruction)
        for computation, instruction, _ in executions.scheduled()
        if instruction.opcode in ("call-start", "async-start")
        for name in instruction.called("calls", "to_apply", "called_computations")
    }


def _between(computation: Computation, start: Instruction, cycles_of: dict[str, float]) -> float:
    """Work between a start with its operands and the -done that ends it."""
    waited, open_names = 0.0, {start.name}
    order = list(computation.instructions.values())
    at = next(i for i, instruction in enumerate(order) if instruction.name == start.name)
    for instruction in order[at + 1 :]:
        if open_names & set(instruction.operands):
            if instruction.opcode.endswith("-done"):
                return waited
            if instruction.opcode.endswith("-update"):  # only here does it get its operands
                open_names.add(instruction.name)
                waited = 0.0
        waited += cycles_of.get(instruction.name, 0.0)
    return waited


def by_kind(found: list[Collective]) -> list[dict[str, object]]:
    """Rows of a table: kind and dtype, executions, bytes per step, the asynchronous share of them, work meanwhile."""
    groups: dict[tuple[str, str], list[Collective]] = defaultdict(list)
    for item in found:
        groups[item.kind, item.dtype].append(item)
    rows = []
    for (kind, dtype), items in groups.items():
        total = sum(c.bytes * c.times for c in items)
        rows.append(
            {
                "kind": kind,
                "dtype": dtype,
                "executions": sum(c.times for c in items),
                "bytes": total,
                "asynchronous_bytes": sum(c.bytes * c.times for c in items if c.asynchronous),
                "cycles_meanwhile": round(sum(c.cycles_meanwhile * c.times for c in items)),
            }
        )
    return sorted(rows, key=lambda row: -int(str(row["bytes"])))
