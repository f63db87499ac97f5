"""The error measure: at most 1 for every order of float32 sums, above 1 for anything less exact."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tilewave.emulator.fma import fma
from tilewave.errors import UsageError
from tilewave.precision import error_in_bounds, ieee_bound

Generator = np.random.Generator
F32 = np.float32


def draw(rng: Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    if kind == "normal":
        return rng.standard_normal(shape).astype(F32)
    if kind == "positive":
        return rng.random(shape, dtype=F32)
    if kind == "spread":
        return np.ldexp(rng.standard_normal(shape), rng.integers(-30, 30, shape)).astype(F32)
    return np.ldexp(rng.standard_normal(shape), -75).astype(F32)  # products are subnormal


def in_order(a: np.ndarray, b: np.ndarray, order: np.ndarray, fused: bool) -> np.ndarray:
    """a @ b by one running float32 sum an element, over k in the given order."""
    total = np.zeros((a.shape[0], b.shape[1]), F32)
    for k in order:
        x, y = np.broadcast_arrays(a[:, k, None], b[None, k])
        total = fma(x.copy(), y.copy(), total) if fused else (x * y) + total
    return total


@pytest.mark.parametrize("kind", ["normal", "positive", "spread", "subnormal"])
@pytest.mark.parametrize("fused", [False, True])
def test_any_order_of_float32_sums_is_within_the_bound(rng: Generator, kind: str, fused: bool) -> None:
    m, n, k = (int(v) for v in rng.integers(1, 40, 3))
    k = int(rng.choice([1, 2, k, 300]))
    a, b = draw(rng, kind, (m, k)), draw(rng, kind, (k, n))
    for order in (np.arange(k), np.arange(k)[::-1], rng.permutation(k)):
        assert error_in_bounds(in_order(a, b, order, fused), a, b) <= 1
    assert error_in_bounds(a @ b, a, b) <= 1


@pytest.mark.parametrize("kind", ["normal", "positive"])
def test_operands_cut_to_tf32_exceed_the_bound(rng: Generator, kind: str) -> None:
    k = 16
    a, b = draw(rng, kind, (64, k)), draw(rng, kind, (k, 64))
    cut = [(x.view(np.uint32) & np.uint32(0xFFFFE000)).view(F32) for x in (a, b)]
    assert error_in_bounds(cut[0] @ cut[1], a, b) > 10


@pytest.mark.parametrize("k", [1, 7, 64])
def test_a_missing_or_doubled_product_exceeds_the_bound(rng: Generator, k: int) -> None:
    a, b = draw(rng, "positive", (8, k)) + F32(0.5), draw(rng, "positive", (k, 8)) + F32(0.5)
    c = a @ b
    spoilt = c.copy()
    spoilt[3, 4] -= a[3, k // 2] * b[k // 2, 4]
    assert error_in_bounds(c, a, b) <= 1 < error_in_bounds(spoilt, a, b)
    # The larger of all elements counts, not the mean.
    assert error_in_bounds(spoilt, a, b) > 1000


def test_the_bound_is_the_formula(rng: Generator) -> None:
    a, b = draw(rng, "normal", (3, 5)), draw(rng, "normal", (5, 4))
    u = 2.0**-24
    expected = np.zeros((3, 4))
    for i, j in itertools.product(range(3), range(4)):
        size = sum(abs(float(a[i, k]) * float(b[k, j])) for k in range(5))
        expected[i, j] = 5 * u / (1 - 5 * u) * size + 5 * 2.0**-149 / 2
    assert np.allclose(ieee_bound(a, b), expected, rtol=1e-14, atol=0)
    c = np.zeros((3, 4), F32)
    measured = np.max(np.abs(a.astype(np.float64) @ b.astype(np.float64)) / expected)
    assert error_in_bounds(c, a, b) == pytest.approx(measured)


def test_one_product_reaches_the_bound() -> None:
    """K = 1: rounding 1 + 2^-12 + 2^-24 half way costs u in relative terms: the bound is not generous."""
    a = b = np.array([[1 + 2.0**-12]], F32)
    assert 0.99 < error_in_bounds(a * b, a, b) <= 1


def test_an_underflown_product_is_within_half_a_subnormal() -> None:
    a, b = np.array([[2.0**-75]], F32), np.array([[2.0**-75]], F32)
    assert error_in_bounds(np.array([[0]], F32), a, b) == pytest.approx(1)
    assert error_in_bounds(np.array([[2.0**-149]], F32), a, b) == pytest.approx(1)
    assert error_in_bounds(np.array([[2.0**-148]], F32), a, b) > 1


def element(c: float, row: list[float], column: list[float]) -> float:
    a, b = np.array([row], F32), np.array([column], F32).T
    return error_in_bounds(np.array([[c]], F32), a, b)


INF, NAN, MAX = float("inf"), float("nan"), float(np.finfo(F32).max)


@pytest.mark.parametrize(
    ("row", "column", "right", "wrong"),
    [
        ([INF, 1], [1, 1], [INF], [-INF, NAN, 0, MAX]),
        ([-INF, 1], [1, 1], [-INF], [INF, NAN, 0]),
        ([INF, -INF], [1, 1], [NAN], [INF, -INF, 0]),
        ([INF, 1], [0, 1], [NAN], [1, INF]),
        ([NAN, 1], [0, 1], [NAN], [1, 0, INF]),
        ([1, 1], [1, 1], [2], [NAN, INF, -INF, 2.1]),
        # The exact result is beyond float32.
        ([MAX, MAX], [1, 1], [INF], [MAX, 0, -INF, NAN]),
        ([MAX, MAX], [-1, -1], [-INF], [-MAX, INF, NAN]),
        ([MAX], [MAX], [INF], [MAX, -INF, NAN]),
        # It is not, but in one of the orders a partial sum is.
        ([MAX, MAX, -MAX], [1, 1, 1], [INF, MAX], [0, -MAX]),
        ([MAX, MAX / 4, -MAX / 2], [1, 1, 1], [INF, 0.75 * MAX], [0, -MAX, -INF, NAN]),
        ([-MAX, -MAX / 4, MAX / 2], [1, 1, 1], [-INF, -0.75 * MAX], [0, MAX, INF, NAN]),
        ([MAX, MAX, -MAX, -MAX], [1, 1, 1, 1], [INF, -INF, NAN, 0], []),
        # The negative terms alone stay in range, and there is nothing that could become NaN.
        ([MAX, MAX, -1], [1, 1, 1], [INF], [-INF, NAN]),
        # The largest number itself does not overflow.
        ([MAX / 2, 1], [1, 1], [MAX / 2], [INF, NAN]),
    ],
)
def test_special_values(
    row: list[float], column: list[float], right: list[float], wrong: list[float]
) -> None:
    for c in right:
        assert element(c, row, column) <= 1
    for c in wrong:
        assert element(c, row, column) > 1


def test_rows_pick_a_sample(rng: Generator) -> None:
    a, b = draw(rng, "normal", (50, 9)), draw(rng, "normal", (9, 30))
    c = a @ b
    c[17, 3] = np.nan
    assert error_in_bounds(c, a, b) == np.inf
    assert error_in_bounds(c, a, b, rows=[0, 16, 18, 49]) <= 1
    assert error_in_bounds(c, a, b, rows=np.array([17])) == np.inf


def test_large_products_are_checked_in_parts(rng: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = draw(rng, "normal", (45, 6)), draw(rng, "normal", (6, 10))
    c = a @ b
    c[44, 9] += F32(1)
    whole = error_in_bounds(c, a, b)
    monkeypatch.setattr("tilewave.precision.bounds._ELEMENTS_AT_ONCE", 70)
    assert error_in_bounds(c, a, b) == whole > 1


def test_batches_broadcast(rng: Generator) -> None:
    a, b = draw(rng, "normal", (4, 1, 5, 6)), draw(rng, "normal", (3, 6, 7))
    c = np.matmul(a, b)
    assert error_in_bounds(c, a, b) <= 1
    c[3, 2, 4, 6] += F32(1)
    assert error_in_bounds(c, a, b) > 1


def test_empty_products() -> None:
    a, b = np.empty((3, 0), F32), np.empty((0, 4), F32)
    assert error_in_bounds(np.zeros((3, 4), F32), a, b) == 0
    assert error_in_bounds(np.ones((3, 4), F32), a, b) == np.inf
    assert error_in_bounds(np.empty((0, 4), F32), np.empty((0, 5), F32), np.empty((5, 4), F32)) == 0


@pytest.mark.parametrize(
    ("c", "a", "b", "words"),
    [
        (np.zeros((2, 2)), np.zeros((2, 2), F32), np.zeros((2, 2), F32), "float64"),
        (np.zeros((2, 2), F32), np.zeros((2, 2)), np.zeros((2, 2), F32), "float64 and float32"),
        (np.zeros((2, 2), F32), np.zeros((2, 3), F32), np.zeros((2, 2), F32), "shapes"),
        (np.zeros((2, 3), F32), np.zeros((2, 2), F32), np.zeros((2, 2), F32), "accepted is float32 of shape"),
        (np.zeros(2, F32), np.zeros((2, 2), F32), np.zeros(2, F32), "shapes"),
    ],
)
def test_nonsense_is_refused(c: np.ndarray, a: np.ndarray, b: np.ndarray, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        error_in_bounds(c, a, b)
