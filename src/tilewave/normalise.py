"""One form for problems that are the same to a kernel: fewer axes, out along rows, no idle strides.

Every element of the result keeps its value and is computed once: only how the work is walked changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilewave.kernels.arguments import Pointers
from tilewave.problem import BATCH_LEVELS, GemmProblem, MatrixLayout, Precision

_OPERANDS = ("a", "b", "out", "c", "bias", "preactivation")
_A, _B, _OUT = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis that the operands share: its extent and the stride of each, in the order of `_OPERANDS`."""

    extent: int
    strides: tuple[int, ...]

    def holds(self, inner: Axis) -> bool:
        """Whether this axis goes on where ``inner`` ends in every operand, so that the two are one."""
        return all(mine == inner.extent * its for mine, its in zip(self.strides, inner.strides, strict=True))

    def joined(self, other: Axis) -> Axis | None:
        """The two axes as one, where that is possible; an axis of one element joins any."""
        if other.extent == 1:
            return self
        if self.extent == 1 or self.holds(other):
            return Axis(self.extent * other.extent, other.strides)
        if other.holds(self):
            return Axis(self.extent * other.extent, self.strides)
        return None


@dataclass(frozen=True, slots=True)
class Normalised:
    """What a kernel computes, and how to come back to what was asked.

    ``swapped``: the transposed product is computed, out^T = B^T A^T, so that a and b change places. ``loops``
    are batch axes beyond those that a kernel walks: one launch for each index, all alike but for addresses.
    """

    problem: GemmProblem
    swapped: bool = False
    loops: tuple[Axis, ...] = ()

    @property
    def launches(self) -> int:
        """How many times the problem is to be launched."""
        count = 1
        for axis in self.loops:
            count *= axis.extent
        return count

    def pointers(self, given: Pointers) -> Iterator[Pointers]:
        """The addresses of each launch, from those of the operands as given."""
        if not self.loops:
            a, b = (given.b, given.a) if self.swapped else (given.a, given.b)
            yield Pointers(a, b, given.out, given.c, given.bias, given.preactivation)
            return
        first = [getattr(given, name) for name in _OPERANDS]
        for index in itertools.product(*(range(axis.extent) for axis in self.loops)):
            addresses = [
                address
                and address
                + 4 * sum(i * axis.strides[operand] for i, axis in zip(index, self.loops, strict=True))
                for operand, address in enumerate(first)
            ]
            named = dict(zip(_OPERANDS, addresses, strict=True))
            if self.swapped:
                named["a"], named["b"] = named["b"], named["a"]
            yield Pointers(**named)


def normalise(problem: GemmProblem, *, batch_invariant: bool = False) -> Normalised:
    """Bring a problem into the form that kernels see.

    Axes of length 1 get stride 0 and leave the batch. Batch axes that follow one another in every operand
    become one; a batch axis along which b (or a) repeats becomes more rows (or columns), where the memory of
    all operands allows it. The product is transposed where out is nearer to contiguous that way, or where
    its one column is better a row. More than `BATCH_LEVELS` axes are left to the host, shortest first. A
    and B of a problem that reads no product lose their layouts, and k becomes 0.

    ``batch_invariant``: the bits of an element must not depend on m or the batch, by which the product may be
    transposed. ``fp16x3`` adds low * high before high * low, so its products are not transposed then.
    """
    layouts: list[MatrixLayout | None] = [getattr(problem, name) for name in _OPERANDS]
    k = problem.k if problem.product else 0
    if not problem.product:
        nothing = MatrixLayout(0, 0, (0,) * len(problem.batch))
        layouts[_A] = layouts[_B] = nothing

    m_axis = Axis(problem.m, tuple(0 if i == _B else x.row if x else 0 for i, x in enumerate(layouts)))
    n_axis = Axis(problem.n, tuple(0 if i == _A else x.column if x else 0 for i, x in enumerate(layouts)))
    batch = [
        Axis(extent, tuple(x.batch[level] if x else 0 for x in layouts))
        for level, extent in enumerate(problem.batch)
        if extent != 1
    ]
    if not problem.product and problem.m != 1:
        # Nothing but elements of c and bias: rows are as good as a batch, and may all become one.
        batch.append(m_axis)
        m_axis = Axis(1, (0,) * len(_OPERANDS))
    m_axis, n_axis, batch = _fold(m_axis, n_axis, batch)

    keeps_sides = batch_invariant and problem.precision is Precision.FP16X3
    swapped = not keeps_sides and _transposing_helps(m_axis, n_axis)
    if swapped:
        m_axis, n_axis = n_axis, m_axis
    m_axis, n_axis = _idle(m_axis), _idle(n_axis)
    loops, walked = _split(batch)

    a, b = layouts[_A], layouts[_B]
    assert a is not None  # every problem has both
    assert b is not None
    k_of_a, k_of_b = (a.column, b.row) if k > 1 else (0, 0)
    if swapped:
        k_of_a, k_of_b = k_of_b, k_of_a

    def layout(operand: int) -> MatrixLayout | None:
        given = layouts[operand]
        if given is None:
            return None
        return MatrixLayout(
            m_axis.strides[operand],
            n_axis.strides[operand],
            tuple(axis.strides[operand] for axis in walked),
            _alignment(given.alignment, [axis.strides[operand] for axis in loops]),
        )

    first, second = layout(_A), layout(_B)
    out = layout(_OUT)
    assert first is not None
    assert second is not None
    assert out is not None
    if swapped:
        first, second = second, first
    return Normalised(
        GemmProblem(
            m_axis.extent,
            n_axis.extent,
            k,
            tuple(axis.extent for axis in walked),
            MatrixLayout(first.row, k_of_a, first.batch, first.alignment),
            MatrixLayout(k_of_b, second.column, second.batch, second.alignment),
            out,
            layout(3),
            layout(4),
            layout(5),
            problem.activation,
            problem.product,
            problem.precision,
        ),
        swapped,
        tuple(loops),
    )


def _fold(m_axis: Axis, n_axis: Axis, batch: list[Axis]) -> tuple[Axis, Axis, list[Axis]]:
    """Join axes until no two can be joined; a matrix of one row (or column) takes the longest that it may."""
    batch = _merged(batch)
    for only_alone in (False, True):  # what lies next to one another first: it leaves the others their chance
        for axis in sorted(batch, key=lambda axis: (-axis.extent, abs(axis.strides[_OUT]))):
            if axis.strides[_A] == 0 and (n_axis.extent == 1) is only_alone:
                joined = axis.joined(n_axis)
                if joined is not None:
                    n_axis = joined
                    batch.remove(axis)
                    continue
            if axis.strides[_B] == 0 and (m_axis.extent == 1) is only_alone:
                joined = axis.joined(m_axis)
                if joined is not None:
                    m_axis = joined
                    batch.remove(axis)
    return m_axis, n_axis, batch


def _merged(batch: list[Axis]) -> list[Axis]:
    """Batch axes with all that follow one another joined."""
    for one, other in itertools.combinations(batch, 2):
        joined = one.joined(other)
        if joined is not None:
            return _merged([joined, *(axis for axis in batch if axis is not one and axis is not other)])
    return batch


def _transposing_helps(m_axis: Axis, n_axis: Axis) -> bool:
    """Whether out is nearer to rows in memory when it is transposed; a single column becomes a row."""
    if m_axis.extent == 1 or n_axis.extent == 1:
        return n_axis.extent == 1 and m_axis.extent > 1
    row, column = abs(m_axis.strides[_OUT]), abs(n_axis.strides[_OUT])
    return row < column


def _idle(axis: Axis) -> Axis:
    """An axis of one element with the strides that it never steps by set to 0."""
    return Axis(1, (0,) * len(axis.strides)) if axis.extent == 1 else axis


def _split(batch: Sequence[Axis]) -> tuple[list[Axis], list[Axis]]:
    """The axes left to the host and those that a kernel walks, the longest steps of out first."""
    ordered = sorted(batch, key=lambda axis: -abs(axis.strides[_OUT]))
    by_extent = sorted(ordered, key=lambda axis: axis.extent)
    loops = by_extent[: max(0, len(ordered) - BATCH_LEVELS)]
    return loops, [axis for axis in ordered if all(axis is not loop for loop in loops)]


def _alignment(base: int, strides: Sequence[int]) -> int:
    """The alignment that all addresses have in common which ``strides`` lead to."""
    for stride in strides:
        while (4 * stride) % base:
            base //= 2
    return base
