"""How the operands of a problem can be read: the axis along which neighbours lie, and the widest vectors."""

from __future__ import annotations

from tilewave.kernels.instances import Access, Contiguous
from tilewave.problem import GemmProblem, MatrixLayout

WIDTHS = (16, 4)
"""Bytes that the tile kernels read at once, the most first."""


def access_of_a(problem: GemmProblem) -> Access:
    """The widest access to A."""
    layout = problem.a
    return _widest(layout, layout.column, problem.k, layout.row, problem.m)


def access_of_b(problem: GemmProblem) -> Access:
    """The widest access to B."""
    layout = problem.b
    return _widest(layout, layout.row, problem.k, layout.column, problem.n)


def common_access(problem: GemmProblem) -> tuple[Contiguous, Contiguous, int]:
    """The axes along which A and B are read, and the widest vectors that suit both."""
    a, b = access_of_a(problem), access_of_b(problem)
    return a.contiguous, b.contiguous, min(a.width, b.width)


def unsuited(access: Access | None, operand: str, problem: GemmProblem) -> str | None:
    """Why ``operand`` ("a" or "b") cannot be read by ``access``, or None."""
    if access is None or access.width == 4:
        return None
    if operand == "a":
        layout, k_stride, other_stride, other = problem.a, problem.a.column, problem.a.row, problem.m
    else:
        layout, k_stride, other_stride, other = problem.b, problem.b.row, problem.b.column, problem.n
    along = (k_stride, problem.k), (other_stride, other)
    if access.contiguous is Contiguous.OTHER:
        along = along[1], along[0]
    if _fits(layout, access.width, *along[0], *along[1]):
        return None
    axis = "k" if access.contiguous is Contiguous.K else {"a": "m", "b": "n"}[operand]
    return (
        f"{operand} cannot be read by {access.width} bytes along {axis}: that needs neighbours along {axis}, "
        f"a length of whole vectors, and rows that all begin at {access.width} bytes"
    )


def _widest(layout: MatrixLayout, k_stride: int, k: int, other_stride: int, other: int) -> Access:
    along_k, along_other = (k_stride, k, other_stride, other), (other_stride, other, k_stride, k)
    for width in WIDTHS[:-1]:
        if _fits(layout, width, *along_k):
            return Access(Contiguous.K, width)
        if _fits(layout, width, *along_other):
            return Access(Contiguous.OTHER, width)
    # An axis of one element has no neighbours, and one of stride 0 the same element again.
    return Access(Contiguous.K if _apart(k_stride, k) < _apart(other_stride, other) else Contiguous.OTHER, 4)


def _apart(stride: int, extent: int) -> float:
    return abs(stride) if extent > 1 and stride != 0 else float("inf")


def _fits(layout: MatrixLayout, width: int, stride: int, extent: int, line_stride: int, lines: int) -> bool:
    """Whether lines along an axis are runs of whole vectors, each aligned."""
    elements = width // 4
    return (
        stride == 1
        and extent % elements == 0
        and layout.alignment >= width
        and (lines == 1 or line_stride % elements == 0)
        and all(step % elements == 0 for step in layout.batch)
    )
