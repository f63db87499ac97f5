"""Which readings count, and what is said of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tilewave.bench.products.records import COLD, WARM, Reading, Result
from tilewave.bench.products.verdicts import (
    choice,
    drift,
    flags,
    median_interval,
    outcome,
    ratio_interval,
    why_rejected,
)
from tilewave.bench.suite import SuiteProduct

PRODUCT = SuiteProduct("p", "t", 1000, 1000, 1000)


def test_times_that_cannot_be_are_rejected() -> None:
    honest = Reading("ours", (40.0, 41.0, 42.0))
    assert why_rejected(honest, PRODUCT.flops, 67.0, 1.5) is None
    fast = replace(honest, rounds_us=(40.0, 29.0, 42.0))  # 69 TFLOP/s in one round
    assert "69.0 TFLOP/s is above the FP32 peak of 67.0" in (why_rejected(fast, 2e9, 67.0, 1.5) or "")
    floor = Reading("ours", (1.1, 1.3, 1.2))
    assert "less than an empty launch takes (1.50 us)" in (why_rejected(floor, 1e3, 67.0, 1.5) or "")
    assert why_rejected(replace(floor, rounds_us=(1.3, 1.4)), 1e3, 67.0, 1.5) is None
    for bad in (0.0, -1.0, math.nan, math.inf):
        assert why_rejected(replace(honest, rounds_us=(40.0, bad)), 2e9, 67.0, 1.5) is not None


@pytest.mark.parametrize("count", [3, 5, 9, 30])
def test_the_interval_covers_the_median_as_often_as_it_says(count: int, rng: np.random.Generator) -> None:
    draws = rng.exponential(size=(4000, count))  # no symmetry to help
    found = [median_interval(row) for row in draws]
    covered = np.mean([one.low <= math.log(2) <= one.high for one in found])
    assert covered == pytest.approx(found[0].coverage, abs=0.025)
    assert found[0].coverage >= 0.9 or (found[0].low, found[0].high) == (draws[0].min(), draws[0].max())
    assert all(one.low <= one.middle <= one.high for one in found)


def test_five_rounds_give_the_whole_range_and_thirty_less(rng: np.random.Generator) -> None:
    five, thirty = (rng.random(count) for count in (5, 30))
    assert (median_interval(five).low, median_interval(five).high) == (five.min(), five.max())
    assert median_interval(five).coverage == pytest.approx(1 - 2 / 2**5)
    inner = median_interval(thirty)
    assert thirty.min() < inner.low < inner.high < thirty.max()
    assert median_interval([3.0]).coverage == 0


def test_ratios_are_of_rounds_so_that_drift_cancels(rng: np.random.Generator) -> None:
    pace = rng.uniform(1, 3, 7)
    one, other = Reading("one", tuple(4 * pace)), Reading("other", tuple(8 * pace))
    found = ratio_interval(one, other)
    assert (found.low, found.high) == (pytest.approx(2), pytest.approx(2))
    assert (outcome(one, other), outcome(other, one)) == ("ahead", "behind")


def test_small_and_uncertain_differences_are_ties() -> None:
    steady = Reading("steady", (100.0,) * 5)
    assert (
        outcome(Reading("a", (99.5,) * 5), steady) == "tie"
    )  # certain, and smaller than what placement does
    assert outcome(Reading("a", (90.0, 80.0, 95.0, 101.0, 90.0)), steady) == "tie"
    assert outcome(Reading("a", (90.0, 80.0, 95.0, 98.0, 90.0)), steady) == "ahead"
    first, second = Reading("first", (100.4,) * 5), Reading("second", (100.0,) * 5)
    far = Reading("far", (130.0,) * 5)
    best, tied = choice([far, first, second])
    assert (best, tied) == (first, (first, second))


def test_noise_throttling_and_drift_are_flagged_and_kept() -> None:
    calm = Reading("calm", (10.0, 10.1, 10.2, 10.1, 10.0), clocks_mhz=(1980.0,) * 5)
    result = Result(PRODUCT, WARM, 1, True, (calm,))
    assert flags(result, 4800, 1) == ()
    noisy = Reading("noisy", (10.0, 14.0, 10.0, 10.1, 10.0))
    hot = Reading("hot", (10.0,) * 5, clocks_mhz=(1700.0,) * 5, throttling=("power cap",))
    sinking = Reading("sinking", (10.0, 10.1, 10.3, 10.4, 10.42), clocks_mhz=(1980.0, 1900.0))
    rejected = Reading("bad", (1.0, 9.0), rejected="wrong")
    said = flags(replace(result, readings=(calm, noisy, hot, sinking, rejected)), 4800, 1)
    assert "noisy: noisy varies by 40%" in said
    assert "throttled: hot (power cap)" in said
    assert "drift: sinking became 4% slower, its clock going from 1980 to 1900 MHz" in said
    assert any(flag.startswith("clocks apart: calm 1980 MHz, hot 1700 MHz") for flag in said)
    assert not any("bad" in flag for flag in said)
    assert replace(result, readings=(noisy,)).reading("noisy") is noisy  # flagged, and still there
    assert result.reading("bad") is None


def test_drift_needs_four_values_and_knows_its_direction() -> None:
    assert drift((1.0, 2.0, 3.0)) == 0
    assert drift((1.0, 1.0, 1.0, 2.0, 2.0)) == 1.0
    assert drift((2.0, 2.0, 1.0, 1.0)) == -0.5


def test_cold_means_beyond_the_cache() -> None:
    one = Result(PRODUCT, COLD, 9, True, (Reading("ours", (50.0,) * 5),))
    assert flags(one, 4800, 50 * 2**20) == ()
    assert flags(replace(one, buffers=8), 4800, 50 * 2**20) != ()
