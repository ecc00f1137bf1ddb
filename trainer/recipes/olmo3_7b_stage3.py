"""OLMo 3 7B, stage 3: 50B tokens of Longmino in sequences of 65,536, whole documents packed together, YaRN.

From OLMo-core's src/scripts/official/OLMo3/OLMo-3-1025-7B-long-context.py and src/scripts/train/OLMo3/OLMo3-7B-long-context.py (commit
fa6c5014). The official file's duration (5e12 tokens, stop at 597,046) is left over from stage 1; the other one's, 50e9 tokens,
gives the 11,921 steps of the released checkpoints. The seed is the official file's 34521 (the other one has 4123).

1. Pack once: python -m trainer data pack --recipe olmo3_7b_stage3 --data-root <sources> --out <data root>
2. Set targetStep to 11,921 and `initFrom: {run: <stage 2's run directory>@47684}`; step counter and window begin anew.

Deviations, all of them:
- bfloat16, where AI2 had the projections in float8 (torchao, tensorwise).
- The loss is divided by the targets of the global batch. OLMo-core divides by those of each rank and takes the mean
  of ranks, which weighs a target in a padded instance more.
- Documents of equal length may be packed in each other's place: OLMo-core's sort leaves their order to the processor.
- Documents end at the eos id. For files at a URL OLMo-core reads their borders from a list beside each file; the
  two are the same where every document ends with it.
- Rows alone are divided over devices: at most 64. AI2 cut each sequence over 8 GPUs.
- Those of stage 1.
"""

import random

from trainer.recipe import Data, DataFile, Order, Packing, Recipe, SchedulePiece, Yarn
from trainer.recipes import olmo3_7b_stage1 as stage_1

SEQUENCE_LENGTH = 65_536
GLOBAL_BATCH = 64  # 4,194,304 tokens
STEPS = 11_921  # ceil(50e9 / 2^22)
PEAK = 0.00020712352850360292
SEED = 34521
SCHEDULE = (SchedulePiece(shape="linear", peak=PEAK, warmup_steps=200, total_steps=STEPS, alpha_f=0.0),)
MODEL = stage_1.MODEL.model_copy(update={"yarn": Yarn(factor=8, old_length=8192, beta_fast=32, beta_slow=1)})

# OLMo-longmino-mix-0625: 998 files, shuffled once, packed eight by eight.
MIX = "preprocessed/dolma3_longmino_0625/allenai/dolma3-tokenizer"
SOURCES = 998
SOURCE_SEED = 123
GROUP_SIZE = 8
PAD_ID = 100_277
PACKED = "packed/dolma3_longmino_0625-65536"


def sources() -> tuple[str, ...]:
    """The mix in packing order."""
    numbers = list(range(SOURCES))
    random.Random(SOURCE_SEED).shuffle(numbers)
    return tuple(f"{MIX}/{number:06d}.npy" for number in numbers)


def recipe() -> Recipe:
    """The recipe, not frozen yet."""
    packing = Packing(sources=sources(), group_size=GROUP_SIZE, pad_id=PAD_ID)
    groups = -(-SOURCES // GROUP_SIZE)
    data = Data(
        files=tuple(DataFile(path=f"{PACKED}/{group:03d}.npy") for group in range(groups)),
        held_out=stage_1.DATA.held_out,
        dtype="uint32",
        eos_id=stage_1.DATA.eos_id,
        order=Order(kind="olmo_core", seed=SEED),
        packing=packing,
        mask_documents=True,
    )
    return stage_1.recipe().model_copy(
        update={
            "name": "olmo3_7b_stage3",
            "stage": "stage3",
            "model": MODEL,
            "data": data,
            "schedule": SCHEDULE,
            "global_batch": GLOBAL_BATCH,
            "sequence_length": SEQUENCE_LENGTH,
        }
    )
