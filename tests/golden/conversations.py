"""Conversations for make_chat.py and the tests."""

from typing import Any

from tests.golden.texts import TRICKY

SYSTEM = "You are terse."


def _turns(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


# No special tokens inside messages: those stay text here.
CONVERSATIONS: list[list[dict[str, Any]]] = [
    _turns("2+2?", "4"),
    _turns("Say hello.", "hello", "Again.", "hello"),
    _turns("", "an empty prompt"),
    _turns("\n\nline ends first\n", "\n\n\nand here\n"),
    _turns("  spaces  ", "  spaces  ", "\ttab", "\r\nboth", "x", "y"),
    _turns(*[text for text in TRICKY if "<|" not in text][2:8], "end") [:6],
    [
        {"role": "system", "content": "Use tools.", "functions": '[{"name": "add"}]'},
        *_turns("3+4?"),
        {"role": "assistant", "content": "Let me see. ", "function_calls": "add(3, 4)"},
        {"role": "environment", "content": "7"},
        {"role": "assistant", "content": "7"},
    ],
    [
        {"role": "user", "content": "5+6?", "functions": '[{"name": "add"}]'},
        {"role": "assistant", "content": None, "function_calls": "add(5, 6)"},
        {"role": "environment", "content": "11"},
        {"role": "assistant", "content": "11", "function_calls": None},
    ],
]  # fmt: skip
