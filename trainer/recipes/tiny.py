"""A model small enough for two CPU cores, with all that the large one has: global batch 512, windows, skip rule.

It learns Python source text byte by byte; `python -m trainer data bytes` writes its two files. An instance is 32
bytes; three layers in four see 16 of them.
"""

from trainer.recipe import Data, DataFile, Model, Optimizer, Order, Recipe, SchedulePiece

BYTES = 256  # ids 0..255 are bytes
EOS_ID = 256
PADDED_VOCAB = 320

MODEL = Model(
    vocab_size=BYTES + 1,
    padded_vocab_size=PADDED_VOCAB,
    d_model=48,
    n_layers=4,
    n_heads=4,
    n_kv_heads=4,
    head_dim=12,
    mlp_hidden=128,
    window_pattern=(16, 16, 16, -1),
)

DATA = Data(
    files=(DataFile(path="stdlib-train.bin"),),
    held_out=(DataFile(path="stdlib-heldout.bin"),),
    dtype="uint16",
    eos_id=EOS_ID,
    order=Order(kind="feistel", seed=0),
)

SCHEDULE = (SchedulePiece(shape="cosine", peak=1e-2, warmup_steps=10, total_steps=1000, alpha_f=0.1),)


def recipe() -> Recipe:
    """The recipe, not frozen yet."""
    return Recipe(
        name="tiny",
        model=MODEL,
        data=DATA,
        optimizer=Optimizer(),
        schedule=SCHEDULE,
        global_batch=512,
        sequence_length=32,
        compute_dtype="float32",
    )
