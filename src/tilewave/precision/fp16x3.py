"""The mode ``fp16x3``: float32 accuracy from FP16 tensor cores. This file is its definition.

The arithmetic, in this order; kernels follow it step by step. ``x`` is a row of A or a column of B, K its
length, and every product of a batch is by itself.

1. Scale (`scale_rows`). e is the exponent of the largest finite abs(x_k), floor(log2), for subnormals too;
   the shift is 14 - e, from -113 to 163, and 0 for a row without finite elements other than 0. x'_k is
   x_k * 2^(shift div 2) * 2^(shift - shift div 2) in float32, div rounding towards zero: the largest is in
   [2^14, 2^15). The two multiplications are exact, or what they round is below 2^-126. Infinities and NaN
   become 0.
2. Split. hi = fp16(x'), lo = fp16(x' - hi), both to nearest even, FP16 subnormals kept. x' - hi is exact.
3. Guard. An element other than 0 is *small* if abs(x') < 2^-2 and (abs(x') < 2^-14 or hi + lo != x'), and
   *large* if abs(x') >= 2^4. t = large elements - 4 * small elements, inexact = there are small elements. The
   guard is the int32 2 t + inexact; `GUARD_ZERO` for a row without elements other than 0, and
   `GUARD_NONFINITE` for one with NaN or an infinity. Zeros that pad K count for nothing.
4. Sum (`sum_products`). K is cut into intervals, the last one padded with zeros. For each, in ascending k, a
   temporary accumulator takes lo_A hi_B, then hi_A lo_B, then hi_A hi_B, each in groups of 16 in ascending
   k; the first group overwrites. A step is `tensor_core.multiply_accumulate`. What then happens to the
   temporary accumulator, in float32, to nearest even, is of two kinds (`Sums`). `COARSE`: intervals are of
   64, and each is added to one sum. `FINE`: intervals are of 16, each is added to the sum of a run of R
   intervals, and each run, the last one short, to the sum; R is 16 up to K = 4096, 32 up to 16,384, and so on
   (`Sums.run_of`). All sums start at +0. `FINE` is what outputs of at
   most 132 tiles of 128 x 128 have, every output under ``batch_invariant``, every one on the host, and any
   that is faster on such tiles; the others have `COARSE`: a plan's kernel tells. (The model also knows
   intervals of 128, which are not of float32's accuracy where all data have one sign.)
5. Unscale (`unscale`). t = -(shift_A + shift_B), clamped to [-252, 254]; the sum is multiplied by
   2^(t div 2), then by 2^(t - t div 2). Together that rounds once: to nearest even where the result is
   subnormal, to an infinity where it is beyond float32.
6. Recompute (`must_recompute`). Where (guard_A | guard_B) & 1 and (guard_A >> 1) + (guard_B >> 1) < K, the
   element is not what step 5 left but the float32 product of the ``ieee`` mode, whose order of sums is the
   executor's own. NaN and infinities come out as in ``ieee`` by that.
7. The epilogue of `gemm`, as for every mode.

K of 2^24 and more is refused. What this guarantees, with proofs in short, is in `tilewave.precision.bounds`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewave.errors import UsageError
from tilewave.precision.tensor_core import HOPPER_F16, TensorCore, multiply_accumulate

Float16 = NDArray[np.float16]
Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Sums:
    """How temporary accumulators are added: each holds ``interval`` of K, runs of them are added first.

    A run is of ``run`` accumulators at least. Without one each accumulator is added to the one sum.
    """

    interval: int
    run: int | None = None

    def run_of(self, k: int) -> int:
        """Accumulators of a run: about as many as there are runs, by doubling ``run``; 1 without runs."""
        found = self.run or 1
        while self.run is not None and self.interval * found * found < k:
            found *= 2
        return found


COARSE = Sums(64)
"""Of large products: a thread's registers hold one sum for each of its elements."""

FINE = Sums(16, 16)
"""Of small outputs, where a library cuts K, whose chains of float32 sums are short then."""

KINDS = (FINE, COARSE, Sums(128))

SCALED_EXPONENT = 14
"""Exponent of a row's largest element after scaling."""

SMALL, HI_SUBNORMAL, LARGE = 2.0**-2, 2.0**-14, 2.0**4
SMALL_WEIGHT = 4

GUARD_ZERO = np.int32(1 << 28)
GUARD_NONFINITE = np.int32(1 - (1 << 29))

K_LIMIT = 1 << 24


@dataclass(frozen=True, slots=True)
class Split:
    """Rows of A, or columns of B as rows, ready for the tensor core.

    ``hi`` and ``lo`` are (..., rows, K), ``shift`` and ``guard`` (..., rows): x 2^shift is about hi + lo.
    """

    hi: Float16
    lo: Float16
    shift: Int32
    guard: Int32


@dataclass(frozen=True, slots=True)
class Result:
    """A product by the mode: ``values`` (float32), and which elements were ``recomputed`` as ``ieee``."""

    values: Float32
    recomputed: NDArray[np.bool_]


def scale_rows(x: Float32) -> tuple[Float32, Int32]:
    """Step 1: the scaled rows of ``x``, (..., rows, K), and their shifts, (..., rows)."""
    finite = np.where(np.isfinite(x), x, np.float32(0))
    largest = np.max(np.abs(finite), axis=-1, initial=np.float32(0))
    _, exponent = np.frexp(largest)  # largest = f 2^exponent with f in [1/2, 1)
    shift = np.where(largest == 0, 0, SCALED_EXPONENT + 1 - exponent).astype(np.int32)
    first = np.trunc(shift / 2).astype(np.int32)
    with np.errstate(under="ignore"):
        scaled = np.ldexp(np.ldexp(finite, first[..., np.newaxis]), (shift - first)[..., np.newaxis])
    return scaled, shift


def split_rows(x: Float32) -> Split:
    """Steps 1 to 3 for the rows of ``x``, (..., rows, K); for B: its transpose."""
    if x.shape[-1] >= K_LIMIT:
        raise UsageError(f"K is {x.shape[-1]}; accepted by fp16x3 is less than 2^24")
    scaled, shift = scale_rows(x)
    with np.errstate(under="ignore"):
        hi = scaled.astype(np.float16)
        rest = scaled - hi.astype(np.float32)
        lo = rest.astype(np.float16)
    size = np.abs(scaled)
    lost = (rest != lo.astype(np.float32)) | (size < HI_SUBNORMAL)
    small = np.count_nonzero((x != 0) & (size < SMALL) & lost & np.isfinite(x), axis=-1)
    large = np.count_nonzero(size >= LARGE, axis=-1)
    guard = (2 * (large - SMALL_WEIGHT * small) + (small > 0)).astype(np.int32)
    guard = np.where(np.any(x != 0, axis=-1), guard, GUARD_ZERO)
    guard = np.where(np.isfinite(x).all(axis=-1), guard, GUARD_NONFINITE)
    return Split(hi, lo, shift, guard)


def must_recompute(guard_a: Int32, guard_b: Int32, k: int) -> NDArray[np.bool_]:
    """Step 6: which elements of the product, (..., M, N), are computed as ``ieee`` instead."""
    rows, columns = guard_a[..., :, np.newaxis], guard_b[..., np.newaxis, :]
    found: NDArray[np.bool_] = (((rows | columns) & 1) != 0) & ((rows >> 1) + (columns >> 1) < k)
    return found


def sum_products(a: Split, b: Split, sums: Sums | None = FINE, core: TensorCore = HOPPER_F16) -> Float32:
    """Step 4: the scaled product, (..., M, N). Without ``sums`` everything shares one accumulator."""
    k = a.hi.shape[-1]
    interval = max(k, 1) if sums is None else sums.interval
    run = 1 if sums is None else sums.run_of(k)
    batch = np.broadcast_shapes(a.hi.shape[:-2], b.hi.shape[:-2])
    total = np.zeros((*batch, a.hi.shape[-2], b.hi.shape[-2]), np.float32)
    for start in range(0, k, run * interval):
        recent = np.zeros_like(total)
        for first in range(start, min(start + run * interval, k), interval):
            recent += _one_accumulator(a, b, slice(first, first + interval), core)
        total += recent
    return total


def _one_accumulator(a: Split, b: Split, part: slice, core: TensorCore) -> Float32:
    """The three products of a part of K, summed by the tensor core."""
    found: Float32 | None = None
    for x, y in ((a.lo, b.hi), (a.hi, b.lo), (a.hi, b.hi)):
        found = multiply_accumulate(x[..., part], y[..., part].swapaxes(-1, -2), found, core)
    assert found is not None  # three products were added
    return found


def unscale(total: Float32, shift_a: Int32, shift_b: Int32) -> Float32:
    """Step 5: the product without its operands' scales."""
    exponent = np.clip(-(shift_a[..., :, np.newaxis] + shift_b[..., np.newaxis, :]), -252, 254)
    first = np.trunc(exponent / 2).astype(np.int32)
    with np.errstate(over="ignore", under="ignore"):
        unscaled: Float32 = np.ldexp(np.ldexp(total, first), exponent - first)
    return unscaled


def multiply(a: Float32, b: Float32, *, sums: Sums | None = FINE, core: TensorCore = HOPPER_F16) -> Result:
    """Steps 1 to 6: the product of ``a`` (..., M, K) and ``b`` (..., K, N), leading axes broadcasting.

    ``sums`` are one of `KINDS`, or None for no promotion. Recomputed elements are NumPy's float32 product.
    """
    if sums is not None and sums not in KINDS:
        raise UsageError(f"sums are {sums}; accepted are {', '.join(map(str, KINDS))}, and None")
    rows, columns = split_rows(a), split_rows(b.swapaxes(-1, -2))
    recomputed = must_recompute(rows.guard, columns.guard, a.shape[-1])
    values = unscale(sum_products(rows, columns, sums, core), rows.shift, columns.shift)
    if recomputed.any():
        with np.errstate(all="ignore"):
            values = np.where(recomputed, np.matmul(a, b), values)
    return Result(values, recomputed)
