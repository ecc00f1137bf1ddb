"""Many inputs tokenised at once, in processes of their own. What one of them does is in tokenize.py.

Processes are started anew (spawned): a fork of a process with threads may hang. They end when their parent does, however
it ended, so that nobody writes beside the one who continues.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.data.json_lines import Input, find_inputs
from trainer.data.output import open_output
from trainer.data.tokenize import MAX_BYTES, Job, Made, Note, Watch, begin, finish, read_note, tokenize_input
from trainer.data.tokenizer import Encoder, SpecialTokens, TokenizerFile
from trainer.errors import ConfigurationError, TrainerError

LOOK_SECONDS = 0.2

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Work:
    """What every process has to know."""

    job: Job
    inputs: tuple[Input, ...]
    tokenizer: TokenizerFile
    out: str
    skip_bad: bool


def tokenize(
    sources: list[str],
    out: str,
    tokenizer: TokenizerFile,
    *,
    special_tokens: SpecialTokens = "text",
    max_bytes: int = MAX_BYTES,
    skip_bad: bool = False,
    processes: int = 1,
    progress: Progress = lambda done, total: None,
) -> tuple[Made, int]:
    """Token files of `sources` below `out`, both on disk or gs://; and how many files of the sources were no input.

    Continues what an earlier call with the same inputs and settings began; `processes` may differ. `progress` is told the
    bytes of the inputs that are done, and all of them. Raises ConfigurationError, StorageUnavailable.
    """
    inputs, other = find_inputs(sources)
    _apart(sources, out)
    output = open_output(out)
    job = Job.of(inputs, tokenizer, special_tokens, max_bytes)
    with output.alone():
        made = begin(output, job)
        if made is None:
            notes = {number: note for number in range(len(inputs)) if (note := read_note(output, number)) is not None}
            work = Work(job, tuple(inputs), tokenizer, out, skip_bad)
            _run(work, notes, processes, progress)
            made = finish(output, job, [notes[number] for number in range(len(inputs))])
    if made.bad and not skip_bad:
        raise ConfigurationError(
            f"--out {out}: it was made with --skip-bad, and {made.bad} bad lines are left out; say --skip-bad again, or "
            "give another folder"
        )
    return made, other


def _apart(sources: Sequence[str], out: str) -> None:
    """What is written must not be read as input."""
    place = out if "://" in out else str(Path(out).resolve())
    for source in sources:
        root = source if "://" in source else str(Path(source).resolve())
        if f"{place.rstrip('/')}/".startswith(f"{root.rstrip('/')}/"):
            raise ConfigurationError(f"--out {out} lies below --source {source}; give a folder beside it")


def _run(work: Work, notes: dict[int, Note], processes: int, progress: Progress) -> None:
    """Do what has no note yet; adds to `notes`."""
    total = sum(one.bytes for one in work.inputs)
    done = sum(work.inputs[number].bytes for number in notes)
    # The largest first: else the last one runs alone at the end. The order of what is written is not changed by it.
    left = sorted(set(range(len(work.inputs))) - set(notes), key=lambda number: -work.inputs[number].bytes)
    progress(done, total)
    if not left:
        return
    if processes == 1:
        counted = _Counter(done, total, progress)
        encode = Encoder(work.tokenizer, work.job.special_tokens)
        output = open_output(work.out)
        with _threads(1):
            for number in left:
                notes[number] = tokenize_input(
                    work.inputs[number], number, work.job, encode, output, work.skip_bad, Watch(counted.add)
                )
        return
    context = multiprocessing.get_context("spawn")
    read, stop = context.Value("q", done), context.Event()
    workers = min(processes, len(left))
    with ProcessPoolExecutor(
        workers, context, initializer=_enter, initargs=(work, processes // workers, read, stop)
    ) as pool:
        # Processes inherit the mask from their first instruction on: Ctrl-C reaches the parent alone, which stops them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            futures = {pool.submit(_in_process, number): number for number in left}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        waiting = set(futures)
        try:
            while waiting:
                finished, waiting = wait(waiting, LOOK_SECONDS, FIRST_EXCEPTION)
                for future in finished:
                    notes[futures[future]] = future.result()
                progress(read.value, total)
        except BrokenProcessPool:
            raise TrainerError(
                "a process was killed while it tokenised (was memory short?); what is done is kept: run this again, "
                "perhaps with fewer --processes"
            ) from None
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


class _Counter:
    def __init__(self, done: int, total: int, progress: Progress) -> None:
        self._done, self._total, self._progress = done, total, progress

    def add(self, count: int) -> None:
        self._done += count
        self._progress(self._done, self._total)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """How many threads the tokenizers library may use, for as long as nobody has used it before."""
    before = {name: os.environ.get(name) for name in ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS")}
    os.environ.update(TOKENIZERS_PARALLELISM="true" if count > 1 else "false", RAYON_NUM_THREADS=str(count))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


# --- in a process of the pool

_mine: dict[str, Any] = {}


def _enter(work: Work, threads: int, read: Any, stop: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(TOKENIZERS_PARALLELISM="true" if threads > 1 else "false", RAYON_NUM_THREADS=str(threads))
    _mine.update(
        work=work,
        encode=Encoder(work.tokenizer, work.job.special_tokens),
        output=open_output(work.out),
        read=read,
        stop=stop,
    )


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _in_process(number: int) -> Note:
    work: Work = _mine["work"]
    read = _mine["read"]

    def advance(count: int) -> None:
        with read.get_lock():
            read.value += count

    watch = Watch(advance, _mine["stop"].is_set)
    return tokenize_input(work.inputs[number], number, work.job, _mine["encode"], _mine["output"], work.skip_bad, watch)
