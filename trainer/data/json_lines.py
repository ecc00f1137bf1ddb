"""JSON lines as corpora come, one object a line: plain, gzip or zstd, on disk or gs://, read once from begin to end.

Compressed files may consist of several members or frames, as parallel compressors write them. One that ends inside a
member is refused: it was cut off, and reading on would lose documents silently.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from trainer.data_root import DataRoot, Wording, open_root
from trainer.errors import ConfigurationError

ENDINGS = tuple(f".{kind}{packed}" for kind in ("jsonl", "json") for packed in ("", ".gz", ".zst", ".zstd"))
CHUNK = 1 << 20  # bytes read at a time; what it decompresses to is in memory at once
ZSTD_WINDOW = 1 << 31  # `zstd --long=31`, the largest there is
INPUT = Wording("input", "--source", "give a file or folder that exists", "it was changed while it was read")


class Input(NamedTuple):
    """A file below a root, and its size as it was when it was looked for."""

    root: str
    path: str
    bytes: int

    @property
    def where(self) -> str:
        """How messages call it."""
        return f"{self.root.rstrip('/')}/{self.path}"


def find_inputs(sources: list[str]) -> tuple[list[Input], int]:
    """The JSON-lines files of `sources`, in the order given, a folder's by name; and how many files in them are none.

    A source is a file, a folder or a gs:// prefix; below folders files are taken by their ending. Raises
    ConfigurationError for a source that is not there or has no such file, StorageUnavailable.
    """
    found, other = [], 0
    for source in sources:
        if source.endswith(ENDINGS):
            folder, _, name = source.rpartition("/")
            root = open_root(folder or ("/" if source.startswith("/") else "."), INPUT)
            found.append(Input(root.uri, name, root.size(name)))
            continue
        if "://" not in source and Path(source).is_file():
            raise ConfigurationError(f"--source {source} does not end in any of {', '.join(ENDINGS)}; give JSON lines")
        root = open_root(source, INPUT)
        files = root.files()
        mine = [Input(root.uri, path, size) for path, size in files.items() if path.endswith(ENDINGS)]
        if not mine:
            raise ConfigurationError(f"--source {source}: no file below it ends in {', '.join(ENDINGS)}")
        found += mine
        other += len(files) - len(mine)
    twice = [where for where, count in Counter(one.where for one in found).items() if count > 1]
    if twice:
        raise ConfigurationError(f"--source: {twice[0]} is in it twice; its documents would be too")
    return found, other


def read_lines(source: Input, advance: Callable[[int], None] = lambda count: None) -> Iterator[bytes]:
    """The lines of a file, without their line ends. `advance` is told of bytes read, compressed ones.

    Raises ConfigurationError for a file that is cut off, is not what its ending says, or is another size by now.
    """
    chunks = _chunks(open_root(source.root, INPUT), source, advance)
    ending = PurePosixPath(source.path).suffix
    if ending == ".gz":
        chunks = _decompressed(chunks, lambda: zlib.decompressobj(wbits=31), source, "gzip")
    elif ending in (".zst", ".zstd"):
        chunks = _decompressed(chunks, _zstd(source), source, "zstd")
    begun: list[bytes] = []  # of a line that goes on in the next chunk
    for chunk in chunks:
        first, *rest = chunk.split(b"\n")
        begun.append(first)
        if rest:
            yield b"".join(begun)
            yield from rest[:-1]
            begun = [rest[-1]]
    if last := b"".join(begun):
        yield last


def _chunks(root: DataRoot, source: Input, advance: Callable[[int], None]) -> Iterator[bytes]:
    if (size := root.size(source.path)) != source.bytes:
        raise ConfigurationError(f"input {source.where} has {size} bytes, it had {source.bytes}: {INPUT.ended}")
    for offset in range(0, source.bytes, CHUNK):
        buffer = bytearray(min(CHUNK, source.bytes - offset))
        root.read_into(source.path, offset, memoryview(buffer))
        yield bytes(buffer)
        advance(len(buffer))


def _zstd(source: Input) -> Callable[[], Any]:
    try:
        import zstandard
    except ImportError:
        raise ConfigurationError(f"input {source.where} needs the package zstandard: pip install zstandard") from None
    return lambda: zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj()


def _decompressed(chunks: Iterator[bytes], new: Callable[[], Any], source: Input, kind: str) -> Iterator[bytes]:
    """`chunks` decompressed, member by member; `new` makes what decompresses one."""
    engine = None
    for chunk in chunks:
        while chunk:
            engine = engine or new()
            try:
                plain = engine.decompress(chunk)
            except Exception as error:  # zlib.error, zstandard.ZstdError
                raise ConfigurationError(f"input {source.where} is damaged, or not {kind}: {error}") from None
            if plain:
                yield plain
            chunk = b""
            if engine.eof:
                chunk, engine = engine.unused_data, None
                if kind == "gzip":
                    chunk = chunk.lstrip(b"\0")  # padding, which tapes and some writers leave
    if engine is not None or not source.bytes:  # a compressed file is never empty, whatever it holds
        raise ConfigurationError(f"input {source.where} ends inside a {kind} stream: it was cut off; get it again")
