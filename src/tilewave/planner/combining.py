"""What the busiest SM moves when tiles are cut: part of both planners' estimates."""

from __future__ import annotations

from tilewave.planner.schedules import Decomposition


def run_of(pieces: int) -> int:
    """Pieces of a run where they are added in two rounds: ``run_of`` of ``kernels/combining.cuh``."""
    run = 4
    while run * run < pieces:
        run *= 2
    return run


def moved_pieces(cut: Decomposition, sms: int, alone: int | None = None) -> int:
    """Pieces that the busiest SM writes to the workspace, plus those that it reads when it sums.

    Whoever arrives last sums a tile; the sums are taken to be spread evenly over the SMs. For a walk this is
    an upper bound: two pieces written and the sum of the most pieces that a tile can have. With ``alone``,
    more pieces of a tile than that are added in runs, each by a block that writes its sum, and then the runs.
    """
    if cut.slots == 0:
        return 0
    if cut.walkers:
        return 2 + added_pieces(most_pieces(cut), 1, sms, alone)
    written = -(-cut.cut_tiles * cut.pieces // sms)
    return written + added_pieces(cut.pieces, cut.cut_tiles, sms, alone)


def most_pieces(cut: Decomposition) -> int:
    """The most pieces that a cut tile can have."""
    if not cut.walkers:
        return cut.pieces
    shortest_run = cut.cut_tiles * cut.slices // cut.walkers
    return min(cut.walkers, -(-(cut.slices - 1) // shortest_run) + 1)


def added_pieces(pieces: int, tiles: int, sms: int, alone: int | None) -> int:
    """Pieces that the busiest SM moves when each of ``tiles`` tiles' is added, in one round or two."""
    if alone is None or pieces <= alone:
        return -(-tiles // sms) * pieces
    run = run_of(pieces)
    runs = -(-pieces // run)
    return -(-tiles * runs // sms) * (run + 1) + -(-tiles // sms) * runs
