"""Text to token files, byte by byte: the smallest real corpus, out of what every Python has.

A token is a byte (0..255); EOS (256) ends each document. `stdlib` is the standard library's own sources without their
tests, about 12 MB. A document goes to the held-out file or to the training file by the hash of its content, so equal
documents never lie on both sides. Different documents still share stretches (rules of dashes, licence texts), so
windows of the held-out file that the training file has too are cut out of it: 6 % of `stdlib`'s (26 % if they were 16
tokens long, 2 % at 64). The same sources give the same files, byte for byte.
"""

import os
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np

from trainer.errors import ConfigurationError

EOS = 256
DTYPE = "uint16"
HELD_OUT_ONE_IN = 20
WINDOW = 32  # tokens, an instance of the recipe `tiny`: no window of this length, or of a multiple, is in both files
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "testdata", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Tokenized:
    """One token file that was made, or found as it should be."""

    path: Path
    documents: int
    tokens: int
    written: bool


def documents(source: str) -> list[Path]:
    """The files of `source`, sorted by name: `stdlib`, or a folder (all its files, tests and hidden ones left out).

    Raises ConfigurationError for an unknown source or one without files.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if source == "stdlib" else Path(source)
    if not root.is_dir():
        raise ConfigurationError(f"--source {source}: no such source; give stdlib, or a folder of text files")
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        wanted = (n for n in names if (n.endswith(".py") if source == "stdlib" else not n.startswith(".")))
        found += [Path(folder, name) for name in wanted]
    if not found:
        raise ConfigurationError(f"--source {source}: no text files below {root}")
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def tokenize(source: str, out: Path, progress: Callable[[int], None] | None = None) -> tuple[Tokenized, Tokenized]:
    """Write <name>-train.bin and <name>-heldout.bin (little-endian uint16) into `out`, atomically, both or none.

    <name> is `stdlib` or the folder's name. `progress` is called with the number of documents done. Files that are
    there with the same content are left alone. Raises ConfigurationError for other content under these names, for an
    unknown source, a folder that cannot be written, or a source too small to have both sides.
    """
    paths = documents(source)
    name = "stdlib" if source == "stdlib" else Path(source).resolve().name
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tokenize-", dir=out) as scratch:
            made = _write_sides(paths, Path(scratch), progress)
            targets = {side: out / f"{name}-{side}.bin" for side in made}
            for side, (path, _, tokens) in made.items():
                if not tokens:
                    raise ConfigurationError(f"--source {source}: no document for the {side} file; add more text")
                _may_become(targets[side], path)
            return _place(targets["train"], *made["train"]), _place(targets["heldout"], *made["heldout"])
    except OSError as error:
        raise ConfigurationError(f"--out {out}: {error.strerror or error} ({error.filename})") from error


def _write_sides(
    paths: list[Path], scratch: Path, progress: Callable[[int], None] | None
) -> dict[str, tuple[Path, int, int]]:
    """Both files in `scratch`, synced to disk: side to (path, documents, tokens)."""
    counts = {"train": 0, "heldout": 0}
    with (scratch / "train").open("wb") as train, (scratch / "heldout").open("wb") as held_out:
        for done, content in enumerate(_contents(paths), 1):
            if content:
                number = int.from_bytes(blake2b(content, digest_size=8).digest(), "little")
                side = "heldout" if number % HELD_OUT_ONE_IN == 0 else "train"
                tokens = np.append(np.frombuffer(content, np.uint8).astype("<u2"), np.uint16(EOS)).astype("<u2")
                (held_out if side == "heldout" else train).write(tokens.tobytes())
                counts[side] += 1
            if progress:
                progress(done)
        train.flush()
        held_out.flush()
        _cut_shared(scratch / "train", scratch / "heldout", held_out)
        for file in (train, held_out):
            file.flush()
            os.fsync(file.fileno())
    width = np.dtype(DTYPE).itemsize
    return {side: (scratch / side, count, (scratch / side).stat().st_size // width) for side, count in counts.items()}


def _cut_shared(train: Path, held_out: Path, file: BinaryIO) -> None:
    """Rewrite `file`, open at `held_out`, without the windows that `train` has at a window's place."""
    size = WINDOW * np.dtype("<u2").itemsize
    known, text = set(_pieces(train, size)), held_out.read_bytes()
    kept = [text[i : i + size] for i in range(0, len(text), size) if text[i : i + size] not in known]
    file.seek(0)
    file.truncate()
    file.write(b"".join(kept))


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(size):
            yield piece


def _contents(paths: list[Path]) -> Iterator[bytes]:
    for path in paths:
        try:
            yield path.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"document {path}: {error.strerror}; it must be readable, or left out") from error


def _may_become(target: Path, made: Path) -> None:
    """Refuse to replace a file of other content: a run may be training on it."""
    if target.exists() and not _same(target, made):
        raise ConfigurationError(
            f"{target} exists with other content (another Python version's sources?); "
            "choose another --out, or remove it if no run uses it"
        )


def _place(target: Path, made: Path, count: int, tokens: int) -> Tokenized:
    written = not target.exists()
    if written:
        os.replace(made, target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return Tokenized(target, count, tokens, written)


def _same(one: Path, other: Path) -> bool:
    if one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb") as a, other.open("rb") as b:
        while left := a.read(1 << 20):
            if left != b.read(1 << 20):
                return False
    return True
