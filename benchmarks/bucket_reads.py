"""Training instances per second out of a bucket, by one process; and how long the look at 1,016 files takes at a start.

`python benchmarks/bucket_reads.py [--seconds N]`. A local server of the GCS API, once as it is and once with each request on
its way for 25 ms (slow_store.py). Corpus: 1,016 files of 4 instances, 8,192 tokens of uint32 each; batches of 64 in feistel
order, so that each instance is a range read of 32 KiB somewhere. Our side is the loader as training uses it; the baseline
does the same range reads with plain `requests`, on as many threads as one of our batches has (32), and checks nothing.
Server, latency and both clients share this machine's cores. Prints one JSON object. `ratio` is ours ÷ baseline; OLMo 3 7B in
12 days reads 700 instances a second on all hosts together, `share_of_goal_64_hosts` is ours ÷ (700 / 64).
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import requests

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# ruff: noqa: E402
from benchmarks.slow_store import SECONDS, slowly
from tests.support.gcs_server import GcsServer
from trainer.data.loader import Loader
from trainer.data.mix import Mix
from trainer.data.order import open_order
from trainer.plan import Plan
from trainer.recipe import Data, DataFile, Model, Order, Recipe, SchedulePiece

FILES, INSTANCES, LENGTH, BATCH, VOCABULARY = 1016, 4, 8192, 64, 100_278
THREADS, ROUNDS = 32, 3
GOAL_PER_HOST = 700 / 64


def recipe() -> Recipe:
    """Frozen: as a start finds it."""
    model = Model(
        vocab_size=VOCABULARY, padded_vocab_size=100_352, d_model=64, n_layers=1,
        n_heads=1, n_kv_heads=1, head_dim=64, mlp_hidden=64,
    )  # fmt: skip
    files = tuple(DataFile(path=f"{i:04}.npy", bytes=4 * INSTANCES * LENGTH) for i in range(FILES))
    piece = SchedulePiece(shape="constant", peak=1e-3, warmup_steps=0, total_steps=1, alpha_f=1.0)
    data = Data(files=files, dtype="uint32", eos_id=100_257, order=Order(kind="feistel", seed=34521))
    return Recipe(name="reads", model=model, data=data, schedule=(piece,), global_batch=BATCH, sequence_length=LENGTH)


def upload(url: str) -> None:
    random = np.random.default_rng(0)
    content = random.integers(0, VOCABULARY, INSTANCES * LENGTH, dtype=np.uint32).tobytes()
    with requests.Session() as session:
        for i in range(FILES):
            target = f"{url}/upload/storage/v1/b/tokens/o?uploadType=media&name=mix/{i:04}.npy"
            session.post(target, data=content, timeout=60).raise_for_status()


def ours(mix: Mix, made: Recipe, seconds: float) -> tuple[float, float]:
    """(instances per second, seconds of CPU per instance) of the loader."""
    plan = Plan(
        device_type="cpu-8", processes=1, devices=8, global_batch=BATCH, data_parallel=8, micro_batch=8, accumulation=1
    )
    with Loader(mix, open_order(made), made, plan, 0, 0) as loader:
        next(loader)
        count, began, cpu = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - began < seconds:
            next(loader)
            count += BATCH
        return count / (time.perf_counter() - began), (time.process_time() - cpu) / count


def baseline(url: str, made: Recipe, seconds: float) -> float:
    """Instances per second of plain range reads."""
    order, local = open_order(made), threading.local()

    def read(instance: int) -> int:
        session = local.__dict__.setdefault("session", requests.Session())
        file, window = divmod(instance, INSTANCES)
        first = window * 4 * LENGTH
        answer = session.get(
            f"{url}/storage/v1/b/tokens/o/mix%2F{file:04}.npy?alt=media",
            headers={"Range": f"bytes={first}-{first + 4 * LENGTH - 1}"},
            timeout=60,
        )
        return len(answer.content)

    count, t, began = 0, 0, time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        while time.perf_counter() - began < seconds:
            assert set(pool.map(read, order.batch_ids(t).tolist())) == {4 * LENGTH}
            count, t = count + BATCH, t + 1
    return count / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="per side and round")
    arguments = parser.parse_args()
    made = recipe()
    result: dict[str, object] = {"cpus": os.cpu_count(), "files": FILES, "instance_bytes": 4 * LENGTH}
    with GcsServer() as server:
        server.create_bucket("tokens")
        upload(server.url)
        for name, latency in (("server_alone", 0.0), ("with_latency", SECONDS)):
            with slowly(server.url) if latency else contextlib.nullcontext(server.url) as url:
                os.environ["STORAGE_EMULATOR_HOST"] = url
                mix = Mix(made, "gs://tokens/mix")
                began = time.perf_counter()
                mix.check()
                looked = time.perf_counter() - began
                rates: dict[str, list[float]] = {"loader": [], "plain": []}
                cpu = []
                for _ in range(ROUNDS):
                    rates["plain"].append(baseline(url, made, arguments.seconds))
                    rate, each = ours(mix, made, arguments.seconds)
                    rates["loader"].append(rate)
                    cpu.append(each)
            median = {side: statistics.median(values) for side, values in rates.items()}
            result[name] = {
                "request_seconds": latency,
                "look_at_all_files_seconds": round(looked, 2),
                "instances_per_second": round(median["loader"]),
                "baseline_instances_per_second": round(median["plain"]),
                "ratio": round(median["loader"] / median["plain"], 2),
                "cpu_ms_per_instance": round(1000 * statistics.median(cpu), 2),
                "share_of_goal_64_hosts": round(median["loader"] / GOAL_PER_HOST, 1),
                "rounds": {side: [round(value) for value in values] for side, values in rates.items()},
            }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
