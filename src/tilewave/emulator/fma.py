"""Fused multiply-add in float32, rounded once, as the GPU's FFMA does it (round to nearest even, no flush).

NumPy has no float32 FMA; `fma` builds one from float64 arithmetic. Why it is correct for every input:

1. *The product is exact.* Two float32 numbers have at most 24 significant bits each, so p = a b has at most
   48, and 2^-298 <= |p| < 2^256 unless p is 0: it is a normal float64 number.
2. *The sum is rounded once to 53 bits, s = RN64(p + c).* It neither overflows nor underflows: p + c is a
   multiple of 2^-298, so a sum that small is exact. Converting s to float32 rounds a second time. Rounding to
   nearest is monotone, and every float32 number and every midpoint of two neighbouring float32 numbers (the
   overflow threshold 2^128 - 2^103 and the subnormal range included) is a float64 number. Hence p + c and s
   lie on the same side of each midpoint, or s is the midpoint itself. So the second rounding can only go
   wrong if *s is such a midpoint and differs from p + c*.
3. *Those lanes are mended by rounding to odd* (Boldo and Melquiond, "Emulation of FMA and correctly rounded
   sums: proved algorithms using rounding to odd", 2008): Knuth's TwoSum gives the error e = p + c - s
   exactly. A midpoint has an even last bit in float64. If e is not 0, s is moved by its last bit towards p +
   c; it is then strictly on p + c's side of the midpoint, and no other midpoint lies between.
4. *Which lanes those are.* If |s| >= 2^-126, the float32 grid has 24 bits, so a midpoint has exactly the
   bits 100...0 (29 of them) at its end. If |s| < 2^-126 the grid is coarser; all such lanes go through step
   3, which is harmless where it is not needed: |s| > 2^-150 stays on the same side of every midpoint and
   float32 number that it is not equal to. What rounds to 0 needs no mending: |s| <= 2^-150, where |s| =
   2^-150 is the only midpoint. For it, p is 0 (then s = c is no midpoint) or |p| >= 2^-150 (else c = 0 and s
   = p, or |c| >= 2^-149 and |p + c| > 2^-150), so p + c is a multiple of 2^-197, which needs at most 48 bits
   at 2^-150: s is exact.

Special values follow IEEE 754: Inf * 0 + c, Inf - Inf and a NaN operand give NaN, and the GPU's only NaN,
0x7FFFFFFF; an exact zero sum of opposite signs is +0; p = -0 and c = -0 give -0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

CANONICAL_NAN = 0x7FFFFFFF
"""The bits of the NaN that the GPU's float32 arithmetic returns, whatever NaN went in."""


def canonical_nan(values: Float32) -> Float32:
    """Replace, in place, every NaN by the one the GPU returns; returns its argument."""
    nan = np.isnan(values)
    if nan.any():
        values.view(np.uint32)[nan] = CANONICAL_NAN
    return values


def fma(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike, out: Float32 | None = None) -> Float32:
    """a * b + c in float32 with a single rounding, element by element, with broadcasting.

    Operands must be float32. `out` (float32, of the result's shape) may be one of them.
    """
    x, y, z = (_float32(operand) for operand in (a, b, c))
    if not x.shape == y.shape == z.shape:
        x, y, z = np.broadcast_arrays(x, y, z)
    if out is None:
        out = np.empty(x.shape, dtype=np.float32)
    elif out.dtype != np.float32 or out.shape != x.shape:
        raise TypeError(f"out is {out.dtype} of shape {out.shape}; accepted is float32 of shape {x.shape}")
    if x.ndim != 1:
        x, y, z = x.reshape(-1), y.reshape(-1), z.reshape(-1)
    flat = out.reshape(-1) if out.flags.c_contiguous else np.empty(out.size, dtype=np.float32)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        for start in range(0, len(flat), _LANES_AT_ONCE):
            part = slice(start, start + _LANES_AT_ONCE)
            _fma_into(x[part], y[part], z[part], flat[part])
    if not out.flags.c_contiguous:
        out[...] = flat.reshape(out.shape)
    return out


def fma_down(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> Float32:
    """a * b + c in float32, rounded once towards minus infinity (`fma.rm`).

    The product is exact in float64, and so is the pair of the rounded sum and its error; the float32 number
    nearest to the sum is too large exactly if it is above the sum, or equal to it with a negative error.
    """
    x, y, z = np.broadcast_arrays(*(_float32(operand) for operand in (a, b, c)))
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        product = np.multiply(x, y, dtype=np.float64)
        total = product + z
        virtual = total - product
        error = (product - (total - virtual)) + (z - virtual)
        result: Float32 = total.astype(np.float32)
        above = (result > total) | ((result == total) & (error < 0))
        result = np.where(above, np.nextafter(result, np.float32(-np.inf)), result)
    # Rounding down, a zero from terms of opposite signs is negative.
    negative_zero = (total == 0) & (np.signbit(product) | np.signbit(z))
    result = np.where(negative_zero, np.float32(-0.0), result)
    return canonical_nan(result)


_LANES_AT_ONCE = 1 << 14  # the float64 temporaries of one step stay in the cache


def _fma_into(x: Float32, y: Float32, z: Float32, out: Float32) -> None:
    total = np.multiply(x, y, dtype=np.float64)
    total += z
    result = total.astype(np.float32)
    suspects = _suspects(total, result)
    if suspects.any():
        product = np.multiply(x[suspects], y[suspects], dtype=np.float64)
        result[suspects] = _round_to_odd(product, z[suspects].astype(np.float64))
    canonical_nan(result)
    out[...] = result


def _float32(operand: npt.ArrayLike) -> Float32:
    array = np.asarray(operand)
    if array.dtype != np.float32:
        raise TypeError(f"fma takes float32 operands; given was {array.dtype}")
    return array


def _suspects(total: npt.NDArray[np.float64], result: Float32) -> npt.NDArray[np.bool_]:
    """Lanes whose float64 sum may be a midpoint of float32: step 4 of the argument above."""
    low_words = total.view(np.uint32)[0::2]  # every machine that CUDA runs on is little-endian
    midpoint = (low_words & np.uint32(0x1FFFFFFF)) == np.uint32(0x10000000)
    # 0 < |result| <= 2^-126; doubling drops the sign, and subtracting 1 turns 0 into the largest number.
    magnitude = (result.view(np.uint32) << np.uint32(1)) - np.uint32(1)
    suspects: npt.NDArray[np.bool_] = midpoint | (magnitude < np.uint32(0x01000000))
    return suspects


def _round_to_odd(p: npt.NDArray[np.float64], c: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """p + c rounded to float64 so that an inexact sum has an odd last bit."""
    total = p + c
    virtual_c = total - p
    error = (p - (total - virtual_c)) + (c - virtual_c)
    bits = total.view(np.int64)
    mend = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    # One step away from zero adds 1 to the bits of either sign.
    step = np.where((error > 0) == (total > 0), 1, -1)
    bits[mend] += step[mend]
    return total
