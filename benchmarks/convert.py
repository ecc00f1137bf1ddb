"""Memory and time of converting weights at OLMo 3 7B's size, on sparse files of zeros. Needs 20 GB of disk.

Hugging Face bf16 → our checkpoint → Hugging Face bf16, and a run's commit as four devices write it (each parameter in four
chunks with all layers in each) → Hugging Face bf16. Prints one JSON object: peak resident GB and seconds of each. Zeros
compress to nothing, so that disk and compressor cost less here than with real weights; what is in memory is the same,
but for one compressed chunk (at most 1.4 GB) in the last case.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trainer.recipe import load
from trainer.weights.description import of_recipe, to_config
from trainer.weights.safetensors import SafetensorsWriter
from trainer.weights.slots import slots

RECIPE = "olmo3_7b_stage1"
DEVICES = 4
LIMIT_GB = 12


def sparse_hugging_face(folder: Path) -> None:
    """A folder with every tensor of the 7B, all zeros, that takes no room on disk."""
    recipe = load(RECIPE)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_config(of_recipe(recipe), "bfloat16")))
    shapes = {slot.hf: ("bfloat16", slot.shape) for slot in slots(recipe.model)}
    with SafetensorsWriter(folder / "model.safetensors", shapes) as writer:
        for name in shapes:
            writer.leave_zero(name)


def commit_like(folder: Path) -> None:
    """A checkpoint folder with the chunks of a commit of four devices; nothing in it but its shapes."""
    import tensorstore

    from trainer.params import param_specs

    folder.mkdir()
    (folder / "_METADATA").write_text(json.dumps({"use_zarr3": False}))
    for name, spec in param_specs(load(RECIPE).model).items():
        dim = next((i for i, axis in enumerate(spec.axes) if axis not in ("layer", "norm")), None)
        chunks = [size // DEVICES if i == dim else size for i, size in enumerate(spec.shape)]
        metadata = {
            "shape": list(spec.shape),
            "chunks": chunks,
            "dtype": "<f4",
            "compressor": {"id": "zstd", "level": 1},
        }
        store = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"params.{name}/"}
        array = tensorstore.open({"driver": "zarr", "kvstore": store, "metadata": metadata}, create=True).result()
        if name == "w_gate":  # the largest one is really there: what is missing is never decoded
            for at in range(0, spec.shape[1], chunks[1]):
                array[:, at : at + chunks[1]] = 1.0


def measured(*arguments: str) -> dict[str, float]:
    """Peak resident memory and seconds of one conversion in a process of its own."""
    began = time.monotonic()
    child = subprocess.Popen([sys.executable, "-m", "trainer", "convert", *arguments], stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"convert {' '.join(arguments)}: status {status}")
    return {"peak_gb": round(usage.ru_maxrss * 1024 / 1e9, 2), "seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where to work; a temporary folder if not given")
    folder = Path(tempfile.mkdtemp(prefix="untildone-convert-", dir=parser.parse_args().folder))
    try:
        sparse_hugging_face(folder / "hf")
        commit_like(folder / "commit")
        out = {
            "hf_to_ours": measured(f"{folder}/hf", f"{folder}/ours", "--to", "untildone"),
            "ours_to_hf": measured(f"{folder}/ours", f"{folder}/back", "--to", "hf", "--dtype", "bfloat16"),
        }
        shutil.rmtree(folder / "back")
        commit = ("--to", "hf", "--dtype", "bfloat16", "--recipe", RECIPE)
        out["commit_to_hf"] = measured(f"{folder}/commit", f"{folder}/back", *commit)
    finally:
        shutil.rmtree(folder)
    worst = max(part["peak_gb"] for part in out.values())
    print(json.dumps({"benchmark": "convert", "limit_gb": LIMIT_GB, "peak_gb": worst, **out}))
    sys.exit(0 if worst < LIMIT_GB else 1)


if __name__ == "__main__":
    main()
