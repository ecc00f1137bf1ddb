"""Text tokenised per second by `python -m trainer data tokenize`, against AI2's `dolma tokens` on the same files.

`python benchmarks/tokenizing.py --dolma PEER/bin/dolma [--processes N]`. The peer's environment (it wants Python 3.11 or older):

    uv venv --python 3.11 /tmp/dolma && uv pip install --python /tmp/dolma/bin/python dolma==1.2.1

Text: the standard library's own sources, about 12 MB, as eight gzip files of JSON lines; both sides with the dolma2
tokenizer, special tokens as text, and the same number of processes, dolma with its own defaults otherwise. Without --dolma the
baseline is the tokenizers library alone: encode_batch of the same texts in memory, in one process with as many threads.
Whole commands are timed, their start included, in turn (A B A B …); medians. Prints one JSON object; `ratio` is ours ÷
baseline in speed, `cpu_ratio` the same in seconds of CPU, which other work on this machine does not change.
"""

import argparse
import gzip
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# ruff: noqa: E402
from trainer.data.byte_tokens import documents
from trainer.data.tokenizer import TokenizerFile, find_tokenizer

INPUTS, ROUNDS = 8, 3

LIBRARY = """
import gzip, json, sys
from pathlib import Path
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
tokenizer.encode_special_tokens = True
for path in sorted(Path(sys.argv[2]).iterdir()):
    texts = [json.loads(line)["text"].strip() for line in gzip.open(path, "rt")]
    tokenizer.encode_batch(texts, add_special_tokens=False)
"""


def write_text(folder: Path) -> int:
    """The inputs; returns the bytes of text in them."""
    texts = [path.read_text(errors="replace") for path in documents("stdlib")]
    for number in range(INPUTS):
        lines = [json.dumps({"id": str(i), "text": text}) for i, text in enumerate(texts[number::INPUTS])]
        with gzip.open(folder / f"{number}.jsonl.gz", "wt") as file:
            file.writelines(line + "\n" for line in lines)
    return sum(len(text.encode()) for text in texts)


def ours(source: Path, out: Path, processes: int) -> list[str]:
    return [
        *(sys.executable, "-m", "trainer", "data", "tokenize", "--source", str(source), "--out", str(out)),
        *("--processes", str(processes)),
    ]


def dolma(command: str, tokenizer: TokenizerFile, source: Path, out: Path, processes: int) -> list[str]:
    return [
        *(command, "tokens", "--documents", f"{source}/*", "--destination", str(out), "--processes", str(processes)),
        *("--tokenizer.name_or_path", tokenizer.path, "--tokenizer.eos_token_id", str(tokenizer.eos_id)),
        *("--tokenizer.pad_token_id", "100277", "--tokenizer.encode_special_tokens"),
        *("--no-tokenizer.segment_before_tokenization", "--dtype", "uint32", "--max_size", "20000000"),
    ]


def timed(command: list[str], out: Path, environment: dict[str, str]) -> tuple[float, float]:
    """(wall, CPU) seconds of a command and its children."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env=os.environ | environment)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    shutil.rmtree(out, ignore_errors=True)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dolma", help="the peer's command")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    tokenizer = find_tokenizer()
    with tempfile.TemporaryDirectory(prefix="bench-tokenize-") as scratch:
        source, out = Path(scratch, "in"), Path(scratch, "out")
        source.mkdir()
        size = write_text(source)
        if arguments.dolma:
            name, environment = "dolma", {"PATH": f"{Path(arguments.dolma).parent}:{os.environ['PATH']}"}
            baseline = dolma(arguments.dolma, tokenizer, source, out, arguments.processes)
        else:
            name, environment = "tokenizers", {"RAYON_NUM_THREADS": str(arguments.processes)}
            baseline = [sys.executable, "-c", LIBRARY, tokenizer.path, str(source)]
        walls: dict[str, list[float]] = {"ours": [], name: []}
        cpus: dict[str, list[float]] = {"ours": [], name: []}
        for _ in range(ROUNDS):
            for side, command, env in (
                (name, baseline, environment),
                ("ours", ours(source, out, arguments.processes), {}),
            ):
                wall, cpu = timed(command, out, env)
                walls[side].append(wall)
                cpus[side].append(cpu)
    wall = {side: statistics.median(values) for side, values in walls.items()}
    cpu = {side: statistics.median(values) for side, values in cpus.items()}
    print(
        json.dumps(
            {
                "cpus": os.cpu_count(),
                "processes": arguments.processes,
                "text_mb": round(size / 1e6, 2),
                "ours_mb_per_second": round(size / 1e6 / wall["ours"], 2),
                f"{name}_mb_per_second": round(size / 1e6 / wall[name], 2),
                "ratio": round(wall[name] / wall["ours"], 2),
                "cpu_ratio": round(cpu[name] / cpu["ours"], 2),
                "seconds": {side: [round(value, 1) for value in values] for side, values in walls.items()},
                "cpu_seconds": {side: [round(value, 1) for value in values] for side, values in cpus.items()},
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
