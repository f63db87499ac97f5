"""Measuring one product: every contender checked, then all timed in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilewave.bench.environment import GpuState
from tilewave.bench.products.answers import check_answer
from tilewave.bench.products.contenders import Contestant, Entry, strict_float32
from tilewave.bench.products.gpu import Operands, Workbench
from tilewave.bench.products.records import COLD, Reading, Result
from tilewave.bench.products.verdicts import flags, why_rejected
from tilewave.bench.suite import SuiteProduct
from tilewave.bench.timing import Contender, Stopwatch, interleave
from tilewave.errors import DeviceError, TilewaveError
from tilewave.runtime.driver import Event, Graph

MOST_SETS = 4096
"""Sets of operands at most: a product of which so many do not exceed twice the L2 cache is flagged."""

GRAPH_CALLS = 16
"""Calls in one graph at least, where a call takes less than `LONG_CALL_US`."""
LONG_CALL_US = 1000.0
SAMPLE_MS = 10.0
"""Least length of a sample: event resolution (0.5 us) is lost in it."""
WARM_UP_MS = 20.0
HOST_CALLS = 30
"""Eager calls in a row whose host time is measured, few enough not to fill the stream's queue."""
HOST_GPU_US = 20_000.0
"""GPU time that these calls may take; three are always made."""


@dataclass(frozen=True)
class Setting:
    """What all products are measured with. ``state`` reads clocks and power, None where nothing tells."""

    bench: Workbench
    contestants: Mapping[str, Contestant]
    mode: str
    rounds: int
    launch_floor_us: float
    state: Callable[[], GpuState] | None


class EventsOfStream(Stopwatch):
    """CUDA events around units of work (a graph's launch, or a round of calls) of ``calls`` products each."""

    def __init__(self, bench: Workbench, calls: int) -> None:
        self._stream, self._calls = bench.stream, calls
        self._start, self._end = Event(bench.device), Event(bench.device)

    def elapsed_ms(self, work: Callable[[], None], repeats: int) -> float:
        """Milliseconds per product of a unit, times ``repeats``."""
        self._stream.synchronize()
        self._start.record(self._stream)
        for _ in range(repeats):
            work()
        self._end.record(self._stream)
        self._end.synchronize()
        return self._end.milliseconds_since(self._start) / self._calls


def sets_for(product: SuiteProduct, mode: str, l2_bytes: int) -> int:
    """How many sets of operands rotate: enough for twice the L2 cache when cold, one when warm."""
    if mode != COLD:
        return 1
    return max(1, min(MOST_SETS, -(-2 * l2_bytes // product.nbytes)))


def measure(product: SuiteProduct, setting: Setting, rng: np.random.Generator) -> Result:
    """Check and time all contenders on one product. A contender that fails is rejected with the reason."""
    bench = setting.bench
    sets = sets_for(product, setting.mode, bench.spec.l2_bytes)
    operands = bench.operands(product, sets, rng)
    with strict_float32():
        entries: dict[str, list[Entry]] = {}
        units: dict[str, _Unit] = {}
        readings: dict[str, Reading] = {}
        for word, contestant in setting.contestants.items():
            readings[word] = Reading(word)
            try:
                entered = contestant.enter(bench, product, operands.sets)
                units[word] = _unit(bench, entered)
                entries[word] = entered
            except Exception as error:  # of a library of its own: the others are measured all the same
                readings[word] = replace(readings[word], rejected=_reason(error))
        # Either all are replayed from graphs or none is: they would not compare.
        graph = all(unit.graph is not None for unit in units.values())
        works = {
            word: unit.graph.launch if graph and unit.graph else unit.eager for word, unit in units.items()
        }
        for word in list(works):
            readings[word] = _checked(readings[word], entries[word][0], works[word], operands, rng)
            if readings[word].rejected is not None:
                del works[word]
        if works:
            watch = _ByWork({work: EventsOfStream(bench, units[word].calls) for word, work in works.items()})
            readings |= time_in_turn(
                works,
                watch,
                {word: readings[word] for word in works},
                flops=product.flops,
                peak_tflops=bench.spec.peak_fp32_tflops,
                launch_floor_us=setting.launch_floor_us,
                rounds=setting.rounds,
                calls=max(units[word].calls for word in works),
                state=setting.state,
            )
        for word in works:
            readings[word] = replace(readings[word], host_us=_host_us(bench, entries[word], readings[word]))
    result = Result(product, setting.mode, sets, graph, tuple(readings.values()))
    return replace(result, flags=flags(result, bench.spec.bandwidth_gb_s, bench.spec.l2_bytes))


@dataclass(frozen=True)
class _Unit:
    """What is timed at once: ``calls`` products on the sets in turn; no graph where none can be captured."""

    eager: Callable[[], None]
    graph: Graph | None
    calls: int


def _unit(bench: Workbench, entries: Sequence[Entry]) -> _Unit:
    """Run every entry once, and capture so many rounds of them that the graph's own launch hardly counts."""
    entries[0].work()  # loads what is loaded at a first call
    start, end = Event(bench.device), Event(bench.device)
    start.record(bench.stream)
    for entry in entries:
        entry.work()
    end.record(bench.stream)
    end.synchronize()
    short = 1e3 * end.milliseconds_since(start) / len(entries) < LONG_CALL_US
    rounds = max(1, -(-GRAPH_CALLS // len(entries))) if short else 1

    def submit() -> None:
        for _ in range(rounds):
            for entry in entries:
                entry.work()

    # Captured once only: tilewave sets workspace aside for one capture at a time.
    try:
        graph = bench.stream.capture(submit)
        graph.launch()
        bench.stream.synchronize()
    except Exception:  # a library that allocates or synchronises inside a call fails in ways of its own
        graph = None
    return _Unit(submit, graph, rounds * len(entries))


def _checked(
    reading: Reading, entry: Entry, work: Callable[[], None], operands: Operands, rng: np.random.Generator
) -> Reading:
    """The reading with what was found about the answer; what is checked is what will be timed."""
    operands.poison()
    try:
        work()
        answer = check_answer(operands, int(rng.integers(len(operands.sets))), rng)
    except DeviceError as error:
        return replace(reading, rejected=_reason(error))
    plan = entry.plan
    return replace(
        reading,
        error_in_bounds=answer.error_in_bounds if np.isfinite(answer.error_in_bounds) else None,
        checked=answer.checked,
        plan=None if plan is None else f"{plan.instance} {plan.schedule}",
        predicted_us=None if plan is None else plan.estimate.total,
        rejected=answer.wrong,
    )


def time_in_turn(
    works: Mapping[str, Callable[[], None]],
    stopwatch: Stopwatch,
    readings: Mapping[str, Reading],
    *,
    flops: float,
    peak_tflops: float,
    launch_floor_us: float,
    rounds: int,
    calls: int = 1,
    state: Callable[[], GpuState] | None = None,
) -> dict[str, Reading]:
    """The readings with the times of interleaved rounds and the GPU's state after each, rejected if need be.

    ``stopwatch`` tells milliseconds a product; a unit of work is ``calls`` products at most.
    """
    seen: dict[str, list[GpuState]] = {word: [] for word in works}

    def observe(word: str) -> None:
        if state is not None:
            seen[word].append(state())

    times = interleave(
        [Contender(word, work) for word, work in works.items()],
        stopwatch,
        rounds=rounds,
        minimum_sample_ms=SAMPLE_MS / calls,
        warm_up_ms=WARM_UP_MS / calls,
        observe=observe,
    )
    found = {}
    for word, timing in times.items():
        states = seen[word]
        reading = replace(
            readings[word],
            rounds_us=tuple(round(1e3 * one, 4) for one in timing.rounds_ms),
            clocks_mhz=tuple(one.sm_clock_mhz for one in states if one.sm_clock_mhz is not None),
            power_w=tuple(round(one.power_w, 1) for one in states if one.power_w is not None),
            throttling=tuple(sorted({reason for one in states for reason in one.throttling})),
        )
        found[word] = replace(reading, rejected=why_rejected(reading, flops, peak_tflops, launch_floor_us))
    return found


class _ByWork(Stopwatch):
    """The stopwatch that belongs to each unit: units may hold different numbers of calls."""

    def __init__(self, watches: Mapping[Callable[[], None], Stopwatch]) -> None:
        self._watches = watches

    def elapsed_ms(self, work: Callable[[], None], repeats: int) -> float:
        """Milliseconds by the unit's own stopwatch."""
        return self._watches[work].elapsed_ms(work, repeats)


def _host_us(bench: Workbench, entries: Sequence[Entry], reading: Reading) -> float:
    """Microseconds of host time that an eager call takes, the median of single calls in a row."""
    bench.stream.synchronize()
    times = []
    for call in range(max(3, min(HOST_CALLS, int(HOST_GPU_US / reading.microseconds)))):
        work = entries[call % len(entries)].work
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    bench.stream.synchronize()
    return round(1e6 * statistics.median(times), 2)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, TilewaveError) else f"{type(error).__name__}: {text}"
