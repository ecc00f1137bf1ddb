"""Which tiles of the scores the attention kernels compute: block by block, and within blocks in smaller tiles.

A block of queries meets a block of keys in one step of a kernel's grid. Blocks that the mask empties are no steps; of
those it cuts, only the tiles that hold something are computed. Pure numpy.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

BLOCK = 1024  # queries and keys per grid step: large, as every step costs a fixed time
TILE = 256  # granularity of what is left out within a block: the width of a matrix unit


class Run(NamedTuple):
    """Tiles start..stop-1 of one strip of a block. `masked`: not all of their pairs are visible."""

    start: int
    stop: int
    masked: bool


class Kind(NamedTuple):
    """What is computed of a block. `offset`: first query minus first key; 0 where nothing is masked, so that it is one kind."""

    offset: int
    rows: tuple[Run, ...]  # per tile of queries, its keys
    columns: tuple[Run, ...]  # per tile of keys, its queries


@dataclass(frozen=True)
class Visits:
    """The steps of a grid: int32 [steps] each. `kind` indexes `kinds`."""

    queries: np.ndarray  # block of queries
    keys: np.ndarray
    kind: np.ndarray
    kinds: tuple[Kind, ...]
    block: int
    tile: int

    @property
    def pairs(self) -> int:
        """Query-key pairs that are computed, per head."""
        tiles = [sum(run.stop - run.start for run in kind.rows) for kind in self.kinds]
        return int(sum(tiles[k] for k in self.kind)) * self.tile**2


def sizes(length: int) -> tuple[int, int] | None:
    """(block, tile) for sequences of this length; None where it is not a multiple of a tile."""
    tile = next((t for t in (TILE, TILE // 2) if length % t == 0), None)
    if tile is None:
        return None
    block = next(b for b in (BLOCK, BLOCK // 2, tile) if length % b == 0)
    return block, tile


def visits(length: int, window: int, by_keys: bool) -> Visits:
    """All blocks that hold a visible pair: along the keys of each block of queries, or along the queries `by_keys`.

    The window includes the query itself; -1 is full.
    """
    chosen = sizes(length)
    assert chosen is not None, length
    block, tile = chosen
    blocks = length // block
    reach = length if window < 0 else window
    found = [
        (i, j) for i in range(blocks) for j in range(i + 1) if (i - j) * block - (block - 1) < reach
    ]  # nearest pair of the two blocks
    if by_keys:
        found.sort(key=lambda pair: (pair[1], pair[0]))
    of_step = [_kind((i - j) * block, block, tile, reach) for i, j in found]
    kinds = tuple(dict.fromkeys(of_step))
    queries, keys = np.asarray(found, np.int32).T
    return Visits(queries, keys, np.asarray([kinds.index(k) for k in of_step], np.int32), kinds, block, tile)


def _kind(offset: int, block: int, tile: int, reach: int) -> Kind:
    tiles = block // tile

    def run(distances: list[int]) -> Run:
        """`distances` from the first query to the first key of each tile of a strip."""
        seen = [n for n, d in enumerate(distances) if d + tile - 1 >= 0 and d - (tile - 1) < reach]
        if not seen:
            return Run(0, 0, False)
        cut = any(distances[n] - (tile - 1) < 0 or distances[n] + tile - 1 >= reach for n in seen)
        return Run(seen[0], seen[-1] + 1, cut)

    rows = tuple(run([offset + (a - b) * tile for b in range(tiles)]) for a in range(tiles))
    columns = tuple(run([offset + (a - b) * tile for a in range(tiles)]) for b in range(tiles))
    return Kind(offset if any(r.masked for r in rows) else 0, rows, columns)
