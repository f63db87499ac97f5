"""The timing protocol: contenders in turn, medians of several rounds, enough work in each sample.

The protocol itself knows no GPU: it drives a `Stopwatch`. On a GPU that is
`tilewave.bench.gpu.EventStopwatch`; tests use one with a clock of their own.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tilewave.errors import MeasurementError, UsageError

#: One sample lasts at least this long. Event resolution (0.5 us) and submission are lost in it, and so is the
#: start: with samples of 2 to 3 ms, cuBLAS at N = 4096 came out 10 % slower on an H200 than in longer ones.
MINIMUM_SAMPLE_MS = 20.0
#: GPU time spent before anything is measured: an idle GPU needs some milliseconds to raise its clock.
WARM_UP_MS = 50.0
#: More repeats than this in one sample say nothing new.
MAXIMUM_REPEATS = 10_000


class Stopwatch(Protocol):
    """Measures work submitted to some device."""

    def elapsed_ms(self, work: Callable[[], None], repeats: int) -> float:
        """Milliseconds from the start of the first of ``repeats`` calls to the end of the last."""
        ...


@dataclass(frozen=True)
class Contender:
    """One of several ways to do the same work: a name and what submits the work once."""

    name: str
    work: Callable[[], None]


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call in each round; ``repeats`` calls made one sample."""

    name: str
    repeats: int
    rounds_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.rounds_ms)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median over the rounds; 0 for a single round."""
        return (max(self.rounds_ms) - min(self.rounds_ms)) / self.median_ms

    def tflops(self, flops: float) -> float:
        """Rate at the median, in TFLOP/s, for a call of ``flops`` operations."""
        return flops / self.median_ms * 1e-9

    def speed_over(self, other: Timing) -> float:
        """How many times as fast as ``other``: median of the ratios round by round, so that drift cancels."""
        pairs = zip(other.rounds_ms, self.rounds_ms, strict=False)
        return statistics.median(theirs / ours for theirs, ours in pairs)


def interleave(
    contenders: Sequence[Contender],
    stopwatch: Stopwatch,
    *,
    rounds: int = 5,
    budget_s: float | None = None,
    minimum_sample_ms: float = MINIMUM_SAMPLE_MS,
    warm_up_ms: float = WARM_UP_MS,
    now: Callable[[], float] = time.monotonic,
    shuffle: Callable[[list[Contender]], None] | None = None,
    observe: Callable[[str], None] | None = None,
) -> dict[str, Timing]:
    """Time contenders against each other; returns a `Timing` for each name.

    All are warmed up and calibrated (so many repeats that a sample lasts ``minimum_sample_ms``), then each
    round measures every contender once, in a new random order and without rest, so that clocks, heat and
    other users of the machine meet all alike. Each sample follows one of the same contender that is thrown
    away, so that it does not pay for what ran before it. With ``budget_s`` (seconds, wall clock) no round
    starts that would outlast it; the first round always runs. ``observe`` is told the contender's name after
    each sample that counts.
    """
    if rounds < 1:
        raise UsageError(f"rounds is {rounds}: at least 1 is needed")
    names = [contender.name for contender in contenders]
    if len(set(names)) != len(names):
        raise UsageError(f"contenders need different names, got {names}")
    start = now()
    reshuffle = shuffle or random.Random(0).shuffle  # repeatable: the order is no part of the result
    repeats = _calibrate_all(contenders, stopwatch, minimum_sample_ms)
    spent = 0.0
    while contenders and spent < warm_up_ms:
        spent += sum(measure(contender, stopwatch, repeats[contender.name]) for contender in contenders)
    repeats = _calibrate_all(contenders, stopwatch, minimum_sample_ms)  # again, now that the clock is up
    samples: dict[str, list[float]] = {name: [] for name in names}
    order = list(contenders)
    for _ in range(rounds):
        round_start = now()
        reshuffle(order)
        for contender in order:
            count = repeats[contender.name]
            measure(contender, stopwatch, count)  # the lead-in
            samples[contender.name].append(measure(contender, stopwatch, count) / count)
            if observe is not None:
                observe(contender.name)
        finished = now()
        if budget_s is not None and finished - start + (finished - round_start) > budget_s:
            break
    return {name: Timing(name, repeats[name], tuple(samples[name])) for name in names}


def measure(contender: Contender, stopwatch: Stopwatch, repeats: int) -> float:
    """Milliseconds that so many calls take; refuses a time that no work can take."""
    elapsed = stopwatch.elapsed_ms(contender.work, repeats)
    if not (math.isfinite(elapsed) and elapsed > 0):
        raise MeasurementError(f"{contender.name}: {repeats} calls took {elapsed} ms, which no work can")
    return elapsed


def _calibrate_all(
    contenders: Sequence[Contender], stopwatch: Stopwatch, minimum_ms: float
) -> dict[str, int]:
    return {contender.name: calibrate(contender, stopwatch, minimum_ms) for contender in contenders}


def calibrate(contender: Contender, stopwatch: Stopwatch, minimum_ms: float) -> int:
    """How many calls fill a sample of ``minimum_ms``: the smallest number found by growing steps."""
    repeats = 1
    while True:
        elapsed = measure(contender, stopwatch, repeats)
        if elapsed >= minimum_ms or repeats >= MAXIMUM_REPEATS:
            return repeats
        wanted = math.ceil(1.1 * repeats * minimum_ms / elapsed)
        repeats = min(MAXIMUM_REPEATS, max(repeats + 1, wanted))


def check_rate(name: str, tflops: float, peak_tflops: float) -> None:
    """Refuse a rate that the FP32 units cannot reach: the work was not done, or not in FP32."""
    if not tflops <= peak_tflops:
        raise MeasurementError(
            f"{name}: {tflops:.1f} TFLOP/s is above the FP32 peak of {peak_tflops:.1f}: either the work was "
            "not done, or it was not done in FP32 (TF32 switched on?)"
        )
