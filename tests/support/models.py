"""Recipes small enough to compile in seconds, for tests of the trainer's mathematics."""

from typing import Any

from trainer.plan import Plan
from trainer.recipe import Data, DataFile, Model, Order, Recipe, SchedulePiece


def small_model(**changes: Any) -> Model:
    """Four layers with grouped heads and windows of three, the last layer full."""
    fields: dict[str, Any] = {
        "vocab_size": 30,
        "padded_vocab_size": 32,
        "d_model": 16,
        "n_layers": 4,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 8,
        "mlp_hidden": 24,
        "window_pattern": (3, 3, 3, -1),
    }
    return Model(**{**fields, **changes})


def small_recipe(**changes: Any) -> Recipe:
    """A batch of 8 instances of 12 tokens in float32, two layers."""
    fields: dict[str, Any] = {
        "name": "small",
        "model": small_model(n_layers=2, window_pattern=(3, -1)),
        "data": Data(files=(DataFile(path="a"),), eos_id=0, order=Order(kind="feistel", seed=0)),
        "schedule": (SchedulePiece(shape="constant", peak=1e-2, warmup_steps=4, total_steps=100, alpha_f=1),),
        "global_batch": 8,
        "sequence_length": 12,
        "compute_dtype": "float32",
    }
    return Recipe(**{**fields, **changes})


def cpu_plan(recipe: Recipe, devices: int, accumulation: int = 1, **changes: Any) -> Plan:
    """The plan of one process with this many devices."""
    return Plan(
        device_type=f"cpu-{devices}",
        processes=1,
        devices=devices,
        global_batch=recipe.global_batch,
        data_parallel=devices,
        micro_batch=recipe.global_batch // devices // accumulation,
        accumulation=accumulation,
        **changes,
    )
