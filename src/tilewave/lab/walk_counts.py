"""Counters of a walk: a launch whose blocks each go through a long run of slices, across tiles.

Blocks of a walk are alike in nothing: they begin and end at any depth of a tile, take more or fewer slices,
store, sum or write. A few of them stand for no others. But what a block counts is a sum over its items, and
an item's share follows from its slices, the edges that its tile touches, and whether its sums are stored,
summed or written. So a few blocks of shorter walks over the same operands, of which each adds something new,
determine all shares, and those of the whole launch add up to its counters. What depends on addresses (passes
of copies, a few instructions of 64-bit divisions) is that of the blocks executed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilewave.lab.launches import RungLaunch
from tilewave.lab.registry import Tile
from tilewave.planner import Decomposition, Raster

_MOST_TILES = 2
"""Tile rows and columns of a short walk: an inner one and one at the edge."""

_MOST_BLOCKS = 256
"""Blocks of the shortest walk, each of which needs workspace for two tiles."""

_RUNS = (1, 2, 3, 5)
"""How many times as long the runs of other short walks are."""

_CLOSE = 1e-6
"""How far a share may be off, relatively, before the short walks do not determine the launch."""

Share = tuple[str, bool, bool]
"""What a counter is proportional to: a name, and whether the tile is at the bottom and at the right edge."""

Count = Callable[[RungLaunch, int, int, int, dict[int, int]], Mapping[str, float]]
"""Counters of one block of a launch: the launch, its M and N, the block, the tickets not 0 before it."""


@dataclass(frozen=True)
class WalkCounts:
    """Counters of a whole launch by name, and how many blocks were executed to find them."""

    counters: dict[str, float]
    blocks_run: int


def shares_of(cut: Decomposition, raster: Raster, walkers: Sequence[int]) -> Counter[Share]:
    """What these walkers do. A tile's last piece is said to arrive last: somebody's must."""
    shares: Counter[Share] = Counter()
    for walker in walkers:
        shares["blocks", False, False] += 1
        for item in cut.items(walker):
            _, row, column = raster.coordinates(item.tile)
            edges = (row == raster.tiles_m - 1, column == raster.tiles_n - 1)
            ends = item.k_end == cut.k
            shares["slices", *edges] += -(-(item.k_end - item.k_begin) // cut.depth)
            shares["items", *edges] += 1
            shares["ends", *edges] += ends
            shares["written", *edges] += ends
            if item.pieces > 1:
                shares["stored", False, False] += 1
                shares["completed", False, False] += ends
                shares["summed", False, False] += item.pieces * ends
    return shares


def count_walk(planned: RungLaunch, extent: tuple[int, int], tile: Tile, count: Count) -> WalkCounts:
    """Counters of a walk over an M x N ``extent`` in such tiles, from a few blocks of shorter walks."""
    cut, raster = planned.cut, planned.raster
    assert cut is not None
    assert raster is not None
    wanted = shares_of(cut, raster, range(cut.walkers))
    names = sorted(wanted)
    target = np.array([wanted[name] for name in names], float)
    rows: list[list[float]] = []
    found: list[Mapping[str, float]] = []
    for short, walker in _short_walks(planned, tile):
        assert short.cut is not None
        assert short.raster is not None
        m = extent[0] - (raster.tiles_m - short.raster.tiles_m) * tile.bm
        n = extent[1] - (raster.tiles_n - short.raster.tiles_n) * tile.bn
        shares = shares_of(short.cut, short.raster, [walker])
        if not shares.keys() <= wanted.keys():
            continue
        row = [float(shares[name]) for name in names]
        if np.linalg.matrix_rank([*rows, row]) == len(rows):
            continue
        rows.append(row)
        found.append(count(short, m, n, walker, _tickets(short.cut, walker)))
        weights, *_ = np.linalg.lstsq(np.array(rows).T, target, rcond=None)
        if np.allclose(weights @ rows, target, rtol=_CLOSE, atol=_CLOSE):
            totals = {name: float(weights @ [one[name] for one in found]) for name in found[0]}
            return WalkCounts(totals, len(found))
    raise AssertionError(f"no short walks determine the counters of {cut}")


def _short_walks(planned: RungLaunch, tile: Tile) -> Iterator[tuple[RungLaunch, int]]:
    """Blocks of walks over few tiles of the same operands, those with the least to do first."""
    cut, raster = planned.cut, planned.raster
    assert cut is not None
    assert raster is not None
    few = Raster(min(raster.tiles_m, _MOST_TILES), min(raster.tiles_n, _MOST_TILES))
    tiles = few.tiles_m * few.tiles_n
    total = tiles * cut.slices
    several_tiles, whole_tiles, pieces = range(1, tiles), tiles, (2 * tiles + 1, 3 * tiles + 1)
    runs = (-(-min(total, _MOST_BLOCKS) // run) for run in _RUNS)
    blocks = {*several_tiles, whole_tiles, *pieces, *runs}
    candidates = []
    for walkers in sorted(count for count in blocks if count <= total):
        short = Decomposition(tiles, cut.k, cut.depth, 0, 1, walkers)
        launch = replace(
            planned,
            grid=(walkers, 1, 1),
            cut=short,
            raster=few,
            partial_floats=short.slots * tile.bm * tile.bn,
            tickets=short.tickets,
        )
        for walker in range(walkers):
            work = sum(
                -(-(item.k_end - item.k_begin) // cut.depth) + item.pieces for item in short.items(walker)
            )
            candidates.append((work, walkers, walker, launch))
    candidates.sort(key=lambda candidate: candidate[:3])
    for _, _, walker, launch in candidates:
        yield launch, walker


def _tickets(cut: Decomposition, walker: int) -> dict[int, int]:
    """Tickets with which this block arrives last at the tiles whose last piece it has, and only there."""
    return {
        item.ticket: item.pieces - 1
        for item in cut.items(walker)
        if item.pieces > 1 and item.piece == item.pieces - 1
    }
