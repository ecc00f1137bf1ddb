"""Reads the text of an optimised HLO module: computations, instructions, shapes, and where in our source each came from.

The grammar is XLA's own (xla/hlo/parser); only what the accounts need is kept. Nothing here needs JAX.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from trainer.errors import TrainerError

BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2", "f8e4m3", "f8e4m3b11fnuz"), 1),
    **dict.fromkeys(("bf16", "f16", "s16", "u16"), 2),
    **dict.fromkeys(("f32", "s32", "u32"), 4),
    **dict.fromkeys(("f64", "s64", "u64", "c64"), 8),
    **dict.fromkeys(("s4", "u4", "s2", "u2", "s1", "u1"), 1),
    "c128": 16,
}
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r"T\(([0-9,]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|called_computations|branch_computations)=(\{[^}]*\}|%[\w.\-]+)")
_REFERENCE = re.compile(r"%([\w.\-]+)")
_COMMENT = re.compile(r"/\*.*?\*/")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_END = re.compile(r"\}(, execution_thread=.*)?$")  # of a computation; a constant's braces close with more behind them
_TABLE_ROW = re.compile(r'^(\d+) (?:"(.*)"|\{(.*)\})$')


class HloError(TrainerError):
    """The program's text is not what this reader knows."""


@dataclass(frozen=True)
class Array:
    """One array of a shape. `space` is XLA's memory space: 0 HBM, 1 VMEM, 5 host."""

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...]
    tile: tuple[int, ...]
    space: int

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Without padding."""
        return self.elements * BYTES.get(self.dtype, 0)

    @property
    def padded_bytes(self) -> int:
        """As it lies in memory: the most minor dimensions rounded up to whole tiles."""
        order = self.minor_to_major or tuple(reversed(range(len(self.dims))))
        dims = [self.dims[i] for i in reversed(order)]  # most minor last
        if not dims or not self.tile:
            return self.bytes
        tile = self.tile[-len(dims) :]
        for i, size in enumerate(tile, len(dims) - len(tile)):
            dims[i] = -(-dims[i] // size) * size
        return math.prod(dims) * BYTES.get(self.dtype, 0)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a shape, of a tuple those of its elements in order, nested ones flattened."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(shape):
        if dtype not in BYTES:
            continue
        order = layout.partition(":")[0]
        tile, space = _TILE.search(layout), _SPACE.search(layout)
        found.append(
            Array(
                dtype,
                tuple(int(d.lstrip("<=")) for d in dims.split(",") if d),
                tuple(int(d) for d in order.split(",") if d.isdecimal()),
                tuple(map(int, tile[1].split(","))) if tile else (),
                int(space[1]) if space else 0,
            )
        )
    return tuple(found)


@dataclass(frozen=True)
class Instruction:
    """One instruction: `shape` and `attributes` as written, `operands` the names of instructions of its computation."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    arguments: str  # what stands between the parentheses: the value of a constant, the number of a parameter
    attributes: str
    is_root: bool

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        return arrays(self.shape)

    @cached_property
    def op_name(self) -> str:
        """JAX's path to the operation, e.g. "jit(train_step)/…/dot_general"; empty when XLA made it."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @cached_property
    def frame(self) -> int:
        found = _FRAME.search(self.attributes)
        return int(found[1]) if found else 0

    @cached_property
    def cycles(self) -> int:
        """The compiler's estimate for one execution; 0 where it makes none."""
        found = _CYCLES.search(self.attributes)
        return int(found[1]) if found else 0

    def called(self, *kinds: str) -> list[str]:
        """Names of the computations that it calls in one of these ways (calls, to_apply, body, condition, …)."""
        return [
            n for kind, names in _CALLED.findall(self.attributes) if kind in kinds for n in _REFERENCE.findall(names)
        ]

    def attribute(self, name: str) -> str | None:
        """An attribute without spaces in it, e.g. `dim_labels`."""
        found = re.search(rf"\b{name}=([^\s,]+|\{{[^}}]*\}})", self.attributes)
        return found[1] if found else None


@dataclass
class Computation:
    """Instructions in the order of the schedule."""

    name: str
    is_entry: bool
    thread: str  # "" is the TensorCore's; "sparsecore" what is offloaded
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @cached_property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.is_root)

    def parameter(self, number: int) -> Instruction:
        return next(i for i in self.instructions.values() if i.opcode == "parameter" and i.arguments == str(number))

    def operand(self, instruction: Instruction, index: int) -> Instruction:
        return self.instructions[instruction.operands[index]]


@dataclass(frozen=True)
class Frame:
    """One line of our source on the way to an operation."""

    file: str  # the stem, e.g. "model"
    function: str
    line: int


@dataclass
class Module:
    computations: dict[str, Computation]
    entry: Computation
    _files: dict[int, str]
    _functions: dict[int, str]
    _locations: dict[int, tuple[int, int, int]]  # file, function, line
    _frames: dict[int, tuple[int, int]]  # location, parent

    def stack(self, frame: int) -> list[Frame]:
        """The frames of an operation, innermost first; empty when XLA made it."""
        found = []
        while frame in self._frames:
            location, parent = self._frames[frame]
            file, function, line = self._locations[location]
            found.append(
                Frame(self._files[file].rpartition("/")[2].removesuffix(".py"), self._functions[function], line)
            )
            # Parents are written one higher than they are, so that 0 stays free for "none".
            frame = parent - 1 if parent - 1 != frame else 0
        return found

    def inside(self, instruction: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """All instructions fused into this one, at any depth."""
        for name in instruction.called("calls") if instruction.opcode == "fusion" else ():
            computation = self.computations[name]
            for inner in computation.instructions.values():
                yield computation, inner
                yield from self.inside(inner)


def parse(text: str) -> Module:
    """Raises HloError for text that is no HLO module."""
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[int, str]] = {"FileNames": {}, "FunctionNames": {}, "FileLocations": {}, "StackFrames": {}}
    table: dict[int, str] | None = None
    current: Computation | None = None
    for line in _whole_lines(text):
        if current is not None:
            if _END.match(line):
                thread = re.search(r'execution_thread="(\w+)"', line)
                current.thread = thread[1] if thread else ""
                current = None
            else:
                instruction = _instruction(line)
                current.instructions[instruction.name] = instruction
        elif line in tables:
            table = tables[line]
        elif table is not None and (row := _TABLE_ROW.match(line)):
            table[int(row[1])] = row[2] if row[2] is not None else row[3]
        elif line.endswith("{") and (start := re.match(r"(ENTRY )?%([\w.\-]+) ", line)):
            current = Computation(start[2], bool(start[1]), "")
            computations[current.name] = current
    entry = next((c for c in computations.values() if c.is_entry), None)
    if entry is None:
        raise HloError("no ENTRY computation: this is not the text of an HLO module")
    return Module(
        computations,
        entry,
        tables["FileNames"],
        tables["FunctionNames"],
        {k: _numbers(v, "file_name_id", "function_name_id", "line") for k, v in tables["FileLocations"].items()},  # type: ignore[misc]
        {k: _numbers(v, "file_location_id", "parent_frame_id") for k, v in tables["StackFrames"].items()},  # type: ignore[misc]
    )


def _numbers(row: str, *names: str) -> tuple[int, ...]:
    values = dict(pair.split("=") for pair in row.split())
    return tuple(int(values.get(name, 0)) for name in names)


def _whole_lines(text: str) -> Iterator[str]:
    """Lines, those of one instruction joined: constants and a kernel's metadata may hold line breaks."""
    pending: str | None = None
    for line in text.split("\n"):
        begins = line.startswith(("  %", "  ROOT ", "%", "ENTRY ")) or _END.match(line) or pending is None
        if begins:
            if pending is not None:
                yield pending
                pending = None
            if line.startswith(("  %", "  ROOT ")):
                pending = line
            else:
                yield line
        else:
            assert pending is not None
            pending += " " + line
    if pending is not None:
        yield pending


def _instruction(line: str) -> Instruction:
    head, sign, rest = line.strip().partition(" = ")
    if not sign:
        raise HloError(f"not an instruction: {line[:120]!r}")
    is_root = head.startswith("ROOT ")
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    stop = _closing(rest, len(opcode))
    arguments = _COMMENT.sub("", rest[len(opcode) + 1 : stop - 1])
    operands = tuple(_REFERENCE.findall(arguments)) if opcode != "constant" else ()
    return Instruction(head.removeprefix("ROOT ").lstrip("%"), opcode, shape, operands, arguments, rest[stop:], is_root)


def _closing(text: str, start: int) -> int:
    """Just behind the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return start + match.end()
    raise HloError(f"unbalanced parentheses: {text[:120]!r}")
