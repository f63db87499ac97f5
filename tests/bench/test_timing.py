"""The timing protocol, driven by a clock of the tests' own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tilewave.bench.timing import Contender, Timing, check_rate, interleave
from tilewave.errors import MeasurementError, UsageError


class FakeMachine:
    """A stopwatch and a wall clock: work adds its cost in ms, a slow start makes early calls dearer."""

    def __init__(self, cold_ms: float = 0.0) -> None:
        self.wall_ms = 0.0
        self.cold_ms = cold_ms
        self.log: list[tuple[str, int]] = []
        self._cost = 0.0
        self._name = ""

    def contender(self, name: str, cost_ms: float | Callable[[], float]) -> Contender:
        def work() -> None:
            cost = cost_ms() if callable(cost_ms) else cost_ms
            cost *= 5 if self.wall_ms < self.cold_ms else 1
            self._cost += cost
            self.wall_ms += cost
            self._name = name

        return Contender(name, work)

    def elapsed_ms(self, work: Callable[[], None], repeats: int) -> float:
        self._cost = 0.0
        for _ in range(repeats):
            work()
        self.log.append((self._name, repeats))
        return self._cost

    def now(self) -> float:
        return self.wall_ms / 1000


def test_samples_are_per_call_and_long_enough(rng) -> None:
    machine = FakeMachine()
    costs = {name: float(cost) for name, cost in zip("abc", rng.uniform(0.01, 5, 3), strict=True)}
    timings = interleave([machine.contender(n, c) for n, c in costs.items()], machine, rounds=4)
    assert set(timings) == set(costs)
    for name, cost in costs.items():
        timing = timings[name]
        assert timing.median_ms == pytest.approx(cost)
        assert len(timing.rounds_ms) == 4
        assert timing.repeats * cost >= 20.0
        assert timing.spread == pytest.approx(0, abs=1e-9)


def test_every_round_measures_every_contender_once() -> None:
    machine = FakeMachine()
    interleave([machine.contender(name, 3.0) for name in "abcd"], machine, rounds=6)
    lead_ins, measured = ([name for name, _ in machine.log[start::2]] for start in (-48, -47))
    assert lead_ins == measured  # each sample follows one of its own that does not count
    rounds = [measured[i : i + 4] for i in range(0, 24, 4)]
    assert all(sorted(one) == list("abcd") for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1  # the order changes


def test_a_cold_start_does_not_shorten_the_samples() -> None:
    # The first 20 ms run five times slower: calibrating in them would give samples of a fifth of the length.
    machine = FakeMachine(cold_ms=20)
    timing = interleave([machine.contender("a", 0.1)], machine, rounds=3)["a"]
    assert timing.repeats >= 200
    assert timing.median_ms == pytest.approx(0.1)


def test_the_budget_ends_after_whole_rounds() -> None:
    machine = FakeMachine()
    contenders = [machine.contender("a", 10.0), machine.contender("b", 30.0)]
    timings = interleave(contenders, machine, rounds=1000, budget_s=1.0, now=machine.now)
    counts = {len(timing.rounds_ms) for timing in timings.values()}
    assert len(counts) == 1
    assert 4 < counts.pop() < 10  # 100 ms a round, less warm-up
    assert machine.now() <= 1.0


def test_the_first_round_runs_even_without_budget() -> None:
    machine = FakeMachine()
    timings = interleave([machine.contender("a", 100.0)], machine, rounds=9, budget_s=0.0, now=machine.now)
    assert len(timings["a"].rounds_ms) == 1


def test_speed_is_compared_round_by_round_so_that_drift_cancels(rng) -> None:
    drift = iter(rng.uniform(1, 3, 10_000))
    level = {"now": 1.0}
    machine = FakeMachine()

    def fast() -> float:
        return 4.0 * level["now"]

    def slow() -> float:
        return 8.0 * level["now"]

    def shuffle(order: list[Contender]) -> None:  # called once a round: the machine changes its pace there
        level["now"] = float(next(drift))

    timings = interleave(
        [machine.contender("fast", fast), machine.contender("slow", slow)],
        machine,
        rounds=7,
        shuffle=shuffle,
    )
    assert timings["fast"].spread > 0.01
    assert timings["fast"].speed_over(timings["slow"]) == pytest.approx(2.0)


@pytest.mark.parametrize("elapsed", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_time_is_refused(elapsed: float) -> None:
    class Broken:
        def elapsed_ms(self, work: Callable[[], None], repeats: int) -> float:
            return elapsed

    with pytest.raises(MeasurementError, match="kernel"):
        interleave([Contender("kernel", lambda: None)], Broken())


def test_contenders_need_names_of_their_own() -> None:
    machine = FakeMachine()
    with pytest.raises(UsageError, match="different names"):
        interleave([machine.contender("a", 1), machine.contender("a", 1)], machine)
    with pytest.raises(UsageError, match="rounds is 0"):
        interleave([machine.contender("a", 1)], machine, rounds=0)


def test_nothing_to_time_is_no_error() -> None:
    assert interleave([], FakeMachine()) == {}


def test_a_rate_above_the_peak_is_refused() -> None:
    check_rate("honest", 51.0, 66.9)
    with pytest.raises(MeasurementError, match=r"cheat: 400\.0 TFLOP/s is above the FP32 peak of 66\.9"):
        check_rate("cheat", 400.0, 66.9)
    with pytest.raises(MeasurementError):
        check_rate("nothing", float("nan"), 66.9)


def test_rate_and_spread() -> None:
    timing = Timing("a", 3, (1.0, 2.0, 4.0))
    assert timing.tflops(4e12) == pytest.approx(2000.0)
    assert timing.spread == pytest.approx(1.5)
