"""Which schedules an instance is weighed under, and how one is bound to a problem."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from tilewave.planner.gemm.estimate import LEAST_SLICES, Weigher
from tilewave.planner.gemm.options import PlanOptions
from tilewave.planner.gemm.records import workspace_of
from tilewave.planner.schedules import (
    DATA_PARALLEL,
    PIECE_BOUNDS,
    STREAM_K_WALK,
    Decomposition,
    Schedule,
    ScheduleKind,
    behind_whole_waves,
    decompose,
    split_k,
    stream_k,
)

MAX_BLOCKS = 2**31 - 1
"""CUDA's limit on blocks along x."""

MANY_WAVES = 4
"""Assumed: with this many tiles an SM, cutting all of them is not worth weighing."""

_LADDER = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_STREAM_K = tuple(stream_k(pieces) for pieces in (2, 3, 4))
_SPLITS = tuple(split_k(pieces) for pieces in range(2, PIECE_BOUNDS[ScheduleKind.SPLIT_K][1] + 1))


def schedules_for(weigher: Weigher, sms: int, options: PlanOptions) -> Iterator[Schedule]:
    """The schedules worth weighing, in order of preference where predictions are equal."""
    kind, pieces = options.wanted
    if kind is not None and pieces is not None:
        yield Schedule(kind, pieces)
        return
    instance = weigher.model.instance
    if kind in (None, ScheduleKind.DATA_PARALLEL):
        yield DATA_PARALLEL
    if options.batch_invariant:
        return
    cut = instance.cuttable and weigher.slices >= 2 * LEAST_SLICES
    incomplete = weigher.tiles > sms and weigher.tiles % sms != 0
    if kind in (None, ScheduleKind.STREAM_K):
        if cut and incomplete:
            yield from _STREAM_K
        elif kind is not None:
            yield _STREAM_K[0]
    if kind in (None, ScheduleKind.SPLIT_K):
        if cut:
            for count in _split_pieces(weigher, sms, forced=kind is not None):
                yield _SPLITS[count - 2]
        elif kind is not None:
            yield _SPLITS[0]
    if kind is None and cut and weigher.tiles % sms:
        yield STREAM_K_WALK


def _split_pieces(weigher: Weigher, sms: int, *, forced: bool) -> list[int]:
    """Numbers of pieces: those that fill one, two and four blocks an SM, or all it holds, and some below."""
    if weigher.tiles >= MANY_WAVES * sms and not forced:
        return []
    most = min(PIECE_BOUNDS[ScheduleKind.SPLIT_K][1], weigher.slices // LEAST_SLICES)
    filling = [min(most, sms * blocks // weigher.tiles) for blocks in (1, 2, 4, weigher.model.resident)]
    top = max(filling)
    # A rung of the ladder next to a number that fills the SMs is not worth weighing.
    found = {pieces for pieces in filling if pieces >= 2}
    beside = {pieces + near for pieces in found for near in range(-(pieces // 8), pieces // 8 + 1)}
    found.update(pieces for pieces in takewhile(top.__gt__, _LADDER) if pieces not in beside)
    return sorted(found) or ([2] if forced else [])


def bind(weigher: Weigher, k: int, schedule: Schedule, sms: int, options: PlanOptions) -> Decomposition:
    """The decomposition that a schedule comes to for a weigher's tiles.

    Whole tiles get a block each; where ``max_sms`` or CUDA's limit allows fewer blocks, so many blocks walk
    over whole tiles instead, with the same bits: a tile is then one slice as deep as K. Pieces that were
    asked for are walked over likewise where ``max_sms`` allows fewer blocks than pieces. A walk follows whole
    waves of such blocks, unless the number of blocks is capped.
    """
    tiles, capped = weigher.tiles, options.max_sms is not None
    walkers = sms if capped else sms * weigher.model.resident
    if schedule.kind is ScheduleKind.STREAM_K_WALK:
        walk = decompose(tiles, k, weigher.depth, schedule, walkers)
        return walk if capped else behind_whole_waves(walk)
    if schedule.kind is ScheduleKind.DATA_PARALLEL and tiles > (sms if capped else MAX_BLOCKS):
        return Decomposition(tiles, k, weigher.slices * weigher.depth, 0, 1, walkers)
    cut = decompose(tiles, k, weigher.depth, schedule, sms, LEAST_SLICES)
    if capped and options.schedule is not None and cut.blocks > sms:
        # A slice is then a piece; those of one tile that follow one another in a block's run are one.
        of_a_piece = -(-weigher.slices // cut.pieces) * weigher.depth
        return decompose(tiles, k, of_a_piece, STREAM_K_WALK, sms)
    return cut


def why_useless(
    weigher: Weigher, schedule: Schedule, cut: Decomposition, sms: int, options: PlanOptions
) -> str | None:
    """Why a bound schedule cannot, or may not, run; None when it can."""
    instance = weigher.model.instance
    if not instance.cuttable and cut.pieces > 1:
        return "its tiles cannot be cut along K"
    if not instance.cuttable and cut.walkers and cut.slices > 1:
        return "its tiles cannot be cut along K, as a walk would"
    if cut.blocks > MAX_BLOCKS:
        return f"{cut.blocks:,} blocks are more than a launch can have ({MAX_BLOCKS:,})"
    if options.max_sms is not None and cut.blocks > sms:
        return f"{cut.blocks:,} blocks would use more than {sms} SMs"
    if (
        cut.tiles != cut.whole_tiles
        and (needed := sum(workspace_of(instance, cut))) > options.workspace_limit
    ):
        return f"a workspace of {needed:,} bytes is more than the limit of {options.workspace_limit:,}"
    return None
