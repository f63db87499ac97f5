"""Arithmetic on halves: float16 and bfloat16, alone or two in a 32-bit register, rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_QUIET_BFLOAT16 = np.uint32(0x7FFF)


def wide(bits: Array, kind: str) -> Array:
    """Bits of halves (any unsigned dtype, read as uint16 in order) as float64."""
    halves = np.ascontiguousarray(bits).view(np.uint16)
    if kind == "f16":
        return halves.view(np.float16).astype(np.float64)
    return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def narrow(values: Array, kind: str) -> Array:
    """Round to nearest, ties to even: the bits as uint16. NaN becomes the hardware's, 0x7fff."""
    if kind == "f16":
        bits = values.astype(np.float16).view(np.uint16)
    else:
        single = _round_to_odd(values).view(np.uint32)
        bits = ((single + np.uint32(0x7FFF) + (single >> 16 & np.uint32(1))) >> 16).astype(np.uint16)
    result: Array = np.where(np.isnan(values), _QUIET_BFLOAT16, bits).astype(np.uint16)
    return result


def _round_to_odd(values: Array) -> Array:
    """float64 to float32 such that a second rounding gives what one would have given."""
    single = values.astype(np.float32)
    inexact = (single != values) & np.isfinite(values)
    # Towards zero, and the last bit set: a float32 beyond the value is one step too far out.
    bits = single.view(np.uint32)
    too_far = inexact & (np.abs(single.astype(np.float64)) > np.abs(values))
    bits = np.where(too_far, bits - np.uint32(1), bits)
    result: Array = np.where(inexact, bits | np.uint32(1), bits).astype(np.uint32).view(np.float32)
    return result


def _odd_sum(a: Array, b: Array) -> Array:
    """The float64 sum; where it is not exact, the neighbour whose last bit is set."""
    total: Array = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    even = (total.view(np.int64) & 1) == 0
    move = np.isfinite(total) & (error != 0) & even
    return np.where(move, np.nextafter(total, np.copysign(np.inf, error)), total)


def compute(operation: str, kind: str, sources: list[Array]) -> Array:
    """`add`, `sub`, `mul`, `fma`, `min`, `max` on bits of halves; the result's bits as uint16."""
    values = [wide(source, kind) for source in sources]
    if operation == "add":
        result = values[0] + values[1]
    elif operation == "sub":
        result = values[0] - values[1]
    elif operation == "mul":
        result = values[0] * values[1]
    elif operation == "fma":
        result = _odd_sum(values[0] * values[1], values[2])  # the product is exact
    else:
        # Of a number and a NaN the number; -0 is below +0, which fmin and fmax leave to chance.
        pick = np.fmin if operation == "min" else np.fmax
        result = pick(values[0], values[1])
        zeros = (values[0] == 0) & (values[1] == 0)
        signs = np.signbit(values[0]), np.signbit(values[1])
        negative = signs[0] | signs[1] if operation == "min" else signs[0] & signs[1]
        result = np.where(zeros, np.where(negative, -0.0, 0.0), result)
    return narrow(result, kind)


def change_sign(operation: str, bits: Array) -> Array:
    """`neg` and `abs` on bits of halves."""
    halves = np.ascontiguousarray(bits).view(np.uint16)
    mask = np.uint16(0x8000)
    return halves ^ mask if operation == "neg" else halves & ~mask


def round_pair(high: Array, low: Array, kind: str) -> Array:
    """`cvt.rn.f16x2.f32`: the first source goes to the upper half."""
    upper, lower = (narrow(part.astype(np.float64), kind).astype(np.uint32) for part in (high, low))
    result: Array = upper << np.uint32(16) | lower
    return result
