"""Writes chat_tokens.json: conversations as AI2's open-instruct turns them into tokens and labels.

The template is read out of open_instruct/dataset_transformation.py (github.com/allenai/open-instruct, commit e6c3044a), and
rendered by Jinja as transformers does it. What is learnt follows its function sft_tulu_tokenize_and_truncate_v1 as it was for
OLMo 3 (commit 00440da3): of a message that is not the assistant's, everything from the tokens of what came before it to the
tokens of it with the generation prompt is masked.

    uv venv /tmp/chat && uv pip install --python /tmp/chat/bin/python jinja2==3.1.6 tokenizers==0.23.3 numpy
    /tmp/chat/bin/python tests/golden/make_chat.py --source dataset_transformation.py --tokenizer allenai_dolma2.json
"""

import argparse
import ast
import json
import sys
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.golden.conversations import CONVERSATIONS, SYSTEM
from tests.golden.inputs import HERE

END = "<|endoftext|>"


def template(source: Path) -> jinja2.Template:
    """Their template `olmo`."""
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "CHAT_TEMPLATES":
            return jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(
                ast.literal_eval(node.value)["olmo"]
            )
    raise SystemExit(f"{source}: no CHAT_TEMPLATES")


def labelled(messages: list[dict[str, Any]], rendering: jinja2.Template, tokenizer: Tokenizer) -> dict[str, Any]:
    def ids(count: int, prompt: bool = False) -> list[int]:
        text = rendering.render(messages=messages[:count], eos_token=END, add_generation_prompt=prompt)
        return tokenizer.encode(text, add_special_tokens=False).ids

    whole = ids(len(messages))
    learnt = [1] * len(whole)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            follows = i + 1 < len(messages) and messages[i + 1]["role"] == "assistant"
            first, end = len(ids(i)) if i else 0, len(ids(i + 1, prompt=follows))
            learnt[first:end] = [0] * (end - first)
    return {"ids": whole, "learnt": "".join(map(str, learnt))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True)
    arguments = parser.parse_args()
    rendering, tokenizer = template(arguments.source), Tokenizer.from_file(arguments.tokenizer)
    found = []
    for messages in CONVERSATIONS:
        # Their own default for a missing system message names another model; all of ours say one.
        given = (
            messages
            if messages[0]["role"] == "system"
            else [{"role": "system", "content": SYSTEM, "functions": ""}, *messages]
        )
        found.append(labelled(given, rendering, tokenizer))
    (HERE / "chat_tokens.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
