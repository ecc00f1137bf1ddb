"""The reader of optimised programs: shapes, trip counts, operations, kinds; on small texts and on a real program."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.preflight import DEVICE, recipe
from trainer.hardware import device_type
from trainer.params import param_count
from trainer.preflight import hlo
from trainer.preflight.accounting import Report, account, refused, report_of
from trainer.preflight.executions import Executions
from trainer.preflight.kernels import kernels
from trainer.preflight.matmuls import flops, matmuls
from trainer.preflight.model_flops import attention_pairs, model_flops
from trainer.preflight.plans import plan_of
from trainer.recipe import load

GOLDEN = Path(__file__).parent.parent / "golden"
LOOP = """HloModule small, is_scheduled=true

%body (state: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %state = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %x = f32[8,16]{1,0:T(8,128)} get-tuple-element(%state), index=1
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  %w = f32[16,16]{1,0:T(8,128)} constant({
    { 1, 2 },
    { 3, 4 }
  })
  %y = f32[8,16]{1,0:T(8,128)} convolution(%x, %w), dim_labels=bf_io->bf, backend_config={"window_config":{"estimated_cycles":"100"}}
  ROOT %out = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}) tuple(%next, %y)
}

%condition (state: (s32[], f32[8,16])) -> pred[] {
  %state = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %bound = s32[]{:T(128)} constant(BOUND)
  ROOT %less = pred[]{:T(512)} compare(%i, %bound), direction=DIRECTION
}

ENTRY %main (x: f32[8,16]) -> f32[8,16] {
  %x = f32[8,16]{1,0:T(8,128)} parameter(0)
  %start = s32[]{:T(128)} constant(2)
  %copied = s32[]{:T(128)} copy(%start)
  %state = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}) tuple(%copied, %x)
  %loop = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}) while(%state), condition=%condition, body=%body
  ROOT %result = f32[8,16]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""


def small(bound: int = 7, direction: str = "LT") -> str:
    return LOOP.replace("BOUND", str(bound)).replace("DIRECTION", direction)


def product(line: str, *operands: str) -> int:
    """FLOPs of one product in a program of its own."""
    body = "\n".join(
        f"  %{name} = {shape} parameter({i})" for i, (name, shape) in enumerate(o.split(" ") for o in operands)
    )
    module = hlo.parse(f"HloModule m\n\nENTRY %main () -> f32[] {{\n{body}\n  ROOT %p = {line}\n}}\n")
    return flops(module.entry, module.entry.root)


def test_a_loop_runs_from_its_start_to_its_bound() -> None:
    executions = Executions(hlo.parse(small(bound=7)))
    assert executions.counts == {"main": 1, "body": 5}
    (only,) = matmuls(executions)
    assert (only.flops, only.times) == (2 * 8 * 16 * 16, 5)


def test_products_in_a_loop_of_unknown_length_are_refused_and_other_such_loops_named() -> None:
    unknown = small(direction="NE")
    with pytest.raises(hlo.HloError, match="not a counter below a bound"):
        Executions(hlo.parse(unknown))
    harmless = Executions(hlo.parse(unknown.replace("convolution(%x, %w), dim_labels=bf_io->bf", "add(%x, %x)")))
    assert (harmless.counts["body"], harmless.uncounted) == (1, ["loop"])


def test_text_that_is_no_program_is_refused() -> None:
    with pytest.raises(hlo.HloError, match="ENTRY"):
        hlo.parse("ModuleNotFoundError: no module")


def test_arrays_are_padded_to_tiles() -> None:
    (narrow,) = hlo.arrays("f32[2,8192,1]{1,2,0:T(1,128)}")
    assert (narrow.bytes, narrow.padded_bytes) == (2 * 8192 * 4, 2 * 8192 * 4)
    (wide,) = hlo.arrays("f32[2,8192,1]{2,1,0:T(8,128)}")
    assert wide.padded_bytes == 2 * 8192 * 128 * 4
    vmem, hbm = hlo.arrays("(bf16[4,128]{1,0:T(8,128)(2,1)S(1)}, s8[3]{0})")
    assert (vmem.space, hbm.space, hbm.padded_bytes) == (1, 0, 3)


def test_products_of_every_form() -> None:
    assert (
        product(
            "f32[8,32] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}", "a f32[8,16]", "b f32[16,32]"
        )
        == 2 * 8 * 16 * 32
    )
    assert (
        product("f32[8,32] convolution(%a, %b), dim_labels=fb_io->bf", "a f32[16,8]", "b f32[16,32]") == 2 * 8 * 16 * 32
    )
    # A dimension that is neither summed nor shared may be written as a spatial one.
    assert (
        product(
            "f32[64,4,16] convolution(%a, %b), window={size=4 pad=3_3 rhs_reversal=1}, dim_labels=bf0_0oi->b0f",
            "a f32[64,32,1]",
            "b f32[4,16,32]",
        )
        == 2 * 64 * 32 * 16 * 4
    )
    # A batch of products: holes of the dilated input are not multiplied.
    assert (
        product(
            "f32[4,8,16] convolution(%a, %b), window={size=4 stride=3 pad=0_0 lhs_dilate=4}, dim_labels=0bf_0io->0bf",
            "a f32[4,8,32]",
            "b f32[4,32,16]",
        )
        == 2 * 4 * 8 * 32 * 16
    )


def test_the_reference_counts_49_gflop_per_token() -> None:
    stage1 = load("olmo3_7b_stage1")
    assert param_count(stage1.model) == 7_298_617_344
    assert model_flops(stage1) / stage1.global_batch / 8192 / 1e9 == pytest.approx(49.03, abs=0.01)  # MaxText: 49.02
    assert attention_pairs(stage1.model, 8) == 32 * 36  # below the window all are causal


@pytest.fixture(scope="session")
def text() -> str:
    return gzip.decompress((GOLDEN / "preflight.hlo.gz").read_bytes()).decode()


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    body: dict[str, Any] = json.loads((GOLDEN / "preflight.json").read_text())
    return body


@pytest.fixture(scope="session")
def report(text: str, golden: dict[str, Any]) -> Report:
    plan = plan_of(recipe(), device_type(DEVICE), 1, 1, "none")
    outcome = {
        "error": None,
        "compile_seconds": golden["compile_seconds"],
        "memory": {"peak_memory": golden["peak_gib"] * 2**30},
    }
    common = {name: golden[name] for name in ("recipe", "plan", "compiler_options", "versions", "program")}
    return account(recipe(), plan, device_type(DEVICE), outcome, text, common)


def test_a_real_program_gives_the_committed_report(report: Report, golden: dict[str, Any]) -> None:
    made, wanted = report.to_json(), report_of(golden).to_json()
    # What a kind is called is in the hands of whoever names functions of the model.
    assert sum(made.pop("cycles").values()) == pytest.approx(sum(wanted.pop("cycles").values()), rel=1e-6)
    assert made == wanted


def test_nothing_is_computed_that_the_model_does_not_ask_for(report: Report) -> None:
    """Matmuls by hand: 6 per matrix weight and token, none recomputed; attention by hand: blocks that the masks leave."""
    model = recipe().model
    tokens = recipe().global_batch * recipe().sequence_length // 8
    matrices = 4 * (4 * 256 * 256 + 3 * 256 * 512) + 256 * model.padded_vocab_size
    assert report.flops is not None
    assert report.flops.matmul == 6 * matrices * tokens
    assert report.flops.recomputed == 0
    block, heads, head_dim, rows = 1024, 2, 128, 2
    local, full = 1 + 2 * 3, 1 + 2 + 3 + 4
    assert report.flops.attention == 14 * head_dim * heads * block * block * rows * 2 * (local + full)


def test_kernels_run_as_often_as_layers_and_micro_batches_say(text: str) -> None:
    runs = [(k.direction, k.blocks, k.times) for k in kernels(Executions(hlo.parse(text)))]
    assert sorted(runs) == [("backward", 7, 4), ("backward", 10, 4), ("forward", 7, 4), ("forward", 10, 4)]


def test_every_weight_is_gathered_and_every_gradient_summed(report: Report) -> None:
    sent = {(row["kind"], row["dtype"]): row for row in report.communication}
    model = recipe().model
    layers = 4 * (4 * 256 * 256 + 3 * 256 * 512)
    gathers = sum(row["bytes"] for (kind, dtype), row in sent.items() if dtype == "bf16")
    # Per micro-batch: what the layers need, embedding and head. Small layers are kept until the backward pass.
    assert gathers == 2 * 2 * (layers + 2 * 256 * model.padded_vocab_size)
    summed = sum(row["bytes"] for (kind, dtype), row in sent.items() if dtype == "f32" and "scatter" in kind)
    # XLA adds up those of embedding and head over the micro-batches first.
    assert summed == 4 * (2 * layers + 2 * 256 * model.padded_vocab_size)


def test_cycles_have_names(report: Report) -> None:
    total = sum(report.cycles.values())
    unnamed = sum(v for kind, v in report.cycles.items() if kind.startswith("other"))
    assert unnamed / total < 0.1
    assert {"matmul", "attention forward", "attention backward", "dq partial sums", "scan slices in and out"} <= set(
        report.cycles
    )
    assert report.mfu_ceiling is not None and 0 < report.mfu_ceiling < 1


def test_what_the_compiler_refuses_is_said_with_its_size() -> None:
    message = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO temporaries "
        "(164.90G) exceeds available HBM (94.74G). HLO module: jit_train_step.\nSee https://openxla.org/xla/errors/error_1000"
    )
    verdict, reason, needed = refused(message)
    assert (verdict, needed) == ("out of memory", 164.9)
    assert "https" not in reason
    assert refused("INTERNAL: Mosaic failed to compile TPU kernel")[0] == "does not compile"
    assert refused("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem")[0] == "does not compile"
