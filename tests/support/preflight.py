"""A recipe that compiles for a TPU in about a minute on one core and still has everything the analysis reads."""

from trainer.recipe import Data, DataFile, Model, Optimizer, Order, Recipe, SchedulePiece

DEVICE = "tpu7x-2x2x1"  # 8 devices


def recipe() -> Recipe:
    """Four layers in two turns of a scan, windowed and full splash kernels, two micro-batches."""
    return Recipe(
        name="preflight_small",
        model=Model(
            vocab_size=500,
            padded_vocab_size=512,
            d_model=256,
            n_layers=4,
            n_heads=2,
            n_kv_heads=2,
            head_dim=128,
            mlp_hidden=512,
            window_pattern=(1024, -1),
        ),
        data=Data(files=(DataFile(path="a.npy"),), eos_id=1, order=Order(kind="feistel", seed=0)),
        optimizer=Optimizer(),
        schedule=(SchedulePiece(shape="constant", peak=1e-3, warmup_steps=10, total_steps=100, alpha_f=1),),
        global_batch=16,
        sequence_length=4096,
    )
