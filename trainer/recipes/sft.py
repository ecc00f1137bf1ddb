"""Supervised fine-tuning of OLMo 3 7B on prompts and responses, with the loss on the responses alone.

From OLMo-core's src/scripts/train/sft/Olmo-3-7B-SFT.py (commit fa6c5014): rate 8e-5 to 0 after a warmup of 3 %, no weight decay, no
z-loss, 64 × 16,384 tokens, packing one file at a time, YaRN as in stage 3.

1. python -m trainer data examples --recipe sft --source chats.jsonl.gz --out <data root>   (docs/data.md)
2. python -m trainer data pack --recipe sft --data-root <data root> --out <data root>
3. Copy this file, and set STEPS to three epochs of what 2. printed: 3 × instances / 64. The rate depends on it.
4. `initFrom: {run: <stage 3>@11921, optimizerState: false}`, or `{hf: …}`.

Deviations: those of stage 3. A prompt's tokens are marked in the token file itself (bit 31), where OLMo-core has a second
file of masks. Special tokens written inside a message stay text (trainer/data/chat.py). AI2's script trains in bfloat16 too.
"""

from trainer.recipe import Data, DataFile, Optimizer, Order, Packing, Recipe, SchedulePiece
from trainer.recipes import olmo3_7b_stage1 as stage_1
from trainer.recipes import olmo3_7b_stage3 as stage_3

SEQUENCE_LENGTH = 16_384
GLOBAL_BATCH = 64
STEPS = 1000
PEAK = 8e-5
SCHEDULE = (SchedulePiece(shape="linear", peak=PEAK, warmup_steps=round(0.03 * STEPS), total_steps=STEPS, alpha_f=0.0),)


def recipe() -> Recipe:
    """The recipe, not frozen yet."""
    data = Data(
        files=(DataFile(path="sft/packed.npy"),),
        dtype="uint32",
        eos_id=stage_1.DATA.eos_id,
        order=Order(kind="olmo_core", seed=stage_1.SEED),
        packing=Packing(sources=("sft/examples.npy",), group_size=1, pad_id=stage_3.PAD_ID),
        mask_documents=True,
        untrained_bit=True,
    )
    return stage_3.recipe().model_copy(
        update={
            "name": "sft",
            "stage": "sft",
            "data": data,
            "optimizer": Optimizer(weight_decay=0.0, z_loss=0.0),
            "schedule": SCHEDULE,
            "global_batch": GLOBAL_BATCH,
            "sequence_length": SEQUENCE_LENGTH,
        }
    )
