"""Communication in optimised programs: what is fused, what runs beside it. Pieces of the 7B's programs, cut down."""

from trainer.preflight import hlo
from trainer.preflight.collectives import Collective, by_kind, collectives
from trainer.preflight.executions import Executions

# v5p-4x4x4: the reduce-scatter of a gradient across planes, and of two smaller ones within them.
SCATTER = """HloModule scatter, is_scheduled=true

%all-reduce-scatter.6 (input.99: f32[11008,4096]) -> f32[2784,4096] {
  %input.99 = f32[11008,4096]{1,0:T(8,128)} parameter(0)
  %constant.2072 = f32[] constant(0)
  %pad.594 = f32[11136,4096]{1,0:T(8,128)} pad(%input.99, %constant.2072), padding=0_128x0_0
  %all-reduce.178 = f32[11136,4096]{1,0:T(8,128)} all-reduce(%pad.594), channel_id=64, replica_groups={{0,16,32,48}}, to_apply=%add
  %constant.2073 = u32[] constant(2784)
  %constant.2074 = u32[] constant(0)
  ROOT %dynamic-slice.633 = f32[2784,4096]{1,0:T(8,128)} dynamic-slice(%all-reduce.178, %constant.2073, %constant.2074), dynamic_slice_sizes={2784,4096}
}

%all-reduce-scatter.18 (input_0.5: f32[1376,4096], input_1.5: f32[1376,4096]) -> (f32[88,4096], f32[88,4096]) {
  %input_0.5 = f32[1376,4096]{1,0:T(8,128)} parameter(0)
  %constant.1780 = f32[] constant(0)
  %pad.550 = f32[1408,4096]{1,0:T(8,128)} pad(%input_0.5, %constant.1780), padding=0_32x0_0
  %input_1.5 = f32[1376,4096]{1,0:T(8,128)} parameter(1)
  %pad.551 = f32[1408,4096]{1,0:T(8,128)} pad(%input_1.5, %constant.1780), padding=0_32x0_0
  %all-reduce.113 = (f32[1408,4096]{1,0:T(8,128)}, f32[1408,4096]{1,0:T(8,128)}) all-reduce(%pad.550, %pad.551), channel_id=1, to_apply=%add
  %get-tuple-element.1 = f32[1408,4096]{1,0:T(8,128)} get-tuple-element(%all-reduce.113), index=0
  %constant.1782 = u32[] constant(0)
  %dynamic-slice.428 = f32[88,4096]{1,0:T(8,128)} dynamic-slice(%get-tuple-element.1, %constant.1782, %constant.1782), dynamic_slice_sizes={88,4096}
  %get-tuple-element.2 = f32[1408,4096]{1,0:T(8,128)} get-tuple-element(%all-reduce.113), index=1
  %dynamic-slice.429 = f32[88,4096]{1,0:T(8,128)} dynamic-slice(%get-tuple-element.2, %constant.1782, %constant.1782), dynamic_slice_sizes={88,4096}
  ROOT %tuple.492 = (f32[88,4096]{1,0:T(8,128)}, f32[88,4096]{1,0:T(8,128)}) tuple(%dynamic-slice.428, %dynamic-slice.429)
}

ENTRY %main (g: f32[11008,4096], s: f32[1376,4096]) -> f32[2784,4096] {
  %g = f32[11008,4096]{1,0:T(8,128)} parameter(0)
  %s = f32[1376,4096]{1,0:T(8,128)} parameter(1)
  %small = (f32[88,4096]{1,0:T(8,128)}, f32[88,4096]{1,0:T(8,128)}) fusion(%s, %s), kind=kCustom, calls=%all-reduce-scatter.18
  ROOT %fusion.1184 = f32[2784,4096]{1,0:T(8,128)} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.6
}
"""


def found(text: str, cycles: dict[str, float] | None = None) -> list[Collective]:
    return collectives(Executions(hlo.parse(text)), cycles or {})


def test_a_fused_reduce_scatter_counts_as_what_it_is_and_without_its_padding() -> None:
    rows = {(c.kind, c.dtype, c.bytes, c.asynchronous) for c in found(SCATTER)}
    assert rows == {
        ("reduce-scatter", "f32", 11008 * 4096 * 4, False),
        ("reduce-scatter", "f32", 2 * 1376 * 4096 * 4, False),
    }
    (row,) = by_kind(found(SCATTER))
    assert (row["executions"], row["bytes"]) == (2, (11008 + 2 * 1376) * 4096 * 4)


def test_a_sum_that_someone_keeps_whole_is_an_all_reduce() -> None:
    kept = SCATTER.replace(
        "ROOT %dynamic-slice.633 =", "%kept = f32[11136,4096] negate(%all-reduce.178)\n  ROOT %dynamic-slice.633 ="
    )
    assert sorted(c.kind for c in found(kept)) == ["all-reduce", "reduce-scatter"]


# Two slices of tpu7x-2x2x1: what each slice has summed and scattered, given to the host to be summed between slices.
BETWEEN = """HloModule between, is_scheduled=true

ENTRY %main (g: f32[256,1024]) -> f32[256,8,128] {
  %g = f32[256,1024]{1,0:T(8,128)} parameter(0)
  %bitcast = f32[256,8,128]{2,1,0:T(8,128)} bitcast(%g)
  %after-all = token[] after-all()
  %send = (f32[256,8,128]{2,1,0:T(8,128)}, u32[]{:S(2)}, token[]) send(%bitcast, %after-all), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="psum.7_0",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2}x{0:7}"}
  %recv = (f32[256,8,128]{2,1,0:T(8,128)}, u32[]{:S(2)}, token[]) recv(%after-all), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_reduce_operation="SUM"}
  %work = f32[256,1024]{1,0:T(8,128)} negate(%g)
  %send-done = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %recv-done = (f32[256,8,128]{2,1,0:T(8,128)}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  ROOT %get-tuple-element = f32[256,8,128]{2,1,0:T(8,128)} get-tuple-element(%recv-done), index=0
}
"""


def test_what_goes_between_slices_is_counted_and_takes_none_of_their_links() -> None:
    (one,) = found(BETWEEN, {"work": 7.0})
    assert (one.kind, one.dtype, one.bytes, one.sent) == ("all-reduce between slices", "f32", 256 * 1024 * 4, 0)
    assert (one.asynchronous, one.cycles_meanwhile) == (True, 7.0)
    (gathered,) = found(BETWEEN.replace('_xla_megascale_reduce_operation="SUM",', ""))
    assert gathered.kind == "transfer between slices"
