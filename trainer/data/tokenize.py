"""Text to OLMo-core's token files: Dolma's JSON lines (`id`, `text`) in, raw little-endian uint32 out.

A text becomes a document: its white space at both ends cut off, its tokens, the eos id. Texts that are empty then are
left out. (So does AI2's `dolma tokens`; it also shuffles, which the order of training does here.) What is written depends
on the inputs and the tokenizer alone, not on processes or interruptions:

1. Each input becomes pieces of at most `max_bytes`, below .tokenize/; a note says that they are all there. An input with
   a note is never read again. No document is split between pieces.
2. Neighbouring pieces that fit together become one file, part-00000.npy and so on, so that small inputs do not make files
   smaller than an instance. A piece is renamed, or joined by the bucket: nothing is written twice.
3. tokens.json is written last: the files, what they were made of, and `data` as a recipe has it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from trainer.data.json_lines import Input, read_lines
from trainer.data.output import Output, write
from trainer.data.tokenizer import SpecialTokens, TokenizerFile
from trainer.errors import ConfigurationError
from trainer.frozen import Frozen

DTYPE = "uint32"
MAX_BYTES = 1 << 30
SCRATCH, JOB, MADE = ".tokenize", ".tokenize/job.json", "tokens.json"
SMALL_PART = 256 << 10  # an instance of 65,536 tokens, the longest of OLMo 3: a smaller part joins its neighbour
BATCH_CHARACTERS = 1 << 20

Encode = Callable[[Sequence[str]], list[list[int]]]


class Stopped(Exception):
    """Another process found something wrong; this one ends."""


class Job(Frozen):
    """All that decides what is written. Stored with it: other settings never continue what these began."""

    inputs: tuple[tuple[str, int], ...]
    tokenizer: str
    eos_id: int
    special_tokens: SpecialTokens
    max_bytes: int
    version: int = 1

    @staticmethod
    def of(inputs: Sequence[Input], tokenizer: TokenizerFile, special_tokens: SpecialTokens, max_bytes: int) -> "Job":
        """The job for these inputs. Where they lie is not part of it."""
        return Job(
            inputs=tuple((one.path, one.bytes) for one in inputs),
            tokenizer=tokenizer.sha256,
            eos_id=tokenizer.eos_id,
            special_tokens=special_tokens,
            max_bytes=max_bytes,
        )


class Note(Frozen):
    """An input is done: what was in it, and its pieces by their tokens."""

    documents: int
    empty: int
    bad: int
    pieces: tuple[int, ...]


class MadeFile(Frozen):
    """One token file."""

    path: str
    bytes: int


class Made(Frozen):
    """What was made, and of what."""

    job: Job
    documents: int
    empty: int
    bad: int
    tokens: int
    files: tuple[MadeFile, ...]

    def data(self) -> dict[str, object]:
        """Those fields of a recipe's `data` that follow from the files."""
        return {"files": [file.model_dump() for file in self.files], "dtype": DTYPE, "eos_id": self.job.eos_id}


@dataclass(frozen=True)
class Watch:
    """How a running input is watched: told of bytes read, asked whether to stop."""

    advance: Callable[[int], None] = lambda count: None
    stopped: Callable[[], bool] = lambda: False


def begin(output: Output, job: Job) -> Made | None:
    """Note what is to be made; what has been made already, if all of it is there.

    Raises ConfigurationError where other files stand, or files of another job.
    """
    if output.size(MADE) is not None:
        made = _read_made(output)
        _same_job(output, made.job, job)
        wrong = [file.path for file in made.files if output.size(file.path) != file.bytes]
        if wrong:
            raise ConfigurationError(
                f"--out {output.uri}: {MADE} says all is there, but {wrong[0]} is missing or changed "
                f"({len(wrong)} of {len(made.files)} files); remove {MADE} and the part files, and run this again"
            )
        output.remove(SCRATCH)  # where the last one was killed before it did
        return made
    if output.size(JOB) is not None:
        _same_job(output, Job.parse(output.read(JOB), JOB), job)
        return None
    stray = [name for name in output.names("") if name.startswith("part-")]
    if stray:
        raise ConfigurationError(
            f"--out {output.uri}: {stray[0]} is there already and is not ours; give another folder"
        )
    write(output, JOB, job.canonical())
    return None


def _read_made(output: Output) -> Made:
    try:
        body = json.loads(output.read(MADE))
        del body["data"]
    except (ValueError, KeyError, TypeError):
        raise ConfigurationError(f"--out {output.uri}: {MADE} is there and is not ours; give another folder") from None
    return Made.parse(body, f"{output.uri}/{MADE}")


def read_note(output: Output, number: int) -> Note | None:
    """The note of an input, None if it is not done."""
    name = note_name(number)
    return None if output.size(name) is None else Note.parse(output.read(name), f"{output.uri}/{name}")


def _same_job(output: Output, there: Job, job: Job) -> None:
    if there == job:
        return
    before, now = there.model_dump(), job.model_dump()
    changed = [name for name in now if before[name] != now[name]]
    raise ConfigurationError(
        f"--out {output.uri}: what is there was begun with other {', '.join(changed)}; give another folder, or the same "
        "sources and options as before"
    )


def note_name(number: int) -> str:
    """Where the note of an input is."""
    return f"{SCRATCH}/{number:06}.json"


def piece_name(number: int, piece: int) -> str:
    """Where a piece of an input is until it becomes a part."""
    return f"{SCRATCH}/{number:06}-{piece:05}"


def tokenize_input(
    source: Input, number: int, job: Job, encode: Encode, output: Output, skip_bad: bool, watch: Watch
) -> Note:
    """Write the pieces of one input, and then its note.

    Raises ConfigurationError naming file and line of a bad one (unless `skip_bad`: then it is counted), Stopped.
    """
    texts = _Texts(source, skip_bad)
    with _Pieces(output, number, job.max_bytes) as pieces:
        for batch in _batches(texts.read(watch.advance)):
            if watch.stopped():
                raise Stopped
            for ids in encode(batch):
                if not ids or ids[-1] != job.eos_id:  # a text may end with it, where texts may hold special tokens
                    ids.append(job.eos_id)
                pieces.add(np.array(ids, "<u4"))
    note = Note(documents=pieces.documents, empty=texts.empty, bad=texts.bad, pieces=tuple(pieces.tokens))
    write(output, note_name(number), note.canonical())
    return note


class _Texts:
    """The texts of an input, and how many of its lines gave none."""

    def __init__(self, source: Input, skip_bad: bool) -> None:
        self._source, self._skip_bad = source, skip_bad
        self.empty = self.bad = 0

    def read(self, advance: Callable[[int], None]) -> Iterator[str]:
        for number, line in enumerate(read_lines(self._source, advance), 1):
            try:
                text = text_of(line)
            except ValueError as error:
                if not self._skip_bad:
                    raise ConfigurationError(
                        f"{self._source.where}:{number}: {error}; mend the line, or leave such lines out with --skip-bad"
                    ) from None
                self.bad += 1
                continue
            if text:
                yield text
            elif text is not None:
                self.empty += 1


def text_of(line: bytes) -> str | None:
    """The text of a line, without the white space at its ends; None for an empty line.

    Raises ValueError saying what is wrong with it.
    """
    if not line.strip():
        return None
    try:
        body = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start + 1}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    if not isinstance(body, dict):
        raise ValueError(f"a document is a JSON object, not {type(body).__name__}")
    text = body.get("text")
    if not isinstance(text, str):
        raise ValueError(f'the field "text" {"is missing" if "text" not in body else f"is {_kind(text)}, not a text"}')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f'the field "text" is not Unicode: half a character at {error.start + 1}') from None
    return text.strip()


def _kind(value: object) -> str:
    return {type(None): "null", bool: "a boolean", int: "a number", float: "a number", list: "a list"}.get(
        type(value), "an object"
    )


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """As many texts as make good use of a call of the tokenizer, few enough to be soon told to stop."""
    batch, size = list[str](), 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Pieces:
    """Writes the documents of one input; a piece is full when the next document does not fit."""

    def __init__(self, output: Output, number: int, max_bytes: int) -> None:
        self._output, self._number, self._max_bytes = output, number, max_bytes
        self._open = ExitStack()
        self._file: BinaryIO | None = None
        self.tokens: list[int] = []
        self.documents = 0

    def __enter__(self) -> "_Pieces":
        return self

    def __exit__(self, *error: object) -> None:
        self._open.__exit__(*error)  # type: ignore[arg-type]

    def add(self, tokens: np.ndarray) -> None:
        """One document, its eos included."""
        if self._file is None or 4 * (self.tokens[-1] + len(tokens)) > self._max_bytes:
            self._open.close()
            self._file = self._open.enter_context(self._output.file(piece_name(self._number, len(self.tokens))))
            self.tokens.append(0)
        self._file.write(tokens.tobytes())
        self.tokens[-1] += len(tokens)
        self.documents += 1


def plan_parts(tokens: Sequence[int], max_bytes: int) -> list[list[int]]:
    """Which pieces, by number, make each part: neighbours while they fit into `max_bytes` together.

    A part smaller than SMALL_PART (or than a 16th of `max_bytes`, where that is less) takes the next piece all the same,
    and if it is the last one joins the one before.
    """
    small = min(SMALL_PART, max_bytes // 16)
    parts: list[list[int]] = []
    size = max_bytes
    for number, count in enumerate(tokens):
        if (size + 4 * count > max_bytes and size >= small) or not parts:
            parts.append([])
            size = 0
        parts[-1].append(number)
        size += 4 * count
    if len(parts) > 1 and size < small:
        last = parts.pop()
        parts[-1] += last
    return parts


def finish(output: Output, job: Job, notes: Sequence[Note]) -> Made:
    """Pieces to parts, then tokens.json. Continues where an earlier call was interrupted."""
    pieces = [(number, piece) for number, note in enumerate(notes) for piece in range(len(note.pieces))]
    tokens = [count for note in notes for count in note.pieces]
    if not tokens:
        raise ConfigurationError("--source: there is no document in it")
    files = []
    for place, part in enumerate(plan_parts(tokens, job.max_bytes)):
        name, size = f"part-{place:05}.npy", 4 * sum(tokens[i] for i in part)
        if output.size(name) != size:
            names = [piece_name(*pieces[i]) for i in part]
            gone = next((n for n in names if output.size(n) is None), None)
            if gone is not None:
                raise ConfigurationError(
                    f"--out {output.uri}: {name} was removed or changed, and {gone} is in it no more; "
                    f"remove {SCRATCH} and the part files, and run this again"
                )
            output.join(name, names)
        files.append(MadeFile(path=name, bytes=size))
    made = Made(
        job=job,
        documents=sum(note.documents for note in notes),
        empty=sum(note.empty for note in notes),
        bad=sum(note.bad for note in notes),
        tokens=sum(tokens),
        files=tuple(files),
    )
    body = made.model_dump(mode="json") | {"data": made.data()}
    write(output, MADE, json.dumps(body, indent=1).encode())
    output.remove(SCRATCH)
    return made
