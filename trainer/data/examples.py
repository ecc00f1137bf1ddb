"""Prompts and responses to a token file, for training on the responses alone.

Input is JSON lines (plain, .gz, .zst): `prompt` and `response`, or with the template olmo3 (chat.py) also `messages`. Without
a template the texts are as the model is to see them. An example becomes one document: what is only read with the untrained
bit, what is learnt without, an EOS. Packed (packing.py) and with data.mask_documents, no example sees another.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trainer.data.chat import SYSTEM, Message, encode_conversations, marks, messages_of
from trainer.data.json_lines import Input, find_inputs, read_lines
from trainer.data.output import open_output
from trainer.data.tokenizer import Encoder, find_tokenizer
from trainer.errors import ConfigurationError
from trainer.recipe import UNTRAINED, Recipe

BATCH = 256  # examples tokenised at a time, on all cores

Template = Literal["none", "olmo3"]
Stretches = list[tuple[list[int], bool]]  # ids, and whether they are learnt
Example = tuple[str, str] | list[Message]


@dataclass(frozen=True)
class Written:
    """The token file that was made."""

    path: str
    examples: int
    tokens: int
    targets: int


class Bytes:
    """A token per byte, for models as small as those of the tests."""

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def id_of(self, token: str) -> int | None:
        """There are no special ones."""
        return None


def open_tokenizer(name: str, eos_id: int) -> Encoder | Bytes:
    """`bytes`, dolma2, or a tokenizer.json or its folder. Raises ConfigurationError when it cannot be used."""
    return Bytes() if name == "bytes" else Encoder(find_tokenizer(name, eos_id))


def write_examples(
    recipe: Recipe,
    sources: list[str],
    out: str,
    tokenizer: str = "bytes",
    template: Template = "none",
    system: str = SYSTEM,
    advance: Callable[[int], None] = lambda done: None,
) -> Written:
    """Write the recipe's one source file below `out` (a folder or gs://), whole or not at all.

    `advance` is told the examples that are done. Raises ConfigurationError for a recipe that does not train on responses,
    a token that its model has no row for, or a bad line (naming file, line and field).
    """
    packing = recipe.data.packing
    if not recipe.data.untrained_bit or packing is None or len(packing.sources) != 1:
        raise ConfigurationError(
            f"recipe {recipe.name!r} is not one for prompts and responses: it needs data.untrained_bit and data.packing "
            "with one source; see trainer/recipes/sft.py"
        )
    inputs, _ = find_inputs(sources)
    encode = _encoder(tokenizer, template, recipe.data.eos_id)
    examples = count = targets = 0
    with open_output(out).file(packing.sources[0]) as file:
        for where, batch in _batches(inputs, template, system):
            for stretches in encode(batch):
                tokens = _joined(stretches)
                if int((tokens & (UNTRAINED - 1)).max()) >= recipe.model.vocab_size:
                    raise ConfigurationError(
                        f"{where}: token {int((tokens & (UNTRAINED - 1)).max())} is not below model.vocab_size "
                        f"{recipe.model.vocab_size}: --tokenizer {tokenizer} is not the model's"
                    )
                file.write(tokens.tobytes())
                examples, count = examples + 1, count + len(tokens)
                targets += int(np.count_nonzero(tokens < UNTRAINED))
            advance(examples)
        if not examples:
            raise ConfigurationError(f"--source {', '.join(sources)}: no example in it")
    return Written(f"{out.rstrip('/')}/{packing.sources[0]}", examples, count, targets)


def _joined(stretches: Stretches) -> Any:
    return np.concatenate(
        [np.array(ids, "<u4") | np.uint32(0 if learnt else UNTRAINED) for ids, learnt in stretches]
    ).astype("<u4", copy=False)


def _encoder(tokenizer: str, template: Template, eos_id: int) -> Callable[[list[Any]], list[Stretches]]:
    encoder = open_tokenizer(tokenizer, eos_id)
    if template == "olmo3":
        signs = marks(encoder.id_of, eos_id, tokenizer)
        return lambda batch: encode_conversations(batch, encoder, signs)

    def plain(batch: list[tuple[str, str]]) -> list[Stretches]:
        prompts, responses = encoder([prompt for prompt, _ in batch]), encoder([response for _, response in batch])
        return [[(asked, False), ([*said, eos_id], True)] for asked, said in zip(prompts, responses, strict=True)]

    return plain


def _batches(inputs: list[Input], template: Template, system: str) -> Iterator[tuple[str, list[Example]]]:
    """Some examples of one file, and which lines they are."""
    for source in inputs:
        batch: list[Example] = []
        first = last = 1
        for last, example in read_examples(source, template, system):
            batch.append(example)
            if len(batch) == BATCH:
                yield f"{source.where}:{first}-{last}", batch
                batch, first = [], last + 1
        if batch:
            yield f"{source.where}:{first}-{last}", batch


def read_examples(source: Input, template: Template = "none", system: str = SYSTEM) -> Iterator[tuple[int, Example]]:
    """(line, example) of each line that is not empty. Raises ConfigurationError naming file, line and field."""
    for number, line in enumerate(read_lines(source), 1):
        if not line.strip():
            continue
        try:
            body = json.loads(line.decode("utf-8"))
            if not isinstance(body, dict):
                raise ValueError(f"an example is a JSON object, not {type(body).__name__}")
            example = messages_of(body, system) if template == "olmo3" else _prompt_and_response(body)
            for text in example:
                "".join(text).encode("utf-8")
        except UnicodeEncodeError:
            raise ConfigurationError(f"{source.where}:{number}: half a Unicode character (a lone surrogate)") from None
        except (ValueError, RecursionError) as error:
            why = f"not JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise ConfigurationError(f"{source.where}:{number}: {why}") from None
        yield number, example


def _prompt_and_response(body: dict[str, Any]) -> tuple[str, str]:
    if "messages" in body and "prompt" not in body:
        raise ValueError('it has "messages": say how they are written, --template olmo3')
    for field in ("prompt", "response"):
        if not isinstance(body.get(field), str):
            raise ValueError(f'the field "{field}" {"is not a text" if field in body else "is missing"}')
    if not body["response"]:
        raise ValueError('the field "response" is empty: there is nothing to learn from it; leave the line out')
    return body["prompt"], body["response"]
