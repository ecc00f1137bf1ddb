"""Communication that the schedule does not hide, if every transfer runs at the peak of the links.

The schedule is played in its order on one TensorCore and one link per device: work takes the compiler's cycles, transfers
take the link one after the other from where they start, and who needs the result waits. What XLA neither starts early nor
fuses with work is waited for as a whole. Latency, distance and rings that use only some of the links make it longer.
"""

from collections import defaultdict
from collections.abc import Iterable

from trainer.preflight.collectives import Collective
from trainer.preflight.executions import Executions
from trainer.preflight.hlo import Computation, Instruction

CALLS = ("calls", "to_apply", "called_computations")
Kind = tuple[str, str]  # collective and dtype


class Schedule:
    """`waits` are the seconds a step waits for each kind of collective, `seconds` what they would take alone, at `rate` bytes
    per second that a device can send."""

    def __init__(
        self, executions: Executions, found: Iterable[Collective], seconds_of: dict[str, float], rate: float
    ) -> None:
        self._executions, self._seconds_of = executions, seconds_of
        self._transfers: dict[tuple[str, str], tuple[Kind, float]] = {}  # by computation and instruction
        self._started: dict[str, tuple[Kind, float]] = {}  # of computations that run beside: on a SparseCore
        self._played: dict[str, float] = {}
        self.seconds: defaultdict[Kind, float] = defaultdict(float)
        self.waits: defaultdict[Kind, float] = defaultdict(float)
        beside = {
            name
            for _, instruction, _ in executions.scheduled()
            if instruction.opcode.endswith("-start")
            for name in instruction.called(*CALLS)
        }
        for item in found:
            kind, seconds = (item.kind, item.dtype), item.sent / rate
            self.seconds[kind] += seconds * item.times
            _, before = self._transfers.get(item.place, (kind, 0.0))
            self._transfers[item.place] = kind, before + seconds
            if item.place[0] in beside:
                _, before = self._started.get(item.place[0], (kind, 0.0))
                self._started[item.place[0]] = kind, before + seconds
        self._play(executions.module.entry)

    def _play(self, computation: Computation) -> float:
        """Seconds of one execution, waits included."""
        if computation.name not in self._played:
            self._played[computation.name] = _Run(self, computation).now
        return self._played[computation.name]

    def _inner(self, computation: Computation, instruction: Instruction) -> float:
        """Seconds of the loop or call that an instruction is."""
        names = instruction.called("body", "branch_computations", *CALLS)
        counts = self._executions.counts
        trips = counts[names[0]] // max(counts[computation.name], 1) if instruction.opcode == "while" else 1
        return trips * sum(self._play(self._executions.module.computations[name]) for name in names)

    def _transfer(self, computation: Computation, instruction: Instruction) -> tuple[Kind, float] | None:
        """What it sends, itself or by what it starts on another core."""
        for name in instruction.called(*CALLS):
            if name in self._started:
                return self._started[name]
        return self._transfers.get((computation.name, instruction.name))


class _Run:
    """One execution of one computation."""

    def __init__(self, schedule: Schedule, computation: Computation) -> None:
        self.now, self._free = 0.0, 0.0  # the TensorCore's time, and when the link is free
        self._times = schedule._executions.counts[computation.name]
        self._waits = schedule.waits
        ends: dict[str, tuple[Kind, float]] = {}  # of transfers under way, by the names that stand for them
        asked: dict[str, tuple[Kind, float]] = {}  # started, but without operands so far
        updated = {n for i in computation.instructions.values() if i.opcode.endswith("-update") for n in i.operands}
        for instruction in computation.instructions.values():
            work = schedule._seconds_of.get(instruction.name, 0.0)
            if instruction.opcode in ("while", "call", "conditional"):
                self.now += schedule._inner(computation, instruction)
            elif instruction.opcode.endswith("-done"):
                for kind, end in (ends[n] for n in instruction.operands if n in ends):
                    self._wait(kind, end)
            elif instruction.opcode.endswith("-update"):
                for name in instruction.operands:
                    if name in asked:
                        kind, seconds = asked[name]
                        ends[instruction.name] = kind, self._send(seconds)
            elif (transfer := schedule._transfer(computation, instruction)) is not None:
                kind, seconds = transfer
                if instruction.opcode.endswith("-start"):
                    if instruction.name in updated:
                        asked[instruction.name] = transfer
                    else:
                        ends[instruction.name] = kind, self._send(seconds)
                else:  # by itself, or fused with the work that hides it
                    end = self._send(seconds)
                    self.now += work
                    self._wait(kind, end)
            else:
                self.now += work

    def _send(self, seconds: float) -> float:
        """When a transfer that starts now ends."""
        self._free = max(self.now, self._free) + seconds
        return self._free

    def _wait(self, kind: Kind, end: float) -> None:
        if end > self.now:
            self._waits[kind] += (end - self.now) * self._times
            self.now = end
