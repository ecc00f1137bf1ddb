"""Instances per second of the loader from page cache, against a plain memory-mapped copy measured in the same run.

`python benchmarks/loader.py [--seconds N]`. Corpus: 8 files of 1,024 instances, 8,192 tokens of uint32 each (256 MiB,
in page cache); global batch 512, feistel order. Our side is everything a training process does per batch: order, reads,
the check of token ranges, Grain's threads, the check of ids. The baseline copies the same instances in the same order
from one numpy memmap per file into int32 arrays, in one thread, and does nothing else. Measured in turn (A B A B …),
the median of the rounds. Prints one JSON object; `ratio` is ours ÷ baseline, `start_seconds` the time from making a
loader at step 1,000,000 to its first batch, `import_seconds` what importing Grain adds where JAX and Orbax are loaded.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# ruff: noqa: E402
from trainer.data.loader import Loader
from trainer.data.mix import Mix
from trainer.data.order import BatchOrder, open_order
from trainer.freezing import freeze
from trainer.plan import Plan
from trainer.recipe import Data, DataFile, Model, Order, Recipe, SchedulePiece

FILES, INSTANCES, LENGTH, BATCH, VOCABULARY = 8, 1024, 8192, 512, 100_278
ROUNDS = 5


def recipe(folder: Path) -> Recipe:
    """The corpus, written and measured."""
    random = np.random.default_rng(0)
    for i in range(FILES):
        random.integers(0, VOCABULARY, INSTANCES * LENGTH + 100, dtype=np.uint32).tofile(folder / f"{i}.npy")
    model = Model(
        vocab_size=VOCABULARY, padded_vocab_size=100_352, d_model=64, n_layers=1,
        n_heads=1, n_kv_heads=1, head_dim=64, mlp_hidden=64,
    )  # fmt: skip
    files = tuple(DataFile(path=f"{i}.npy") for i in range(FILES))
    piece = SchedulePiece(shape="constant", peak=1e-3, warmup_steps=0, total_steps=1, alpha_f=1.0)
    data = Data(files=files, dtype="uint32", eos_id=100_257, order=Order(kind="feistel", seed=34521))
    return freeze(
        Recipe(name="loader", model=model, data=data, schedule=(piece,), global_batch=BATCH, sequence_length=LENGTH),
        str(folder),
    )


def share(processes: int) -> Plan:
    """A plan with 16 devices and 1 instance per device and pass; its processes own 512 / processes rows of a batch."""
    return Plan(
        device_type="cpu-16", processes=processes, devices=16,
        global_batch=BATCH, data_parallel=16, micro_batch=1, accumulation=32,
    )  # fmt: skip


def ours(mix: Mix, order: BatchOrder, made: Recipe, plan: Plan, seconds: float) -> float:
    """Instances per second of one process."""
    with Loader(mix, order, made, plan, 0, 0) as loader:
        next(loader)
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            _, batch = next(loader)
            count += batch["tokens"].shape[0] * batch["tokens"].shape[1]
        return count / (time.perf_counter() - began)


def baseline(folder: Path, order: BatchOrder, rows: int, seconds: float) -> float:
    """Instances per second of a plain copy."""
    maps = [np.memmap(folder / f"{i}.npy", "<u4", "r").view(np.int32) for i in range(FILES)]
    count, t, began = 0, 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        batch = np.empty((rows, LENGTH), np.int32)
        for row, i in zip(batch, order.batch_ids(t)[:rows].tolist(), strict=True):
            file, window = divmod(i, INSTANCES)
            row[:] = maps[file][window * LENGTH : window * LENGTH + LENGTH]
        count, t = count + rows, t + 1
    return count / (time.perf_counter() - began)


def start_seconds(mix: Mix, made: Recipe, plan: Plan) -> float:
    """From nothing but the recipe to the first batch of step 1,000,000; Grain is imported already."""
    began = time.perf_counter()
    with Loader(mix, open_order(made), made, plan, 0, 1_000_000) as loader:
        next(loader)
        return time.perf_counter() - began


def import_seconds() -> float:
    """What `import grain` takes in a process that has JAX and Orbax."""
    code = "import jax, orbax.checkpoint, time; t = time.perf_counter(); import grain; print(time.perf_counter() - t)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.5, help="per side and round")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-loader-") as name:
        folder = Path(name)
        made = recipe(folder)
        mix, order = Mix(made, name), open_order(made)
        for path in folder.iterdir():
            path.read_bytes()  # into page cache
        result: dict[str, object] = {"cpus": os.cpu_count(), "instance_tokens": LENGTH, "dtype": "uint32"}
        for processes in (1, 8):
            plan, rows = share(processes), BATCH // processes
            rates: dict[str, list[float]] = {"loader": [], "memmap": []}
            for _ in range(ROUNDS):
                rates["memmap"].append(baseline(folder, order, rows, arguments.seconds))
                rates["loader"].append(ours(mix, order, made, plan, arguments.seconds))
            median = {side: statistics.median(values) for side, values in rates.items()}
            result[f"rows_{rows}"] = {
                "instances_per_second": round(median["loader"]),
                "baseline_instances_per_second": round(median["memmap"]),
                "ratio": round(median["loader"] / median["memmap"], 2),
                "rounds": {side: [round(value) for value in values] for side, values in rates.items()},
            }
        result["start_seconds"] = round(start_seconds(mix, made, share(8)), 4)
        result["import_seconds"] = round(import_seconds(), 2)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
