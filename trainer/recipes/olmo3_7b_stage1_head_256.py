"""OLMo 3 7B, stage 1, with 16 heads of 256 instead of 32 of 128: all shapes of parameters stay as they are.

Another model, not AI2's: their weights have the right shapes for it, but mean something else. It is here because a TPU's
matrix unit is 256 wide: a head dimension of 128 uses half of it in the scores. Everything else is stage 1's.
"""

from trainer.recipe import Recipe
from trainer.recipes import olmo3_7b_stage1 as stage_1

MODEL = stage_1.MODEL.model_copy(update={"n_heads": 16, "n_kv_heads": 16, "head_dim": 256})


def recipe() -> Recipe:
    """The recipe, not frozen yet."""
    return stage_1.recipe().model_copy(update={"name": "olmo3_7b_stage1_head_256", "model": MODEL})
