"""The mode tf32: low precision, and within its own bound."""

from __future__ import annotations

import numpy as np
import pytest

from tilewave.precision import error_in_bounds, error_in_mode_bounds, tf32
from tilewave.precision.data_sets import DATA_SETS, draw

Generator = np.random.Generator
F32 = np.float32


def test_rounding_is_to_nearest_with_ties_away() -> None:
    unit = F32(2.0**-10)
    one = F32(1)
    for given, expected in (
        (one + unit / 2, one + unit),
        (-(one + unit / 2), -(one + unit)),
        (np.nextafter(one + unit / 2, one), one),
        (F32(2.0**-149), F32(0)),
        (F32(2.0**-137), F32(2.0**-136)),
        (F32(0), F32(0)),
        (F32(np.inf), F32(np.inf)),
        (np.finfo(F32).max, F32(np.inf)),
    ):
        assert tf32.round_to_tf32(np.array([given], F32))[0] == expected
    assert np.isnan(tf32.round_to_tf32(np.array([np.nan], F32)))[0]
    nan_of_all_ones = np.array([0xFFFFFFFF], np.uint32).view(F32)
    assert np.isnan(tf32.round_to_tf32(nan_of_all_ones))[0]


@pytest.mark.parametrize("name", DATA_SETS)
def test_the_bound_holds(rng: Generator, name: str) -> None:
    for k in (1, 7, 8, 9, int(rng.integers(1, 600))):
        a, b = draw(name, rng, 9, k, 11)
        assert error_in_mode_bounds("tf32", tf32.multiply(a, b), a, b) <= 1, k


@pytest.mark.parametrize("name", ["normal", "uniform"])
def test_it_is_no_float32(rng: Generator, name: str) -> None:
    a, b = draw(name, rng, 30, 100, 30)
    assert error_in_bounds(tf32.multiply(a, b), a, b) > 10
