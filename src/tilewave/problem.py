"""What a product is, as plain data: sizes, strides, alignments, epilogue. No pointers, no GPU.

A `GemmProblem` is what the planner sees and what a cache of plans is keyed by: two calls with equal problems
run the same kernel in the same way. Strides are in elements and may have any sign; 0 repeats an element.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

BATCH_LEVELS = 3
"""Batch axes that a kernel can walk; more are looped over by the host, after adjacent ones were merged."""


class Activation(IntEnum):
    """What the epilogue applies last; the value is what kernels receive."""

    NONE = 0
    RELU = 1
    GELU = 2
    GELU_TANH = 3
    SILU = 4


class Precision(StrEnum):
    """The arithmetic of a product.

    ``ieee``: float32 products and float32 sums. ``fp16x3``: float32 accuracy from three FP16 products on
    tensor cores (`tilewave.precision.fp16x3`). ``tf32``: low precision, for comparison
    (`tilewave.precision.tf32`).
    """

    IEEE = "ieee"
    FP16X3 = "fp16x3"
    TF32 = "tf32"


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """How a matrix (or a batch of them) lies in memory.

    ``row`` and ``column`` are the distances, in elements, from an element to the one below and to the one on
    its right; ``batch`` the distances along `GemmProblem.batch`. ``alignment`` is what the address of element
    (0, 0) of the first matrix is a multiple of: 16, 8 or 4 bytes.
    """

    row: int
    column: int
    batch: tuple[int, ...] = ()
    alignment: int = 16

    @property
    def transposed(self) -> MatrixLayout:
        """The layout of the transposed matrix over the same memory."""
        return MatrixLayout(self.column, self.row, self.batch, self.alignment)


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """out = activation(alpha * A B + beta * C + bias), for every item of a batch.

    A is m x k, B is k x n; C, bias, out and preactivation are m x n (a bias vector has stride 0 along the
    other axis). ``batch`` holds the extents of the batch axes, outermost first. ``c`` is None where beta is
    0, ``product`` False where alpha is 0 or k is 0: then A and B are never read. ``preactivation`` also
    receives what the activation is applied to.
    """

    m: int
    n: int
    k: int
    batch: tuple[int, ...]
    a: MatrixLayout
    b: MatrixLayout
    out: MatrixLayout
    c: MatrixLayout | None = None
    bias: MatrixLayout | None = None
    preactivation: MatrixLayout | None = None
    activation: Activation = Activation.NONE
    product: bool = True
    precision: Precision = Precision.IEEE

    @property
    def batches(self) -> int:
        """Items of the batch; 1 without batch axes, 0 when an axis is empty."""
        count = 1
        for extent in self.batch:
            count *= extent
        return count

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds that the product needs, without padding."""
        return self.batches * self.m * self.n * self.k if self.product else 0

    def __str__(self) -> str:
        times = f"{self.batches} times " if self.batch else ""
        return f"{times}{self.m} x {self.n} x {self.k}"
