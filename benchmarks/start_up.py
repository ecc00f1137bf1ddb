"""Process start to the first completed step: cold, with the compile cache filled, and from a checkpoint.

Ours alone, on one CPU device; `maxtext.py` has the same beside MaxText's. Shapes as there. CPU seconds are those of the
whole process (it ends after two more steps and a commit) and depend less on what else the machine does. With
`--against FOLDER` another checkout of this repository is measured in turn with this one. Prints one JSON document.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.maxtext import ROOT, trainer_command, write_tokens

KINDS = ("cold", "warm", "from a checkpoint")
STEPS = 3


def start(tree: Path, scratch: Path, run: Path, target: int) -> dict[str, Any]:
    """One start in checkout `tree`: seconds and phases until its first step, CPU seconds until its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        trainer_command(tree, scratch, run, target),
        cwd=tree,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"the trainer ended with {done.returncode}:\n{done.stderr[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    (said,) = (json.loads(line) for line in done.stderr.splitlines() if '"first step completed"' in line)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": said["seconds"], "cpu_seconds": round(cpu, 2), "phases": said["phases"]}


def round_of(tree: Path, scratch: Path, number: int) -> dict[str, dict[str, Any]]:
    """One start of each kind, with a compile cache of its own."""
    here = scratch / f"{number}"
    here.mkdir(parents=True)
    write_tokens(here)
    cold = start(tree, here, here / "cold", STEPS)
    warm = start(tree, here, here / "warm", STEPS)
    return {"cold": cold, "warm": warm, "from a checkpoint": start(tree, here, here / "warm", 2 * STEPS)}


def summary(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Medians of the seconds, and the phases of the round that has the median."""
    found = {}
    for kind in KINDS:
        ordered = sorted((one[kind] for one in rounds), key=lambda one: one["seconds"])
        cpu = statistics.median(one["cpu_seconds"] for one in ordered)
        found[kind] = {**ordered[(len(ordered) - 1) // 2], "cpu_seconds": cpu}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout, measured in turn")
    options = parser.parse_args()
    trees = {"ours": ROOT} | ({"against": options.against.resolve()} if options.against else {})
    rounds: dict[str, list[dict[str, dict[str, Any]]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for name, tree in trees.items():
                rounds[name].append(round_of(tree, Path(folder) / name, number))
    print(json.dumps({name: summary(found) for name, found in rounds.items()}, indent=2))


if __name__ == "__main__":
    main()
