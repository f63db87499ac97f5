"""What the busiest SM moves when tiles are cut: part of both planners' estimates."""

from __future__ import annotations

from tilewave.planner.schedules import Decomposition


def moved_pieces(cut: Decomposition, sms: int) -> int:
    """Pieces that the busiest SM writes to the workspace, plus those that it reads when it sums.

    Whoever arrives last sums a tile; the sums are taken to be spread evenly over the SMs. For a walk this is
    an upper bound: two pieces written and the sum of the most pieces that a tile can have.
    """
    if cut.slots == 0:
        return 0
    if cut.walkers:
        shortest_run = cut.cut_tiles * cut.slices // cut.walkers
        return 2 + min(cut.walkers, -(-(cut.slices - 1) // shortest_run) + 1)
    written = -(-cut.cut_tiles * cut.pieces // sms)
    return written + -(-cut.cut_tiles // sms) * cut.pieces
