"""Prompts and responses to a token file, for training on the responses alone.

Input is JSON lines (plain or .gz) with `prompt` and `response`, text as the model is to see it: a chat template, if there
is one, is already in it. An example becomes one document: the prompt's tokens with the untrained bit, the response's,
an EOS. Packed (packing.py) and with data.mask_documents, no example sees another.
"""

import gzip
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.errors import ConfigurationError
from trainer.recipe import UNTRAINED, Recipe

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Written:
    """The token file that was made."""

    path: Path
    examples: int
    tokens: int
    targets: int


def open_tokenizer(name: str) -> Encode:
    """`bytes`, or the path of a tokenizer.json. Raises ConfigurationError when it cannot be used."""
    if name == "bytes":
        return lambda text: list(text.encode())
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigurationError(f"--tokenizer {name} needs the package tokenizers: pip install tokenizers") from None
    try:
        tokenizer = Tokenizer.from_file(name)
    except Exception as error:  # the library raises Exception itself
        raise ConfigurationError(f"--tokenizer {name}: {error}") from None
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def read_examples(path: Path) -> Iterator[tuple[str, str]]:
    """(prompt, response) of each line. Raises ConfigurationError naming file and line."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _example(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ConfigurationError(f"--source {path}: {error}") from None


def _example(line: str, where: str) -> tuple[str, str]:
    try:
        body = json.loads(line)
    except ValueError as error:
        raise ConfigurationError(f"{where}: not JSON: {error}") from None
    if (
        not isinstance(body, dict)
        or not isinstance(body.get("prompt"), str)
        or not isinstance(body.get("response"), str)
    ):
        raise ConfigurationError(f'{where}: an example has the texts "prompt" and "response"')
    if not body["response"]:
        raise ConfigurationError(
            f"{where}: the response is empty: there is nothing to learn from it; leave the line out"
        )
    return body["prompt"], body["response"]


def write_examples(recipe: Recipe, sources: list[Path], encode: Encode, out: Path) -> Written:
    """Write the recipe's one source file below `out`, whole or not at all.

    Raises ConfigurationError for a recipe that does not train on responses, a token that its model has no row for, or a
    bad line.
    """
    packing = recipe.data.packing
    if not recipe.data.untrained_bit or packing is None or len(packing.sources) != 1:
        raise ConfigurationError(
            f"recipe {recipe.name!r} is not one for prompts and responses: it needs data.untrained_bit and data.packing "
            "with one source; see trainer/recipes/sft.py"
        )
    parts, targets = [], 0
    for source in sources:
        for prompt, response in read_examples(source):
            asked, said = (
                np.array(encode(prompt), np.uint32),
                np.array([*encode(response), recipe.data.eos_id], np.uint32),
            )
            highest = int(max(asked.max(initial=0), said.max()))
            if highest >= recipe.model.vocab_size:
                raise ConfigurationError(
                    f"{source}: token {highest} is not below model.vocab_size {recipe.model.vocab_size}: another tokenizer"
                )
            parts += [asked | np.uint32(UNTRAINED), said]
            targets += len(said)
    if not parts:
        raise ConfigurationError(f"--source {', '.join(map(str, sources))}: no example in it")
    tokens = np.concatenate(parts)
    target = out / packing.sources[0]
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    tokens.astype("<u4").tofile(beside)
    os.replace(beside, target)
    return Written(target, len(parts) // 2, len(tokens), targets)
