"""OLMo 3 at 190M parameters (267M with both embeddings), trained to 20 tokens per parameter: a day's experiment.

From OLMo-core's src/scripts/train/OLMo3/OLMo-3-190M.py (commit fa6c5014): model, rate, batch, repetition filter, seeds. Set
targetStep to 7,262. Deviations: the mix is stage 1's (0625 official), the script's is the later 0925; initial weights as in stage 1.
"""

from trainer.recipe import Recipe, RepetitionFilter, SchedulePiece
from trainer.recipes import olmo3_7b_stage1 as stage_1

GLOBAL_BATCH = 64  # 2^19 tokens of 8,192
STEPS = 7_262  # ceil(20 × 190,354,176 parameters outside the embedding / 2^19)
SCHEDULE = (SchedulePiece(shape="cosine", peak=3e-4, warmup_steps=2000, total_steps=STEPS, alpha_f=0.1),)
MODEL = stage_1.MODEL.model_copy(
    update={"d_model": 768, "n_layers": 12, "n_heads": 12, "n_kv_heads": 12, "head_dim": 64, "mlp_hidden": 3072}
)


def recipe() -> Recipe:
    """The recipe, not frozen yet."""
    data = stage_1.DATA.model_copy(update={"repetition_filter": RepetitionFilter()})
    return stage_1.recipe().model_copy(
        update={
            "name": "olmo3_190m",
            "model": MODEL,
            "data": data,
            "schedule": SCHEDULE,
            "global_batch": GLOBAL_BATCH,
            "init_seed": 1337,
        }
    )
