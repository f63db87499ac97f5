"""The argument block of a product's kernel: `kernels/gemm_args.cuh`'s GemmArgs, packed on the host."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from tilewave.planner.schedules import Decomposition, Raster
from tilewave.problem import BATCH_LEVELS, GemmProblem, MatrixLayout

_MATRIX = "6q"
_LAYOUT = struct.Struct("<" + 6 * _MATRIX + "3q" + "3q" + "6q" + "3q" + "2q" + "2q" + "2f" + "2i")
GEMM_ARGS_BYTES = _LAYOUT.size

OUT_VECTORS = 1
C_VECTORS = 2

#: Offset in the block of each address, by the name of the operand: what changes from call to call.
POINTER_OFFSETS = {
    "a": 0,
    "b": 48,
    "c": 96,
    "bias": 144,
    "out": 192,
    "preactivation": 240,
    "partials": 6 * 48 + 15 * 8,
    "tickets": 6 * 48 + 16 * 8,
}
#: Offset of alpha, behind which beta lies.
SCALARS_OFFSET = 6 * 48 + 19 * 8


@dataclass(frozen=True, slots=True)
class Pointers:
    """Addresses of element (0, 0) of the first item of each operand; 0 where there is none."""

    a: int
    b: int
    out: int
    c: int = 0
    bias: int = 0
    preactivation: int = 0
    partials: int = 0
    tickets: int = 0


def pack_arguments(
    problem: GemmProblem,
    cut: Decomposition,
    raster: Raster,
    pointers: Pointers,
    alpha: float = 1.0,
    beta: float = 0.0,
    *,
    depth: int | None = None,
) -> bytes:
    """The bytes of GemmArgs. ``problem`` has at most `BATCH_LEVELS` batch axes.

    ``depth`` is that of the kernel's slices, by which it steps along K; it is the cut's unless the plan takes
    all of K for one slice, so that blocks walk over whole tiles.
    """
    step = cut.depth if depth is None else depth
    values: list[int | float] = []
    for address, layout in (
        (pointers.a, problem.a),
        (pointers.b, problem.b),
        (pointers.c, problem.c),
        (pointers.bias, problem.bias),
        (pointers.out, problem.out),
        (pointers.preactivation, problem.preactivation),
    ):
        values += _matrix(address, layout)
    values += (problem.m, problem.n, problem.k, *_padded(problem.batch, 1))
    values += (cut.tiles, cut.k, cut.depth, cut.whole_tiles, cut.pieces, cut.walkers)
    values += (raster.tiles_m, raster.tiles_n, raster.band, pointers.partials, pointers.tickets)
    values += (4 * step * problem.a.column, 4 * step * problem.b.row)
    values += (alpha, beta, int(problem.activation), _flags(problem))
    return _LAYOUT.pack(*values)


def vectors(layout: MatrixLayout, width: int = 16) -> bool:
    """Whether ``width``-byte accesses along a row are aligned in every row of every item."""
    elements = width // 4
    strides = (layout.row, *layout.batch)
    return (
        layout.column == 1 and layout.alignment >= width and all(stride % elements == 0 for stride in strides)
    )


def _matrix(address: int, layout: MatrixLayout | None) -> tuple[int, ...]:
    if layout is None:
        return (0,) * 6
    return (address, layout.row, layout.column, *_padded(layout.batch, 0))


def _padded(values: Sequence[int], filler: int) -> tuple[int, ...]:
    return (filler,) * (BATCH_LEVELS - len(values)) + tuple(values)


def _flags(problem: GemmProblem) -> int:
    flags = OUT_VECTORS if vectors(problem.out) else 0
    if problem.c is not None and vectors(problem.c):
        flags |= C_VECTORS
    return flags
