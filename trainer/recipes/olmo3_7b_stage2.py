"""OLMo 3 7B, stage 2: 100B tokens of Dolmino, the rate from 2.07e-4 linearly to 0.

From OLMo-core's src/scripts/official/OLMo3/OLMo-3-1025-7B-midtrain.py (commit fa6c5014). Set targetStep to 47,684, and
`initFrom: {run: <stage 1's run directory>@1413814}`: weights and moments are carried over, and Adam's own count goes on; the step
counter begins at 0, and the window of the skip rule empty, as the losses of another mix are not comparable. So the rate
jumps from 3.93e-5 to 2.07e-4 in one step, without warmup, as it did.

The peak is the rate of stage 1's part 1 at step 476,838, which is 2T tokens; the report prints 2.074e-4. Files of fewer than 8,192 tokens hold
no instance: OLMo-core passes over them, here they have to be named in `data.omitted_files`, which changes nothing else.
Deviations: those of stage 1.
"""

from pathlib import Path

from trainer.recipe import Data, DataFile, Order, Recipe, SchedulePiece
from trainer.recipes import olmo3_7b_stage1 as stage_1

SEQUENCE_LENGTH = 8192
GLOBAL_BATCH = 256  # 2^21 tokens
STEPS = 47_684  # ceil(100e9 / 2^21)
PEAK = 0.00020712352850360292
SEED = 1337
SCHEDULE = (SchedulePiece(shape="linear", peak=PEAK, warmup_steps=0, total_steps=STEPS, alpha_f=0.0),)

# OLMo-midtraining-mix-0625-100B: 11,933 files in 201 folders, named part-000-00000.npy and so on, with gaps.
MIX = "preprocessed/dolma3-dolmino-official/100B/allenai/dolma3-tokenizer"
LISTING = Path(__file__).with_name("olmo3_7b_stage2_mix.txt")  # per line: folder, digits of a number, numbers


def files() -> tuple[DataFile, ...]:
    """The mix in its order."""
    found = []
    for line in LISTING.read_text().splitlines():
        folder, digits, ranges = line.split()
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            for number in range(int(first), int(last or first) + 1):
                found.append(DataFile(path=f"{MIX}/{folder}/part-{number:0{digits}d}-00000.npy"))
    return tuple(found)


def recipe() -> Recipe:
    """The recipe, not frozen yet."""
    data = Data(
        files=files(),
        held_out=stage_1.DATA.held_out,
        dtype="uint32",
        eos_id=stage_1.DATA.eos_id,
        order=Order(kind="olmo_core", seed=SEED),
    )
    return stage_1.recipe().model_copy(
        update={
            "name": "olmo3_7b_stage2",
            "stage": "stage2",
            "data": data,
            "schedule": SCHEDULE,
            "global_batch": GLOBAL_BATCH,
            "sequence_length": SEQUENCE_LENGTH,
            "init_seed": SEED,
        }
    )
