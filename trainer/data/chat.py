"""Conversations as OLMo 3's instruct models read them, and which of their tokens are learnt.

    <|im_start|>system⏎…<|im_end|>⏎<|im_start|>user⏎…<|im_end|>⏎<|im_start|>assistant⏎…<|endoftext|>

Learnt is what an assistant says and what ends it (<|im_end|>, the last one's <|endoftext|>), as in AI2's open-instruct
(sft_tulu_tokenize_and_truncate_v1). A conversation without a system message gets the one that the released template of
Olmo-3-7B-Instruct puts there. One thing differs on purpose: special tokens written inside a message stay text, so that no
message can end itself and begin another's.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from trainer.errors import ConfigurationError

START, STOP = "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant", "environment")
SYSTEM = (
    "You are a helpful function-calling AI assistant. You do not currently have access to any functions. "
    "<functions></functions>"
)

Encode = Callable[[Sequence[str]], list[list[int]]]


class Message(NamedTuple):
    """One turn: who, and the text between the role and the end."""

    role: str
    text: str


class Marks(NamedTuple):
    """The ids that a conversation is made of besides its texts."""

    start: int
    stop: int
    eos: int


def marks(id_of: Callable[[str], int | None], eos_id: int, name: str) -> Marks:
    """The marks of a tokenizer. Raises ConfigurationError for one that was not made for conversations."""
    start, stop = id_of(START), id_of(STOP)
    if start is None or stop is None:
        raise ConfigurationError(f"--template olmo3: --tokenizer {name} has no {START} or {STOP}")
    return Marks(start, stop, eos_id)


def messages_of(body: dict[str, Any], system: str = SYSTEM) -> list[Message]:
    """The turns of a line with `messages`, or with `prompt` and `response`.

    Raises ValueError naming the field that is wrong.
    """
    if "messages" not in body:
        turns = [
            {"role": "user", "content": body.get("prompt")},
            {"role": "assistant", "content": body.get("response")},
        ]
        names = ['the field "prompt"', 'the field "response"']
    else:
        turns = body["messages"]
        if not isinstance(turns, list) or not turns:
            raise ValueError('the field "messages" is not a list of messages')
        names = [f'"messages[{i}].content"' for i in range(len(turns))]
    found = [_message(turn, name, i) for i, (turn, name) in enumerate(zip(turns, names, strict=True))]
    if found[-1].role != "assistant":
        raise ValueError(
            f'"messages[{len(found) - 1}].role" is {found[-1].role}: the last one to speak is the assistant'
        )
    if not any(message.role == "system" for message in found):
        found.insert(0, Message("system", system))
    return found


def _message(turn: Any, name: str, number: int) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f'"messages[{number}]" is not an object with role and content')
    role = turn.get("role")
    if role == "tool":
        role = "environment"
    if role not in ROLES:
        raise ValueError(f'"messages[{number}].role" is {role!r}; it is one of {", ".join(ROLES)}')
    text = turn.get("content")
    calls, functions = turn.get("function_calls"), turn.get("functions")
    if text is None and calls is not None:
        text = ""
    if not isinstance(text, str):
        raise ValueError(f"{name} {'is missing' if text is None else 'is not a text'}")
    for field, value in (("functions", functions), ("function_calls", calls)):
        if value is not None and not isinstance(value, str):
            raise ValueError(f'"messages[{number}].{field}" is not a text')
    if role in ("system", "user") and functions is not None:
        text += f"{' ' if role == 'system' else chr(10)}<functions>{functions}</functions>"
    if role == "assistant" and calls is not None:
        text += f"<function_calls>{calls}</function_calls>"
    if role == "assistant" and not text:
        raise ValueError(f"{name} is empty: there is nothing to learn from it; leave the line out")
    return Message(role, text)


def encode_conversations(
    conversations: Sequence[list[Message]], encode: Encode, marks: Marks
) -> list[list[tuple[list[int], bool]]]:
    """Each conversation as stretches of (ids, whether they are learnt).

    A role and its text are encoded as one, so that a text that begins with line ends meets the tokenizer as it does in AI2's
    data; of that, as many tokens are the role's as it has alone.
    """
    flat = [f"{message.role}\n{message.text}" for messages in conversations for message in messages]
    line_end, *heads = encode(["\n", *(f"{role}\n" for role in ROLES)])
    length = dict(zip(ROLES, map(len, heads), strict=True))
    ids = iter(encode(flat))
    found = []
    for messages in conversations:
        stretches: list[tuple[list[int], bool]] = []
        for place, message in enumerate(messages, 1):
            mine, learnt, last = next(ids), message.role == "assistant", place == len(messages)
            head = length[message.role]
            stretches.append(([marks.start, *mine[:head]], False))
            stretches.append(([*mine[head:], marks.eos if last else marks.stop], learnt))
            if not last:
                stretches.append((line_end, False))
        found.append(stretches)
    return found
