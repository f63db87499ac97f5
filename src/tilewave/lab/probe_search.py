"""Lane maps: which threads of a warp take which patches, and how many passes shared memory then needs.

Pure arithmetic with the rule of `tilewave.emulator.passes`, and without a kernel. In one step of K a thread
reads ``tm`` values of A and ``tn`` of B, four at a time, from slices that lie as rungs from 09 on have them:
rows of A's transposed slice and of B's are contiguous.

A lane map gives each bit of a lane's number to the lane's row or its column in the warp. A thread's rows come
in groups of ``row_group`` neighbours (4: split as in rung 09; ``tm``: one after the other as in rung 08), and
a group of one lane is followed by that of the next; so do its columns.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilewave.emulator.passes import WARP, shared_passes
from tilewave.errors import UsageError

LANE_BITS = 5
WIDE = 4
"""Floats of one 16-byte load."""

Bits = tuple[int, ...]
PATCHES = ((8, 8), (16, 8), (8, 16))
"""Thread patches that the search covers: rows x columns."""

_LANE = np.arange(WARP)


@dataclass(frozen=True)
class LaneMapCost:
    """Passes of a warp for one step of K: of each 16-byte load of A and of B, in the order of the loads."""

    row_bits: Bits
    column_bits: Bits
    row_group: int
    column_group: int
    a_passes: tuple[int, ...]
    b_passes: tuple[int, ...]

    @property
    def passes(self) -> int:
        """Passes of all loads of one step."""
        return sum(self.a_passes) + sum(self.b_passes)

    @property
    def mean(self) -> float:
        """Passes of an average load."""
        return self.passes / (len(self.a_passes) + len(self.b_passes))

    @property
    def lanes(self) -> str:
        """The warp's shape in lanes: rows x columns."""
        return f"{2 ** len(self.row_bits)} x {2 ** len(self.column_bits)}"

    def __str__(self) -> str:
        rows, columns = (" ".join(map(str, bits)) or "none" for bits in (self.row_bits, self.column_bits))
        return (
            f"{self.lanes} lanes, row bits {rows}, column bits {columns}, "
            f"groups of {self.row_group} rows and {self.column_group} columns"
        )


def number_of(bits: Sequence[int]) -> npt.NDArray[np.int64]:
    """For each lane the number whose bit i is bit ``bits[i]`` of the lane."""
    number = np.zeros(WARP, dtype=np.int64)
    for place, bit in enumerate(bits):
        number |= (_LANE >> bit & 1).astype(np.int64) << place
    return number


def load_addresses(bits: Sequence[int], patch: int, group: int) -> npt.NDArray[np.int64]:
    """Byte addresses of a warp's 16-byte loads of ``patch`` values a lane: shape (patch / 4, 32)."""
    if patch % group or group % WIDE:
        raise UsageError(f"groups of {group} do not divide a patch of {patch} into 16-byte loads")
    lane = number_of(bits)
    first = np.arange(0, patch, WIDE)[:, None]
    place = first // group * (group << len(bits)) + lane * group + first % group
    return 4 * place


def passes_of(bits: Sequence[int], patch: int, group: int) -> tuple[int, ...]:
    """Passes of each of the warp's loads of one operand in one step of K."""
    passes, _ = shared_passes(load_addresses(bits, patch, group), None, 16, "load")
    return tuple(int(count) for count in passes)


def groups_of(patch: int) -> tuple[int, ...]:
    """The group sizes that divide a patch: 4, 8, ... up to the whole."""
    return tuple(group for group in (4, 8, 16) if patch % group == 0)


def cost_of(
    row_bits: Bits, column_bits: Bits, tm: int, tn: int, row_group: int, column_group: int
) -> LaneMapCost:
    """What one lane map costs."""
    return LaneMapCost(
        row_bits,
        column_bits,
        row_group,
        column_group,
        passes_of(row_bits, tm, row_group),
        passes_of(column_bits, tn, column_group),
    )


def lane_maps(shapes: Iterable[int] = range(LANE_BITS + 1)) -> Iterator[tuple[Bits, Bits]]:
    """All ways to give the lane's bits to row and column, in any order; ``shapes``: numbers of row bits."""
    for row_count in shapes:
        for order in itertools.permutations(range(LANE_BITS)):
            yield order[:row_count], order[row_count:]


@functools.cache
def search(tm: int, tn: int) -> tuple[LaneMapCost, ...]:
    """Every lane map with every split of rows and columns for a ``tm`` x ``tn`` patch, the cheapest first.

    Of equals those come first whose warp's tile is nearest to a square (it needs the fewest distinct values),
    then those in the order of their bits.
    """
    # Rows and columns cost independently of each other: each operand's passes are worked out once.
    rows = {
        (bits, group): passes_of(bits, tm, group)
        for count in range(LANE_BITS + 1)
        for bits in itertools.permutations(range(LANE_BITS), count)
        for group in groups_of(tm)
    }
    columns = {
        (bits, group): passes_of(bits, tn, group)
        for count in range(LANE_BITS + 1)
        for bits in itertools.permutations(range(LANE_BITS), count)
        for group in groups_of(tn)
    }
    found = [
        LaneMapCost(r, c, row_group, column_group, rows[r, row_group], columns[c, column_group])
        for r, c in lane_maps()
        for row_group in groups_of(tm)
        for column_group in groups_of(tn)
    ]

    def order(cost: LaneMapCost) -> tuple[object, ...]:
        extent = (tm << len(cost.row_bits)) + (tn << len(cost.column_bits))
        return cost.passes, extent, cost.row_group, cost.column_group, cost.row_bits, cost.column_bits

    return tuple(sorted(found, key=order))


ARRANGEMENTS = {"two rows of eight": 1, "4 x 4 square": 2}
"""Arrangements of a half-warp (lanes 0 to 15): how many of the bits 0 to 3 belong to the row."""


@functools.cache
def arrangements(tm: int = 16, tn: int = 8) -> Mapping[str, Sequence[LaneMapCost]]:
    """Every lane map of the two half-warp arrangements that the article compares, with every split.

    The fifth bit may extend the half-warp's rows or its columns.
    """
    found: dict[str, list[LaneMapCost]] = {name: [] for name in ARRANGEMENTS}
    for row_bits, column_bits in lane_maps():
        in_half = sum(bit < LANE_BITS - 1 for bit in row_bits)
        for name, wanted in ARRANGEMENTS.items():
            if in_half == wanted:
                found[name] += [
                    cost_of(row_bits, column_bits, tm, tn, row_group, column_group)
                    for row_group in groups_of(tm)
                    for column_group in groups_of(tn)
                ]
    return found


READINGS = ("an average load", "an average load of A", "an average load of B", "the costliest load")
"""What "passes" of the article could mean for a kernel whose loads differ."""


def reading(cost: LaneMapCost, which: str) -> float:
    """The passes of a lane map in one of `READINGS`."""
    if which == READINGS[0]:
        return cost.mean
    if which == READINGS[1]:
        return sum(cost.a_passes) / len(cost.a_passes)
    if which == READINGS[2]:
        return sum(cost.b_passes) / len(cost.b_passes)
    if which == READINGS[3]:
        return float(max(*cost.a_passes, *cost.b_passes))
    raise UsageError(f"there is no reading {which!r}; there are {', '.join(READINGS)}")


def attained(costs: Sequence[LaneMapCost], which: str) -> dict[float, int]:
    """How many of the lane maps need each number of passes, ascending."""
    values: dict[float, int] = {}
    for cost in costs:
        value = round(reading(cost, which), 3)
        values[value] = values.get(value, 0) + 1
    return dict(sorted(values.items()))
