"""Waits for communication: the schedule of a program played on one TensorCore and one link. Programs cut down by hand."""

import pytest

from trainer.preflight import hlo
from trainer.preflight.collectives import collectives
from trainer.preflight.executions import Executions
from trainer.preflight.overlap import Schedule

# 3 × 2^20 elements come from the three others of four devices: 12 MiB of float32.
GATHER = "f32[4194304]{0} all-gather"
RATE = 600e9  # bytes per second
ALONE = 3 * 2**20 * 4 / RATE

LATE = f"""HloModule late, is_scheduled=true

ENTRY %main (p: f32[1048576]) -> f32[4194304] {{
  %p = f32[1048576]{{0}} parameter(0)
  %work = f32[1048576]{{0}} negate(%p)
  ROOT %gather = {GATHER}(%p), dimensions={{0}}
}}
"""
EARLY = """HloModule early, is_scheduled=true

%beside (q: f32[1048576]) -> f32[4194304] {
  %q = f32[1048576]{0} parameter(0)
  ROOT %gather = f32[4194304]{0} all-gather(%q), dimensions={0}
}, execution_thread="sparsecore"

ENTRY %main (p: f32[1048576]) -> f32[4194304] {
  %p = f32[1048576]{0} parameter(0)
  %start = ((f32[1048576]), f32[4194304], u32[]) call-start(%p), to_apply=%beside
  %work = f32[1048576]{0} negate(%p)
  ROOT %done = f32[4194304]{0} call-done(%start)
}
"""
LOOP = """HloModule loop, is_scheduled=true

%condition (s: (s32[], f32[1048576])) -> pred[] {
  %s = (s32[], f32[1048576]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%body (t: (s32[], f32[1048576])) -> (s32[], f32[1048576]) {
  %t = (s32[], f32[1048576]{0}) parameter(0)
  %j = s32[] get-tuple-element(%t), index=0
  %x = f32[1048576]{0} get-tuple-element(%t), index=1
  %first = ((f32[1048576]), f32[4194304]) all-gather-start(%x), dimensions={0}
  %second = ((f32[1048576]), f32[4194304]) all-gather-start(%x), dimensions={0}
  %work = f32[1048576]{0} negate(%x)
  %first-done = f32[4194304]{0} all-gather-done(%first)
  %second-done = f32[4194304]{0} all-gather-done(%second)
  ROOT %out = (s32[], f32[1048576]{0}) tuple(%j, %work)
}

ENTRY %main (p: f32[1048576]) -> (s32[], f32[1048576]) {
  %p = f32[1048576]{0} parameter(0)
  %zero = s32[] constant(0)
  %state = (s32[], f32[1048576]{0}) tuple(%zero, %p)
  ROOT %while = (s32[], f32[1048576]{0}) while(%state), condition=%condition, body=%body
}
"""


def waits(text: str, work: float, sent_alone: float = ALONE) -> float:
    """Seconds a step waits when `%work` takes `work`; all that is sent alone takes `sent_alone`."""
    executions = Executions(hlo.parse(text))
    schedule = Schedule(executions, collectives(executions, {}), {"work": work}, RATE)
    assert schedule.seconds == {("all-gather", "f32"): pytest.approx(sent_alone)}
    return schedule.waits["all-gather", "f32"]


def test_what_is_not_started_early_is_waited_for_as_a_whole() -> None:
    assert waits(LATE, 10 * ALONE) == pytest.approx(ALONE)


@pytest.mark.parametrize(("work", "rest"), [(0.25, 0.75), (2, 0)])
def test_work_between_start_and_done_hides_as_much_as_it_takes(work: float, rest: float) -> None:
    assert waits(EARLY, work * ALONE) == pytest.approx(rest * ALONE)


def test_a_transfer_that_gets_its_operands_later_starts_there() -> None:
    late = EARLY.replace("call-done(%start)", "call-done(%update)").replace(
        "  ROOT %done", "  %update = ((f32[1048576]), f32[4194304], u32[]) call-update(%start)\n  ROOT %done"
    )
    assert waits(late, 2 * ALONE) == pytest.approx(ALONE)


def test_two_transfers_share_the_link_in_every_turn_of_a_loop() -> None:
    assert waits(LOOP, 1.5 * ALONE, 10 * ALONE) == pytest.approx(5 * 0.5 * ALONE)


def test_a_sum_that_every_device_gets_goes_twice() -> None:
    summed = LATE.replace("4194304", "1048576").replace("all-gather", "all-reduce")
    executions = Executions(hlo.parse(summed))
    (found,) = collectives(executions, {})
    assert (found.sent, found.place) == (2 * 2**20 * 4, ("main", "gather"))
