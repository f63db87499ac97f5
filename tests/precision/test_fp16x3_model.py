"""The mode fp16x3 as a model: its bound on every kind of data, its guard, and how exact it is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tilewave.errors import UsageError
from tilewave.precision import error_in_mode_bounds, fp16x3, fp16x3_bound, ieee_bound
from tilewave.precision.bounds import UNIT_ROUNDOFF, gamma, ratios_to
from tilewave.precision.data_sets import DATA_SETS, draw
from tilewave.precision.fp16x3 import GUARD_NONFINITE, GUARD_ZERO, multiply, split_rows
from tilewave.precision.mode_bounds import fp16x3_coefficient, fp16x3_unguarded_bound
from tilewave.precision.mode_bounds import recomputed as outside

Generator = np.random.Generator
F32 = np.float32

LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 100, 128, 129, 500, 1000)
IN_RANGE = (
    "normal",
    "uniform",
    "relu",
    "integers",
    "rows-and-columns",
    "tiny-rows",
    "zero-rows",
    "7e4",
    "1e30",
)
OUT_OF_RANGE = ("along-k-30", "along-k-60", "elements")


def unguarded(a: np.ndarray, b: np.ndarray, sums: fp16x3.Sums | None = fp16x3.FINE) -> np.ndarray:
    """Steps 1 to 5: nothing is recomputed."""
    rows, columns = split_rows(a), split_rows(b.T)
    return fp16x3.unscale(fp16x3.sum_products(rows, columns, sums), rows.shift, columns.shift)


def relative(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """The relative error in Frobenius's norm."""
    exact = a.astype(np.float64) @ b.astype(np.float64)
    return float(np.linalg.norm(c - exact) / np.linalg.norm(exact))


def in_order(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product by one chain of fused float32 sums an element, as a GPU's FP32 kernel has it."""
    total = np.zeros((a.shape[0], b.shape[1]), F32)
    for k in range(a.shape[1]):  # exact in float64 but for the last of 53 bits
        total = (total + a[:, k, None].astype(np.float64) * b[k]).astype(F32)
    return total


@pytest.mark.parametrize("name", DATA_SETS)
def test_the_bound_holds(rng: Generator, name: str) -> None:
    for k in (*rng.choice(LENGTHS, 5), rng.integers(1, 800)):
        m, n = (int(size) for size in rng.integers(1, 30, 2))
        a, b = draw(name, rng, m, int(k), n)
        sums = fp16x3.KINDS[rng.integers(len(fp16x3.KINDS))]
        found = multiply(a, b, sums=sums)
        limit = np.where(found.recomputed, ieee_bound(a, b), fp16x3_bound(a, b, sums))
        assert ratios_to(limit, found.values, a.astype(float), b.astype(float)).max() <= 1, (m, k, n)
        loose = ratios_to(
            fp16x3_unguarded_bound(a, b, sums), unguarded(a, b, sums), a.astype(float), b.astype(float)
        )
        assert loose.max() <= 1, (m, k, n)


@pytest.mark.parametrize("name", IN_RANGE)
def test_usual_data_are_in_range(rng: Generator, name: str) -> None:
    for k in (64, 300, 5000):
        assert not outside(*draw(name, rng, 40, k, 50)).any(), k


def test_tails_that_are_too_heavy_are_out_of_range(rng: Generator) -> None:
    assert outside(*draw("heavy-tails-3", rng, 40, 3000, 50)).mean() > 0.9


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_data_out_of_range_are_recomputed(rng: Generator, name: str) -> None:
    a, b = draw(name, rng, 12, 40, 12)
    found = multiply(a, b)
    with np.errstate(all="ignore"):
        assert np.array_equal(found.values[found.recomputed], (a @ b)[found.recomputed])
    assert found.recomputed.mean() > 0.9
    assert error_in_mode_bounds("fp16x3", found.values, a, b) <= 1


def test_without_the_guard_the_bound_would_be_exceeded_by_far(rng: Generator) -> None:
    a, b = draw("along-k-60", rng, 12, 40, 12)
    x, y = a.astype(float), b.astype(float)
    componentwise = fp16x3_coefficient(40) * (np.abs(x) @ np.abs(y))
    assert ratios_to(componentwise, unguarded(a, b), x, y).max() > 100


def test_one_bad_row_costs_that_row(rng: Generator) -> None:
    a, b = draw("outlier", rng, 40, 300, 30)
    recomputed = multiply(a, b).recomputed
    bad = np.abs(a).max(1) > 1e5
    assert recomputed[bad].all()
    assert not recomputed[~bad].any()


def at_the_edge(rng: Generator) -> tuple[np.ndarray, np.ndarray]:
    """A row and a column that pass the guard, or miss it, by little, and lose all that can be lost.

    Small elements of one meet the largest of the other; all the rest is barely large, or nearly.
    """
    small = int(rng.integers(1, 4))
    rest = max(0, 4 * small + int(rng.integers(-4, 5)))
    a, b = (2.0**4 * rng.uniform(1, 1.01, 1 + small + rest) for _ in "ab")
    if rng.random() < 0.3:
        a, b = 0.52 * a, 0.52 * b
    a[0], b[0] = 2.0**14, 0
    a[1 : 1 + small] = 2.0**-25 * rng.uniform(0.9, 1.1, small)
    b[1 : 1 + small] = 2.0**15 * (1 - 2.0**-11)
    order, sign = rng.permutation(a.size), rng.choice([-1, 1], a.size)
    row, column = (a * sign)[order].astype(F32)[None], b[order].astype(F32)[:, None]
    return (row, column) if rng.random() < 0.5 else (column.T.copy(), row.T.copy())


def test_the_guard_is_sound_at_its_edge(rng: Generator) -> None:
    """What passes keeps the 24 u that the bound has for splitting, 4 of them for the product of low parts."""
    passed, stopped = [], []
    for _ in range(600):
        a, b = at_the_edge(rng)
        rows, columns = split_rows(a), split_rows(b.T)
        x, y = (part.hi.astype(float) + part.lo for part in (rows, columns))
        split = np.ldexp(x @ y.T, -(rows.shift[:, None] + columns.shift))
        error = abs(split - a.astype(float) @ b) / (np.abs(a).astype(float) @ np.abs(b))
        kept = not outside(a, b)[0, 0]
        (passed if kept else stopped).append(float(error[0, 0]) / UNIT_ROUNDOFF)
    assert len(passed) > 100
    assert 10 < max(passed) <= 20.001
    assert max(stopped) > 20.001


def test_truncation_alone_can_take_24_roundings() -> None:
    """Products just below what is kept beside the sum so far: all of them are lost, within the bound."""
    a, b = np.zeros((1, 64), F32), np.zeros((64, 1), F32)
    a[0, 0] = b[0, 0] = 1
    a[0, 16:], b[16:, 0] = 2.0**-12 * (1 - 2.0**-11), 2.0**-13
    found = multiply(a, b, sums=fp16x3.COARSE)
    assert not found.recomputed.any()
    lost = float((a.astype(float) @ b - found.values)[0, 0]) / UNIT_ROUNDOFF
    assert 23.9 < lost < 24.1
    assert error_in_mode_bounds("fp16x3", found.values, a, b) <= 1


def test_recomputed_elements_have_the_bound_of_ieee(rng: Generator) -> None:
    a, b = draw("outlier", rng, 20, 50, 30)
    stopped = outside(a, b)
    assert stopped.any()
    assert not stopped.all()
    limit = fp16x3_bound(a, b)
    assert np.array_equal(limit[stopped], ieee_bound(a, b)[stopped])
    assert (limit[~stopped] > ieee_bound(a, b)[~stopped]).all()


def test_splitting_keeps_what_it_says(rng: Generator) -> None:
    x = np.ldexp(rng.uniform(1, 2, (40, 500)), rng.integers(-40, 0, (40, 500))).astype(F32)
    x *= F32(2.0) ** rng.integers(-80, 80, (40, 1)).astype(F32)
    scaled, shift = fp16x3.scale_rows(x)
    assert np.array_equal(np.ldexp(scaled.astype(float), -shift[:, None]), x)
    assert ((np.abs(scaled).max(1) >= 2.0**14) & (np.abs(scaled).max(1) < 2.0**15)).all()
    split = split_rows(x)
    lost = np.abs(scaled - split.hi.astype(float) - split.lo)
    assert (lost <= np.maximum(2.0**-23 * np.abs(scaled), 2.0**-25)).all()
    assert (np.abs(split.lo.astype(float)) <= 2.0**-11 * np.abs(scaled)).all()


@pytest.mark.parametrize("largest", [2.0**-149, 2.0**-130, 2.0**-126, 1.0, 65504.0, 3.4028235e38])
def test_rows_of_any_size_are_scaled(rng: Generator, largest: float) -> None:
    x = np.zeros((2, 9), F32)
    x[0, rng.integers(9)] = -largest
    scaled, shift = fp16x3.scale_rows(x)
    assert 2.0**14 <= np.abs(scaled[0]).max() < 2.0**15
    assert shift[1] == 0
    assert split_rows(x).guard[1] == GUARD_ZERO
    identity = np.eye(9, dtype=F32)
    assert np.array_equal(multiply(x, identity).values, x)
    assert np.array_equal(multiply(identity, x.T.copy()).values, x.T)


def test_nan_and_infinities_come_out_as_in_ieee(rng: Generator) -> None:
    for special in (np.nan, np.inf, -np.inf):
        for side in "ab":
            a, b = draw("normal", rng, 5, 70, 6)
            a[0], b[:, 1] = 0, 0  # an infinity times zero is NaN
            (a if side == "a" else b)[rng.integers(5), rng.integers(6)] = special
            found = multiply(a, b)
            with np.errstate(invalid="ignore"):
                plain = a @ b
            wrong = ~np.isfinite(plain)
            assert wrong.any()
            assert np.array_equal(found.values[wrong], plain[wrong], equal_nan=True)
            assert np.isfinite(found.values[~wrong]).all()
            assert error_in_mode_bounds("fp16x3", found.values, a, b) <= 1
    assert GUARD_NONFINITE & 1


def test_nan_at_every_place_reaches_its_row_or_column_only(rng: Generator) -> None:
    a, b = draw("normal", rng, 4, 18, 5)
    clean = multiply(a, b).values
    for place in np.ndindex(a.shape):
        spoiled = a.copy()
        spoiled[place] = np.nan
        values = multiply(spoiled, b).values
        assert np.isnan(values[place[0]]).all()
        others = np.arange(4) != place[0]
        assert np.array_equal(values[others], clean[others])
    for place in np.ndindex(b.shape):
        spoiled = b.copy()
        spoiled[place] = np.inf
        values = multiply(a, spoiled).values
        assert not np.isfinite(values[:, place[1]]).any()


def test_partial_sums_do_not_overflow() -> None:
    """float32 sums of these overflow on the way: the mode's do not."""
    a = np.array([[3e38, 3e38, -3e38]], F32)
    assert multiply(a, np.ones((3, 1), F32)).values[0, 0] == F32(3e38)
    assert multiply(a[:, :2], np.ones((2, 1), F32)).values[0, 0] == np.inf


def in_pieces(a: np.ndarray, b: np.ndarray, pieces: int) -> np.ndarray:
    """The product as a library makes it that cuts K: a chain of each piece, and the chains added in order."""
    cuts = [a.shape[1] * i // pieces for i in range(pieces + 1)]
    total = np.zeros((a.shape[0], b.shape[1]), F32)
    for first, end in itertools.pairwise(cuts):
        total += in_order(a[:, first:end], b[first:end])
    return total


@pytest.mark.parametrize("name", ["normal", "uniform"])
@pytest.mark.parametrize("k", [1024, 1500, 2048, 4096])
def test_float32_accuracy_for_k_of_1024_and_more(rng: Generator, name: str, k: int) -> None:
    """Coarse sums beat a library that cuts K in two, fine ones one that cuts it in eight."""
    a, b = draw(name, rng, 64, k, 64)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    fine, coarse, two, eight = (
        np.linalg.norm(c - exact)
        for c in (
            multiply(a, b).values,
            multiply(a, b, sums=fp16x3.COARSE).values,
            in_pieces(a, b, 2),
            in_pieces(a, b, 8),
        )
    )
    assert coarse <= two
    assert fine <= eight


@pytest.mark.parametrize("name", ["normal", "uniform"])
def test_at_most_3e_7_for_small_k(rng: Generator, name: str) -> None:
    for k in (1, 2, 8, 33, 64, 100, 256, 700, 1023):
        a, b = draw(name, rng, 48, k, 64)
        for sums in (fp16x3.FINE, fp16x3.COARSE):
            assert relative(multiply(a, b, sums=sums).values, a, b) <= 3e-7, (k, sums)


def test_runs_are_added_by_themselves() -> None:
    """2^24 + 1 is no float32: what a run of 256 sums up to survives beside it; added alone, it is lost."""
    k = 256 * 3
    a, b = np.ones((1, k), F32), np.ones((k, 1), F32)
    a[0, 0], a[0, 1:256] = 2.0**24, 0
    expected = {fp16x3.FINE: 2.0**24 + 512, fp16x3.Sums(1): 2.0**24, fp16x3.Sums(1, 256): 2.0**24 + 512}
    rows, columns = split_rows(a), split_rows(b.T)
    for sums, value in expected.items():
        total = fp16x3.sum_products(rows, columns, sums)
        assert fp16x3.unscale(total, rows.shift, columns.shift)[0, 0] == value, sums


def test_runs_are_longer_where_there_are_many() -> None:
    runs = {1: 16, 256: 16, 4096: 16, 4097: 32, 16384: 32, 16385: 64, 65536: 64, (1 << 24) - 1: 1024}
    assert {k: fp16x3.FINE.run_of(k) for k in runs} == runs
    assert {fp16x3.COARSE.run_of(k) for k in runs} == {1}


def test_the_bound_of_fine_sums_is_within_the_modes() -> None:
    for k in (1, 15, 16, 17, 64, 255, 256, 257, 4095, 4097, 1 << 20, (1 << 24) - 1):
        assert fp16x3_coefficient(k, fp16x3.FINE) < fp16x3_coefficient(k)
    for k, additions in ((1, 2), (16, 2), (256, 17), (257, 18), (4096, 32), (4097, 41), (16384, 64)):
        expected = 44 * UNIT_ROUNDOFF + gamma(additions)
        assert fp16x3_coefficient(k, fp16x3.FINE) == expected


@pytest.mark.long
@pytest.mark.parametrize("name", ["normal", "uniform"])
def test_float32_accuracy_for_the_largest_k(rng: Generator, name: str) -> None:
    for k in (16384, 65536, 262144):
        a, b = draw(name, rng, 6, k, 7)
        found = multiply(a, b)
        assert not found.recomputed.any()
        assert error_in_mode_bounds("fp16x3", found.values, a, b) <= 1
        assert relative(found.values, a, b) <= relative(in_order(a, b), a, b), k


def test_without_promotion_or_a_low_part_it_is_no_fp32(rng: Generator) -> None:
    """Either would be seen: the bound fails for one, the accuracy for the other."""
    a, b = draw("uniform", rng, 16, 4096, 16)
    alone = multiply(a, b, sums=None).values
    assert error_in_mode_bounds("fp16x3", alone, a, b) > 1
    rows, columns = split_rows(a), split_rows(b.T)
    rows.lo[...] = 0
    total = fp16x3.sum_products(rows, columns)
    without = fp16x3.unscale(total, rows.shift, columns.shift)
    assert relative(without, a, b) > 1e-6


def test_batches_broadcast_and_empty_products_are_zero(rng: Generator) -> None:
    a = rng.standard_normal((2, 1, 3, 70)).astype(F32)
    b = rng.standard_normal((4, 70, 5)).astype(F32)
    values = multiply(a, b).values
    assert values.shape == (2, 4, 3, 5)
    for i, j in np.ndindex(2, 4):
        assert np.array_equal(values[i, j], multiply(a[i, 0], b[j]).values)
    assert np.array_equal(multiply(np.ones((3, 0), F32), np.ones((0, 4), F32)).values, np.zeros((3, 4), F32))
    assert multiply(np.ones((0, 3), F32), np.ones((3, 4), F32)).values.shape == (0, 4)


def test_what_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"sums are Sums\(interval=32, run=None\); accepted are Sums\(.*None"
    ):
        multiply(np.ones((2, 2), F32), np.ones((2, 2), F32), sums=fp16x3.Sums(32))
    with pytest.raises(UsageError, match=r"sums are Sums\(interval=32, run=2\)"):
        fp16x3_bound(np.ones((2, 2), F32), np.ones((2, 2), F32), fp16x3.Sums(32, 2))
    with pytest.raises(UsageError, match="less than 2\\^24"):
        split_rows(np.broadcast_to(F32(1), (1, 1 << 24)))
    with pytest.raises(UsageError, match="there is no data set 'gaussian'; accepted are normal"):
        draw("gaussian", np.random.default_rng(0), 1, 1, 1)
    with pytest.raises(UsageError, match="precision is 'fp8'; accepted are ieee, fp16x3, tf32"):
        error_in_mode_bounds("fp8", np.ones((1, 1), F32), np.ones((1, 1), F32), np.ones((1, 1), F32))
