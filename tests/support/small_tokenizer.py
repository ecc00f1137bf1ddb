"""A tokenizer.json of 257 ids, written in a moment: a token per byte, and <end>."""

import json
from pathlib import Path

END = 256


def write_tokenizer(folder: Path) -> Path:
    """The folder with tokenizer.json and tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    return folder


def texts_of(tokens: list[int], folder: Path) -> list[str]:
    """The texts of documents that end with END."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found, begun = [], list[int]()
    for token in tokens:
        if token == END:
            found.append(tokenizer.decode(begun))
            begun = []
        else:
            begun.append(token)
    assert not begun, "the last document has no end"
    return found
