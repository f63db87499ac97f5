"""How the work of a product is cut and dealt to blocks, as integer arithmetic.

A product is a row of *tiles* (of C, over all batches), each as deep as K. Along K a tile is walked in
*slices* of ``depth``; the last slice may be ragged. A tile always has at least one slice, an empty one when K
is 0, because C must be written even then. A schedule gives every block its work items: a tile, a range of K,
and, when the tile is cut, which piece of how many that range is.

Everything a block needs follows from its index and the few integers of `Decomposition`, in closed form and in
64-bit arithmetic; ``kernels/stream_k.cuh`` holds the same functions for the device, and a test compares the
two.

No block waits for another. Each piece of a cut tile goes to its own *slot* of the workspace, then its block
takes a *ticket* of the tile (an atomic counter that wraps to zero by itself); the block that takes the last
ticket sums all slots in piece order and writes C. The sum's order is fixed, so the bits are the same in every
run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from tilewave.errors import UsageError

INT64_MAX = 2**63 - 1


class ScheduleKind(StrEnum):
    """The ways of dealing tiles to blocks; the value is the name used in JSON and on the command line."""

    DATA_PARALLEL = "data_parallel"
    SPLIT_K = "split_k"
    STREAM_K_WALK = "stream_k_walk"
    STREAM_K_SIXTEEN = "stream_k_sixteen"
    STREAM_K = "stream_k"


# Fewest and most pieces that a schedule of each kind may be asked for. The article cut a tile three ways in
# split-K, into up to 16 pieces in its second attempt at stream-K, and into two to four in the version it
# kept.
PIECE_BOUNDS: dict[ScheduleKind, tuple[int, int]] = {
    ScheduleKind.DATA_PARALLEL: (1, 1),
    ScheduleKind.SPLIT_K: (2, 1024),
    ScheduleKind.STREAM_K_WALK: (1, 1),
    ScheduleKind.STREAM_K_SIXTEEN: (1, 16),
    ScheduleKind.STREAM_K: (2, 4),
}


@dataclass(frozen=True)
class Schedule:
    """A way of dealing tiles to blocks.

    * ``data_parallel``: a block a tile.
    * ``split_k``: every tile is cut into ``pieces``, a block a piece.
    * ``stream_k_walk``: the article's first attempt. One block an SM; each walks an equally long run of
      slices that crosses tile boundaries. ``pieces`` is 1 and means nothing: boundaries fall where they fall.
    * ``stream_k_sixteen``: the second attempt. Tiles of the full waves are whole, those of the incomplete
      wave are cut into ``pieces``, 1 to 16.
    * ``stream_k``: as kept. The same with two to four pieces.
    """

    kind: ScheduleKind
    pieces: int = 1

    def __post_init__(self) -> None:
        least, most = PIECE_BOUNDS[self.kind]
        if not least <= self.pieces <= most:
            raise UsageError(f"{self.kind} takes {least} to {most} pieces, not {self.pieces}")

    def __str__(self) -> str:
        match self.kind:
            case ScheduleKind.DATA_PARALLEL:
                return "data-parallel"
            case ScheduleKind.SPLIT_K:
                return f"split-K {self.pieces} ways"
            case ScheduleKind.STREAM_K_WALK:
                return "stream-K walk"
            case _:
                return f"stream-K {self.pieces} pieces"


DATA_PARALLEL = Schedule(ScheduleKind.DATA_PARALLEL)
STREAM_K_WALK = Schedule(ScheduleKind.STREAM_K_WALK)


def split_k(pieces: int) -> Schedule:
    """Every tile cut into ``pieces`` along K."""
    return Schedule(ScheduleKind.SPLIT_K, pieces)


def stream_k(pieces: int) -> Schedule:
    """The tiles of the incomplete wave cut into two to four pieces."""
    return Schedule(ScheduleKind.STREAM_K, pieces)


def stream_k_sixteen(pieces: int) -> Schedule:
    """The tiles of the incomplete wave cut into 1 to 16 pieces."""
    return Schedule(ScheduleKind.STREAM_K_SIXTEEN, pieces)


@dataclass(frozen=True)
class WorkItem:
    """One block's walk along K in one tile: elements ``k_begin`` to ``k_end`` (exclusive).

    ``piece`` of ``pieces`` counts along K. A whole tile is piece 0 of 1, with ``slot`` and ``ticket`` -1: it
    goes straight to C. Otherwise ``slot`` is where this piece's partial sums go and ``ticket`` the tile's
    counter.
    """

    tile: int
    k_begin: int
    k_end: int
    piece: int
    pieces: int
    slot: int
    ticket: int

    def __str__(self) -> str:
        part = "whole" if self.pieces == 1 else f"piece {self.piece} of {self.pieces}, slot {self.slot}"
        return f"tile {self.tile}, k {self.k_begin}..{self.k_end} ({part})"


@dataclass(frozen=True)
class Decomposition:
    """A schedule bound to a product: the integers from which every block computes its own items.

    ``tiles`` of ``slices`` slices each; slice s covers K elements s*depth to min(k, (s+1)*depth). The first
    ``whole_tiles`` blocks do one whole tile each. The other tiles are dealt in one of two ways:

    * ``walkers`` = 0: each is cut into ``pieces`` even pieces, a block a piece, all first pieces first, so
      that blocks that run together read the same slices of A and B;
    * ``walkers`` > 0: that many blocks share the tiles' slices, laid end to end, in even runs.

    "Even" means that lengths differ by one slice at most and the longer ones come first.
    """

    tiles: int
    k: int
    depth: int
    whole_tiles: int
    pieces: int
    walkers: int

    @property
    def slices(self) -> int:
        """Slices a tile, at least one."""
        return max(1, -(-self.k // self.depth))

    @property
    def cut_tiles(self) -> int:
        """Tiles that are not dealt whole (a walker may still happen to do one alone)."""
        return self.tiles - self.whole_tiles

    @property
    def blocks(self) -> int:
        """Blocks of the launch."""
        return self.whole_tiles + (self.walkers or self.cut_tiles * self.pieces)

    @property
    def slots(self) -> int:
        """Slots of the workspace, each the size of one tile of C."""
        if self.walkers:
            return 2 * self.walkers
        return self.cut_tiles * self.pieces if self.pieces > 1 else 0

    @property
    def tickets(self) -> int:
        """32-bit counters, zero before the launch and again after it."""
        if self.walkers:
            return self.walkers
        return self.cut_tiles if self.pieces > 1 else 0

    @property
    def counters(self) -> int:
        """The product's kernels add many pieces in runs, each with a counter of its own, that of its first
        piece's slot: a counter a slot behind the tickets."""
        return self.tickets + self.slots

    def items(self, block: int) -> Iterator[WorkItem]:
        """The items of ``block``, in the order in which it does them."""
        if not 0 <= block < self.blocks:
            raise UsageError(f"block {block} is outside the launch of {self.blocks} blocks")
        if block < self.whole_tiles:
            yield self._item(block, 0, self.slices, 0, 1, -1, -1)
        elif not self.walkers:
            yield self._even_piece(block - self.whole_tiles)
        else:
            yield from self._walk(block - self.whole_tiles)

    def all_items(self) -> Iterator[tuple[int, WorkItem]]:
        """Every (block, item), block by block."""
        for block in range(self.blocks):
            for item in self.items(block):
                yield block, item

    def slot_of(self, item: WorkItem, piece: int) -> int:
        """The slot of another piece of ``item``'s tile: what the last arriver sums, piece by piece."""
        if item.pieces == 1 or not 0 <= piece < item.pieces:
            raise UsageError(f"{item} has no slot for piece {piece}")
        if self.walkers:
            # The ticket is the tile's first walker, whose last item this tile is; the later ones begin with
            # it.
            return 2 * item.ticket + max(1, 2 * piece)
        return item.ticket * self.pieces + piece

    def _item(
        self, tile: int, begin: int, end: int, piece: int, pieces: int, slot: int, ticket: int
    ) -> WorkItem:
        k_begin, k_end = min(begin * self.depth, self.k), min(end * self.depth, self.k)
        return WorkItem(tile, k_begin, k_end, piece, pieces, slot, ticket)

    def _even_piece(self, index: int) -> WorkItem:
        """The item of the ``index``-th block behind the whole tiles."""
        piece, cut = divmod(index, self.cut_tiles)
        begin = even_begin(self.slices, self.pieces, piece)
        end = even_begin(self.slices, self.pieces, piece + 1)
        slot, ticket = (cut * self.pieces + piece, cut) if self.pieces > 1 else (-1, -1)
        return self._item(self.whole_tiles + cut, begin, end, piece, self.pieces, slot, ticket)

    def _walk(self, walker: int) -> Iterator[WorkItem]:
        """The items of one walker: its run of slices, broken at tile boundaries."""
        total = self.cut_tiles * self.slices
        position = even_begin(total, self.walkers, walker)
        run_end = even_begin(total, self.walkers, walker + 1)
        while position < run_end:
            cut = position // self.slices
            tile_begin = cut * self.slices
            tile_end = tile_begin + self.slices
            end = min(run_end, tile_end)
            first = even_owner(total, self.walkers, tile_begin)
            pieces = even_owner(total, self.walkers, tile_end - 1) - first + 1
            piece = walker - first
            slot, ticket = (2 * walker + (piece == 0), first) if pieces > 1 else (-1, -1)
            begin = position - tile_begin
            tile = self.whole_tiles + cut
            yield self._item(tile, begin, end - tile_begin, piece, pieces, slot, ticket)
            position = end

    def busiest_slices(self, sms: int) -> int:
        """Slices of the busiest SM when block b runs on SM b mod ``sms``: the article's estimate, bare.

        Resident blocks share an SM's throughput, so only their sum counts, not how many run at once. Equal to
        a count over all blocks (SM 0 is always a busiest one), without the count.
        """
        whole = -(-self.whole_tiles // sms) * self.slices
        if self.cut_tiles == 0:
            return whole
        if self.whole_tiles % sms:
            raise UsageError(f"{self.whole_tiles} whole tiles are not full waves of {sms} SMs")
        if self.walkers:
            base, longer = divmod(self.cut_tiles * self.slices, self.walkers)
            rounds = -(-self.walkers // sms)
            return whole + rounds * base + min(rounds, -(-longer // sms))
        # SM 0 takes pieces 0, sms, 2 sms, ... of the list "all first pieces, all second pieces, ...".
        base, longer = divmod(self.slices, self.pieces)
        rounds = -(-self.cut_tiles * self.pieces // sms)
        return whole + rounds * base + min(rounds, -(-longer * self.cut_tiles // sms))


def even_begin(total: int, parts: int, part: int) -> int:
    """Where ``part`` begins when ``total`` is cut into ``parts`` even parts, the longer first."""
    base, longer = divmod(total, parts)
    return part * base + min(part, longer)


def even_owner(total: int, parts: int, position: int) -> int:
    """The part that holds ``position``; needs parts <= total, so that no part is empty."""
    base, longer = divmod(total, parts)
    in_longer = longer * (base + 1)
    if position < in_longer:
        return position // (base + 1)
    return longer + (position - in_longer) // base


def decompose(
    tiles: int, k: int, depth: int, schedule: Schedule, sms: int, least_slices: int = 1
) -> Decomposition:
    """Bind ``schedule`` to ``tiles`` tiles of depth ``k``, walked in slices of ``depth``, on ``sms`` SMs.

    A tile is cut into fewer pieces than asked for, down to one, where a piece would have fewer than
    ``least_slices`` slices; a walk has no more blocks than slices. Raises ``UsageError`` for sizes below
    their least and for more than 2^63 - 1 slices in all, which no device arithmetic could count.
    """
    for name, value, least in (
        ("tiles", tiles, 0),
        ("k", k, 0),
        ("depth", depth, 1),
        ("sms", sms, 1),
        ("least_slices", least_slices, 1),
    ):
        if value < least:
            raise UsageError(f"{name} must be at least {least}, not {value}")
    slices = max(1, -(-k // depth))
    if tiles * slices > INT64_MAX or k + depth > INT64_MAX:
        raise UsageError(f"{tiles} tiles of depth {k} have more than 2^63 - 1 slices")
    kind = schedule.kind
    if kind is ScheduleKind.STREAM_K_WALK:
        return Decomposition(tiles, k, depth, 0, 1, min(sms, tiles * slices))
    pieces = min(schedule.pieces, max(1, slices // least_slices))
    if pieces == 1:
        return Decomposition(tiles, k, depth, tiles, 1, 0)
    whole = 0 if kind is ScheduleKind.SPLIT_K else tiles // sms * sms
    return Decomposition(tiles, k, depth, whole, pieces, 0)


def behind_whole_waves(walk: Decomposition) -> Decomposition:
    """A walk that leaves all full waves of tiles but the last to blocks of their own, a block a tile.

    A wave is as many tiles as the walk has walkers. They share what is left, one to two waves, so they are as
    evenly loaded as before, but most tiles run side by side, where they read the same slices of A and B.
    """
    waves = walk.tiles // walk.walkers if walk.walkers else 0
    return replace(walk, whole_tiles=max(0, waves - 1) * walk.walkers)


@dataclass(frozen=True)
class Raster:
    """The order of tiles: which rows and columns of C, in which batch, tile number t covers.

    Tiles go row by row in bands of ``band`` tile rows, down each column of a band before the next column,
    batch after batch; ``band`` 1 is plain row-major. Bands keep the tiles of a wave close to square, so that
    the wave reads fewer distinct rows of A and columns of B.
    """

    tiles_m: int
    tiles_n: int
    band: int = 1

    def __post_init__(self) -> None:
        if self.tiles_m < 0 or self.tiles_n < 0 or self.band < 1:
            raise UsageError(
                f"a raster needs tile counts of at least 0 and a band of at least 1, not {self.tiles_m} x "
                f"{self.tiles_n} and {self.band}"
            )

    def coordinates(self, tile: int) -> tuple[int, int, int]:
        """(batch, tile row, tile column) of ``tile``."""
        batch, within = divmod(tile, self.tiles_m * self.tiles_n)
        band, offset = divmod(within, self.band * self.tiles_n)
        first_row = band * self.band
        rows = min(self.band, self.tiles_m - first_row)
        column, row = divmod(offset, rows)
        return batch, first_row + row, column
