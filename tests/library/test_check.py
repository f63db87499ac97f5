"""check tells rounding from a bug, and says where."""

from __future__ import annotations

import numpy as np
import pytest
from host_gpu import InterfaceArray

import tilewave
from tilewave.errors import OperandTypeError, UsageError
from tilewave.precision import fp16x3, ieee_bound, tf32

Rng = np.random.Generator
F = np.float32


@pytest.mark.parametrize(
    "shapes", [((50, 300), (300, 40)), ((3, 1, 5, 70), (2, 70, 9)), ((70,), (70, 9)), ((9,), (9,))]
)
@pytest.mark.parametrize("positive", [False, True])
def test_a_right_product_is_rounding(
    rng: Rng, shapes: tuple[tuple[int, ...], tuple[int, ...]], positive: bool
) -> None:
    a, b = (rng.standard_normal(shape, dtype=F) for shape in shapes)
    if positive:
        a, b = np.abs(a), np.abs(b)
    verdict = tilewave.check(a, b, np.matmul(a, b))
    assert verdict.rounding
    assert verdict.error <= 1
    assert str(verdict).startswith("rounding")


def test_one_wrong_element_is_found_where_it_is(rng: Rng) -> None:
    a, b = rng.standard_normal((4, 30, 200), dtype=F), rng.standard_normal((200, 20), dtype=F)
    for wrong in (np.nan, np.inf, None):
        c = np.matmul(a, b)
        c[2, 17, 5] = c[2, 17, 5] + 3 * ieee_bound(a[2], b)[17, 5] if wrong is None else wrong
        verdict = tilewave.check(a, b, c)
        assert not verdict.rounding
        assert (verdict.worst, verdict.wrong) == ((2, 17, 5), 1)
        assert "a bug, not rounding: 1 of 2,400" in str(verdict)
        assert "(2, 17, 5)" in str(verdict)


def test_indices_are_those_of_the_result(rng: Rng) -> None:
    a, b = rng.standard_normal((6, 40), dtype=F), rng.standard_normal(40, dtype=F)
    c = a @ b
    c[4] += 1
    assert tilewave.check(a, b, c).worst == (4,)
    row = b @ a.T
    row[3] -= 1
    assert tilewave.check(b, a.T, row).worst == (3,)


def test_a_product_rounded_to_ten_bits_is_a_bug(rng: Rng) -> None:
    def ten_bits(
        x: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(F)

    a, b = rng.standard_normal((64, 64), dtype=F), rng.standard_normal((64, 64), dtype=F)
    assert not tilewave.check(a, b, np.matmul(ten_bits(a), ten_bits(b))).rounding


def test_large_products_are_looked_at_in_parts(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = rng.standard_normal((97, 30), dtype=F), rng.standard_normal((30, 40), dtype=F)
    c = a @ b
    c[95, 39] += 2
    whole = tilewave.check(a, b, c)
    monkeypatch.setattr("tilewave.checking._ROWS_OF_ELEMENTS", 300)
    assert tilewave.check(a, b, c) == whole
    assert whole.worst == (95, 39)


def test_empty_products(rng: Rng) -> None:
    assert "nothing to check" in str(
        tilewave.check(np.empty((0, 3), F), np.empty((3, 2), F), np.empty((0, 2), F))
    )
    zeros = tilewave.check(np.empty((2, 0), F), np.empty((0, 3), F), np.zeros((2, 3), F))
    assert zeros.rounding
    assert not tilewave.check(np.empty((2, 0), F), np.empty((0, 3), F), np.ones((2, 3), F)).rounding


def test_what_cannot_be_checked(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    a = rng.standard_normal((3, 3), dtype=F)
    with pytest.raises(UsageError, match=r"c of shape \(3, 2\) does not fit; the product has shape \(3, 3\)"):
        tilewave.check(a, a, a[:, :2])
    with pytest.raises(OperandTypeError, match="c is float64"):
        tilewave.check(a, a, a.astype(np.float64))
    monkeypatch.setattr("tilewave.runtime.interop.device_of_pointer", lambda address: 0)
    with pytest.raises(OperandTypeError, match="pass it as a NumPy array"):
        tilewave.check(a, InterfaceArray(a), a)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_results_that_are_no_numbers_are_checked_in_silence(rng: Rng, value: float) -> None:
    a = rng.standard_normal((3, 3), dtype=F)
    a[1, 1] = value
    with np.errstate(all="ignore"):
        c = a @ a
    found = tilewave.check(a, a, c)  # a warning would be an error
    assert found.rounding
    assert np.isfinite(found.cancellation)
    c[1] = 0
    assert not tilewave.check(a, a, c).rounding
    largest = np.full((2, 2), np.finfo(F).max, F)
    assert tilewave.check(largest, largest, np.full((2, 2), np.inf, F)).rounding
    assert not tilewave.check(largest, largest, np.full((2, 2), -np.inf, F)).rounding


def test_every_mode_is_held_to_its_own_bound(rng: Rng) -> None:
    a, b = rng.standard_normal((30, 200), F), rng.standard_normal((200, 20), F)
    low = tf32.multiply(a, b)
    assert tilewave.check(a, b, low, precision="tf32").rounding
    assert not tilewave.check(a, b, low, precision="fp16x3").rounding
    good = fp16x3.multiply(a, b).values
    found = tilewave.check(a, b, good, precision="fp16x3")
    assert found.rounding
    assert (found.precision, found.recomputed) == ("fp16x3", 0)
    assert "of sum |a||b| (fp16x3, K = 200)" in str(found)
    a[3, 5] = 1e7
    found = tilewave.check(a, b, fp16x3.multiply(a, b).values, precision="fp16x3")
    assert found.rounding
    assert found.recomputed == 20
    assert "20 of 600 elements are out of its range: recomputed as ieee" in str(found)
    with pytest.raises(UsageError, match="precision is 'auto'; accepted are ieee, fp16x3, tf32"):
        tilewave.check(a, b, good, precision="auto")
