"""Fine-tuning data: from JSON lines to a loss on the responses alone."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from tests.golden import inputs
from tests.support import reference_model
from tests.unit.test_rows import MODEL
from trainer.data.commands import data as command
from trainer.data.examples import read_examples, write_examples
from trainer.data.json_lines import find_inputs
from trainer.data.mix import Mix
from trainer.data.packing import write_packed
from trainer.errors import ConfigurationError
from trainer.freezing import freeze
from trainer.model import Weights, next_token_loss
from trainer.recipe import UNTRAINED, Recipe, load
from trainer.rows import read_rows

EXAMPLES = [("2+2=", "4"), ("Say hello twice. ", "hello hello"), ("", "no prompt"), ("x" * 40, "too long to fit")]
LENGTH = 32


def recipe() -> Recipe:
    """The sft recipe, small and in bytes."""
    return load(
        "sft",
        {
            "model": MODEL.model_copy(update={"yarn": None}).model_dump(mode="json"),
            "data.eos_id": inputs.EOS,
            "data.packing.pad_id": inputs.PAD,
            "sequence_length": LENGTH,
            "global_batch": 1,
        },
    )


def write(path: Path, lines: list[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def chats(folder: Path) -> Path:
    return write(folder / "chats.jsonl", [{"prompt": p, "response": r, "id": 1} for p, r in EXAMPLES])


def test_prompts_are_marked_and_responses_end_with_eos(tmp_path: Path) -> None:
    made = write_examples(recipe(), [str(chats(tmp_path))], str(tmp_path))
    tokens = np.fromfile(made.path, "<u4")
    prompt, response = EXAMPLES[0]
    first = [*(ord(c) | UNTRAINED for c in prompt), *map(ord, response), inputs.EOS]
    assert tokens[: len(first)].tolist() == first
    assert (made.examples, made.tokens) == (4, sum(len(p) + len(r) + 1 for p, r in EXAMPLES))
    assert made.targets == sum(len(r) + 1 for _, r in EXAMPLES) == int((tokens < UNTRAINED).sum())


def test_only_responses_are_targets_through_packing_reading_and_loss(tmp_path: Path) -> None:
    write_examples(recipe(), [str(chats(tmp_path))], str(tmp_path))
    list(write_packed(recipe(), str(tmp_path), str(tmp_path)))
    frozen = freeze(recipe(), str(tmp_path))
    mix = Mix(frozen, str(tmp_path))
    tokens = mix.instances(np.arange(len(mix), dtype=np.uint64))
    rows = read_rows(jnp.asarray(tokens), frozen.data)
    assert int(rows.tokens.min()) >= 0
    params = {name: jnp.asarray(value) for name, value in inputs.model_params().items()}
    loss = next_token_loss(
        params, rows.tokens, frozen.model, Weights(jnp.dtype("float32")), 0.0, "none", rows.targets, rows.documents
    )[1]
    # Each example by itself, cut where an instance ends, and the step from one example's EOS to the next if that is a target.
    expected, targets = 0.0, 0
    for row in tokens:
        clean = row & 0x7FFFFFFF
        starts = [0, *(np.flatnonzero(row == inputs.EOS) + 1).tolist(), LENGTH]
        for start, end in pairwise(starts):
            if start == end or clean[start] == inputs.PAD:
                continue
            logits = reference_model.logits(params, clean[start:end], frozen.model)  # type: ignore[arg-type]
            for at in range(start, end):
                if at + 1 < LENGTH and row[at + 1] >= 0 and clean[at + 1] != inputs.PAD:
                    z = logits[at - start]
                    expected += float(np.log(np.exp(z).sum()) - z[clean[at + 1]])
                    targets += 1
    assert float(loss.sum()) == pytest.approx(expected, rel=1e-5)
    assert int(rows.counted.sum()) == targets == int(rows.targets.sum())
    # The last example's prompt alone fills an instance. What comes first in an instance is predicted from nothing.
    first = int((tokens[:, 0] >= 0).sum())
    assert targets == sum(len(r) + 1 for _, r in EXAMPLES[:3]) - first


def test_the_command_writes_and_says_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(recipe().model_dump_json())
    ran = CliRunner().invoke(
        command,
        [
            *("examples", "--recipe", str(path), "--source", str(chats(tmp_path)), "--out", str(tmp_path)),
            *("--tokenizer", "bytes", "--template", "none"),
        ],
    )
    assert ran.exit_code == 0, ran.output
    assert "4 examples" in ran.output
    with pytest.raises(ConfigurationError, match="'tiny' is not one for prompts and responses"):
        write_examples(load("tiny"), [str(chats(tmp_path))], str(tmp_path))
    for line, why in (
        ({"prompt": "a"}, r'bad\.jsonl:2: the field "response" is missing'),
        ({"prompt": "a", "response": ""}, r'bad\.jsonl:2: the field "response" is empty'),
        ({"messages": []}, r'bad\.jsonl:2: it has "messages": say how they are written, --template olmo3'),
    ):
        bad = write(tmp_path / "bad.jsonl", [{"prompt": "a", "response": "b"}, line])
        with pytest.raises(ConfigurationError, match=why):
            write_examples(recipe(), [str(bad)], str(tmp_path / "out"))
        assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    (tmp_path / "no.jsonl").write_text("{")
    with pytest.raises(ConfigurationError, match=r"no\.jsonl:1: not JSON"):
        write_examples(recipe(), [str(tmp_path / "no.jsonl")], str(tmp_path))
    narrow = load(
        "sft", {"model.vocab_size": 90, "model.padded_vocab_size": 96, "data.eos_id": 1, "data.packing.pad_id": 2}
    )
    with pytest.raises(ConfigurationError, match=r"chats\.jsonl:1-4: token 1\d\d is not below model\.vocab_size 90"):
        write_examples(narrow, [str(chats(tmp_path))], str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"none\.json"):
        write_examples(recipe(), [str(chats(tmp_path))], str(tmp_path), str(tmp_path / "none.json"))


def test_compressed_lines_are_read(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write(json.dumps({"prompt": "a", "response": "ü"}) + "\n\n")
    (source,), _ = find_inputs([str(tmp_path / "c.jsonl.gz")])
    assert list(read_examples(source)) == [(1, ("a", "ü"))]


def test_the_bit_needs_room() -> None:
    with pytest.raises(ConfigurationError, match=r"data\.untrained_bit needs data\.dtype uint32"):
        load("sft", {"data.dtype": "uint16"})
