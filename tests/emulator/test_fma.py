"""The emulator's FMA rounds once: compared with exact rational arithmetic and the C library's fmaf."""

from __future__ import annotations

import ctypes
import ctypes.util
import math
from fractions import Fraction

import numpy as np
import pytest

from tilewave.emulator.fma import CANONICAL_NAN, canonical_nan, fma, fma_down

Generator = np.random.Generator
F32 = np.float32
MAX = np.finfo(np.float32).max
TINY = 2.0**-149
OVERFLOW = Fraction(2**128 - 2**103)


def bits(values: np.ndarray | np.float32) -> np.ndarray:
    return np.atleast_1d(np.asarray(values, np.float32)).view(np.uint32)


def from_bits(patterns: np.ndarray) -> np.ndarray:
    return patterns.astype(np.uint32).view(np.float32)


def round_to_float32(value: Fraction) -> float:
    """Round to nearest even by integer arithmetic alone (the reference; not 0)."""
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    # round() of a Fraction rounds halves to even.
    rounded = round(magnitude / unit) * unit
    result = math.inf if rounded >= 2**128 else float(rounded)
    return -result if value < 0 else result


def exact_fma(a: float, b: float, c: float) -> int:
    """The bits of a b + c by IEEE 754, from the definition."""
    if math.isnan(a) or math.isnan(b) or math.isnan(c):
        return CANONICAL_NAN
    if math.isinf(a) or math.isinf(b):
        if a == 0 or b == 0:
            return CANONICAL_NAN
        product = math.copysign(math.inf, a) * math.copysign(1, b)
        return CANONICAL_NAN if math.isinf(c) and c != product else int(bits(F32(product))[0])
    if math.isinf(c):
        return int(bits(F32(c))[0])
    value = Fraction(a) * Fraction(b) + Fraction(c)
    if value == 0:
        product_sign = math.copysign(1, a) * math.copysign(1, b)
        zero_sum_of_zeros = (a == 0 or b == 0) and c == 0
        negative = zero_sum_of_zeros and product_sign < 0 and math.copysign(1, c) < 0
        return 0x80000000 if negative else 0
    rounded = round_to_float32(value)
    result = int(bits(F32(rounded))[0])
    return result | 0x80000000 if value < 0 else result


def check(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    got = bits(fma(a, b, c))
    expected = [exact_fma(*map(float, triple)) for triple in zip(a, b, c, strict=True)]
    wrong = np.flatnonzero(got != np.array(expected, np.uint32))
    details = [
        f"fma({a[i].item().hex()}, {b[i].item().hex()}, {c[i].item().hex()}) = {got[i]:#010x}, "
        f"correct is {expected[i]:#010x}"
        for i in wrong[:5]
    ]
    assert not len(wrong), f"{len(wrong)} of {len(got)} wrong:\n" + "\n".join(details)


def random_bits(rng: Generator, count: int) -> np.ndarray:
    return from_bits(rng.integers(0, 1 << 32, count))


def random_floats(rng: Generator, count: int, low: int, high: int) -> np.ndarray:
    """Random significands, some with few bits, and exponents in [low, high)."""
    significand = rng.integers(1 << 23, 1 << 24, count)
    cut = rng.integers(0, 24, count) * rng.integers(0, 2, count)
    significand = (significand >> cut) << cut
    sign = rng.choice([-1.0, 1.0], count)
    return np.ldexp(sign * significand, rng.integers(low, high, count) - 23).astype(np.float32)


def special(rng: Generator, count: int) -> np.ndarray:
    values = np.array(
        [
            0,
            TINY,
            2 * TINY,
            2.0**-126,
            2.0**-126 - TINY,
            1,
            1 + 2.0**-23,
            1 - 2.0**-24,
            3,
            MAX,
            np.inf,
            np.nan,
        ],
        np.float32,
    )
    return np.concatenate([values, -values])[rng.integers(0, 2 * len(values), count)]


def test_every_triple_of_special_values() -> None:
    values = np.array(
        [0, TINY, 2.0**-126, 2.0**-126 - TINY, 1, 1 + 2.0**-23, 2.0**-75, MAX, np.inf, np.nan], np.float32
    )
    values = np.concatenate([values, -values])
    a, b, c = (grid.ravel() for grid in np.meshgrid(values, values, values))
    check(a, b, c)


@pytest.mark.parametrize("kind", ["bits", "special", "near"])
def test_random_operands_against_exact_arithmetic(rng: Generator, kind: str) -> None:
    n = 8000
    if kind == "bits":
        check(random_bits(rng, n), random_bits(rng, n), random_bits(rng, n))
    elif kind == "special":
        columns = [np.where(rng.random(n) < 0.5, special(rng, n), random_bits(rng, n)) for _ in range(3)]
        check(*columns)
    else:
        check(*(random_floats(rng, n, -3, 3) for _ in range(3)))


def halfway_cases(rng: Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a b + c on a midpoint of float32 exactly, or beside it by far less than float64's last bit.

    a b is h half-units of c's last place (h odd), plus t units of the product's own last place, t in -1, 0,
    1: b = t / a modulo 2^24 makes the low 24 bits of the product equal t.
    """
    chosen = [np.empty((0, 3), np.float32)]
    while sum(map(len, chosen)) < count:
        n = 1 << 18
        a = rng.integers(1 << 23, 1 << 24, n, dtype=np.uint64) | np.uint64(1)
        inverse = a.copy()
        for _ in range(5):
            inverse *= np.uint64(2) - a * inverse
        t = rng.integers(-1, 2, n)
        b = (inverse * t.astype(np.uint64)) & np.uint64((1 << 24) - 1)
        exact = t == 0
        # (An exact midpoint needs few bits: 2^k times an odd number, by 2^24 / 2^k.)
        k = rng.integers(1, 20, n)
        a[exact] = (a[exact] >> k[exact].astype(np.uint64)) | np.uint64(1)
        b[exact] = np.uint64(1 << 23)
        product = a.astype(np.int64) * b.astype(np.int64) - t
        zeros = np.where(product > 0, np.log2((product & -product).clip(1)), 0).astype(np.int64)
        keep = (b > 0) & np.where(exact, rng.random(n) < 1 / 64, zeros >= 29)
        c = np.ldexp(rng.integers(1 << 23, 1 << 24, n).astype(np.float32), zeros + 1)
        scale = rng.integers(-20, 20, (3, n))
        x = np.ldexp(a.astype(np.float32), scale[0] - 30) * rng.choice([-1, 1], n).astype(np.float32)
        y = np.ldexp(b.astype(np.float32), scale[1] - 30)
        z = np.ldexp(c, scale[0] + scale[1] - 60) * rng.choice([-1, 1], n).astype(np.float32)
        chosen.append(np.stack([x, y, z], axis=1)[keep].astype(np.float32))
    rows = np.concatenate(chosen)[:count]
    return rows[:, 0].copy(), rows[:, 1].copy(), rows[:, 2].copy()


def wrong_when_rounded_twice(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> float:
    """Share of the cases that float64 arithmetic converted to float32 gets wrong: the teeth of a test."""
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    return float((bits(twice) != bits(fma(a, b, c))).mean())


def test_halfway_cases_and_their_neighbours(rng: Generator) -> None:
    a, b, c = halfway_cases(rng, 20000)
    assert wrong_when_rounded_twice(a, b, c) > 0.1
    check(a, b, c)


def test_subnormal_results(rng: Generator) -> None:
    n = 10000
    a = random_floats(rng, n, -80, -60)
    b = random_floats(rng, n, -80, -60)
    c = from_bits(rng.integers(0, 1 << 24, n) | rng.choice([0, 1 << 31], n))
    check(a, b, c)
    check(a, b, np.zeros(n, np.float32))


def test_midpoints_between_subnormals(rng: Generator) -> None:
    """c is subnormal or just normal, a b a half of the smallest subnormal with a tail of either sign."""
    n = 20000
    c = from_bits(rng.integers(0, 1 << 24, n) | rng.choice([0, 1 << 31], n))
    i = rng.integers(-4, 5, n)
    a = np.ldexp(1 + i * 2.0**-23, -75).astype(np.float32)
    j = np.where(rng.random(n) < 0.7, i, rng.integers(-4, 5, n))
    b = np.ldexp(1 - j * 2.0**-23, -75).astype(np.float32) * rng.choice([-1, 1, 3, 5], n).astype(np.float32)
    assert wrong_when_rounded_twice(a, b, c) > 0.001
    check(a, b, c)


def test_subnormal_operands(rng: Generator) -> None:
    n = 6000
    tiny = [from_bits(rng.integers(0, 1 << 23, n) | rng.choice([0, 1 << 31], n)) for _ in range(3)]
    check(tiny[0], random_floats(rng, n, -2, 128), tiny[2])
    check(tiny[0], random_floats(rng, n, -2, 128), random_floats(rng, n, -126, -100))
    check(tiny[0], tiny[1], tiny[2])


def test_cancellation_leaves_the_exact_low_part(rng: Generator) -> None:
    """c = -RN(a b): the result is the rounding error of the product, exactly."""
    n = 8000
    a, b = random_floats(rng, n, -20, 20), random_floats(rng, n, -20, 20)
    check(a, b, -(a * b))
    check(a, b, np.nextafter(-(a * b), np.float32(0)))


def test_overflow_boundary(rng: Generator) -> None:
    n = 8000
    c = from_bits(0x7F7FFFFF - rng.integers(0, 3, n)) * rng.choice([-1, 1], n).astype(np.float32)
    # Half a unit of the largest number is 2^103.
    i = rng.integers(-3, 4, n)
    a = np.ldexp(1 + i * 2.0**-23, 60).astype(np.float32)
    j = np.where(rng.random(n) < 0.7, i, rng.integers(-3, 4, n))
    b = np.ldexp(1 - j * 2.0**-23, 43).astype(np.float32) * rng.choice([-3, -1, 1, 3], n).astype(np.float32)
    check(a, b, c)
    big = random_floats(rng, n, 60, 68)
    check(big, random_floats(rng, n, 60, 68), random_floats(rng, n, 120, 128))
    # A product beyond float32's range may come back into it.
    check(big, random_floats(rng, n, 60, 61), -(big * np.float32(2.0**60)))


def test_a_nan_of_any_payload_becomes_the_gpus() -> None:
    payloads = from_bits(np.array([0x7F800001, 0xFFC12345, 0x7FC00000, 0xFFFFFFFF]))
    one = np.ones(4, np.float32)
    for triple in ((payloads, one, one), (one, payloads, one), (one, one, payloads)):
        assert (bits(fma(*triple)) == CANONICAL_NAN).all()
    values = np.array([1, np.nan, -np.inf], np.float32)
    assert canonical_nan(values) is values
    assert bits(values).tolist() == [0x3F800000, CANONICAL_NAN, 0xFF800000]


def libm_fmaf() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    function.argtypes, function.restype = [ctypes.c_float] * 3, ctypes.c_float
    return function


def test_millions_of_random_draws_against_the_c_library(rng: Generator) -> None:
    library, n = libm_fmaf(), 700_000
    for columns in (
        [random_bits(rng, n) for _ in range(3)],
        [rng.standard_normal(n).astype(np.float32) for _ in range(3)],
        [random_floats(rng, n, -70, -50), random_floats(rng, n, -80, -60), random_floats(rng, n, -140, -120)],
        halfway_cases(rng, n),
    ):
        a, b, c = columns
        expected = np.fromiter(map(library, a.tolist(), b.tolist(), c.tolist()), np.float32, n)
        assert (bits(canonical_nan(expected)) == bits(fma(a, b, c))).all()


def test_rounding_down_is_exact(rng: Generator) -> None:
    def check_down(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        found = fma_down(a, b, c)
        for x, y, z, r in zip(a.tolist(), b.tolist(), c.tolist(), found.tolist(), strict=True):
            exact = Fraction(x) * Fraction(y) + Fraction(z)
            above = float(np.nextafter(F32(r), F32(np.inf)))
            assert math.isinf(r) or Fraction(r) <= exact
            assert math.isinf(above) or exact < Fraction(above)

    n = 2000
    check_down(*(rng.standard_normal(n).astype(np.float32) for _ in range(3)))
    check_down(*halfway_cases(rng, n))
    low = random_floats(rng, n, -80, -60)
    check_down(low, random_floats(rng, n, -80, -60), random_floats(rng, n, -148, -120))
    zero, one = np.zeros(2, np.float32), np.ones(2, np.float32)
    assert bits(fma_down(one, one, -one)).tolist() == [0x80000000] * 2
    assert bits(fma_down(zero, one, zero)).tolist() == [0] * 2
    huge = np.full(2, MAX, np.float32)
    assert (fma_down(huge, one * 2, zero) == MAX).all()
    assert (fma_down(-huge, one * 2, zero) == -np.inf).all()
    assert (bits(fma_down(one * np.float32(np.nan), one, one)) == CANONICAL_NAN).all()


def test_shapes_and_out(rng: Generator) -> None:
    a = rng.standard_normal((5, 1)).astype(np.float32)
    b = rng.standard_normal(7).astype(np.float32)
    c = rng.standard_normal((5, 7)).astype(np.float32)
    expected = fma(np.broadcast_to(a, (5, 7)).ravel(), np.broadcast_to(b, (5, 7)).ravel(), c.ravel())
    assert np.array_equal(fma(a, b, c), expected.reshape(5, 7))
    assert fma(F32(2), F32(3), F32(4)).shape == ()
    strided = np.zeros((7, 5), np.float32).T
    assert np.array_equal(fma(a, b, c, out=strided), expected.reshape(5, 7))
    assert fma(F32(2), F32(3), F32(4)) == 10
    assert fma(F32(2), F32(3), c).shape == (5, 7)
    assert fma(c[:0], c[:0], c[:0]).shape == (0, 7)
    assert fma(a, b, c, out=c) is c
    assert np.array_equal(c.ravel(), expected)


def test_other_types_are_refused() -> None:
    ones = np.ones(2, np.float32)
    with pytest.raises(TypeError, match="float64"):
        fma(np.ones(2), ones, ones)
    with pytest.raises(TypeError, match="shape"):
        fma(ones, ones, ones, out=np.empty(3, np.float32))
    with pytest.raises(TypeError, match="int32"):
        fma(ones, ones, ones, out=np.empty(2, np.int32))  # type: ignore[arg-type]
