"""What `reduction: invariant` costs on the CPU: seconds per step over those of `reduction: fast`, measured in turn.

Two layouts: the demo's recipe on 8 devices of this process, all gradients of a device summed before they are exchanged,
and the shapes of maxtext.py on 4 devices, one instance per pass, exchanged each time. Prints one JSON line.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np

from benchmarks.small_recipe import recipe as small
from trainer.plan import Plan
from trainer.recipe import Recipe
from trainer.recipes.tiny import recipe as tiny
from trainer.sharding import mesh_of, put_batch
from trainer.step import init_state, make_train_step

ROUNDS = 9


class Training:
    """One compiled step and its state."""

    def __init__(self, recipe: Recipe, devices: int, micro_batch: int) -> None:
        self.recipe, self.mesh = recipe, mesh_of(jax.devices()[:devices])
        self.plan = Plan(
            device_type=f"cpu-{devices}",
            processes=1,
            devices=devices,
            global_batch=recipe.global_batch,
            data_parallel=devices,
            micro_batch=micro_batch,
            accumulation=recipe.global_batch // devices // micro_batch,
        )
        self.state = init_state(recipe, self.mesh)
        began = time.perf_counter()
        shapes = self._batch(0)
        step: Any = make_train_step(recipe, self.plan, self.mesh)
        self.step = step.lower(self.state, shapes).compile()
        self.compile_seconds = time.perf_counter() - began

    def _batch(self, t: int) -> dict[str, jax.Array]:
        batch, length = self.recipe.global_batch, self.recipe.sequence_length
        tokens = np.random.default_rng(t).integers(0, self.recipe.model.vocab_size, (batch, length)).astype(np.int32)
        ids = np.stack([np.arange(batch), np.zeros(batch)], axis=-1).astype(np.uint32)
        rows = self.plan.accumulation
        return put_batch({"tokens": tokens.reshape(rows, -1, length), "ids": ids.reshape(rows, -1, 2)}, self.mesh)

    def seconds(self, t: int) -> float:
        batch = self._batch(t)
        began = time.perf_counter()
        self.state, metrics = self.step(self.state, batch)
        float(metrics["loss"])  # waits for the step
        return time.perf_counter() - began


def compare(recipe: Recipe, devices: int, micro_batch: int) -> dict[str, float]:
    both = {
        name: Training(recipe.model_copy(update={"reduction": name}), devices, micro_batch)
        for name in ("fast", "invariant")
    }
    seconds: dict[str, list[float]] = {name: [] for name in both}
    for t in range(ROUNDS + 1):
        for name, training in both.items():
            seconds[name].append(training.seconds(t))
    fast, invariant = (statistics.median(seconds[name][1:]) for name in both)
    return {
        "step_seconds_fast": round(fast, 4),
        "step_seconds_invariant": round(invariant, 4),
        "ratio": round(invariant / fast, 3),
        "compile_ratio": round(both["invariant"].compile_seconds / both["fast"].compile_seconds, 2),
    }


def main() -> None:
    print(json.dumps({"demo_8_devices": compare(tiny(), 8, 64), "one_instance_per_pass": compare(small(), 4, 1)}))


if __name__ == "__main__":
    main()
