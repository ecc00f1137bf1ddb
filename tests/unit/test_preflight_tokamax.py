"""tokamax's splash kernels, as MaxText calls them: operations by the blocks that run. Cut down from its 7B's program."""

from trainer.preflight import hlo
from trainer.preflight.executions import Executions
from trainer.preflight.kernels import kernels

# 4 instances × 32 heads × 8192 tokens × 128: two products forward, five backward, over all pairs.
PAIRS = 4 * 32 * 8192**2
FORWARD, BACKWARD = 2 * 2 * 128 * PAIRS, 5 * 2 * 128 * PAIRS
KERNEL = """
  %{name} = ({made}) custom-call(%grid.active_rows_ref, %q), custom_call_target="tpu_custom_call", frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{\\"block_q\\": 2048, \\"block_kv\\": 2048, \\"block_q_dkv\\": 1024, \\"block_kv_dkv\\": 2048, \\"block_q_dq\\": null}}"
}}}}, backend_config={{"custom_call_config":{{"cost_estimate":{{"flops":"{flops}","bytes_accessed":"1"}}}}}}
"""
OUTPUT, DQ = "bf16[4,32,8192,128]", "bf16[4,3,32,8192,128]"


def flops(name: str, made: str, grid: int, stated: int) -> int:
    text = f"""HloModule maxtext, is_scheduled=true

ENTRY %main (g: s8[{grid}], q: bf16[4,32,128,8192]) -> f32[] {{
  %grid.active_rows_ref = s8[{grid}]{{0}} parameter(0)
  %q = bf16[4,32,128,8192]{{3,2,1,0}} parameter(1){KERNEL.format(name=name, made=made, flops=stated)}  ROOT %zero = f32[] constant(0)
}}
"""
    (found,) = kernels(Executions(hlo.parse(text)))
    return found.flops


def test_a_grid_of_the_blocks_that_run_counts_those() -> None:
    assert flops("splash_mha_fwd_segmented_residuals.2", f"{OUTPUT}, {OUTPUT}", 9, FORWARD) == FORWARD * 9 // 16
    assert flops("splash_mha_fwd_segmented_residuals.5", f"{OUTPUT}, {OUTPUT}", 10, FORWARD) == FORWARD * 10 // 16


def test_a_grid_of_all_blocks_has_stated_what_runs() -> None:
    stated = BACKWARD * 9 // 16
    assert flops("splash_mha_dkv_segmented_no_residuals.2", f"{DQ}, {OUTPUT}, {OUTPUT}", 32, stated) == stated
