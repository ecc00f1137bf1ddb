"""Documents packed into instances of one length, best fit decreasing, as OLMo-core's NumpyPackedFSLDataset does it.

The documents of a group of files are sorted by length, longest first, and each goes into the fullest instance that still
has room for it (arXiv 2404.10830); of equally full ones, into the one that has been so for longest. Documents longer
than an instance are cut and their rest is dropped; the room left at an instance's end is padded. No document is split
between instances, and no instance holds documents of two groups.

OLMo-core keeps an index and gathers an instance's documents when it is read. Here the packed instances are written out
once, as token files: reading one is then a single read, and order, audit and loader know nothing of packing. Where an
instance's documents and its padding begin, the devices see from the tokens.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from trainer.data.output import open_output, write
from trainer.data_root import open_root, read_whole
from trainer.errors import ConfigurationError
from trainer.recipe import DTYPE_BYTES, Packing, Recipe

I64 = npt.NDArray[np.int64]
WORD = 64


def documents(tokens: npt.NDArray[np.unsignedinteger], eos_id: int, limit: int) -> tuple[I64, I64]:
    """(start, length) of each document, its EOS included, lengths cut at `limit`. What follows the last EOS is no document."""
    ends = np.flatnonzero(tokens == eos_id) + 1
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(ends)]
    return starts, np.minimum(ends - starts, limit)


def pack(lengths: I64, size: int) -> list[list[int]]:
    """Which documents (by number) each instance of `size` tokens holds, in their order. Lengths are 1..size.

    Documents of one length keep their order. OLMo-core sorts with numpy's default sort, which does not promise that:
    there, documents of equal length may trade places, differently from processor to processor.
    """
    rooms = _Rooms(size)
    bins: list[list[int]] = []
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        room, number = rooms.take(length)
        if number is None:
            number = len(bins)
            bins.append([])
        bins[number].append(document)
        rooms.put(room - length, number)
    return bins


class _Rooms:
    """The open instances by the room they have left: the smallest room that suffices is found by scanning a bit map."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._open: dict[int, deque[int]] = {}
        self._words = [0] * (size // WORD + 1)  # bit r of the map: there is an instance with room r
        self._used = 0  # bit w: word w is not 0

    def take(self, length: int) -> tuple[int, int | None]:
        """The smallest room of at least `length`, and the instance that has had it longest; (size, None): a new one."""
        word, bit = divmod(length, WORD)
        here = self._words[word] >> bit << bit
        if not here:
            later = self._used >> word + 1 << word + 1
            if not later:
                return self._size, None
            word = (later & -later).bit_length() - 1
            here = self._words[word]
        room = word * WORD + (here & -here).bit_length() - 1
        queue = self._open[room]
        number = queue.popleft()
        if not queue:
            self._words[word] ^= 1 << room % WORD
            if not self._words[word]:
                self._used ^= 1 << word
        return room, number

    def put(self, room: int, number: int) -> None:
        """Instance `number` now has this much room."""
        if not room:
            return
        queue = self._open.setdefault(room, deque())
        if not queue:
            self._words[room // WORD] |= 1 << room % WORD
            self._used |= 1 << room // WORD
        queue.append(number)


def packed_instances(
    files: Sequence[npt.NDArray[np.unsignedinteger]], size: int, eos_id: int, pad_id: int
) -> tuple[npt.NDArray[np.unsignedinteger], int, int]:
    """(tokens [n, size] of one group of files, documents, documents that were cut)."""
    tokens = np.concatenate(files)
    # Found file by file: an unfinished document at a file's end is dropped, it does not run on into the next.
    found = [documents(file, eos_id, size) for file in files]
    offsets = np.cumsum([0, *(len(file) for file in files)])
    starts = np.concatenate([start + offset for (start, _), offset in zip(found, offsets[:-1], strict=True)])
    lengths = np.concatenate([length for _, length in found])
    bins = pack(lengths, size)
    packed = np.full((len(bins), size), pad_id, tokens.dtype)
    for row, numbers in zip(packed, bins, strict=True):
        at = 0
        for number in numbers:
            start, length = int(starts[number]), int(lengths[number])
            row[at : at + length] = tokens[start : start + length]
            at += length
    cut = int(np.count_nonzero(tokens[starts + lengths - 1] != eos_id))
    return packed, len(lengths), cut


@dataclass(frozen=True)
class Packed:
    """One packed file that was written, or found complete."""

    path: str
    sources: tuple[str, ...]
    source_bytes: tuple[int, ...]
    instances: int
    documents: int
    cut_documents: int
    padding: int


def groups(packing: Packing) -> list[tuple[str, ...]]:
    """The source files of each packed file."""
    size = packing.group_size
    return [packing.sources[i : i + size] for i in range(0, len(packing.sources), size)]


def write_packed(
    recipe: Recipe, source_root: str, out: str, processes: int = 1, progress: Callable[[int], None] | None = None
) -> Iterator[Packed]:
    """Pack the recipe's sources below `source_root` into its data.files below `out`; yields each file as it is there.

    Both are folders or gs:// prefixes. Each group's file appears whole, with a note beside it (NAME.json) of what it was
    made from; a group whose file and note are there already is left alone, so an interrupted packing is continued. Needs
    memory for one group per process, twice. Raises ConfigurationError when the recipe has no packing, or a note says that
    a file was made from other sources.
    """
    packing = recipe.data.packing
    if packing is None:
        raise ConfigurationError(f"recipe {recipe.name!r} has no data.packing: its files are read as they are")
    jobs = [(recipe, source_root, out, number) for number in range(len(recipe.data.files))]
    if processes == 1:
        for done, job in enumerate(jobs, 1):
            yield _pack_group(*job)
            if progress:
                progress(done)
        return
    with ProcessPoolExecutor(processes) as pool:
        futures = [pool.submit(_pack_group, *job) for job in jobs]
        for done, future in enumerate(as_completed(futures), 1):
            yield future.result()
            if progress:
                progress(done)


def _pack_group(recipe: Recipe, source_root: str, out: str, number: int) -> Packed:
    packing = recipe.data.packing
    assert packing is not None
    sources = groups(packing)[number]
    target = recipe.data.files[number].path
    note = f"{target}.json"
    root, output = open_root(source_root), open_output(out)
    sizes = tuple(root.size(path) for path in sources)
    width = DTYPE_BYTES[recipe.data.dtype]
    if output.size(note) is not None:
        found = _read_note(output.read(note))
        if (found.sources, found.source_bytes) != (sources, sizes):
            raise ConfigurationError(
                f"{out}: {target} was packed from other files than {', '.join(sources)}; choose another --out"
            )
        if output.size(target) == found.instances * recipe.sequence_length * width:
            return found
    dtype = np.dtype(recipe.data.dtype).newbyteorder("<")
    files = []
    for path, size in zip(sources, sizes, strict=True):
        tokens = np.empty(size // width, dtype)
        read_whole(root, path, memoryview(tokens).cast("B"))
        files.append(tokens)
    packed, count, cut = packed_instances(files, recipe.sequence_length, recipe.data.eos_id, packing.pad_id)
    if not len(packed):
        raise ConfigurationError(f"{', '.join(sources)}: no document ends with data.eos_id {recipe.data.eos_id}")
    made = Packed(
        recipe.data.files[number].path, sources, sizes, len(packed), count, cut, int((packed == packing.pad_id).sum())
    )
    write(output, target, memoryview(packed).cast("B"))
    write(output, note, json.dumps(asdict(made), indent=1).encode())
    return made


def _read_note(note: bytes) -> Packed:
    body = json.loads(note)
    return Packed(**{**body, "sources": tuple(body["sources"]), "source_bytes": tuple(body["source_bytes"])})
