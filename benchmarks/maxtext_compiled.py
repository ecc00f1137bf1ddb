"""The 7B's train step beside MaxText's, both compiled here for the same TPU slices by the same compiler. Nothing is run.

    python benchmarks/maxtext_compiled.py [--slice v5p-4x4x8] [--json] [--markdown docs/beside-maxtext.md]

MaxText compiles what its own launcher of OLMo 3 7B, stage 1, starts (`maxtext_launcher`); ours what the planner takes.
Each in a process of its own, one after the other, with the same jax, jaxlib and libtpu. Both programs are then read by
the same accounts (trainer/preflight) against the same model FLOPs. Takes minutes of CPU per program. What was compiled
stays in the folder, and is compiled again only when the question has changed, or with --fresh.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.maxtext_compiled_table import markdown, text
from benchmarks.maxtext_environment import ROOT, install, package
from benchmarks.maxtext_launcher import launch
from trainer.hardware import DeviceType, device_type
from trainer.preflight.accounting import account_program
from trainer.preflight.cache import sources, versions
from trainer.preflight.choice import choose
from trainer.preflight.model_flops import model_flops
from trainer.preflight.preflight import ENVIRONMENT, one_at_a_time
from trainer.recipe import Recipe, load

RECIPE = "olmo3_7b_stage1"
PROGRESS_SECONDS = 60


@dataclass(frozen=True)
class Attempt:
    """What MaxText is told beyond its launcher's defaults: variables of the launcher, settings of the trainer."""

    variables: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        told = [f"{name}={value}" for name, value in (self.variables | self.settings).items()]
        return " ".join(("as shipped", *told))


# The first that fits is compared. On 64 v5p devices its defaults do not, nor do they with two passes.
TWO_PASSES = {"GRAD_ACCUM_STEPS": "2"}
SLICES = {
    "tpu7x-4x4x4": (Attempt(),),
    "v5p-4x4x8": (Attempt(),),
    "v5p-4x4x4": (Attempt(), Attempt(TWO_PASSES), Attempt(TWO_PASSES, {"out_proj": "remat"})),
}


def compiled(python: Path, question: dict[str, Any], folder: Path, flags: str, fresh: bool) -> dict[str, Any]:
    """The outcome that compile_worker writes into `folder`, beside the program. `flags` are libtpu's."""
    asked, outcome = folder / "request.json", folder / "compiled.json"
    here = {"root": str(ROOT), "out": str(folder)}  # where it is asked does not change the answer
    request = question | {"flags": flags} | here
    if not fresh and outcome.is_file() and json.loads(asked.read_text()) | here == request:
        return json.loads(outcome.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("compiled.json", "program.hlo"):
        (folder / name).unlink(missing_ok=True)
    asked.write_text(json.dumps(request))
    worker = str(ROOT / "benchmarks" / "compile_worker.py")
    clean = {n: v for n, v in os.environ.items() if n not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "PYTHONPATH")}
    with one_at_a_time(), (folder / "log").open("w") as log:
        began = time.monotonic()
        process = subprocess.Popen(
            [str(python), "-P", worker, str(asked)],
            env={**clean, **ENVIRONMENT, "LIBTPU_INIT_ARGS": flags},
            cwd=folder,
            stdout=log,
            stderr=log,
        )
        try:
            while True:
                try:
                    process.wait(PROGRESS_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    say(f"{folder.parent.name} {folder.name}: {time.monotonic() - began:.0f} s")
        finally:
            process.kill()
            process.wait()
    if not outcome.is_file():
        raise SystemExit(f"{folder}: the process that compiles ended with {process.returncode}; see {folder / 'log'}")
    return json.loads(outcome.read_text())


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def accounted(outcome: dict[str, Any], folder: Path, recipe: Recipe, kind: DeviceType, told: str) -> dict[str, Any]:
    """One row of the table."""
    program = folder / "program.hlo"
    outcome = outcome | {"compile_seconds": outcome["phases"]["compile"]["wall"]}
    common = {
        "recipe": recipe.name,
        "plan": {"device_type": kind.name, "devices": kind.devices, "told": told},
        "compiler_options": {},
        "versions": outcome["versions"],
        "program": "",
    }
    model = model_flops(recipe) // kind.devices
    report = account_program(model, kind, outcome, program.read_text() if program.is_file() else None, common)
    return report.to_json() | {"told": told, "phases": outcome["phases"]}


def ours(folder: Path, recipe: Recipe, kind: DeviceType, fresh: bool) -> dict[str, Any]:
    """What the planner takes for this slice."""
    plan = choose(recipe, kind, 1).plan
    told = f"{plan.micro_batch} × {plan.accumulation} passes × {plan.data_parallel}, remat {plan.remat}"
    say(f"{kind.name} ours: {told}")
    question = {
        "whose": "ours",
        "recipe": recipe.model_dump(mode="json"),
        "plan": plan.model_dump(mode="json"),
        "sources": sources(),
        "versions": versions(),
    }
    outcome = compiled(Path(sys.executable), question, folder / "ours", "", fresh)
    return accounted(outcome, folder / "ours", recipe, kind, told)


def maxtext(python: Path, folder: Path, recipe: Recipe, kind: DeviceType, fresh: bool) -> list[dict[str, Any]]:
    """Its attempts up to the first that fits, which is the last of the rows."""
    rows = []
    for number, attempt in enumerate(SLICES[kind.name], 1):
        say(f"{kind.name} MaxText: {attempt}")
        started = launch(python, kind.devices, attempt.variables)
        # v5p-256 is 128 chips: its names count TensorCores, of which a chip of either family has two.
        slice_ = {"compile_topology": f"{kind.family}-{2 * kind.chips}", "compile_topology_num_slices": "1"}
        settings = started.settings | slice_ | attempt.settings
        arguments = ["train_compile", str(package(python) / "configs" / "base.yml")]
        arguments += [f"{name}={value}" for name, value in settings.items()]
        flags = f"{started.libtpu} --xla_tpu_spmd_rng_bit_generator_unsafe=true"  # which train_compile's main adds
        at = folder / f"maxtext-{number}"
        outcome = compiled(python, {"whose": "maxtext", "arguments": arguments}, at, flags, fresh)
        rows.append(accounted(outcome, at, recipe, kind, str(attempt)))
        if rows[-1]["verdict"] == "fits":
            break
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", action="append", choices=list(SLICES), help="only this one; may be repeated")
    parser.add_argument("--folder", type=Path, default=ROOT / "bench-out" / "maxtext-compiled", help="for the programs")
    parser.add_argument("--fresh", action="store_true", help="compile again what the folder has")
    parser.add_argument("--json", action="store_true", help="everything, instead of the table")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there, too")
    options = parser.parse_args()
    python, recipe, results = install(), load(RECIPE), {}
    for name in options.slice or SLICES:
        kind, folder = device_type(name), options.folder.resolve() / name
        theirs = maxtext(python, folder, recipe, kind, options.fresh)
        results[name] = {"maxtext": theirs, "ours": ours(folder, recipe, kind, options.fresh)}
        compilers = {json.dumps(row["versions"]) for row in (*theirs, results[name]["ours"])}
        if len(compilers) > 1:
            raise SystemExit(
                f"{name}: not the same compiler: {', '.join(sorted(compilers))}; see requirements/maxtext.txt"
            )
    if options.markdown:
        options.markdown.write_text(markdown(results, SLICES))
    print(json.dumps(results, indent=1) if options.json else text(results))


if __name__ == "__main__":
    main()
