"""Documents to tokenise, and how they are dealt to files: the same everywhere, for make_dolma.py and the tests."""

import gzip
import json
from pathlib import Path

from tests.golden.inputs import text_documents, uniform

INPUTS, LENGTH, BATCH, SEED = 5, 16, 24, 34521  # instances of 16 tokens, 24 of them in a batch
TRICKY = [
    "",
    " \n\t ",
    "\ufeff\u200b zero width, and a mark at the begin",
    "  white space at both ends \n\n",
    "Tabs\tand\r\nline ends\rof all kinds\n\n\n\nand   runs    of spaces",
    "I'll've they'RE don'T",
    "1 12 123 1234 12345 3.14159265358979 0x1F 1,000,000",
    "Grüße aus Ö, naïve café, Ελληνικά, Русский язык, 中文字符, 日本語のテキスト, 한국어, עברית, العربية, हिन्दी",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 ﬁ Å \U0001f600\U00010348",
    "def f(x):\n    return {k: v for k, v in x.items() if v is not None}\n\n\nclass A:\n    pass\n",
    "an end <|endoftext|> in the middle of it",
    "<|im_start|>user\nHello<|im_end|>\n<|endoftext|>",
    "|||EMAIL_ADDRESS||| <|extra_id_0|> <|fim_prefix|><|pad|>",
    "nul \x00 and \x7f and \x1b[0m",
    "a" * 300 + "!" * 300 + "\n" * 40 + "z",
    "https://example.org/a?b=c&d=%20#e <b>bold</b> &amp; \\begin{align}x^2\\end{align}",
]


def documents() -> list[str]:
    """The paragraphs of the Apache licence, what tokenizers trip over, and longer texts of the licence's words."""
    paragraphs = [bytes(int(token) for token in tokens[:-1]).decode() for tokens in text_documents()]
    words = " ".join(paragraphs).split()
    longer = []
    for case in range(30):
        count = 20 + int(uniform(60_000 + case, 1)[0] * 200)
        longer.append(" ".join(words[int(at * len(words))] for at in uniform(61_000 + case, count)))
    return TRICKY + paragraphs + longer


def write_inputs(folder: Path) -> list[Path]:
    """The documents in Dolma's format, gzip, dealt to files by turns."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(INPUTS):
        lines = [
            json.dumps({"id": f"{number}-{i}", "text": text}) for i, text in enumerate(documents()[number::INPUTS])
        ]
        paths.append(folder / f"{number}.jsonl.gz")
        paths[-1].write_bytes(gzip.compress("".join(line + "\n" for line in lines).encode(), mtime=0))
    return paths
