"""The shapes of maxtext.py as a recipe: 4 layers, width 256, 8 instances of 256 random tokens, float32."""

from trainer.recipe import Data, DataFile, Model, Order, Recipe, SchedulePiece


def recipe() -> Recipe:
    return Recipe(
        name="small",
        model=Model(
            vocab_size=1024,
            padded_vocab_size=1024,
            d_model=256,
            n_layers=4,
            n_heads=4,
            n_kv_heads=4,
            head_dim=64,
            mlp_hidden=688,
            window_pattern=(128, 128, 128, -1),
        ),
        data=Data(files=(DataFile(path="random.bin"),), dtype="uint16", eos_id=0, order=Order(kind="feistel", seed=0)),
        schedule=(SchedulePiece(shape="constant", peak=1e-4, warmup_steps=10, total_steps=1000, alpha_f=1),),
        global_batch=8,
        sequence_length=256,
        compute_dtype="float32",
    )
