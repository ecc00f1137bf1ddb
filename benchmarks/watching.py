"""What it costs to watch a run of OLMo 3 7B's size: per step in the loop, beside it, and for a TensorBoard export. One JSON line.

The order has 724 million instances (feistel), batches have 512; the fastest step foreseen takes 0.73 s (256 Ironwood chips).
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support import runs
from tests.support.corpus import sized
from tests.support.memory_store import MemoryStore
from trainer.data.hashes import hash_text, ids_hashes
from trainer.data.order import open_order
from trainer.guard import Guard
from trainer.metrics.committed import Point
from trainer.metrics.event_files import EventWriter
from trainer.metrics.names import Throughput, of_step
from trainer.progress import Pace
from trainer.recipe import load
from trainer.rundir.records import StepLine

STEPS, BLOCK, STEP_SECONDS = 4000, 250, 0.73


def main() -> None:
    order = open_order(sized(724_000_000, batch=512))
    lines = []
    for first in range(0, STEPS, BLOCK):
        for step, lanes in enumerate(ids_hashes(order.block(first, first + BLOCK)), first + 1):
            lines.append(
                StepLine(
                    step=step, loss=2.5, grad_norm=0.3, lr=3e-4, skipped=False, ids=hash_text(lanes), data="0",
                    seconds=STEP_SECONDS, loading=0.001,
                )
            )  # fmt: skip
    guard = Guard(runs.begun(MemoryStore()), order, 1, 1, None, lambda alarms: None)
    pace = Pace()

    def in_the_loop() -> None:
        for line in lines:
            guard.stepped(line)
            pace.stepped(line.seconds)

    loop = timed(in_the_loop)
    beside = timed(guard._look)
    assert guard._rundir.open_alarms() == ()
    recipe = load("olmo3_7b_stage1")
    text = [line.canonical() for line in lines]
    throughput = Throughput(recipe.global_batch * recipe.sequence_length, 46.6e9, 256, 1153.5e12)

    def export() -> None:
        with tempfile.TemporaryFile() as file:
            writer = EventWriter(file, 0.0)
            for data in text:
                line = StepLine.parse(data, "step log")
                writer.add(Point(line.step, 0.0, of_step(line, throughput)))

    exported = timed(export)
    print(
        json.dumps(
            {
                "loop_microseconds_per_step": round(loop * 1e6, 2),
                "beside_microseconds_per_step": round(beside * 1e6, 1),
                "beside_share_of_a_step": round(beside / STEP_SECONDS, 6),
                "export_microseconds_per_step": round(exported * 1e6, 1),
                "export_minutes_of_stage_1": round(exported * 1_413_814 / 60, 1),
            }
        )
    )


def timed(work: Callable[[], None]) -> float:
    """Seconds per step."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) / STEPS


if __name__ == "__main__":
    main()
