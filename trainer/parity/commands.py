"""`python -m trainer parity`: our model beside Hugging Face's, on the same tokens."""

import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from trainer.errors import ConfigurationError
from trainer.places import check_writable, written

REFERENCE = Path(__file__).with_name("reference.py")
DEFAULT_LENGTH = 8192


@click.command()
@click.option("--hf", metavar="FOLDER", help="Hugging Face model to compare with")
@click.option("--python", metavar="PATH", help="Python with torch and transformers 4.57, which runs it [this one]")
@click.option("--reference", metavar="FOLDER", help="what an earlier call kept with --keep, instead of --hf")
@click.option("--keep", metavar="FOLDER", help="keep the reference's logits and hidden states here")
@click.option("--run", "run_directory", metavar="URI[@STEP]", help="our weights: a commit of a run")
@click.option("--checkpoint", metavar="FOLDER", help="our weights: any that `convert` reads [those of --hf]")
@click.option("--recipe", metavar="NAME", help="what model our weights are of, where they do not say")
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="override a recipe field; dotted")
@click.option("--tokens", metavar="FILE", help="a token file (.npy int32 [rows, length], or raw uint32) [random ids]")
@click.option("--rows", type=click.IntRange(1), default=1, show_default=True)
@click.option("--length", type=click.IntRange(2), help=f"tokens per row [the model's, at most {DEFAULT_LENGTH}]")
@click.option("--seed", type=int, default=0, show_default=True, help="of the random ids")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--max-kl", type=float, help="limit of the mean KL divergence [1e-9 in float32, 1.5e-3 in bfloat16]")
@click.option("--min-top1", type=float, help="limit of the top-1 agreement [0.999 in float32, 0.9875 in bfloat16]")
@click.option("--plot", metavar="FILE.png", help="draw KL per position and error per layer")
@click.option("--json", "as_json", is_flag=True, help="one JSON object on standard output")
def parity(as_json: bool, plot: str | None, **given: Any) -> int:
    """Compare the predictions of our model with those of Hugging Face's, on the same tokens.

    Both compute in --dtype. Exit code 1 when a limit is broken.
    """
    from trainer.parity.show import draw, table

    if plot is not None:
        check_writable("--plot", Path(plot))
    result, about = run(Given(**given))
    problems = result.problems()
    if plot is not None:
        with written(f"--plot {plot}"):
            draw(result, about, Path(plot))
    if as_json:
        click.echo(
            json.dumps({**result.to_json(), **about, "passed": not problems, "problems": problems}, sort_keys=True)
        )
    else:
        click.echo(table(result, about, problems))
    return 1 if problems else 0


@dataclass(frozen=True)
class Given:
    """The options."""

    hf: str | None = None
    python: str | None = None
    reference: str | None = None
    keep: str | None = None
    run_directory: str | None = None
    checkpoint: str | None = None
    recipe: str | None = None
    overrides: tuple[str, ...] = ()
    tokens: str | None = None
    rows: int = 1
    length: int | None = None
    seed: int = 0
    dtype: str = "float32"
    max_kl: float | None = None
    min_top1: float | None = None


def run(given: Given) -> tuple[Any, dict[str, Any]]:
    """(Comparison, where both sides came from). Raises ConfigurationError."""
    from trainer import recipe as recipes
    from trainer.parity.compare import LIMITS, Comparison
    from trainer.parity.layerwise import Layerwise
    from trainer.weights.sources import open_source

    if (given.hf is None) == (given.reference is None):
        raise ConfigurationError("parity: give one of --hf and --reference")
    if given.run_directory is not None and given.checkpoint is not None:
        raise ConfigurationError("parity: give one of --run and --checkpoint")
    uri = given.run_directory or given.checkpoint or given.hf
    if uri is None:
        raise ConfigurationError("--reference says nothing of our weights; give --run or --checkpoint")
    if given.overrides and given.recipe is None:
        raise ConfigurationError("--set overrides fields of a recipe; give --recipe as well")
    recipe = recipes.load(given.recipe, recipes.parse_overrides(given.overrides)) if given.recipe else None
    source = open_source(uri, recipe)
    kl, top1 = LIMITS[given.dtype]
    result = Comparison(
        given.dtype,
        kl if given.max_kl is None else given.max_kl,
        top1 if given.min_top1 is None else given.min_top1,
    )
    with tempfile.TemporaryDirectory() if given.keep is None else nullcontext(given.keep) as scratch:
        folder = Path(given.reference) if given.reference is not None else Path(scratch)
        if given.hf is not None:
            tokens = tokens_of(given, source.description.model.vocab_size, source.description.max_positions)
            ask(given, tokens, folder)
        about = _about(folder, given.dtype)
        tokens = _load(folder / "tokens.npy")
        if tokens.max() >= source.description.model.vocab_size:
            raise ConfigurationError(f"token {tokens.max()}: our model has {source.description.model.vocab_size} ids")
        ours = Layerwise(source, given.dtype)
        references = [_load(folder / f"hidden-{row:04d}.npy") for row in range(len(tokens))]
        if len(references[0]) != source.description.model.n_layers + 1:
            raise ConfigurationError(
                f"the reference has {len(references[0]) - 1} layers, our model {source.description.model.n_layers}"
            )
        for i, last in enumerate(ours.hidden(tokens)):
            result.add_layer(np.stack([hidden[i] for hidden in references]), np.asarray(last, np.float32))
        logits = [_load(folder / f"logits-{row:04d}.npy") for row in range(len(tokens))]
        for row, first, mine in ours.logits(last):
            theirs = np.asarray(logits[row][first : first + len(mine), : mine.shape[1]])
            result.add_logits(theirs, mine, tokens[row, first + 1 : first + 1 + len(mine)])
    return result, {**about, "ours": uri, "rows": len(tokens), "length": int(tokens.shape[1])}


def tokens_of(given: Given, vocab_size: int, longest: int) -> np.ndarray:
    """int32 [rows, length]: from the file, or random."""
    length = given.length or min(longest, DEFAULT_LENGTH)
    if given.tokens is None:
        return np.random.default_rng(given.seed).integers(0, vocab_size, (given.rows, length), dtype=np.int32)
    path = Path(given.tokens)
    try:
        if path.read_bytes()[:6] == b"\x93NUMPY":
            found = np.load(path)
            if found.ndim != 2:
                raise ConfigurationError(
                    f"--tokens {path}: an array of {found.ndim} dimensions, expected [rows, length]"
                )
            return found.astype(np.int32)
        count = given.rows * length
        found = np.fromfile(path, "<u4", count)
    except OSError as error:
        raise ConfigurationError(f"--tokens {path}: {error.strerror}") from None
    if len(found) < count:
        raise ConfigurationError(
            f"--tokens {path}: {len(found)} tokens, {given.rows} × {length} are wanted; set --length"
        )
    return found.reshape(given.rows, length).astype(np.int32)


def ask(given: Given, tokens: np.ndarray, folder: Path) -> None:
    """Run Hugging Face's model in its own environment. Raises ConfigurationError with what it said."""
    with written(f"--keep {folder}" if given.keep is not None else str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "tokens.npy", tokens)
    python = given.python or sys.executable
    command = [python, str(REFERENCE), str(given.hf), str(folder / "tokens.npy"), str(folder), "--dtype", given.dtype]
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        raise ConfigurationError(f"--python {python}: {error.strerror}") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        hint = "; give --python, an environment with torch and transformers 4.57" if "No module named" in said else ""
        raise ConfigurationError(f"{python} could not run the model at {given.hf}: {said}{hint}")


def _about(folder: Path, dtype: str) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads((folder / "about.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{folder}: not what --keep writes: {error}") from None
    if about["dtype"] != dtype:
        raise ConfigurationError(f"{folder} was computed in {about['dtype']}; give --dtype {about['dtype']}")
    return about


def _load(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
