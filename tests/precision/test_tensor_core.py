"""The tensor core's sum against an independent one in exact fractions, and where it is what IEEE says."""

from __future__ import annotations

from fractions import Fraction
from math import floor, log2

import numpy as np
import pytest

from tilewave.errors import UsageError
from tilewave.precision.tensor_core import (
    HOPPER_BF16,
    HOPPER_F16,
    HOPPER_TF32,
    TensorCore,
    multiply_accumulate,
)
from tilewave.precision.tf32 import round_to_tf32

Generator = np.random.Generator
F32 = np.float32


def exponent(value: Fraction) -> int:
    """floor(log2(abs(value))), exactly."""
    guess = floor(log2(abs(value.numerator)) - log2(value.denominator))
    while Fraction(2) ** guess > abs(value):
        guess -= 1
    while Fraction(2) ** (guess + 1) <= abs(value):
        guess += 1
    return guess


def cut(value: Fraction, unit: Fraction) -> Fraction:
    """The multiple of ``unit`` next to ``value`` towards zero."""
    quotient = abs(value) // unit
    return quotient * unit if value > 0 else -quotient * unit


def one_step(products: list[tuple[float, float]], c: float, core: TensorCore) -> float:
    """A step as the module's text says, one element, in fractions."""
    terms = [Fraction(x) * Fraction(y) for x, y in products] + [Fraction(c)]
    exponents = [core.smallest_exponent]
    for x, y in products:
        if x and y:
            factors = [max(exponent(Fraction(v)), core.smallest_factor) for v in (x, y)]
            exponents.append(sum(factors))
    if c:
        exponents.append(exponent(Fraction(c)))
    unit = Fraction(2) ** (max(exponents) - core.fraction_bits)
    total = sum((cut(term, unit) for term in terms), Fraction(0))
    if not total:
        return 0.0
    return float(cut(total, Fraction(2) ** max(exponent(total) - 23, -149)))


def draw(rng: Generator, shape: tuple[int, ...], core: TensorCore) -> np.ndarray:
    """Values of the format, of widely different sizes, zeros and subnormals among them."""
    spread = rng.integers(1, 14)
    values = np.ldexp(rng.standard_normal(shape), rng.integers(-spread, spread, shape))
    values[rng.random(shape) < 0.2] *= 2.0**-14
    values[rng.random(shape) < 0.1] = 0
    if core is HOPPER_F16:
        return values.astype(np.float16)
    scaled = np.ldexp(values, int(rng.integers(-70, 30))).astype(F32)
    if core is HOPPER_TF32:
        return round_to_tf32(scaled)
    return (scaled.view(np.uint32) & np.uint32(0xFFFF0000)).view(F32)


@pytest.mark.parametrize("core", [HOPPER_F16, HOPPER_BF16, HOPPER_TF32], ids=["f16", "bf16", "tf32"])
def test_every_step_is_that_of_exact_fractions(rng: Generator, core: TensorCore) -> None:
    for _ in range(12):
        k = int(rng.integers(1, 2 * core.products + 1))
        a, b = draw(rng, (3, k), core), draw(rng, (k, 4), core)
        largest = max(float(np.abs(a).max()) * float(np.abs(b).max()), 2.0**-100)
        c = (rng.standard_normal((3, 4)) * largest * 2.0 ** rng.integers(-30, 20)).astype(F32)
        c[rng.random(c.shape) < 0.2] = 0
        result = multiply_accumulate(a, b, c, core)
        for i, j in np.ndindex(3, 4):
            total = float(c[i, j])
            for first in range(0, k, core.products):
                pairs = list(zip(a[i].tolist(), b[:, j].tolist(), strict=True))[first : first + core.products]
                total = one_step(pairs, total, core)
            assert result[i, j] == F32(total), (a[i], b[:, j], c[i, j])


def test_without_an_accumulator_it_starts_from_nothing(rng: Generator) -> None:
    a, b = draw(rng, (5, 16), HOPPER_F16), draw(rng, (16, 6), HOPPER_F16)
    assert np.array_equal(multiply_accumulate(a, b), multiply_accumulate(a, b, np.zeros((5, 6), F32)))


def test_what_is_cut_is_cut_towards_zero() -> None:
    a = np.ones((1, 2), np.float16)
    for sign in (1, -1):
        b = np.array([[sign * 2.0**-12], [sign * 2.0**-12]], np.float16)
        c = np.full((1, 1), sign, F32)
        assert multiply_accumulate(a, b, c)[0, 0] == F32(sign * (1 + 2.0**-11))
        assert multiply_accumulate(np.full((1, 1), 2.0**-13, np.float16), b[:1], c)[0, 0] == c[0, 0]


def test_two_more_bits_than_float32_are_kept_while_adding() -> None:
    """Four products of 2^-25 beside 1 count, though each is below half a unit of float32; of 2^-26, none."""
    b = np.full((5, 1), 2.0**-13, np.float16)
    b[0] = 1
    for small, expected in ((2.0**-12, 1 + 2.0**-23), (2.0**-13, 1.0)):
        a = np.full((1, 5), small, np.float16)
        a[0, 0] = 1
        assert multiply_accumulate(a, b)[0, 0] == F32(expected)


def test_zeros_after_a_sum_change_nothing(rng: Generator) -> None:
    c = rng.standard_normal((4, 4)).astype(F32) * F32(2.0**-120)
    zeros = np.zeros((4, 40), np.float16)
    assert np.array_equal(multiply_accumulate(zeros, zeros.T, c), c)


def test_nan_and_infinities_are_those_of_ieee(rng: Generator) -> None:
    for special in (np.nan, np.inf, -np.inf):
        a, b = draw(rng, (6, 20), HOPPER_F16), draw(rng, (20, 6), HOPPER_F16)
        a[2, rng.integers(20)] = special
        b[rng.integers(20), 3] = special
        with np.errstate(invalid="ignore"):
            exact = a.astype(np.float64) @ b.astype(np.float64)
        result = multiply_accumulate(a, b)
        infinite = ~np.isfinite(exact)
        assert infinite.sum() == 11
        assert np.array_equal(result[infinite], exact[infinite].astype(F32), equal_nan=True)
        assert np.isfinite(result[~infinite]).all()
    opposite = multiply_accumulate(np.array([[np.inf, np.inf]]), np.array([[1.0], [-1.0]]))
    assert np.isnan(opposite[0, 0])
    c = np.full((1, 1), np.inf, F32)
    assert multiply_accumulate(np.ones((1, 1)), np.ones((1, 1)), c)[0, 0] == np.inf


@pytest.mark.parametrize("core", [HOPPER_BF16, HOPPER_TF32], ids=lambda core: f"{core.products} products")
@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_that_overflows_stays_infinite(core: TensorCore, sign: int) -> None:
    """Whatever later steps add: nothing, more of it, or as much of the other sign."""
    for later in (0.0, 1.0, 2.0**100, -(2.0**100)):
        a = np.full((1, 3 * core.products), later)
        a[0, : core.products] = 2.0**100
        found = multiply_accumulate(sign * a, np.full((a.shape[1], 1), 2.0**100), core=core)
        assert found[0, 0] == sign * np.inf, later


def test_batches_broadcast(rng: Generator) -> None:
    a, b = draw(rng, (2, 1, 3, 16), HOPPER_F16), draw(rng, (4, 16, 5), HOPPER_F16)
    c = rng.standard_normal((4, 3, 5)).astype(F32)
    result = multiply_accumulate(a, b, c)
    assert result.shape == (2, 4, 3, 5)
    for i, j in np.ndindex(2, 4):
        assert np.array_equal(result[i, j], multiply_accumulate(a[i, 0], b[j], c[j]))


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(UsageError, match=r"\(3, 4\) and \(5, 6\)"):
        multiply_accumulate(np.ones((3, 4)), np.ones((5, 6)))
    with pytest.raises(UsageError, match=r"c has shape \(3, 5\); accepted is \(3, 6\)"):
        multiply_accumulate(np.ones((3, 4)), np.ones((4, 6)), np.ones((3, 5), F32))
