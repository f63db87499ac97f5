"""What a Hopper tensor core computes, bit for bit: products aligned, truncated, summed, truncated again.

One step takes an accumulator c (float32) and a group of products a_k b_k, 16 of them for FP16 and BF16, 8 for
TF32, and makes a new accumulator:

1. The products are exact (FP16: 22 bits). The exponent of a product is the sum of the exponents of its
   factors, whatever the size of its significand, which is in [1, 4). Subnormal factors count with the
   format's smallest exponent. Zero products, and a zero accumulator, have none.
2. The largest exponent E among the products and the accumulator decides: every product and the accumulator
   are cut to multiples of 2^(E - 25), towards zero. 25 is float32's 23 fraction bits and two more.
3. These are added exactly, and the sum is cut to float32, towards zero.

An instruction of more than one group (none of FP16's k16) takes its groups in ascending k. An instruction
that overwrites starts from no accumulator at all. A sum of zero is +0. NaN and infinities are those of IEEE
arithmetic; a sum of at least 2^128 is an infinity.

Sources: Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores" (arXiv 2512.07004; 16 products, two
extra bits and truncation on an H100) and Xie et al., "MMA-Sim" (arXiv 2511.10909). The treatment of subnormal
factors and of overflow is the plainest reading of these; no bit has been compared with an H200 here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewave.errors import UsageError

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

_ELEMENTS_AT_ONCE = 1 << 14
"""Elements of an accumulator that are worked on together: their float64 copies stay in the cache."""

_EXPONENT_BITS = np.int64(0x7FF0_0000_0000_0000)
_BEYOND_FLOAT32 = np.int64((1 << 29) - 1)


@dataclass(frozen=True, slots=True)
class TensorCore:
    """How a tensor core sums: products a step, fraction bits kept, exponents of the factors' format.

    ``smallest_factor`` is the exponent of the format's subnormals, ``smallest_exponent`` the least that
    step 2 aligns to.
    """

    products: int
    fraction_bits: int
    smallest_factor: int
    smallest_exponent: int = -133


HOPPER_F16 = TensorCore(16, 25, -14)
HOPPER_BF16 = TensorCore(16, 25, -126)
HOPPER_TF32 = TensorCore(8, 25, -126)


def multiply_accumulate(
    a: NDArray[Any], b: NDArray[Any], c: Float32 | None = None, core: TensorCore = HOPPER_F16
) -> Float32:
    """The accumulator after the products of ``a`` and ``b`` were added to ``c``; a new float32 array.

    ``a`` is (..., M, K), ``b`` (..., K, N) and ``c`` (..., M, N), with leading axes that broadcast. Elements
    of ``a`` and ``b`` must be values of the factors' format, in any floating-point dtype that holds them.
    ``c`` is None where the instruction overwrites. K may be any length; steps run in ascending k, and a last
    group that is not full is filled with zeros. Raises ``UsageError`` for shapes that do not fit.
    """
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        raise UsageError(
            f"a and b have shapes {a.shape} and {b.shape}; accepted are (..., M, K), (..., K, N)"
        )
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2], () if c is None else c.shape[:-2])
    shape = (*batch, a.shape[-2], b.shape[-1])
    if c is not None and c.shape[-2:] != shape[-2:]:
        raise UsageError(f"c has shape {c.shape}; accepted is {shape}")
    result = np.zeros(shape, np.float32)
    if c is not None:
        result[...] = c
    wide_a = np.broadcast_to(a.astype(np.float64), (*batch, *a.shape[-2:]))
    wide_b = np.broadcast_to(b.astype(np.float64), (*batch, *b.shape[-2:]))
    rows = max(1, _ELEMENTS_AT_ONCE // max(1, shape[-1]))
    with np.errstate(all="ignore"):
        for index in np.ndindex(*batch):
            for row in range(0, shape[-2], rows):
                part = (*index, slice(row, row + rows))
                result[part] = _steps(wide_a[part], wide_b[index], result[part], core)
    return result


def _steps(a: Float64, b: Float64, c: Float32, core: TensorCore) -> Float64:
    """All steps for some rows; the result, in float64, holds float32 values."""
    total = c.astype(np.float64)
    special = None
    if not (np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(total).all()):
        special = _ieee_sum(a, b, total)
        a, b, total = (np.where(np.isfinite(part), part, 0.0) for part in (a, b, total))
    power_a, power_b = (_powers(part, core.smallest_factor) for part in (a, b))
    term, largest = np.empty_like(total), np.empty_like(total)
    for first in range(0, a.shape[-1], core.products):
        group = range(first, min(first + core.products, a.shape[-1]))
        overflowed = np.isinf(total)
        if any_overflowed := bool(overflowed.any()):
            infinities = total[overflowed]
            total[overflowed] = 0.0
        np.copyto(largest, _power_of_two(total))
        for k in group:
            np.multiply(power_a[:, k, None], power_b[k], out=term)
            np.maximum(largest, term, out=largest)
        np.maximum(largest, 2.0**core.smallest_exponent, out=largest)
        np.divide(2.0**core.fraction_bits, largest, out=largest)  # a power of two: exact, and so is each use
        np.multiply(total, largest, out=total)
        np.trunc(total, out=total)
        for k in group:
            np.multiply(a[:, k, None], b[k], out=term)
            np.multiply(term, largest, out=term)
            np.trunc(term, out=term)
            np.add(total, term, out=total)
        np.divide(total, largest, out=total)
        total = _cut_to_float32(total)
        if any_overflowed:
            total[overflowed] = infinities  # whatever is added to them
    if special is not None:
        total = np.where(np.isfinite(special), total, special)
    return total


def _powers(factors: Float64, smallest_exponent: int) -> Float64:
    """2^exponent of each factor, 0 for zero; subnormals of their format count with its smallest exponent."""
    powers = np.maximum(_power_of_two(factors), 2.0**smallest_exponent)
    powers[factors == 0] = 0.0
    return powers


def _power_of_two(values: Float64) -> Float64:
    """The largest power of two that is at most abs(value), 0 for zero; the values are normal in float64."""
    return (values.view(np.int64) & _EXPONENT_BITS).view(np.float64)


def _cut_to_float32(values: Float64) -> Float64:
    """Round towards zero to float32; from 2^128 on to an infinity."""
    magnitude = np.abs(values)
    cut = (values.view(np.int64) & ~_BEYOND_FLOAT32).view(np.float64)
    if magnitude.size and (magnitude.min() < 2.0**-126 or magnitude.max() >= 2.0**128):
        cut = np.where(magnitude < 2.0**-126, np.trunc(values * 2.0**149) * 2.0**-149, cut)
        cut = np.where(magnitude >= 2.0**128, np.copysign(np.inf, values), cut)
    return cut + 0.0  # a sum of zero is +0


def _ieee_sum(a: Float64, b: Float64, c: Float64) -> Float64:
    """The sum in float64, where nothing overflows: NaN and infinities are those of IEEE arithmetic."""
    total = c.copy()
    for k in range(a.shape[-1]):
        total += a[:, k, None] * b[k]
    return total
