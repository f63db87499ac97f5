"""Tiles of warps of 64 x 64 outputs, for products that fill the GPU: 16 x 8 a thread, slices eight deep.
Beside them, for the largest products, wide tiles of 12 x 16 or 16 x 12 outputs a thread.

They read any strides along K; along m or n, also element by element, only neighbours.
"""

from __future__ import annotations

from itertools import product

from tilewave.kernels.access import WIDTHS, common_access, unsuited
from tilewave.kernels.instances import Access, Contiguous, Instance
from tilewave.problem import GemmProblem

name = "large_tile"

_DEPTH = 8
_TASK_BYTES = 256
#: Warps of 64 x 64 outputs along M and N, blocks an SM, and what the tile is there for.
_TILES = (
    (2, 4, 1, "the fewest loads from shared memory a multiply-add, for wide products"),
    (4, 2, 1, "the fewest loads from shared memory a multiply-add, for tall products"),
    (2, 2, 2, "half the largest tile: fuller waves and less waste at the edges, two blocks an SM"),
    (2, 1, 4, "a quarter of the largest tile for tall C, columns from 64 on"),
    (1, 2, 4, "a quarter of the largest tile for wide C, rows from 64 on"),
    (1, 1, 8, "a warp a tile: the least waste at edges and in the last wave"),
)
_WORDS = {16: "operands on 16 bytes", 4: "any lengths and strides"}


def _instance(warps_m: int, warps_n: int, blocks: int, reason: str, a: Access, b: Access) -> Instance:
    bm, bn = 64 * warps_m, 64 * warps_n
    letters = layout_letters(a.contiguous, b.contiguous)
    flags = f"{_flag(a)}, {a.width}, {_flag(b)}, {b.width}"
    return Instance(
        name=f"{name}_{bm}x{bn}_{letters}_{a.width}",
        family=name,
        header="kernels/large_tile.cuh",
        entry=f"tilewave::large_tile<{warps_m}, {warps_n}, {blocks}, {flags}>",
        bm=bm,
        bn=bn,
        bk=_DEPTH,
        tm=16,
        tn=8,
        threads=32 * warps_m * warps_n,
        shared_bytes=2 * _stage_bytes(bm, bn, a, b) + _TASK_BYTES,
        a=a,
        b=b,
        reason=f"{reason}; layout {letters.upper()}, {_WORDS[a.width]}",
        keeps_own=True,
    )


def _wide(tm: int, tn: int, a: Contiguous, b: Contiguous) -> Instance:
    row_lanes = 8 if tm == 12 else 4
    bm, bn, width = 2 * tm * row_lanes, 2 * tn * (32 // row_lanes), 16
    letters = layout_letters(a, b)
    of_a, of_b = Access(a, width), Access(b, width)
    return Instance(
        name=f"{name}_{bm}x{bn}_{letters}_{width}",
        family=name,
        header="kernels/wide_tile.cuh",
        entry=f"tilewave::wide_tile<{tm}, {tn}, {_flag(of_a)}, {_flag(of_b)}>",
        bm=bm,
        bn=bn,
        bk=_DEPTH,
        tm=tm,
        tn=tn,
        threads=128,
        shared_bytes=2 * _stage_bytes(bm, bn, of_a, of_b) + _TASK_BYTES,
        a=of_a,
        b=of_b,
        reason="the fewest loads and other instructions a multiply-add, for products of many tiles; "
        f"layout {letters.upper()}, {_WORDS[width]}",
        keeps_own=True,
        needs_new_loop=True,
    )


def _stage_bytes(bm: int, bn: int, a: Access, b: Access) -> int:
    """Bytes from one stage to the other: `large_stage_bytes` of the template."""
    pitches = (extent + 4 * (access.contiguous is Contiguous.K) for extent, access in ((bm, a), (bn, b)))
    needed: int = 1024 + 4 * _DEPTH * sum(pitches)
    return 1 << (needed - 1).bit_length()


def layout_letters(a: Contiguous, b: Contiguous) -> str:
    """The layout as BLAS names it: n for an operand that lies row by row, t for one column by column."""
    return ("n" if a is Contiguous.K else "t") + ("t" if b is Contiguous.K else "n")


def _flag(access: Access) -> str:
    return "true" if access.contiguous is Contiguous.K else "false"


_BY_ACCESS = {
    (of_a, of_b, width): tuple(_instance(*tile, Access(of_a, width), Access(of_b, width)) for tile in _TILES)
    for width, of_a, of_b in product(WIDTHS, Contiguous, Contiguous)
}
for _tile in (
    _wide(16, 12, Contiguous.K, Contiguous.OTHER),
    _wide(12, 16, Contiguous.OTHER, Contiguous.OTHER),
    _wide(12, 16, Contiguous.OTHER, Contiguous.K),
):
    assert _tile.a is not None
    assert _tile.b is not None
    _BY_ACCESS[_tile.a.contiguous, _tile.b.contiguous, _tile.a.width] += (_tile,)
_INSTANCES = tuple(instance for group in _BY_ACCESS.values() for instance in group)

#: The loop over K counts its slices in 32 bits.
_MOST_DEPTH = _DEPTH * 2**31


def instances() -> tuple[Instance, ...]:
    """Every instance of the family."""
    return _INSTANCES


def matching(problem: GemmProblem) -> tuple[Instance, ...]:
    """The tiles that fit into C, in the problem's layout and by its widest vectors."""
    if not problem.product or problem.m < 64 or problem.n < 64:
        return ()
    a, b, width = common_access(problem)
    # Along K a tile takes any strides, along the other axis only neighbours.
    if problem.a.row != 1:
        a = Contiguous.K
    if problem.b.column != 1:
        b = Contiguous.K
    group = _BY_ACCESS[a, b, width]
    return tuple(instance for instance in group if refuses(instance, problem) is None)


def refuses(instance: Instance, problem: GemmProblem) -> str | None:
    """Why the instance cannot compute the problem, or None."""
    if not problem.product:
        return "there is no product to compute"
    if problem.m < instance.bm or problem.n < instance.bn:
        return (
            f"its tile of {instance.bm} x {instance.bn} must fit into C, which is {problem.m} x {problem.n}"
        )
    if problem.k >= _MOST_DEPTH:
        return f"its K is below {_MOST_DEPTH}, not {problem.k}"
    for access, operand, stride in (
        (instance.a, "a", problem.a.row),
        (instance.b, "b", problem.b.column),
    ):
        if (reason := unsuited(access, operand, problem)) is not None:
            return reason
        if access is not None and access.contiguous is Contiguous.OTHER and stride != 1:
            axis = {"a": "m", "b": "n"}[operand]
            return f"it reads {operand} along {axis}, where neighbours lie {stride} elements apart, not 1"
    return None
