"""Operations of PTX that are more than one NumPy function: integer division, bit fields, conversions, ...

Every function takes and returns arrays (or scalars) of the dtype that the instruction's type names, and
follows the PTX ISA; NumPy's warnings are off while kernels run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_SMALLEST_NORMAL = {np.dtype(np.float32): np.float32(2.0**-126), np.dtype(np.float64): np.float64(2.0**-1022)}


def flush(values: Array) -> Array:
    """Subnormal numbers become zeros of their sign (`.ftz`)."""
    small = np.abs(values) < _SMALLEST_NORMAL[values.dtype]
    return np.where(small, np.copysign(values.dtype.type(0), values), values)


def saturate(values: Array) -> Array:
    """Clamp to [+0, 1]; NaN becomes +0 (`.sat` of a floating-point result)."""
    clamped: Array = np.where(np.isnan(values), values.dtype.type(0), np.clip(values, 0, 1)) + 0.0
    return clamped.astype(values.dtype)


def minimum(a: Array, b: Array) -> Array:
    """The smaller operand; the other one if one is NaN; -0 is smaller than +0."""
    return np.where((a == b) & np.signbit(a), a, np.where((a == b), b, np.fmin(a, b)))


def maximum(a: Array, b: Array) -> Array:
    """The larger operand; the other one if one is NaN; -0 is smaller than +0."""
    return np.where((a == b) & np.signbit(a), b, np.where((a == b), a, np.fmax(a, b)))


def minimum_nan(a: Array, b: Array) -> Array:
    """`min.NaN`: NaN if either operand is."""
    return np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), minimum(a, b))


def maximum_nan(a: Array, b: Array) -> Array:
    """`max.NaN`: NaN if either operand is."""
    return np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), maximum(a, b))


def divide(a: Array, b: Array) -> Array:
    """Integer division towards zero; by zero all bits are set, as the hardware's division routine gives."""
    a, b = np.broadcast_arrays(a, b)
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    quotient = a // safe
    if a.dtype.kind == "i":
        # NumPy rounds down. A remainder of another sign than the divisor cannot occur there, so mend by sign.
        quotient = quotient + ((quotient * safe != a) & ((a < 0) != (safe < 0))).astype(a.dtype)
    return np.where(b == 0, np.array(-1).astype(a.dtype), quotient).astype(a.dtype)


def remainder(a: Array, b: Array) -> Array:
    """Remainder with the sign of the dividend; of a division by zero it is the dividend."""
    a, b = np.broadcast_arrays(a, b)
    return np.where(b == 0, a, a - divide(a, b) * b).astype(a.dtype)


def multiply_high(a: Array, b: Array) -> Array:
    """The upper half of the double-width product."""
    a, b = np.broadcast_arrays(a, b)
    bits = a.dtype.itemsize * 8
    if bits < 64:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return ((a.astype(wide) * b.astype(wide)) >> np.array(bits, dtype=wide)).astype(a.dtype)
    ua, ub = a.view(np.uint64), b.view(np.uint64)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a0, a1, b0, b1 = ua & low, ua >> half, ub & low, ub >> half
    middle = a1 * b0 + (a0 * b0 >> half)
    other = a0 * b1 + (middle & low)
    high = a1 * b1 + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, ub, np.uint64(0)) - np.where(b < 0, ua, np.uint64(0))
    result: Array = high.view(a.dtype)
    return result


def shift_left(a: Array, amount: Array) -> Array:
    """Left shift; amounts of the width or more give 0."""
    bits = a.dtype.itemsize * 8
    inside = amount < bits
    return np.where(inside, a << np.where(inside, amount, 0).astype(a.dtype), 0).astype(a.dtype)


def shift_right(a: Array, amount: Array) -> Array:
    """Right shift, arithmetic for signed types; amounts are clamped to the width."""
    bits = a.dtype.itemsize * 8
    inside = amount < bits
    if a.dtype.kind == "i":
        result: Array = a >> np.where(inside, amount, bits - 1).astype(a.dtype)
        return result
    return np.where(inside, a >> np.where(inside, amount, 0).astype(a.dtype), 0).astype(a.dtype)


def extract_bits(a: Array, position: Array, length: Array) -> Array:
    """`bfe`: the field of `length` bits at `position` (both mod 256), zero- or sign-extended."""
    bits = a.dtype.itemsize * 8
    position, length = (position & 0xFF).astype(np.int64), (length & 0xFF).astype(np.int64)
    unsigned = a.view(f"u{a.dtype.itemsize}")
    field: Array = shift_right(unsigned, position)
    # Bits of the field that the operand does not have are copies of the sign too.
    present = np.minimum(length, np.maximum(bits - position, 0))
    ones = ~unsigned.dtype.type(0)
    mask = ~np.where(present >= bits, 0, shift_left(np.full_like(unsigned, ones), present)).astype(
        unsigned.dtype
    )
    field = field & mask
    if a.dtype.kind == "u":
        return field
    last = np.minimum(position + length - 1, bits - 1)
    sign = (shift_right(unsigned, np.maximum(last, 0)) & unsigned.dtype.type(1)).astype(bool) & (length > 0)
    extended: Array = np.where(sign, field | ~mask, field).astype(unsigned.dtype)
    return extended.view(a.dtype)


def insert_bits(a: Array, b: Array, position: Array, length: Array) -> Array:
    """`bfi`: b with its field of `length` bits at `position` (both mod 256) replaced by the low bits of a."""
    bits = a.dtype.itemsize * 8
    position, length = (position & 0xFF).astype(np.int64), (length & 0xFF).astype(np.int64)
    ones = np.where(length >= bits, ~a.dtype.type(0), shift_left(np.ones_like(a), length) - 1).astype(a.dtype)
    mask = shift_left(ones, position)
    return (b & ~mask) | (shift_left(a, position) & mask)


def permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """`prmt.b32`, default mode: nibbles choose among the bytes of {b, a}; bit 3 replicates the sign."""
    a, b, selector = np.broadcast_arrays(a, b, selector)
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros(a.shape, dtype=np.uint32)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & np.uint32(0xF)
        byte = (
            (both >> ((nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(0xFF)
        ).astype(np.uint32)
        sign = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        result |= np.where(nibble & np.uint32(8), sign, byte).astype(np.uint32) << np.uint32(8 * i)
    return result


def logic3(a: Array, b: Array, c: Array, table: int) -> Array:
    """`lop3.b32`: bitwise function of three operands given by its truth table."""
    a, b, c = np.broadcast_arrays(a, b, c)
    result = np.zeros(a.shape, dtype=np.uint32)
    for row in range(8):
        if table >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result


def funnel_shift(low: Array, high: Array, amount: Array, *, left: bool, wrap: bool) -> Array:
    """`shf`: shift the 64-bit value {high, low} and take its upper (left) or lower (right) word."""
    count = (amount & np.uint32(31)) if wrap else np.minimum(amount, np.uint32(32))
    value = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
    if left:
        return ((value << count.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)
    return ((value >> count.astype(np.uint64)) & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def count_ones(a: Array) -> Array:
    """`popc`."""
    return np.bitwise_count(a).astype(np.uint32)


def count_leading_zeros(a: Array) -> Array:
    """`clz`."""
    bits = a.dtype.itemsize * 8
    for shift in (1, 2, 4, 8, 16, 32):
        if shift < bits:
            a = a | (a >> a.dtype.type(shift))
    return (bits - np.bitwise_count(a)).astype(np.uint32)


def reverse_bits(a: Array) -> Array:
    """`brev`."""
    as_bytes = np.ascontiguousarray(a).view(np.uint8).reshape(-1, a.dtype.itemsize)
    flipped = np.packbits(
        np.unpackbits(as_bytes, axis=1, bitorder="little")[:, ::-1], axis=1, bitorder="little"
    )
    return flipped.view(a.dtype).reshape(a.shape)


_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def float_to_integer(values: Array, rounding: str, dtype: Any) -> Array:
    """Rounded and clamped to the range of an integer type; NaN becomes 0."""
    target = np.dtype(dtype)
    limits = np.iinfo(target)
    rounded = _ROUND[rounding](values.astype(np.float64))
    result = np.where(np.isnan(rounded), 0, rounded)
    # float64 cannot hold the largest 64-bit integers: compare with the power of two behind them.
    too_large, too_small = result >= float(limits.max) + (target.itemsize < 8), result < float(limits.min)
    converted = np.where(too_large | too_small, 0, result).astype(target)
    return np.where(too_large, limits.max, np.where(too_small, limits.min, converted)).astype(target)


def round_to_integral(values: Array, rounding: str) -> Array:
    """Rounded to an integral value of the same floating-point type."""
    return _ROUND[rounding](values)


def saturate_integer(values: Array, dtype: Any) -> Array:
    """Clamped to the range of an integer type (`cvt.sat`)."""
    limits = np.iinfo(dtype)
    if values.dtype.kind == "u":
        most = values.dtype.type(min(limits.max, np.iinfo(values.dtype).max))
        return np.minimum(values, most).astype(dtype)  # type: ignore[no-any-return]
    low = max(limits.min, np.iinfo(values.dtype).min)
    high = min(limits.max, np.iinfo(values.dtype).max)
    return np.clip(values, low, high).astype(dtype)
