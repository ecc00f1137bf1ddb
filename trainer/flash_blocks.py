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
    """The steps of a grid: int32 [steps] each, or [devices, steps]. `kind` indexes `kinds`; beyond them it is a step
    that computes nothing.
    """

    queries: np.ndarray  # block of queries
    keys: np.ndarray
    kind: np.ndarray
    kinds: tuple[Kind, ...]
    block: int
    tile: int

    @property
    def pairs(self) -> int:
        """Query-key pairs that are computed, per head; by the device with the most."""
        tiles = np.array([*(sum(run.stop - run.start for run in kind.rows) for kind in self.kinds), 0])
        return int(np.max(np.sum(tiles[self.kind], axis=-1))) * self.tile**2


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
    starts = np.arange(0, length, block)
    found = _pairs(starts, starts, block, tile, length if window < 0 else window, by_keys)
    kinds = tuple(dict.fromkeys(kind for _, _, kind in found))
    queries, keys = np.asarray([step[:2] for step in found], np.int32).T
    return Visits(queries, keys, np.asarray([kinds.index(k) for *_, k in found], np.int32), kinds, block, tile)


def divided_visits(queries: np.ndarray, keys: np.ndarray, unit: int, window: int, by_keys: bool) -> Visits:
    """`visits` of devices that share a sequence and hold stretches of `unit` tokens of it: arrays [devices, steps].

    `queries` and `keys` int [devices, stretches of one device]: the positions at which they begin, in the order in which
    they lie there; a negative one is nothing that is seen. Devices with less to do have steps that compute nothing; so
    has, `by_keys`, a block of keys that no query sees: something has to write its gradient.
    """
    chosen = sizes(unit)
    assert chosen is not None, unit
    block, tile = chosen
    within = np.arange(0, unit, block)
    reach = unit + int(queries.max()) if window < 0 else window

    def starts(stretches: np.ndarray) -> np.ndarray:
        return (stretches[:, None] + within).reshape(-1)

    all_steps = [_pairs(starts(q), starts(k), block, tile, reach, by_keys) for q, k in zip(queries, keys, strict=True)]
    if by_keys:
        all_steps = [_with_every_key(steps, keys.shape[1] * len(within)) for steps in all_steps]
    kinds = tuple(dict.fromkeys(kind for steps in all_steps for *_, kind in steps if kind is not None))
    longest = max(len(steps) for steps in all_steps)
    table = [
        [(i, j, len(kinds) if kind is None else kinds.index(kind)) for i, j, kind in steps]
        + [(*steps[-1][:2], len(kinds))] * (longest - len(steps))
        for steps in all_steps
    ]
    return Visits(*np.moveaxis(np.asarray(table, np.int32), 2, 0), kinds, block, tile)


def _pairs(
    queries: np.ndarray, keys: np.ndarray, block: int, tile: int, reach: int, by_keys: bool
) -> list[tuple[int, int, Kind | None]]:
    """(block of queries, block of keys, what is computed) for blocks that begin at these positions."""
    offsets = queries[:, None] - keys[None, :]
    # No keys of the future, and the nearest pair of the two blocks is visible.
    found = np.argwhere((keys >= 0) & (offsets >= 0) & (offsets - (block - 1) < reach))
    steps = [(int(i), int(j)) for i, j in found]
    if by_keys:
        steps.sort(key=lambda pair: (pair[1], pair[0]))
    kinds: dict[int, Kind] = {offset: _kind(offset, block, tile, reach) for offset in {int(offsets[s]) for s in steps}}
    return [(i, j, kinds[int(offsets[i, j])]) for i, j in steps]


def _with_every_key(steps: list[tuple[int, int, Kind | None]], blocks: int) -> list[tuple[int, int, Kind | None]]:
    """The steps, and one without queries of its own for each block of keys that has none."""
    out: list[tuple[int, int, Kind | None]] = []
    for j in range(blocks):
        own = [step for step in steps if step[1] == j]
        out += own or [(out[-1][0] if out else 0, j, None)]
    return out


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
