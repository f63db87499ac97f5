"""NumPy's rules of shapes and BLAS's rules of a gemm, on shapes and strides alone: no memory is touched.

Strides are in elements. A `Product` holds the strides of its operands along the axes that all of them share
after broadcasting: the batch axes, then the two of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from tilewave.errors import UsageError
from tilewave.messages import shown
from tilewave.problem import Activation, GemmProblem, MatrixLayout

Strides = tuple[int, ...]

MOST_BYTES = 2**63 - 1

_OVERLAP_WORK = 10_000
"""Candidates that are tried to prove two arrays apart; well under a millisecond."""


class Layout(NamedTuple):
    """An array's shape and its strides in elements."""

    shape: tuple[int, ...]
    strides: Strides

    def __str__(self) -> str:
        return f"shape {self.shape} and strides {self.strides}"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def contiguous(shape: Sequence[int]) -> Layout:
    """The layout of an array in C order."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(1, shape[axis + 1])
    return Layout(tuple(shape), tuple(strides))


@dataclass(frozen=True, slots=True)
class Product:
    """The product of two arrays: sizes, and the strides of each along the shared axes.

    ``a`` is along (*batch, m, k), ``b`` along (*batch, k, n). ``rows`` is False where a is a vector and the
    result has no axis for m, ``columns`` likewise for b and n.
    """

    m: int
    n: int
    k: int
    batch: tuple[int, ...]
    a: Strides
    b: Strides
    rows: bool
    columns: bool

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        return (*self.batch, *((self.m,) * self.rows), *((self.n,) * self.columns))

    def along_result(self, strides: Strides) -> Strides:
        """Strides along (*batch, m, n), from those of an array that has the result's shape."""
        axes = list(strides)
        if not self.rows:
            axes.insert(len(self.batch), 0)
        if not self.columns:
            axes.append(0)
        return tuple(axes)


def product_of(a: Layout, b: Layout, transpose_a: bool = False, transpose_b: bool = False) -> Product:
    """The product of ``a`` and ``b`` by the rules of `numpy.matmul`, each transposed first where asked.

    A vector becomes a matrix of one row (a) or one column (b), whose axis the result lacks. Leading axes
    broadcast. Raises ``UsageError`` naming both operands where shapes do not fit.
    """
    a_shape, a_strides = _as_matrix("a", a, transpose_a, row=True)
    b_shape, b_strides = _as_matrix("b", b, transpose_b, row=False)
    if a_shape[-1] != b_shape[-2]:
        raise UsageError(
            f"a{_transposed(transpose_a)} of {a} and b{_transposed(transpose_b)} of {b} do not fit: K is "
            f"{a_shape[-1]} in a and {b_shape[-2]} in b; they must be equal"
        )
    try:
        batch = broadcast_shapes(a_shape[:-2], b_shape[:-2])
    except ValueError:
        raise UsageError(
            f"a of {a} and b of {b} do not fit: their leading axes {a_shape[:-2]} and {b_shape[:-2]} do not "
            "broadcast; each pair must be equal or one of the two be 1"
        ) from None
    return Product(
        a_shape[-2],
        b_shape[-1],
        a_shape[-1],
        batch,
        (*_broadcast(a_shape[:-2], a_strides[:-2], batch), *a_strides[-2:]),
        (*_broadcast(b_shape[:-2], b_strides[:-2], batch), *b_strides[-2:]),
        rows=len(a.shape) > 1,
        columns=len(b.shape) > 1,
    )


def check_addressable(name: str, shape: Sequence[int]) -> None:
    """Raise ``UsageError`` for an array that would be longer than 64 bits can address."""
    if 4 * math.prod(shape) > MOST_BYTES:
        raise UsageError(
            f"{name} of shape {shown(tuple(shape))} would be longer than 64 bits can address; accepted are "
            f"arrays of up to {MOST_BYTES:,} bytes"
        )


def broadcast_shapes(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that two broadcast to, by NumPy's rule; extents may be PyTorch's symbols.

    Raises ``ValueError`` where they do not.
    """
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    new = len(longer) - len(shorter)
    shape = list(longer)
    for axis, extent in enumerate(shorter, new):
        if shape[axis] == 1:
            shape[axis] = extent
        elif extent not in (1, shape[axis]):
            raise ValueError(f"{one} and {other} do not broadcast")
    return tuple(shape)


def addend_strides(product: Product, c: Layout) -> Strides:
    """Strides along (*batch, m, n) of c, broadcast to the result."""
    shape = product.result_shape
    try:
        fits = broadcast_shapes(c.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise UsageError(f"c of {c} does not broadcast to the result's shape {shape}")
    return product.along_result(_broadcast(c.shape, c.strides, shape))


def check_bias_axis(axis: object) -> None:
    """Raise ``UsageError`` for anything but -1 and -2."""
    if not isinstance(axis, Integral) or axis not in (-1, -2):
        raise UsageError(f"bias_axis is {shown(axis)}; accepted are -1, the result's last axis, and -2")


def bias_strides(product: Product, bias: Layout, axis: int) -> Strides:
    """Strides along (*batch, m, n) of a bias that lies along ``axis`` of the result, -1 or -2.

    Its last axis is that one and must have its length; any axes before it broadcast over the batch.
    """
    shape = product.result_shape
    matrix_axes = len(shape) - len(product.batch)
    check_bias_axis(axis)
    if -axis > matrix_axes:
        raise UsageError(
            f"bias_axis is {axis}, but the result of shape {shape} has {matrix_axes} axes besides its batch's"
        )
    along_m = axis == -2 or not product.columns
    length = product.m if along_m else product.n
    if not bias.shape or bias.shape[-1] != length:
        raise UsageError(
            f"bias of {bias} does not fit: along axis {axis} the result of shape {shape} has "
            f"length {length}, which the last axis of bias must have"
        )
    try:
        fits = broadcast_shapes(bias.shape[:-1], product.batch) == product.batch
    except ValueError:
        fits = False
    if not fits:
        raise UsageError(
            f"bias of {bias} does not fit: its leading axes do not broadcast to the batch {product.batch}"
        )
    batch = _broadcast(bias.shape[:-1], bias.strides[:-1], product.batch)
    last = bias.strides[-1]
    return (*batch, last, 0) if along_m else (*batch, 0, last)


def out_strides(product: Product, out: Layout) -> Strides:
    """Strides along (*batch, m, n) of out, whose shape must be the result's and whose elements be
    distinct.
    """
    if out.shape != product.result_shape:
        raise UsageError(
            f"out of {out} does not fit (a non-broadcastable output); the result has shape "
            f"{product.result_shape}"
        )
    if overlaps_itself(out):
        raise UsageError(
            f"out of {out}: several of its elements share memory, so it cannot hold a result; "
            "accepted is an array whose elements are distinct"
        )
    return product.along_result(out.strides)


def gemm_problem(
    product: Product,
    out: Strides,
    alignments: Alignments,
    *,
    c: Strides | None = None,
    bias: Strides | None = None,
    preactivation: Strides | None = None,
    activation: Activation = Activation.NONE,
    reads_product: bool = True,
) -> GemmProblem:
    """The problem as plain data; all strides are along (*batch, m, n).

    ``c`` is None where beta is 0, ``reads_product`` False where alpha is 0.
    """

    def layout(strides: Strides | None, alignment: int) -> MatrixLayout | None:
        if strides is None:
            return None
        return MatrixLayout(strides[-2], strides[-1], strides[:-2], alignment)

    def present(strides: Strides, alignment: int) -> MatrixLayout:
        return MatrixLayout(strides[-2], strides[-1], strides[:-2], alignment)

    return GemmProblem(
        product.m,
        product.n,
        product.k,
        product.batch,
        present(product.a, alignments.a),
        present(product.b, alignments.b),
        present(out, alignments.out),
        layout(c, alignments.c),
        layout(bias, alignments.bias),
        layout(preactivation, alignments.preactivation),
        activation,
        product=reads_product and product.k > 0,
    )


class Alignments(NamedTuple):
    """What each operand's address is a multiple of: 16, 8 or 4 bytes."""

    a: int = 16
    b: int = 16
    out: int = 16
    c: int = 16
    bias: int = 16
    preactivation: int = 16


def alignment_of(address: int) -> int:
    """16, 8 or 4: the widest vector that may be read at ``address``, in bytes."""
    return 16 if address % 16 == 0 else 8 if address % 8 == 0 else 4


@lru_cache(maxsize=4096)
def span(layout: Layout) -> tuple[int, int]:
    """The first byte of an array and the one behind its last, from its address on; both 0 if it is empty."""
    if layout.size == 0:
        return 0, 0
    low = high = 0
    for extent, stride in zip(layout.shape, layout.strides, strict=True):
        reach = (extent - 1) * stride
        low, high = low + min(0, reach), high + max(0, reach)
    return 4 * low, 4 * high + 4


def share_memory(one_address: int, one: Layout, other_address: int, other: Layout) -> bool:
    """Whether two float32 arrays have an element in common.

    Rows of one that lie between the rows of the other are told apart; where that would take too long to
    prove, the answer is yes.
    """
    (one_low, one_high), (other_low, other_high) = span(one), span(other)
    apart = other_address - one_address
    if one_low >= apart + other_high or apart + other_low >= one_high or one_low == one_high:
        return False
    if other_low == other_high:
        return False
    try:
        return np.shares_memory(
            _phantom(one_address, one),
            _phantom(other_address, other),
            max_work=_OVERLAP_WORK,  # type: ignore[arg-type]  # any count is accepted
        )
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(layout: Layout) -> bool:
    """Whether two different indices of an array may lead to one element.

    Exact for arrays of which all but two axes nest (each stride longer than what lies inside it); beyond
    that, the answer may be yes where the truth is no.
    """
    if layout.size == 0:
        return False
    axes = sorted(
        (abs(stride), extent)
        for extent, stride in zip(layout.shape, layout.strides, strict=True)
        if extent > 1
    )
    if axes and axes[0][0] == 0:
        return True
    # An axis whose stride exceeds the reach of all smaller ones separates: it can be left out.
    while axes and axes[-1][0] > sum(stride * (extent - 1) for stride, extent in axes[:-1]):
        axes.pop()
    if len(axes) == 2:
        (inner, inner_extent), (outer, outer_extent) = axes
        common = math.gcd(inner, outer)
        return outer // common < inner_extent and inner // common < outer_extent
    return bool(axes)


class _Phantom:
    """Carries an address and a layout to NumPy, which compares them and never reads the memory."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _phantom(address: int, layout: Layout) -> np.ndarray[Any, Any]:
    strides = tuple(4 * stride for stride in layout.strides)
    return np.asarray(
        _Phantom(
            {
                "data": (address, True),
                "shape": layout.shape,
                "strides": strides,
                "typestr": np.dtype(np.float32).str,
                "version": 3,
            }
        )
    )


def _as_matrix(name: str, layout: Layout, transpose: bool, *, row: bool) -> Layout:
    """The last two axes as a matrix: a vector becomes a row or a column, a matrix is transposed if asked."""
    shape, strides = layout
    if not shape:
        raise UsageError(
            f"{name} is 0-dimensional (a scalar): matmul takes vectors, matrices and batches of them; "
            "multiply by a scalar with *"
        )
    if len(shape) == 1:
        if transpose:
            raise UsageError(f"transpose_{name} is set, but {name} of {layout} is a vector")
        return Layout((1, *shape), (0, *strides)) if row else Layout((*shape, 1), (*strides, 0))
    if transpose:
        return Layout((*shape[:-2], shape[-1], shape[-2]), (*strides[:-2], strides[-1], strides[-2]))
    return layout


def _transposed(transpose: bool) -> str:
    return " (transposed)" if transpose else ""


def _broadcast(shape: tuple[int, ...], strides: Strides, to: tuple[int, ...]) -> Strides:
    """Strides along the axes ``to``, 0 where an axis is new or repeated."""
    kept = tuple(
        stride if extent == target else 0
        for extent, stride, target in zip(shape, strides, to[len(to) - len(shape) :], strict=True)
    )
    return (0,) * (len(to) - len(shape)) + kept
