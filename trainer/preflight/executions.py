"""How often each computation of a module runs in one step: whiles by their trip count, calls by their callers."""

from collections.abc import Iterator

from trainer.preflight.hlo import Computation, HloError, Instruction, Module

PRODUCTS = ("convolution", "dot")
_SEQUENCED = {"call", "call-start", "async-start", "conditional"}
_THROUGH = {
    "copy",
    "copy-start",
    "copy-done",
    "bitcast",
    "convert",
    "slice-start",
    "slice-done",
    "optimization-barrier",
}


def contains_matmul(module: Module, instruction: Instruction) -> bool:
    """Whether it is a matrix product, or a fusion around one."""
    return instruction.opcode in PRODUCTS or any(i.opcode in PRODUCTS for _, i in module.inside(instruction))


class Executions:
    """`counts[name]` of every computation that is scheduled for itself; fused ones run with their fusion."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.counts: dict[str, int] = {}
        self.uncounted: list[str] = []  # whiles whose length the data decides: taken to run once
        self._callers: dict[str, tuple[Computation, Instruction]] = {}  # of the bodies of whiles
        self._add(module.entry, 1)

    def _add(self, computation: Computation, times: int) -> None:
        self.counts[computation.name] = self.counts.get(computation.name, 0) + times
        for instruction in computation.instructions.values():
            if instruction.opcode == "while":
                (body,) = instruction.called("body")
                self._callers[body] = (computation, instruction)
                self._add(self.module.computations[body], times * self._trips_or_one(computation, instruction))
            elif instruction.opcode in _SEQUENCED:
                kinds = ("calls", "to_apply", "called_computations", "branch_computations")
                for name in instruction.called(*kinds):
                    self._add(self.module.computations[name], times)

    def _trips_or_one(self, computation: Computation, loop: Instruction) -> int:
        try:
            return self.trips(computation, loop)
        except HloError:
            body = self.module.computations[loop.called("body")[0]]
            for instruction in body.instructions.values():
                if "tpu_custom_call" in instruction.attributes or contains_matmul(self.module, instruction):
                    raise
            self.uncounted.append(loop.op_name or loop.name)
            return 1

    def scheduled(self) -> Iterator[tuple[Computation, Instruction, int]]:
        """Every instruction that runs for itself, and how often."""
        for name, times in self.counts.items():
            computation = self.module.computations[name]
            for instruction in computation.instructions.values():
                yield computation, instruction, times

    def trips(self, computation: Computation, loop: Instruction) -> int:
        """How often a while runs: it counts up from a constant to a constant, as every loop of jax.lax.scan does.

        Raises HloError for any other.
        """
        known = loop.attributes.partition('"known_trip_count":{"n":"')[2].partition('"')[0]
        if known.isdecimal():
            return int(known)
        condition = self.module.computations[loop.called("condition")[0]]
        compare = condition.root
        if compare.opcode != "compare" or compare.attribute("direction") != "LT":
            raise HloError(f"while {loop.name}: its condition is {compare.opcode}, not a counter below a bound")

        def value(index: int) -> int:
            instruction = condition.operand(compare, index)
            while instruction.opcode in _THROUGH:
                instruction = condition.operand(instruction, 0)
            if instruction.opcode == "get-tuple-element":
                element = int(instruction.attribute("index") or 0)
                start = computation.operand(loop, 0)
                instruction = self.source(computation, computation.operand(start, element))
            if instruction.opcode != "constant":
                raise HloError(f"while {loop.name}: its bounds are not constants, but {instruction.opcode}")
            return int(instruction.arguments)

        return max(value(1) - value(0), 0)

    def source(self, computation: Computation, instruction: Instruction) -> Instruction:
        """What made a value, looking through copies and, for what a loop does not change, out of the loop."""
        while True:
            if instruction.opcode in _THROUGH:
                instruction = computation.operand(instruction, 0)
            elif instruction.opcode == "get-tuple-element":
                of = computation.operand(instruction, 0)
                index = int(instruction.attribute("index") or 0)
                if of.opcode == "tuple":
                    instruction = computation.operand(of, index)
                elif of.opcode == "while" and self._unchanged(of, index):
                    instruction = computation.operand(computation.operand(of, 0), index)
                elif of.opcode == "parameter" and computation.name in self._callers:
                    computation, loop = self._callers[computation.name]
                    instruction = computation.operand(computation.operand(loop, 0), index)
                else:
                    return instruction
            else:
                return instruction

    def _unchanged(self, loop: Instruction, index: int) -> bool:
        """Whether the loop hands this element of its state on as it got it."""
        body = self.module.computations[loop.called("body")[0]]
        out = body.operand(body.root, index) if body.root.opcode == "tuple" else body.root
        return (
            out.opcode == "get-tuple-element"
            and int(out.attribute("index") or 0) == index
            and body.operand(out, 0).opcode == "parameter"
        )
