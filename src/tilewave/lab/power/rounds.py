"""The sustained run itself: contenders in turn without rest, each for some seconds, round after round.

It knows no GPU: it drives a `Stopwatch` and listens to a `Watch`. Tests use both with a clock of their own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tilewave.bench.timing import Contender, Stopwatch, calibrate, measure
from tilewave.errors import UsageError
from tilewave.lab.power.records import Repeat, Sample
from tilewave.lab.power.watch import Watch

REPEAT_S = 2.0
"""One contender runs for about so long before the next one has its turn."""
LEAST_ROUNDS = 3
"""Fewer repeats than this have no spread worth the name."""
SHORTEST_REPEAT_S = 0.1
SETTLING_S = 1.0
"""How long figures still show what ran before: NVML may average power over the last second.

A repeat shorter than two such times settles for half its length."""
BATCH_S = 0.1
"""Calls are submitted and timed in batches of about this length."""


@dataclass(frozen=True)
class Load:
    """A contender on one kind of data: what submits a call, and how many operations a call has."""

    contender: str
    data: str
    work: Callable[[], None]
    flops: float

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from the others."""
        return self.contender, self.data


def plan_rounds(seconds: float, loads: int) -> tuple[int, float]:
    """How many rounds fit into ``seconds``, and how long each load runs in a round, in seconds."""
    shortest = LEAST_ROUNDS * loads * SHORTEST_REPEAT_S
    if not (math.isfinite(seconds) and seconds >= shortest):
        raise UsageError(
            f"seconds {seconds:g}: at least {shortest:g} are needed, for {LEAST_ROUNDS} repeats of each of "
            f"{loads} contenders"
        )
    rounds = max(LEAST_ROUNDS, round(seconds / (loads * REPEAT_S)))
    return rounds, seconds / (rounds * loads)


def run_rounds(
    loads: Sequence[Load],
    stopwatch: Stopwatch,
    watch: Watch,
    now: Callable[[], float],
    seconds: float,
) -> list[Repeat]:
    """Run the loads in turn for ``seconds`` in all; ``now`` tells the seconds since the run began.

    Every other round runs them in the opposite order, so that each follows each neighbour equally often.
    """
    rounds, repeat_s = plan_rounds(seconds, len(loads))
    contenders = {load.key: Contender(f"{load.contender} on {load.data}", load.work) for load in loads}
    for load in loads:  # the clock comes up before anything is counted
        calibrate(contenders[load.key], stopwatch, BATCH_S * 1e3 / 2)
    calls = {load.key: calibrate(contenders[load.key], stopwatch, BATCH_S * 1e3) for load in loads}
    started = now()
    raw: list[_Stretch] = []
    for index in range(rounds):
        for load in loads if index % 2 == 0 else loads[::-1]:
            due = started + repeat_s * (len(raw) + 1)
            watch.running(*load.key)
            raw.append(_run_stretch(load, index, contenders[load.key], calls[load.key], stopwatch, now, due))
    watch.running("", "")
    return [summarise(stretch, watch.samples) for stretch in raw]


@dataclass(frozen=True)
class _Stretch:
    load: Load
    round: int
    start_s: float
    calls: int
    ends_s: tuple[float, ...]
    batch_ms: tuple[float, ...]


def _run_stretch(
    load: Load,
    index: int,
    contender: Contender,
    calls: int,
    stopwatch: Stopwatch,
    now: Callable[[], float],
    due: float,
) -> _Stretch:
    """Batches of one load until ``due``; one at least."""
    start = now()
    ends: list[float] = []
    batch_ms: list[float] = []
    while not ends or ends[-1] < due:
        batch_ms.append(measure(contender, stopwatch, calls) / calls)
        ends.append(now())
    return _Stretch(load, index, start, calls, tuple(ends), tuple(batch_ms))


def summarise(stretch: _Stretch, samples: Iterable[Sample]) -> Repeat:
    """A stretch as a record, from its settled part alone."""
    end = stretch.ends_s[-1]
    settled_s = stretch.start_s + min(SETTLING_S, (end - stretch.start_s) / 2)
    starts = (stretch.start_s, *stretch.ends_s)
    # The last batch always counts, however few there are.
    unsettled = min(sum(start < settled_s for start in starts[:-1]), len(stretch.batch_ms) - 1)
    ms = statistics.fmean(stretch.batch_ms[unsettled:])
    seen = [
        sample
        for sample in samples
        if (sample.contender, sample.data) == stretch.load.key and starts[unsettled] <= sample.seconds <= end
    ]
    watts = _median(sample.power_w for sample in seen)
    reasons = sorted({reason for sample in seen for reason in sample.throttling})
    return Repeat(
        contender=stretch.load.contender,
        data=stretch.load.data,
        round=stretch.round,
        start_s=stretch.start_s,
        end_s=end,
        calls_per_batch=stretch.calls,
        batch_ends_s=stretch.ends_s,
        batch_ms=stretch.batch_ms,
        unsettled=unsettled,
        tflops=stretch.load.flops / ms * 1e-9,
        median_w=watts,
        joules_per_call=None if watts is None else watts * ms / 1e3,
        sm_clock_mhz=_median(sample.sm_clock_mhz for sample in seen),
        memory_clock_mhz=_median(sample.memory_clock_mhz for sample in seen),
        temperature_c=_median(sample.temperature_c for sample in seen),
        throttled={
            reason: sum(reason in sample.throttling for sample in seen) / len(seen) for reason in reasons
        },
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
