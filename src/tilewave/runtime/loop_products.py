"""The products on which a kernel's new loop must give the bits of the compiler's loop.

Ragged along every axis; depths from less than a slice to many; every kind of schedule; numbers drawn at
random, small integers, NaNs and infinities. One product has a tile for every block that the GPU holds at
once, so that the loop also runs on full SMs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from tilewave.kernels.arguments import Pointers, pack_arguments
from tilewave.kernels.instances import Access, Contiguous, Instance
from tilewave.planner.schedules import (
    DATA_PARALLEL,
    STREAM_K_WALK,
    Decomposition,
    Raster,
    Schedule,
    decompose,
    split_k,
)
from tilewave.problem import GemmProblem, MatrixLayout

Floats = NDArray[np.float32]

_VECTOR = 4
"""Elements in the longest vector by which a kernel reads."""


class Numbers(StrEnum):
    """What the operands hold."""

    RANDOM = "random numbers"
    INTEGERS = "small integers"
    NAN = "NaNs among random numbers"
    INFINITE = "infinities among random numbers"


@dataclass(frozen=True)
class LoopProduct:
    """out = alpha A B with its launch. A and B are stored lines of whole vectors, a gap after each line."""

    numbers: Numbers
    instance: Instance
    problem: GemmProblem
    schedule: Schedule
    cut: Decomposition
    raster: Raster
    alpha: float
    a: Floats
    b: Floats

    @property
    def finite(self) -> bool:
        """Whether no element of the result is NaN."""
        return self.numbers in (Numbers.RANDOM, Numbers.INTEGERS)

    @property
    def partials(self) -> int:
        """Elements of workspace for partial sums."""
        return self.cut.slots * self.instance.bm * self.instance.bn if self.cut.slices > 1 else 0

    @property
    def tickets(self) -> int:
        """Tickets of 4 bytes, 0 before and after."""
        return self.cut.counters

    def arguments(self, a: int, b: int, out: int, partials: int, tickets: int) -> bytes:
        """The kernel's argument, given the addresses of the operands and of the workspace."""
        pointers = Pointers(a, b, out, partials=partials, tickets=tickets)
        depth = self.instance.bk
        return pack_arguments(self.problem, self.cut, self.raster, pointers, self.alpha, depth=depth)

    def __str__(self) -> str:
        problem = self.problem
        return f"{problem.m} x {problem.n} x {problem.k} of {self.numbers}, {self.schedule}"


def loop_products(
    instance: Instance, rng: np.random.Generator, *, sms: int, resident: int
) -> Iterator[LoopProduct]:
    """The products for an instance. ``resident``: how many of its blocks the GPU's ``sms`` SMs hold at once.

    With ``resident`` 0 the large one is left out.
    """
    schedules = (DATA_PARALLEL, split_k(2), STREAM_K_WALK)
    for i, numbers in enumerate(Numbers):
        # All kinds of numbers under two schedules, so that every schedule meets at least two kinds.
        for schedule in (schedules[i % 3], schedules[(i + 1) % 3]):
            m, n = (extent + int(rng.integers(1, 61)) for extent in (instance.bm, instance.bn))
            deep = instance.bk * int(rng.integers(1, 9)) + int(rng.integers(instance.bk))
            yield _product(instance, rng, numbers, schedule, m, n, deep, min(sms, 3))
    yield _product(instance, rng, Numbers.RANDOM, DATA_PARALLEL, instance.bm + 4, instance.bn + 4, 4, sms)
    if resident:
        rows = max(1, round(math.sqrt(resident * instance.bn / instance.bm)))
        columns = -(-resident // rows)
        m, n = rows * instance.bm - int(rng.integers(4, 32)), columns * instance.bn - int(rng.integers(4, 32))
        deep = instance.bk * int(rng.integers(16, 25)) + int(rng.integers(instance.bk))
        yield _product(instance, rng, Numbers.RANDOM, DATA_PARALLEL, m, n, deep, sms)


def _product(
    instance: Instance,
    rng: np.random.Generator,
    numbers: Numbers,
    schedule: Schedule,
    m: int,
    n: int,
    k: int,
    sms: int,
) -> LoopProduct:
    assert instance.a is not None
    assert instance.b is not None
    along_k = [access for access in (instance.a, instance.b) if access.contiguous is Contiguous.K]
    if along_k:
        k = _whole(k)
    if instance.a not in along_k:
        m = _whole(m)
    if instance.b not in along_k:
        n = _whole(n)
    a, layout_a = _operand(rng, numbers, m, k, instance.a, instance.a in along_k)
    b, layout_b = _operand(rng, numbers, k, n, instance.b, instance.b not in along_k)
    problem = GemmProblem(m, n, k, (), layout_a, layout_b, MatrixLayout(n, 1))
    rows, columns, groups = instance.tiles(problem)
    cut = decompose(rows * columns * groups, k, instance.bk, schedule, sms)
    alpha = float(rng.choice([1.0, -1.5]))
    return LoopProduct(numbers, instance, problem, schedule, cut, Raster(rows, columns, 2), alpha, a, b)


def _whole(extent: int) -> int:
    """The next multiple of a vector's elements."""
    return -(-extent // _VECTOR) * _VECTOR


def _operand(
    rng: np.random.Generator, numbers: Numbers, rows: int, columns: int, access: Access, by_rows: bool
) -> tuple[Floats, MatrixLayout]:
    """Stored lines (rows or columns of the matrix) with NaN in their gaps, and how the matrix lies there."""
    lines, length = (rows, columns) if by_rows else (columns, rows)
    stored = np.full((lines, _whole(length) + _VECTOR * int(rng.integers(3))), np.nan, np.float32)
    if numbers is Numbers.INTEGERS:
        values = rng.integers(-8, 9, (lines, length)).astype(np.float32)
    else:
        values = rng.standard_normal((lines, length), np.float32)
    if numbers in (Numbers.NAN, Numbers.INFINITE):
        special = [np.nan] if numbers is Numbers.NAN else [np.inf, -np.inf]
        for _ in range(3):
            values[rng.integers(lines), rng.integers(length)] = rng.choice(special)
    stored[:, :length] = values
    pitch = stored.shape[1]
    return stored, MatrixLayout(pitch, 1) if by_rows else MatrixLayout(1, pitch)
