"""What `dot_stream` and `column_stream` share: a product with few rows, or few columns, of C."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tilewave.kernels.arguments import vectors
from tilewave.kernels.instances import Access, Contiguous, Instance
from tilewave.problem import GemmProblem, MatrixLayout

MOST_FEW = 16
"""The most rows, or columns, that count as few."""


def few_of(problem: GemmProblem, mirrored: bool) -> int:
    """Lines of the short operand: rows of A, or mirrored columns of B."""
    return problem.n if mirrored else problem.m


def at_most(few: int, mirrored: bool) -> str:
    """How many lines of the short operand a tile has, in words."""
    line = "column" if mirrored else "row"
    return f"one {line}" if few == 1 else f"up to {few} {line}s"


def long_operand(problem: GemmProblem, mirrored: bool) -> MatrixLayout:
    """The layout of the operand that is streamed, with its lines as rows and K along them."""
    return problem.a if mirrored else problem.b.transposed


def short_operand(problem: GemmProblem, mirrored: bool) -> MatrixLayout:
    """The layout of the other one, likewise."""
    return problem.b.transposed if mirrored else problem.a


@dataclass(frozen=True, slots=True)
class Stream:
    """A streaming kernel's instance; a tile has ``few`` lines of the short operand, ``many`` of the long."""

    instance: Instance
    few: int
    many: int
    width: int
    mirrored: bool


def added_alone(outputs: int, threads: int) -> int:
    """Most pieces of a tile that one block adds: 16 for each group of threads, ``combine`` of streams.cuh."""
    return 16 * min(32, max(1, 4 * threads // outputs))


def smallest(streams: Iterable[Stream], few: int) -> Stream | None:
    """Of streams in growing order, the first whose short side holds ``few`` lines."""
    return next((stream for stream in streams if stream.few >= few), None)


def refuses(instance: Instance, problem: GemmProblem) -> str | None:
    """Why the instance cannot compute the problem, or None: it wants vectors where there are none."""
    if not problem.product:
        return "there is no product to compute"
    for name, access, layout in (("A", instance.a, problem.a), ("B", instance.b, problem.b.transposed)):
        if access is None or access.width == 4:
            continue
        along_k = access.contiguous is Contiguous.K
        if not vectors(layout if along_k else layout.transposed, access.width):
            axis = "K" if along_k else "M" if name == "A" else "N"
            return f"{name} cannot be read by {access.width} bytes along {axis}"
    return None


def accesses(few: Access | None, many: Access, mirrored: bool) -> tuple[Access | None, Access | None]:
    """(access to A, access to B) from those to the short and to the long operand."""
    return (many, few) if mirrored else (few, many)
