"""Floating-point instructions and conversions, with the GPU's bits wherever the hardware rounds correctly."""

from __future__ import annotations

import numpy as np

from tilewave.emulator.fma import canonical_nan, fma
from tilewave.emulator.memory import Mask
from tilewave.emulator.sass.instruction import Instruction
from tilewave.emulator.sass.integer import Handler, combine, unsupported
from tilewave.emulator.sass.machine import F32, U64, Machine
from tilewave.emulator.sass.operands import Immediate, Predicate, Register

_SMALLEST_NORMAL = np.float32(2.0**-126)


def _flush(i: Instruction, value: F32) -> F32:
    """Subnormal numbers become zeros of their sign with .FTZ."""
    if not i.has("FTZ"):
        return value
    return np.where(np.abs(value) < _SMALLEST_NORMAL, np.copysign(np.float32(0), value), value)


def _only_nearest(i: Instruction) -> None:
    if any(i.has(name) for name in ("RM", "RP", "RZ", "SAT", "FMZ")):
        raise unsupported(i, "this rounding or saturation")


def ffma(m: Machine, i: Instruction, threads: Mask) -> None:
    """d = a b + c, rounded once."""
    _only_nearest(i)
    d, a, b, c = i.operands
    if i.has("FTZ"):
        value = fma(_flush(i, m.float32(a)), _flush(i, m.float32(b)), _flush(i, m.float32(c)))
        m.write(d, _flush(i, value), threads)
    else:
        m.write(d, fma(m.float32(a), m.float32(b), m.float32(c)), threads)


def fmul(m: Machine, i: Instruction, threads: Mask) -> None:
    """d = a b."""
    _only_nearest(i)
    d, a, b = i.operands
    value = _flush(i, m.float32(a)) * _flush(i, m.float32(b))
    m.write(d, _flush(i, canonical_nan(value)), threads)


def fadd(m: Machine, i: Instruction, threads: Mask) -> None:
    """d = a + b."""
    _only_nearest(i)
    d, a, b = i.operands
    value = _flush(i, m.float32(a)) + _flush(i, m.float32(b))
    m.write(d, _flush(i, canonical_nan(value)), threads)


def fmnmx(m: Machine, i: Instruction, threads: Mask) -> None:
    """The smaller of a and b where the predicate holds, else the larger; a NaN loses."""
    if i.has("NAN") or i.has("XORSIGN"):
        raise unsupported(i, "this minimum")
    d, a, b, smaller = i.operands
    assert isinstance(smaller, Predicate)
    x, y = _flush(i, m.float32(a)), _flush(i, m.float32(b))
    # -0 counts as smaller than +0.
    low = np.where((x == y) & np.signbit(x), x, np.where(x == y, y, np.fmin(x, y)))
    high = np.where((x == y) & np.signbit(x), y, np.where(x == y, x, np.fmax(x, y)))
    value = np.where(m.predicate(smaller, per_thread=True), low, high)
    m.write(d, canonical_nan(value), threads)


def fsel(m: Machine, i: Instruction, threads: Mask) -> None:
    """d = a where the predicate holds, else b."""
    d, a, b, which = i.operands
    assert isinstance(which, Predicate)
    m.write(d, _flush(i, np.where(m.predicate(which, per_thread=True), m.float32(a), m.float32(b))), threads)


def fsetp(m: Machine, i: Instruction, threads: Mask) -> None:
    """Compare; a comparison whose name ends in U also holds if an operand is NaN."""
    first, second, a, b, other = i.operands
    assert isinstance(other, Predicate)
    x, y = _flush(i, m.float32(a)), _flush(i, m.float32(b))
    nan = np.isnan(x) | np.isnan(y)
    name = i.modifiers[0]
    base = name.removesuffix("U") if name not in ("NUM",) else name
    tables = {
        "F": np.zeros(x.shape, dtype=np.bool_),
        "T": np.ones(x.shape, dtype=np.bool_),
        "NUM": ~nan,
        "NAN": nan,
        "LT": x < y,
        "EQ": x == y,
        "LE": x <= y,
        "GT": x > y,
        "NE": (x != y) & ~nan,
        "GE": x >= y,
    }
    result = tables[base]
    if base != name:
        result = result | nan
    joined = m.predicate(other, per_thread=True)
    m.write_predicate(first, combine(i, result, joined), threads)
    m.write_predicate(second, combine(i, ~result, joined), threads)


def mufu(m: Machine, i: Instruction, threads: Mask) -> None:
    """d = 1 / a. The hardware may differ in the last bit; ptxas corrects for that where it uses it."""
    if i.modifiers != ("RCP",):
        raise unsupported(i, "this function")
    d, a = i.operands
    value = np.float32(1) / _flush_always(m.float32(a))
    m.write(d, _flush_always(value), threads)


def _flush_always(value: F32) -> F32:
    return np.where(np.abs(value) < _SMALLEST_NORMAL, np.copysign(np.float32(0), value), value)


_SOURCES = {"U8": np.uint8, "S8": np.int8, "U16": np.uint16, "S16": np.int16, "U32": np.uint32}


def _rounded_up(i: Instruction, nearest: F32, exact: U64) -> F32:
    """The smallest float32 number that is not below an unsigned 64-bit integer."""
    if i.has("S64"):
        raise unsupported(i, "this rounding")
    # As Python integers, which are exact: a float64 number has too few bits.
    below = np.array([int(x) < int(n) for x, n in zip(nearest, exact, strict=True)])
    return np.where(below, np.nextafter(nearest, np.float32(np.inf)), nearest)


def i2f(m: Machine, i: Instruction, threads: Mask) -> None:
    """d = a as float32, rounded to nearest or towards plus infinity."""
    if i.has("RM") or i.has("RZ"):
        raise unsupported(i, "this rounding")
    d, a = i.operands
    if i.has("U64") or i.has("S64"):
        pair = m.pair(a)
        nearest = (pair.view(np.int64) if i.has("S64") else pair).astype(np.float32)
        m.write(d, _rounded_up(i, nearest, pair) if i.has("RP") else nearest, threads)
        return
    kind = next((_SOURCES[name] for name in i.modifiers if name in _SOURCES), np.int32)
    exact = m.integer(a).astype(np.uint32).view(np.dtype(kind))[:: 4 // np.dtype(kind).itemsize]
    exact = exact.astype(np.float64)
    value = exact.astype(np.float32)
    if i.has("RP"):
        value = np.where(value < exact, np.nextafter(value, np.float32(np.inf)), value)
    m.write(d, value.astype(np.float32), threads)


_ROUNDINGS = {"TRUNC": np.trunc, "FLOOR": np.floor, "CEIL": np.ceil}


def f2i(m: Machine, i: Instruction, threads: Mask) -> None:
    """d = a as an integer, clamped to its range; a NaN becomes 0."""
    d, a = i.operands
    value = _flush(i, m.float32(a)).astype(np.float64)
    rounding = next((_ROUNDINGS[name] for name in i.modifiers if name in _ROUNDINGS), np.rint)
    value = np.nan_to_num(rounding(value), nan=0.0, posinf=2.0**40, neginf=-(2.0**40))
    if i.has("U64"):
        inside = np.where((value > 0) & (value < 2.0**64), value, 0.0).astype(np.uint64)
        m.write_pair(d, np.where(value >= 2.0**64, np.uint64(0xFFFFFFFFFFFFFFFF), inside), threads)
        return
    if i.has("S64"):
        raise unsupported(i, "a conversion to a signed 64-bit integer")
    low, high = (0.0, 2.0**32 - 1) if i.has("U32") else (-(2.0**31), 2.0**31 - 1)
    m.write(d, np.clip(value, low, high).astype(np.int64).astype(np.uint32), threads)


def frnd(m: Machine, i: Instruction, threads: Mask) -> None:
    """d = a rounded to an integer, as float32."""
    d, a = i.operands
    rounding = next((_ROUNDINGS[name] for name in i.modifiers if name in _ROUNDINGS), np.rint)
    m.write(d, canonical_nan(rounding(_flush(i, m.float32(a))).astype(np.float32)), threads)


def hfma2(m: Machine, i: Instruction, threads: Mask) -> None:
    """Two float16 multiply-adds: known only as the idiom -0 * 0 + immediate, which loads a constant."""
    d, a, b, c = i.operands
    if not (
        isinstance(a, Register)
        and a.is_zero
        and isinstance(b, Register)
        and b.is_zero
        and isinstance(c, Immediate)
    ):
        raise unsupported(i, "float16 arithmetic")
    # -0 + -0 would stay -0, and +0 + -0 is +0.
    halves = np.array([c.value], dtype=np.uint32).view(np.float16)
    product = np.float16(-0.0 if a.negate else 0.0)
    m.write(d, np.full(m.lanes, (halves + product).view(np.uint32)[0], dtype=np.uint32), threads)


HANDLERS: dict[str, Handler] = {
    "FFMA": ffma,
    "FMUL": fmul,
    "FADD": fadd,
    "FMNMX": fmnmx,
    "FSEL": fsel,
    "FSETP": fsetp,
    "MUFU": mufu,
    "I2F": i2f,
    "I2FP": i2f,
    "F2I": f2i,
    "FRND": frnd,
    "HFMA2.MMA": hfma2,
    "HFMA2": hfma2,
}
"""What executes each opcode."""
