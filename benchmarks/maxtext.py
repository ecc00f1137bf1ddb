"""Step time and start-up against MaxText, both measured in this one run, in turn (A B A B …).

MaxText is installed into an environment of its own in the cache folder, from requirements/maxtext.txt. Its settings
here are the best found for it on a CPU: `minimal` remat, plain dot-product attention, no checkpointing. Both train the
same shapes in float32: 4 layers, width 256, 4 heads of 64, MLP 688, vocabulary 1024, 8 instances of 256 tokens, window
128 on 3 of 4 layers, QK-norm. Ours also reads data, writes its run directory and commits once. Prints one JSON
document; the ratios are ours ÷ MaxText's, below 1 is faster.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.maxtext_environment import ROOT, install, package

SHAPE = {
    "base_num_decoder_layers": 4,
    "base_emb_dim": 256,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "head_dim": 64,
    "base_mlp_dim": 688,
    "vocab_size": 1024,
    "max_target_length": 256,
    "per_device_batch_size": 8,
    "sliding_window_size": 128,
    "use_qk_norm": True,
    "dtype": "float32",
    "weight_dtype": "float32",
    "decoder_block": "olmo3",
}


def first_match_and_all(command: list[str], pattern: str, log: Path) -> tuple[float, list[float]]:
    """Run `command`; seconds from its start to the first line matching `pattern`, and group 1 of every match."""
    # Huge pages for large arrays, as the local cluster gives its trainers; for both alike.
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    began = time.monotonic()
    first = None
    values: list[float] = []
    with (
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
        log.open("w") as out,
    ):
        assert process.stdout
        for line in process.stdout:
            out.write(line)
            match = re.search(pattern, line)
            if match:
                first = first if first is not None else time.monotonic() - began
                values.append(float(match.group(1)))
    if process.returncode or first is None:
        raise SystemExit(f"{command[0]} … failed with exit code {process.returncode}; its output is in {log}")
    return first, values


def run_maxtext(python: Path, scratch: Path, steps: int, remat: str) -> tuple[float, list[float]]:
    config = package(python) / "configs" / "base.yml"
    settings = {
        **SHAPE,
        "run_name": "bench",
        "base_output_directory": scratch / "maxtext",
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
        "dataset_type": "synthetic",
        "attention": "dot_product",
        "enable_checkpointing": False,
        "remat_policy": remat,
        "jax_cache_dir": scratch / "maxtext-cache",
        "log_config": False,
        "steps": steps,
    }
    command = [
        str(python),
        "-m",
        "maxtext.trainers.pre_train.train",
        str(config),
        *(f"{k}={v}" for k, v in settings.items()),
    ]
    return first_match_and_all(command, r"completed step: \d+, seconds: ([\d.]+)", scratch / "maxtext.log")


def write_tokens(scratch: Path) -> None:
    """The token file of our starts in `scratch`/data: MaxText makes its tokens up as it goes."""
    if not (scratch / "data").exists():
        (scratch / "data").mkdir()
        tokens = array("H", random.Random(0).choices(range(1024), k=256 * 4096))
        (scratch / "data" / "random.bin").write_bytes(tokens.tobytes())


def trainer_command(tree: Path, scratch: Path, run: Path, target: int) -> list[str]:
    """Our trainer in checkout `tree`, to step `target`; runs in one `scratch` share a compile cache."""
    recipe, data = str(tree / "benchmarks" / "small_recipe.py"), str(scratch / "data")
    command = [sys.executable, "-m", "trainer", "train", "--recipe", recipe, "--data-root", data, "--device", "cpu-1"]
    command += ["--run-directory", str(run), "--target", str(target), "--commit-every", str(target)]
    return [*command, "--compile-cache", str(scratch / "our-cache")]


def run_ours(scratch: Path, steps: int, round_: int) -> tuple[float, list[float]]:
    write_tokens(scratch)
    run = scratch / f"run-{round_}"
    command = trainer_command(ROOT, scratch, run, steps)
    first, _ = first_match_and_all(command, r'"seconds": ([\d.]+).*first step completed', scratch / "ours.log")
    lines = [json.loads(line) for file in sorted(run.glob("steps/*/*.jsonl")) for line in file.read_text().splitlines()]
    return first, [line["seconds"] for line in sorted(lines, key=lambda line: line["step"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    python = install()
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        # One round to fill both compile caches; its start-up is the cold figure.
        cold = {"ours": run_ours(scratch, 2, 0)[0], "maxtext": run_maxtext(python, scratch, 2, "minimal")[0]}
        starts: dict[str, list[float]] = {"ours": [], "maxtext": []}
        resumed: list[float] = []
        steps: dict[str, list[float]] = {"ours": [], "maxtext": []}
        for round_ in range(1, options.rounds + 1):
            for name, (first, seconds) in (
                ("ours", run_ours(scratch, options.steps, round_)),
                ("maxtext", run_maxtext(python, scratch, options.steps, "minimal")),
            ):
                starts[name].append(first)
                steps[name].append(statistics.median(seconds[4:]))
                print(
                    f"round {round_} {name}: first step after {first:.1f} s, median step {steps[name][-1]:.3f} s",
                    file=sys.stderr,
                )
            resumed.append(run_ours(scratch, options.steps + 2, round_)[0])
        for label, table in (("step_seconds", steps), ("warm_start_seconds", starts)):
            medians = {name: statistics.median(values) for name, values in table.items()}
            ratios = [a / b for a, b in zip(table["ours"], table["maxtext"], strict=True)]
            result[label] = {
                **{k: round(v, 3) for k, v in medians.items()},
                "ratio": round(statistics.median(ratios), 3),
            }
        result["cold_start_seconds"] = {
            **{k: round(v, 1) for k, v in cold.items()},
            "ratio": round(cold["ours"] / cold["maxtext"], 3),
        }
        # Ours with a checkpoint restored and verified, theirs without one.
        result["start_from_a_checkpoint_seconds"] = {
            "ours": round(statistics.median(resumed), 3),
            "ratio_to_a_warm_start_of_maxtext": round(
                statistics.median(resumed) / statistics.median(starts["maxtext"]), 3
            ),
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
