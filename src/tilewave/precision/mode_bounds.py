"""How far the modes that use tensor cores may be from the exact product.

Below, u = 2^-24, gamma_n = n u / (1 - n u), L is the promotion interval (64), P = ceil(K / L), S = sum_k
|a_k| |b_k| for one element of the product, r = max_k |a_k| and c = max_k |b_k|. Where sums are fine
(`fp16x3.FINE`: L = 16, then runs of R intervals) P is R + ceil(K / 16 R), and what follows is less for every
K: the mode's bound is that of the coarse ones.

**fp16x3.** Componentwise, for every element that is not recomputed:

    |result - exact|  <=  ((12 + 2 L) u + gamma_P) S  +  2^-150.

A recomputed element has the bound of ``ieee``. In short (scaled values; `fp16x3` defines them):

* Splitting: |x' - hi - lo| <= 2^-23 |x'|, or <= 2^-25 for a small element, and |lo| <= 2^-11 |x'|. So the
  three products differ from the exact one by at most 4 u S for the splitting, 4 u S for lo lo, and, for n
  small elements in the row and the column together, 2^-25 2^15 n = 2^-10 n.
* The guard makes that last term 16 u S: at least (large in the row) + (large in the column) - K products are
  of two large elements and at least 2^8 each, and the guard lets an element pass only where there are 4 n of
  them (or where n is 0), so S >= 2^10 n.
* A step of the tensor core cuts 17 numbers to multiples of 2^(E - 25) and the sum to 24 bits: it errs by at
  most (17/2 + 2) u times the sum of magnitudes so far. Per interval there are L / 16 such steps for hi hi;
  the 2 L / 16 before them work on magnitudes 2^-11 times as large, or, where FP16 subnormals set E, half as
  large: below 1.21 L u S in all. (Groups of 8 would make it 1.4 L u S.)
* Adding P temporary accumulators in float32 is gamma_(P-1), in any order; of runs of R, an addend takes part
  in at most R - 1 sums within its run, which begins with 0, and in one for each run. Unscaling rounds once,
  and only where the result is subnormal: 2^-150.
* The sum: 4 + 4 + 16 + 1.21 L < 12 + 2 L for L of 16 and more, with room for the products of these terms.

Without the guard the bound is partly normwise, `fp16x3_unguarded_bound`: for elements that are far below
their row's or column's largest it adds 2^-39 (r |b|_1 + c |a|_1), which no longer shrinks with the element.

**tf32.** (2^-10 + 2^-22) S for the rounding of the operands, and gamma_K S for the tensor core's sum, which
is truncated at every step and never promoted; 2^-136 (|a|_1 + |b|_1) + K 2^-148 where there are subnormals.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tilewave.errors import UsageError
from tilewave.precision.bounds import (
    UNIT_ROUNDOFF,
    Float64,
    gamma,
    ieee_bound,
    operands_in_float64,
    product_in_float64,
    ratios_to,
)
from tilewave.precision.fp16x3 import COARSE, KINDS, Sums, must_recompute, split_rows

MODES = ("ieee", "fp16x3", "tf32")
"""Modes that have a bound here."""

_UNDERFLOW = 2.0**-150
_TF32_ROUNDING = 2.0**-10 + 2.0**-22
_SUBNORMAL_SPACING_IN_ROWS = 2.0**-39


def fp16x3_coefficient(k: int, sums: Sums = COARSE) -> float:
    """What sum |a| |b| is multiplied with: (12 + 2 L) u + gamma_P, P = ceil(K / L) without runs."""
    if sums not in KINDS:
        raise UsageError(f"sums are {sums}; accepted are {', '.join(map(str, KINDS))}")
    return (12 + 2 * sums.interval) * UNIT_ROUNDOFF + gamma(_additions(k, sums))


def _additions(k: int, sums: Sums) -> int:
    """P: of how many float32 sums an accumulator may be part."""
    intervals = -(-k // sums.interval)
    run = sums.run_of(k)
    return intervals if sums.run is None else min(run, intervals) + -(-intervals // run)


def fp16x3_bound(a: npt.ArrayLike, b: npt.ArrayLike, sums: Sums = COARSE) -> Float64:
    """The largest error, element by element, of the mode as it is offered: guarded, with elements recomputed.

    Shapes and what Inf and NaN do are those of `ieee_bound`.
    """
    x, y = np.asarray(a), np.asarray(b)
    limit = _componentwise(x, y, sums)
    outside = recomputed(x, y)
    if outside.any():
        limit[outside] = ieee_bound(x, y)[outside]
    return limit


def recomputed(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Which elements of a @ b the mode ``fp16x3`` computes as ``ieee``: those that its guard stops."""
    return must_recompute(split_rows(a).guard, split_rows(b.swapaxes(-1, -2)).guard, a.shape[-1])


def fp16x3_unguarded_bound(a: npt.ArrayLike, b: npt.ArrayLike, sums: Sums = COARSE) -> Float64:
    """The bound of what steps 1 to 5 compute, nothing recomputed: partly normwise. Operands are finite."""
    x, y = operands_in_float64(a, b)
    x, y = np.abs(x), np.abs(y)
    with np.errstate(over="ignore"):
        row, column = x.max(-1, initial=0)[..., :, np.newaxis], y.max(-2, initial=0)[..., np.newaxis, :]
        normwise = row * y.sum(-2)[..., np.newaxis, :] + column * x.sum(-1)[..., :, np.newaxis]
        slack = 1 + 2.0**-6 + gamma(_additions(x.shape[-1], sums))  # what happens to these errors afterwards
    limit: Float64 = _componentwise(a, b, sums) + slack * _SUBNORMAL_SPACING_IN_ROWS * normwise
    return limit


def tf32_bound(a: npt.ArrayLike, b: npt.ArrayLike) -> Float64:
    """The largest error, element by element, of the mode ``tf32``."""
    x, y = operands_in_float64(a, b)
    k = x.shape[-1]
    with np.errstate(invalid="ignore", over="ignore"):
        x, y = np.abs(x), np.abs(y)
        limit: Float64 = mode_coefficient("tf32", k) * np.matmul(x, y)
        limit += 2.0**-136 * (x.sum(-1)[..., :, np.newaxis] + y.sum(-2)[..., np.newaxis, :]) + k * 2.0**-148
    return limit


def mode_coefficient(precision: str, k: int) -> float:
    """What a mode's bound multiplies sum |a| |b| with. Raises ``UsageError`` for a mode without one."""
    if precision not in MODES:
        raise UsageError(f"precision is {precision!r}; accepted are {', '.join(MODES)}")
    if precision == "fp16x3":
        return fp16x3_coefficient(k)
    return gamma(k) + (_TF32_ROUNDING if precision == "tf32" else 0.0)


def mode_bound(precision: str, a: npt.ArrayLike, b: npt.ArrayLike) -> Float64:
    """The bound of a mode by its name. Raises ``UsageError`` for one that has none."""
    if precision not in MODES:
        raise UsageError(f"precision is {precision!r}; accepted are {', '.join(MODES)}")
    return {"ieee": ieee_bound, "fp16x3": fp16x3_bound, "tf32": tf32_bound}[precision](a, b)


def error_in_mode_bounds(precision: str, c: npt.ArrayLike, a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """The largest |c - a @ b| in units of the mode's bound: at most 1 for what the mode may answer.

    As `error_in_bounds`, which this is for ``ieee``.
    """
    return float(errors_in_mode_bounds(precision, c, a, b).max(initial=0.0))


def errors_in_mode_bounds(precision: str, c: npt.ArrayLike, a: npt.ArrayLike, b: npt.ArrayLike) -> Float64:
    """What `error_in_mode_bounds` takes the largest of: the error of every element of ``c``."""
    result, x, y = product_in_float64(c, a, b)
    return ratios_to(mode_bound(precision, a, b), result, x, y)


def _componentwise(a: npt.ArrayLike, b: npt.ArrayLike, sums: Sums) -> Float64:
    x, y = operands_in_float64(a, b)
    with np.errstate(invalid="ignore", over="ignore"):
        limit: Float64 = fp16x3_coefficient(x.shape[-1], sums) * np.matmul(np.abs(x), np.abs(y))
    return limit + _UNDERFLOW
