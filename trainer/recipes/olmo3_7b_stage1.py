"""OLMo 3 7B, stage 1, as AI2 ran it: two cosines, stitched where the run was extended.

From OLMo-core's src/scripts/official/OLMo3/OLMo-3-1025-7B-pretrain-{1,2}.py (commit fa6c5014). One epoch is 1,413,814
steps: set targetStep to that. The rate then ends at 3.93e-5, as it did, not at the 3e-5 of the report: the schedule was cut at
5.93T of its 7T tokens. Evaluate every 10,000 steps, as they did.

Some olmOCR files of the mix are not public (OLMo-core PR 435). To train on what there is, name the others: `data.omitted_files`
takes them out of the mix and says so in fingerprint and audit. Every later instance then has another number, and the
order is another one.

Deviations, all of them:
- Initial weights: torch's generator cannot be drawn from here. To follow AI2's curve, start from the released step 0
  (`initFrom: {hf: ...}`, revision stage1-step0; bfloat16, so rounded).
- The released checkpoints do not say which script did steps 596,048 to 597,046; here the second one does.
- The window of the skip rule survives restarts. Theirs was lost at each, and the rule off for 63 steps after it.
- Attention: one kernel or another adds in another order; rotary angles are exact to float32, theirs off by up to 5e-4.
"""

from trainer.recipe import Data, DataFile, Model, Optimizer, Order, Recipe, SchedulePiece

SEQUENCE_LENGTH = 8192
GLOBAL_BATCH = 512  # 4,194,304 tokens, 4,193,792 targets
SEED = 34521  # epoch 1 is shuffled with 34522
PEAK = 3e-4

MODEL = Model(
    vocab_size=100_278,
    padded_vocab_size=100_352,  # × 128
    d_model=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=32,
    head_dim=128,
    mlp_hidden=11_008,
    window_pattern=(4096, 4096, 4096, -1),
)

# Part 1 was planned for 5T tokens. Part 2 took over from its checkpoint at step 596,047, on the second half of a cosine
# for 7T that begins halfway down, at step 597,046, where the first one had got to: 1.65e-4. The 999 steps before that
# run on part 2's warmup, 0.4 % below part 1 at first.
PART_1_STEPS = 1_192_093  # ceil(5e12 / 4,194,304)
PART_2_STEPS = 1_668_931  # ceil(7e12 / 4,194,304)
PART_2_WARMUP = 597_046
PART_2_FROM = 596_047
SCHEDULE = (
    SchedulePiece(
        shape="cosine",
        peak=PEAK,
        warmup_steps=2000,
        total_steps=PART_1_STEPS,
        alpha_f=0.1,
        until_step=PART_2_FROM + 1,  # the update from step N uses the rate of N + 1
    ),
    SchedulePiece(shape="half_cosine", peak=PEAK, warmup_steps=PART_2_WARMUP, total_steps=PART_2_STEPS, alpha_f=0.1),
)

# Folders of the mix, in order, each with files 000000.npy … (raw tokens in spite of the suffix). OLMo-core calls the
# tokenizer dolma2; the data was saved under another name of the same.
MIX = "preprocessed/dolma3-0625/v0.1-official/allenai/dolma3-tokenizer"
TOPICS = (  # noqa: SIM905
    "adult_content art_and_design crime_and_law education_and_jobs electronics_and_hardware entertainment "
    "fashion_and_beauty finance_and_business food_and_dining games health history_and_geography home_and_hobbies "
    "industrial literature politics religion science_math_and_technology social_life software software_development "
    "sports_and_fitness transportation travel_and_tourism"
).split()
LANGUAGES = "C CSharp Cpp Go Java JavaScript Markdown PHP Python Ruby Rust SQL Shell Swift TypeScript".split()  # noqa: SIM905
PDF_FILES = {  # where it is not 8; there is no fashion_and_beauty
    "adult_content": 4,
    "art_and_design": 2,
    "entertainment": 5,
    "fashion_and_beauty": 0,
    "food_and_dining": 1,
    "games": 1,
    "history_and_geography": 7,
    "home_and_hobbies": 3,
    "social_life": 1,
    "transportation": 3,
    "travel_and_tourism": 1,
}
FOLDERS = (
    *((f"common_crawl/{topic}", 4 if topic == "fashion_and_beauty" else 32) for topic in TOPICS),
    ("rpj-proofpile-arxiv", 8),
    ("finemath-3plus", 8),
    *((f"olmocr_science_pdfs/{topic}", PDF_FILES.get(topic, 8)) for topic in TOPICS),
    *((f"stack_edu/{language}", 8) for language in LANGUAGES),
    ("dolma1_7-wiki-en", 8),
)
DATA = Data(
    files=tuple(DataFile(path=f"{MIX}/{folder}/{i:06d}.npy") for folder, count in FOLDERS for i in range(count)),
    held_out=(DataFile(path="eval-data/perplexity/v3_small_dolma2-tokenizer/c4_en/val/part-0-00000.npy"),),
    dtype="uint32",
    eos_id=100_257,
    order=Order(kind="olmo_core", seed=SEED),
)


def recipe() -> Recipe:
    """The recipe, not frozen yet."""
    return Recipe(
        name="olmo3_7b_stage1",
        stage="stage1",
        model=MODEL,
        data=DATA,
        optimizer=Optimizer(),  # the defaults are this run's: decay 0.1, betas 0.9 and 0.95, clip 1, z-loss 1e-5
        schedule=SCHEDULE,
        global_batch=GLOBAL_BATCH,
        sequence_length=SEQUENCE_LENGTH,
        init_seed=0,
        compute_dtype="bfloat16",
    )
