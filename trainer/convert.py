"""`python -m trainer convert`: weights from any format to any other, one tensor at a time.

Hugging Face's safetensors ↔ our checkpoints ↔ OLMo-core's names. What is written is complete or not there: it grows
beside its final place and is moved there at the end.
"""

import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from trainer.errors import ConfigurationError
from trainer.places import alone, written

if TYPE_CHECKING:
    from trainer.weights.sources import Source

FORMATS = ("hf", "untildone", "olmo-core")


@click.command()
@click.argument("source")
@click.argument("destination")
@click.option("--to", "target", type=click.Choice(FORMATS), required=True, help="format to write")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="of what is written [that of the source]")
@click.option("--recipe", metavar="NAME", help="what model it is, where the source does not say; a name or a file")
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="override a recipe field; dotted")
def convert(
    source: str, destination: str, target: str, dtype: str | None, recipe: str | None, overrides: tuple[str, ...]
) -> None:
    """Convert the weights at SOURCE, written to the new folder DESTINATION.

    SOURCE is a run directory (its newest commit, or RUN@STEP), a checkpoint folder, the folder of an Olmo3ForCausalLM in
    safetensors, or a checkpoint of OLMo-core; on disk or gs://. A checkpoint folder that is written here starts a run
    with initFrom: {checkpoint: …}; a Hugging Face folder does that directly with initFrom: {hf: …}.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed: leave accelerators to those who train
    click.echo(run(source, destination, target, dtype, recipe, overrides))


def run(
    source: str, destination: str, target: str, dtype: str | None, recipe: str | None, overrides: tuple[str, ...]
) -> str:
    """Convert; returns what to say about it. Raises ConfigurationError before anything is written."""
    from trainer import recipe as recipes
    from trainer.weights.description import to_config
    from trainer.weights.slots import slots
    from trainer.weights.sources import open_source

    if overrides and recipe is None:
        raise ConfigurationError("--set overrides fields of a recipe; give --recipe as well")
    if target == "untildone" and dtype == "bfloat16":
        raise ConfigurationError("--dtype bfloat16: our checkpoints hold float32; leave it out")
    if "://" in destination:
        raise ConfigurationError(f"{destination}: write to a folder on disk, then copy it (gcloud storage cp -r)")
    path = Path(destination)
    if path.exists():
        raise ConfigurationError(f"{destination} exists already; remove it, or give another name")
    loaded = recipes.load(recipe, recipes.parse_overrides(overrides)) if recipe is not None else None
    opened = open_source(source, loaded)
    kind = dtype or opened.dtype
    if target == "hf":
        to_config(opened.description, kind)  # what config.json cannot say has to show before the work
    count = len(slots(opened.description.model))
    with written(destination):
        path.parent.mkdir(parents=True, exist_ok=True)
        with alone(path):
            if path.exists():
                raise ConfigurationError(f"{destination} exists already; remove it, or give another name")
            _write(path, opened, shown(opened.stream(), count, f"{source} → {target}"), target, kind)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    shown_size = f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
    return f"{count} tensors, {shown_size} written to {destination}"


def _write(path: Path, opened: "Source", values: Iterator[tuple[Any, np.ndarray]], target: str, kind: str) -> None:
    """The folder `path`, whole or not at all; what is left of an earlier try goes first"""
    from trainer.weights import checkpoint, writing

    growing = path.with_name(f"{path.name}.incomplete")

    def clear() -> None:
        for left in (growing, *path.parent.glob(f"{glob.escape(growing.name)}.orbax-checkpoint-tmp*")):
            shutil.rmtree(left, ignore_errors=True)

    clear()
    try:
        if target == "untildone":
            checkpoint.write_checkpoint(growing, opened.description, values)
        else:
            growing.mkdir()
            if target == "hf":
                writing.write_hugging_face(growing, opened.description, values, kind)
            else:
                writing.write_olmo_core(growing, opened.description, values, kind)
        os.rename(growing, path)
    except BaseException:
        clear()
        raise


def shown(values: Iterator[tuple[Any, np.ndarray]], count: int, what: str) -> Iterator[tuple[Any, np.ndarray]]:
    """`values`, with a progress bar where there is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=count)
        for item in values:
            yield item
            progress.advance(task)
