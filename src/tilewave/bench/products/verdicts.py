"""What readings mean: which are rejected, which are flagged, and who is ahead beyond the noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tilewave.bench.products.records import COLD, Reading, Result

CONFIDENCE = 0.9
"""Least coverage asked of an interval; five rounds give 0.94, from the fastest to the slowest."""

TIE = 0.01
"""Differences below this are never called differences: where in memory operands lie, and the order of
compilation, move a time by as much between two runs of one kernel."""

NOISY = 0.05
"""Spread of the rounds from which on a reading is called noisy."""

DRIFTED = 0.03
"""How much slower the last third of the rounds may be than the first before it is called drift."""

CLOCKS_APART = 0.02
"""How far apart the median clocks of two contenders may be before their ratio is doubted."""

UNDER_FLOOR = 0.8
"""A time below this share of what an empty launch took is rejected; the share allows for noise in that."""


@dataclass(frozen=True)
class Interval:
    """A median with the order statistics that enclose it with probability ``coverage``."""

    low: float
    middle: float
    high: float
    coverage: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} ({self.low:.3f} to {self.high:.3f})"


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The narrowest pair of order statistics around the median that covers it with ``confidence``.

    For independent rounds, whatever their distribution: the number of values below the median is binomial.
    With too few values for it, the interval is the whole range and ``coverage`` says what that is worth.
    """
    ordered, count = sorted(values), len(values)
    best = 0
    for cut in range(1, count // 2 + 1):
        if _coverage(count, cut) < confidence:
            break
        best = cut
    best = max(best, 1)
    return Interval(
        ordered[best - 1], statistics.median(ordered), ordered[count - best], _coverage(count, best)
    )


def _coverage(count: int, cut: int) -> float:
    """Probability that the median lies from the ``cut``-th smallest to the ``cut``-th largest of so many."""
    outside: float = sum(math.comb(count, below) for below in range(cut)) * 2.0**-count
    return 1 - 2 * outside


def ratio_interval(one: Reading, other: Reading) -> Interval:
    """How many times as fast as ``other`` one is, round by round, so that drift cancels."""
    return median_interval(
        [theirs / ours for ours, theirs in zip(one.rounds_us, other.rounds_us, strict=False)]
    )


def outcome(one: Reading, other: Reading) -> str:
    """``ahead``, ``behind`` or ``tie``: a tie where the interval holds 1 or the difference is below `TIE`."""
    ratio = ratio_interval(one, other)
    if ratio.low <= 1 <= ratio.high or abs(math.log(ratio.middle)) < TIE:
        return "tie"
    return "ahead" if ratio.middle > 1 else "behind"


def choice(readings: Sequence[Reading]) -> tuple[Reading, tuple[Reading, ...]]:
    """The fastest reading, and all that tie with it: the first of these as given is the choice.

    So equal contenders give the same choice every time, however the noise falls.
    """
    fastest = min(readings, key=lambda one: one.microseconds)
    tied = tuple(one for one in readings if one is fastest or outcome(one, fastest) == "tie")
    return tied[0], tied


def why_rejected(reading: Reading, flops: float, peak_tflops: float, launch_floor_us: float) -> str | None:
    """Why a time cannot be; None for one that can."""
    if not all(math.isfinite(time) and time > 0 for time in reading.rounds_us):
        return f"a time of {min(reading.rounds_us)} us is none that work can take"
    fastest = min(reading.rounds_us)
    rate = flops / fastest * 1e-6
    if rate > peak_tflops:
        return (
            f"{rate:.1f} TFLOP/s is above the FP32 peak of {peak_tflops:.1f}: the work was not done, or not "
            "in FP32"
        )
    if fastest < UNDER_FLOOR * launch_floor_us:
        return (
            f"{fastest:.2f} us is less than an empty launch takes ({launch_floor_us:.2f} us): nothing was "
            "launched"
        )
    return None


def drift(values: Sequence[float]) -> float:
    """How much larger the last third of these values is than the first, as a share; 0 for less than four."""
    if len(values) < 4:
        return 0.0
    third = max(2, len(values) // 3)
    return statistics.median(values[-third:]) / statistics.median(values[:third]) - 1


def flags(result: Result, bandwidth_gb_s: float, l2_bytes: int) -> tuple[str, ...]:
    """What a reader of these readings must know."""
    said: list[str] = []
    counted = [one for one in result.readings if one.counts]
    for one in counted:
        if one.spread > NOISY:
            said.append(f"noisy: {one.contender} varies by {one.spread:.0%}")
        moved = drift(one.rounds_us)
        if abs(moved) > DRIFTED:
            direction = "slower" if moved > 0 else "faster"
            said.append(f"drift: {one.contender} became {abs(moved):.0%} {direction}{_clock_moved(one)}")
        if one.throttling:
            said.append(f"throttled: {one.contender} ({', '.join(one.throttling)})")
    if counted and not result.graph:
        said.append("no graph: some contender could not be captured, so that host time may be in the figures")
    clocks = {one.contender: statistics.median(one.clocks_mhz) for one in counted if one.clocks_mhz}
    if clocks and max(clocks.values()) > (1 + CLOCKS_APART) * min(clocks.values()):
        shown = ", ".join(f"{name} {clock:.0f} MHz" for name, clock in clocks.items())
        said.append(f"clocks apart: {shown}")
    if result.mode == COLD:
        if result.buffers * result.product.nbytes < 2 * l2_bytes:
            said.append(f"warm in part: {result.buffers} sets do not exceed twice the L2 cache")
        for one in counted:
            rate = result.product.nbytes / one.microseconds * 1e-3
            if rate > bandwidth_gb_s:
                said.append(f"warm in part: {one.contender} moves {rate:.0f} GB/s, above the memory's peak")
    return tuple(said)


def _clock_moved(reading: Reading) -> str:
    clocks = reading.clocks_mhz
    if len(clocks) < 2 or clocks[0] == clocks[-1]:
        return ""
    return f", its clock going from {clocks[0]:.0f} to {clocks[-1]:.0f} MHz"
