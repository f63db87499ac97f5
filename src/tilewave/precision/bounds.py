"""How far a float32 matrix product may be from the exact one, whatever the order of its sums.

The bound is the classical one (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section
3.1 and equation 3.5, with underflow as in section 2.8): a sum of K products, each operation rounded to
nearest, satisfies

    |c - sum_k a_k b_k|  <=  gamma_K sum_k |a_k| |b_k|  +  K eta / 2,

with gamma_K = K u / (1 - K u), u = 2^-24 and eta = 2^-149, the smallest subnormal. It holds for fused and
for separate multiplication and addition, and for any tree of additions; additions do not underflow inexactly.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tilewave.errors import UsageError

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

UNIT_ROUNDOFF = 2.0**-24
"""u of float32: half the distance from 1 to the next larger number."""

SMALLEST_SUBNORMAL = 2.0**-149
"""eta of float32."""


def gamma(k: int) -> float:
    """K u / (1 - K u): the relative error of K rounded operations in float32."""
    if not 0 <= k * UNIT_ROUNDOFF < 1:
        raise UsageError(f"the bound needs 0 <= K < 2^24; K is {k}")
    return k * UNIT_ROUNDOFF / (1 - k * UNIT_ROUNDOFF)


def ieee_bound(a: npt.ArrayLike, b: npt.ArrayLike) -> Float64:
    """The largest error, element by element, that float32 arithmetic may leave in a @ b.

    `a` is (..., M, K) and `b` is (..., K, N); the result is float64 (..., M, N), NaN or Inf where the
    operands make it so.
    """
    x, y = operands_in_float64(a, b)
    k = x.shape[-1]
    with np.errstate(invalid="ignore", over="ignore"):
        magnitude: Float64 = np.matmul(np.abs(x), np.abs(y))
        limit: Float64 = gamma(k) * magnitude + k * SMALLEST_SUBNORMAL / 2
    return limit


def error_in_bounds(
    c: npt.ArrayLike, a: npt.ArrayLike, b: npt.ArrayLike, rows: npt.ArrayLike | None = None
) -> float:
    """The largest |c - a @ b| in units of `ieee_bound`: at most 1 for any correct float32 product.

    The reference is computed in float64. `rows` picks rows of `c` and `a` (indices), for products too large
    to check in full. Infinity is returned for an element that is wrong in kind: NaN or Inf where the
    reference is finite, or the reverse, or an Inf of the wrong sign. Where the positive terms of a sum reach
    the float32 range, some order of it may overflow, and Inf is accepted; likewise -Inf where the negative
    ones do, and NaN where both do.
    """
    result, x, y = product_in_float64(c, a, b)
    if rows is not None:
        chosen = np.asarray(rows)
        result, x = result[..., chosen, :], x[..., chosen, :]
    if result.size == 0:
        return 0.0
    # A few rows at a time: float64 copies of a large product would not fit.
    step = max(1, _ELEMENTS_AT_ONCE // max(1, result[..., :1, :].size, x.shape[-1]))
    return max(
        float(_ratios(result[..., i : i + step, :], x[..., i : i + step, :], y).max())
        for i in range(0, result.shape[-2], step)
    )


def errors_in_bounds(c: npt.ArrayLike, a: npt.ArrayLike, b: npt.ArrayLike) -> Float64:
    """What `error_in_bounds` takes the largest of: the error of every element of `c`."""
    return _ratios(*product_in_float64(c, a, b))


_ELEMENTS_AT_ONCE = 1 << 22
_FLOAT32_OVERFLOW = 2.0**128 - 2.0**103


def operands_in_float64(a: npt.ArrayLike, b: npt.ArrayLike) -> tuple[Float64, Float64]:
    """Both operands, which must be float32 matrices that fit, in float64."""
    x, y = np.asarray(a), np.asarray(b)
    if x.dtype != np.float32 or y.dtype != np.float32:
        raise UsageError(f"a and b are {x.dtype} and {y.dtype}; accepted is float32")
    if x.ndim < 2 or y.ndim < 2 or x.shape[-1] != y.shape[-2]:
        raise UsageError(
            f"a and b have shapes {x.shape} and {y.shape}; accepted are (..., M, K) and (..., K, N)"
        )
    return x.astype(np.float64), y.astype(np.float64)


def product_in_float64(
    c: npt.ArrayLike, a: npt.ArrayLike, b: npt.ArrayLike
) -> tuple[Float32, Float64, Float64]:
    """A float32 product, and its operands in float64; all must fit."""
    x, y = operands_in_float64(a, b)
    result = np.asarray(c)
    expected = (*np.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-1])
    if result.dtype != np.float32 or result.shape != expected:
        raise UsageError(
            f"c is {result.dtype} of shape {result.shape}; accepted is float32 of shape {expected}"
        )
    return result, x, y


def _ratios(c: Float32, x: Float64, y: Float64) -> Float64:
    k = x.shape[-1]
    with np.errstate(invalid="ignore", over="ignore"):
        limit = gamma(k) * np.matmul(np.abs(x), np.abs(y)) + k * SMALLEST_SUBNORMAL / 2
    return ratios_to(limit, c, x, y)


def ratios_to(limit: Float64, c: Float32, x: Float64, y: Float64) -> Float64:
    """The error of every element of ``c``, for x @ y, in units of ``limit``; infinite if wrong in kind."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        reference = np.matmul(x, y)
        error = np.abs(c.astype(np.float64) - reference)
        ratio = np.where(error == 0, 0.0, error / limit)
    known = np.isfinite(reference)
    same_kind = (np.isnan(c) & np.isnan(reference)) | (c == reference)
    ratio = np.where(known, ratio, np.where(same_kind, 0.0, np.inf))
    strange = known & ~np.isfinite(c)
    if strange.any():
        ratio = np.where(strange, np.where(_may_overflow_to(c, limit, x, y), 0.0, np.inf), ratio)
    return ratio


def _may_overflow_to(c: Float32, limit: Float64, x: Float64, y: Float64) -> npt.NDArray[np.bool_]:
    """Whether x @ y, a finite product, may become Inf, -Inf or NaN, whichever ``c`` is, in some order.

    Partial sums lie between the sum of the negative terms and that of the positive ones.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        above, below = (np.maximum(x, 0), np.maximum(y, 0)), (np.minimum(x, 0), np.minimum(y, 0))
        positive = above[0] @ above[1] + below[0] @ below[1]
        negative = -(above[0] @ below[1]) - below[0] @ above[1]
        least = _FLOAT32_OVERFLOW / (1 + limit / (positive + negative))
        up, down = positive >= least, negative >= least
    accepted: npt.NDArray[np.bool_] = np.where(np.isnan(c), up & down, np.where(c > 0, up, down))
    return accepted
