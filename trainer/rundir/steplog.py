"""The step log: one JSON line per step, in immutable files named after their first and last step.

Floats are written so that the very same float comes back (shortest repr; NaN, Infinity and -Infinity as JSON
constants): a step done again is compared with its line bit for bit.
"""

from collections.abc import Sequence

import google_crc32c

from trainer.errors import Damaged, TrainerError
from trainer.rundir.documents import Documents
from trainer.rundir.records import StepLine, StepLogFile
from trainer.rundir.store import AlreadyExists


def folder(attempt: int, start: int) -> str:
    return f"steps/{attempt}.{start}"


def append(documents: Documents, attempt: int, start: int, lines: Sequence[StepLine]) -> StepLogFile:
    """Make `lines`, consecutive steps, durable as one file; the same lines again are fine.

    Raises ValueError when steps are missing or out of order, TrainerError when the file exists with other lines.
    """
    if not lines:
        raise ValueError("step log: no lines to append")
    first, last = lines[0].step, lines[-1].step
    if [line.step for line in lines] != list(range(first, last + 1)):
        raise ValueError(f"step log of start {attempt}.{start}: steps {first}..{last} are not consecutive")
    data = b"".join(line.canonical() + b"\n" for line in lines)
    key = f"{folder(attempt, start)}/{first}-{last}.jsonl"
    try:
        documents.create_bytes(key, data)
    except AlreadyExists:
        raise TrainerError(
            f"step log {documents.path(key)} exists with other lines; a start logs each step once"
        ) from None
    return StepLogFile(key=key, first=first, last=last, crc32c=google_crc32c.value(data))


def read(documents: Documents, file: StepLogFile) -> list[StepLine]:
    """The lines of one file. Raises Damaged when it is missing, or not what was written."""
    data = documents.get(file.key)
    if data is None:
        raise Damaged(f"step log {documents.path(file.key)} is missing")
    if google_crc32c.value(data) != file.crc32c:
        raise Damaged(
            f"step log {documents.path(file.key)} is damaged: crc32c {google_crc32c.value(data):08x}, "
            f"written was {file.crc32c:08x}"
        )
    return _parse(documents, file.key, data)


def read_all(documents: Documents, attempt: int, start: int) -> list[StepLine]:
    """Every line that start logged, also what it never committed, by step. For audits and reports."""
    lines: list[StepLine] = []
    for key in documents.patient(lambda: documents.store.list(folder(attempt, start))):
        lines += _parse(documents, key, documents.get(key) or b"")
    return sorted(lines, key=lambda line: line.step)


def _parse(documents: Documents, key: str, data: bytes) -> list[StepLine]:
    return [StepLine.parse(line, documents.path(key)) for line in data.splitlines()]
