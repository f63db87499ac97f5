"""What a launch of a rung needs: which kernel, how many blocks, and the arguments behind M, N and K.

A plain rung has a block a tile. A rung with a schedule deals tiles to blocks as ``tilewave.planner`` says,
takes a workspace for partial sums and counters for its tickets, and its grid follows the GPU's number of SMs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from tilewave.device import DeviceSpec
from tilewave.errors import UsageError
from tilewave.lab.registry import Alternative, Rung, RungSchedule
from tilewave.planner import (
    DATA_PARALLEL,
    FAMILIES,
    LARGE,
    SMALL,
    STREAM_K_WALK,
    Decomposition,
    Problem,
    Raster,
    Schedule,
    Variant,
    decompose,
    estimate,
    least_bare_pieces,
    plan,
    split_k,
    stream_k,
    stream_k_sixteen,
)
from tilewave.planner.schedules import PIECE_BOUNDS, ScheduleKind

MAX_BLOCKS_X = 2**31 - 1
"""CUDA's limit for the x extent of a grid."""

WIDE_BYTES = 16
"""Bytes of a wide load: four floats."""

FLOAT_BYTES = 4

Shape = tuple[int, int, int]
_Array = TypeVar("_Array")


@dataclass(frozen=True)
class RungLaunch:
    """One launch of a rung for one product on one GPU.

    ``integers`` are the schedule's own arguments, behind the pointers to the workspace of ``partial_floats``
    floats and to ``tickets`` 32-bit counters, which are 0 before and after each launch. ``cut`` says which
    block does what; it is None for a plain rung, whose kernel takes no more than A, B, C, M, N and K.
    """

    entry: str
    grid: Shape
    block: Shape
    cut: Decomposition | None = None
    raster: Raster | None = None
    integers: tuple[int, ...] = ()
    partial_floats: int = 0
    tickets: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return math.prod(self.grid)

    def arguments(self, partials: _Array, tickets: _Array) -> list[_Array | int]:
        """The arguments behind M, N and K, given the workspace and the counters."""
        return [] if self.cut is None else [partials, tickets, *self.integers]


def launch_of(rung: Rung, m: int, n: int, k: int, spec: DeviceSpec) -> RungLaunch:
    """The launch of ``rung`` for an M x N x K product on ``spec``.

    Raises ``UsageError`` for sizes that the rung does not take.
    """
    entry = rung.entry_for(m, n, k)
    if rung.schedule is None:
        return RungLaunch(entry, rung.grid(m, n), rung.block)
    variant, schedule = _choose(rung.schedule, m, n, k, spec)
    kernel: Rung | Alternative = rung
    if rung.alternative is not None and variant is SMALL:
        kernel = rung.alternative
        entry = kernel.ragged_entry if entry == rung.ragged_entry else kernel.entry
    tile = kernel.tile
    raster = Raster(-(-m // tile.bm), -(-n // tile.bn))
    cut = decompose(raster.tiles_m * raster.tiles_n, k, tile.bk, schedule, spec.sms)
    if cut.blocks > MAX_BLOCKS_X or cut.tiles > MAX_BLOCKS_X:
        raise UsageError(
            f"{m} x {n} is too large for rung {rung.title}: it needs {max(cut.tiles, cut.blocks):,} blocks, "
            f"and a grid has at most {MAX_BLOCKS_X:,}"
        )
    return RungLaunch(
        entry,
        (cut.blocks, 1, 1),
        kernel.block,
        cut,
        raster,
        _integers(rung.schedule, cut),
        cut.slots * tile.bm * tile.bn,
        cut.tickets,
    )


def check_addresses(rung: Rung, launch: RungLaunch, **operands: int) -> None:
    """Refuse addresses of A, B and C (by name) that the launch's kernel cannot read or write.

    Every kernel accesses whole floats; one of wide loads, which runs where N and K suit it, reads A and B by
    16 bytes. Raises ``UsageError``: on the GPU such a launch would be the end of the whole CUDA context.
    """
    narrow = {rung.ragged_entry, None if rung.alternative is None else rung.alternative.ragged_entry}
    wide = rung.needs is not None and launch.entry not in narrow
    for name, address in operands.items():
        multiple = WIDE_BYTES if wide and name in ("A", "B") else FLOAT_BYTES
        if address % multiple:
            raise UsageError(
                f"{name} starts at address {address:#x}, {address % multiple} bytes past a multiple of "
                f"{multiple}: rung {rung.title} takes {name} from multiples of {multiple} bytes on "
                f"(its kernel here is {launch.entry})"
            )


def _choose(schedule: RungSchedule, m: int, n: int, k: int, spec: DeviceSpec) -> tuple[Variant, Schedule]:
    """The variant and the schedule that the rung's rule picks."""
    if schedule.kind == "select":
        chosen = plan(Problem(m, n, k), spec, family=FAMILIES[schedule.family or ""])
        if chosen.variant in (LARGE, SMALL):
            return chosen.variant, chosen.schedule
        return LARGE, DATA_PARALLEL  # a GPU without cp.async, where the rung copies without it
    if schedule.kind == "split_k":
        return SMALL, split_k(schedule.pieces or 0)
    if schedule.kind == "stream_k_walk":
        return LARGE, STREAM_K_WALK
    rows, columns = LARGE.tile.count(m, n)
    depth = LARGE.tile.bk
    if schedule.kind == "stream_k_sixteen":
        return LARGE, stream_k_sixteen(least_bare_pieces(rows * columns, k, depth, spec.sms))

    def cost(candidate: Schedule) -> float:
        cut = decompose(rows * columns, k, depth, candidate, spec.sms)
        return estimate(LARGE, candidate, cut, spec).cost

    least, most = PIECE_BOUNDS[ScheduleKind.STREAM_K]
    return LARGE, min((stream_k(pieces) for pieces in range(least, most + 1)), key=cost)


def _integers(schedule: RungSchedule, cut: Decomposition) -> tuple[int, ...]:
    """The arguments that the rung's kernel takes behind workspace and tickets."""
    if schedule.kind == "stream_k_walk":
        return ()  # the grid says it all
    if schedule.kind == "split_k" or schedule.family == "three":
        return (cut.pieces,)
    return cut.whole_tiles, cut.pieces


def sample_of_cut(launch: RungLaunch, sample: int) -> list[tuple[tuple[int, ...], int]]:
    """Blocks of a scheduled rung that do the same: a few of each kind to execute, and how many there are.

    Whole and cut tiles, inside, at the right edge, at the bottom edge and in the corner, are told apart. Of a
    cut tile all pieces are executed, so that one of them arrives last. Not for walkers, which are each
    different (`tilewave.lab.walk_counts`).
    """
    cut, raster = launch.cut, launch.raster
    assert cut is not None
    assert raster is not None
    assert not cut.walkers
    kinds: dict[tuple[bool, bool, bool], list[int]] = {}
    for tile in range(cut.tiles):
        _, row, column = raster.coordinates(tile)
        edges = (row == raster.tiles_m - 1, column == raster.tiles_n - 1)
        kinds.setdefault((tile < cut.whole_tiles, *edges), []).append(tile)
    found = []
    for (whole, _, _), tiles in kinds.items():
        picked = sorted({tiles[(2 * i + 1) * len(tiles) // (2 * sample)] for i in range(sample)})
        blocks = tuple(block for tile in picked for block in _blocks_of(cut, tile))
        found.append((blocks, len(tiles) * (1 if whole else cut.pieces)))
    return found


def _blocks_of(cut: Decomposition, tile: int) -> range:
    """The blocks that work on a tile, in the order of its pieces."""
    if tile < cut.whole_tiles:
        return range(tile, tile + 1)
    return range(tile, tile + cut.cut_tiles * cut.pieces, cut.cut_tiles)
