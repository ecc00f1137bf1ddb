"""Median seconds of one optimizer step on one CPU device, without a run directory, data or commits.

The shapes are those of `maxtext.py`: 4 layers, width 256, 4 heads of 64, MLP 688, vocabulary 1024, window 128 on 3 of 4
layers, 8 instances of 256 tokens, float32. Prints one JSON line.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np

from benchmarks.small_recipe import recipe
from trainer.plan import Plan
from trainer.sharding import mesh_of, put_batch
from trainer.step import init_state, make_train_step

RECIPE = recipe()
BATCH = RECIPE.global_batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--remat", choices=("none", "full"), default="none")
    options = parser.parse_args()
    plan = Plan(
        device_type="cpu-1",
        processes=1,
        devices=1,
        global_batch=BATCH,
        data_parallel=1,
        micro_batch=BATCH,
        accumulation=1,
        remat=options.remat,
    )
    mesh = mesh_of(jax.devices()[:1])
    began = time.perf_counter()
    state = init_state(RECIPE, mesh)
    step = make_train_step(RECIPE, plan, mesh)
    random = np.random.default_rng(0)
    seconds = []
    for t in range(options.steps + 1):
        tokens = random.integers(0, 1024, (1, BATCH, RECIPE.sequence_length)).astype(np.int32)
        ids = np.stack([np.arange(BATCH) + t * BATCH, np.zeros(BATCH)], axis=-1).astype(np.uint32)[None]
        batch = put_batch({"tokens": tokens, "ids": ids}, mesh)
        start = time.perf_counter()
        state, metrics = step(state, batch)
        loss = float(metrics["loss"])  # waits for the step
        seconds.append(time.perf_counter() - start)
        if t == 0:
            first = time.perf_counter() - began
    print(
        json.dumps(
            {
                "step_seconds_median": round(statistics.median(seconds[1:]), 4),
                "step_seconds_min": round(min(seconds[1:]), 4),
                "init_and_first_step_seconds": round(first, 2),
                "last_loss": round(loss, 4),
                "steps": options.steps,
            }
        )
    )


if __name__ == "__main__":
    main()
