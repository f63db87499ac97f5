"""The sustained run with a clock of its own: who runs when, what counts, and what the samples say."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from power_fakes import ALL_LOADS, FLOPS, PretendGpu

from tilewave.errors import MeasurementError, UsageError
from tilewave.lab.power.records import CUBLAS, OURS, RANDOM, ZEROS
from tilewave.lab.power.rounds import BATCH_S, LEAST_ROUNDS, SETTLING_S, plan_rounds


@pytest.mark.parametrize("loads", [1, 3, 5])
def test_rounds_fill_the_time_whatever_it_is(loads: int, rng: np.random.Generator) -> None:
    for seconds in (LEAST_ROUNDS * loads * 0.1, 50.0, *rng.uniform(2, 500, 20)):
        rounds, repeat_s = plan_rounds(seconds, loads)
        assert rounds >= LEAST_ROUNDS
        assert rounds * repeat_s * loads == pytest.approx(seconds)


def test_the_usual_run_is_five_rounds_of_two_seconds() -> None:
    assert plan_rounds(50.0, 5) == (5, 2.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1.49, float("nan"), float("inf")])
def test_a_run_too_short_for_a_spread_is_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match=r"at least 1\.5 are needed, for 3 repeats of each of 5 contenders"):
        plan_rounds(seconds, 5)


def test_every_load_has_its_share_and_follows_each_neighbour_alike(rng: np.random.Generator) -> None:
    times = {key: float(rng.uniform(0.5, 40.0)) for key in ALL_LOADS}
    gpu = PretendGpu()
    repeats = gpu.run({key: lambda ms=ms: ms for key, ms in times.items()}, 60.0)
    rounds = plan_rounds(60.0, len(ALL_LOADS))[0]
    assert Counter(gpu.order) == dict.fromkeys(ALL_LOADS, rounds)
    assert [(repeat.contender, repeat.data) for repeat in repeats] == gpu.order
    # Each pair of neighbours runs in both orders.
    followers = Counter(itertools.pairwise(gpu.order))
    for one, other in itertools.pairwise(ALL_LOADS):
        assert abs(followers[one, other] - followers[other, one]) <= 1
        assert followers[other, one] >= 1
    for one, other in itertools.pairwise(repeats):
        assert other.start_s == one.end_s  # no rest between them
    # What one repeat runs over is taken from the next, so the whole lasts what was asked for.
    assert repeats[-1].end_s - repeats[0].start_s == pytest.approx(60.0, abs=2 * BATCH_S)


def test_rates_come_from_the_settled_part_alone() -> None:
    gpu = PretendGpu()

    def warming(ms: float) -> float:
        """Half as fast for the first half second of a repeat."""
        return 2 * ms if gpu.order and gpu.seconds - gpu.turned_s < 0.5 else ms

    repeats = gpu.run({(OURS, RANDOM): lambda: warming(20.0), (CUBLAS, RANDOM): lambda: warming(10.0)}, 24.0)
    for repeat in repeats:
        ms = 20.0 if repeat.contender == OURS else 10.0
        assert max(repeat.batch_ms) > ms  # the slow start is in the record ...
        assert repeat.tflops == pytest.approx(FLOPS / ms * 1e-9)  # ... and not in the rate
        settled = repeat.batch_ends_s[repeat.unsettled - 1] - repeat.start_s
        assert 0.9 * SETTLING_S < settled < SETTLING_S + 2 * BATCH_S


def test_samples_count_for_what_ran_and_only_once_it_has_settled() -> None:
    watts = {(OURS, RANDOM): 600.0, (CUBLAS, RANDOM): 500.0}

    def state(contender: str, data: str, since: float) -> dict[str, object]:
        stale = since < 0.9  # power that still shows what ran before
        power = 100.0 if stale else watts.get((contender, data), 100.0)
        hot = contender == CUBLAS and not stale
        return {
            "power_w": power,
            "sm_clock_mhz": 1900.0 if hot else 1980.0,
            "temperature_c": 60.0,
            "throttling": ("power cap",) if hot else (),
        }

    gpu = PretendGpu(state)
    repeats = gpu.run({(OURS, RANDOM): lambda: 20.0, (CUBLAS, RANDOM): lambda: 10.0}, 24.0)
    for repeat in repeats:
        ours = repeat.contender == OURS
        ms = 20.0 if ours else 10.0
        assert repeat.median_w == watts[repeat.contender, RANDOM]
        assert repeat.joules_per_call == pytest.approx(repeat.median_w * ms / 1e3)
        assert repeat.sm_clock_mhz == (1980.0 if ours else 1900.0)
        assert repeat.memory_clock_mhz is None
        assert repeat.throttled == ({} if ours else {"power cap": 1.0})


def test_without_samples_there_are_rates_and_nothing_else() -> None:
    gpu = PretendGpu()
    gpu.samples = _Deaf()
    repeats = gpu.run({(OURS, RANDOM): lambda: 3.0, (OURS, ZEROS): lambda: 3.0}, 2.0)
    assert all(repeat.tflops == pytest.approx(FLOPS / 3.0 * 1e-9) for repeat in repeats)
    assert {(r.median_w, r.joules_per_call, r.sm_clock_mhz, r.temperature_c) for r in repeats} == {
        (None,) * 4
    }


class _Deaf(list):  # type: ignore[type-arg]
    def append(self, item: object) -> None:
        """Nothing is kept: a machine without NVML."""


def test_a_call_longer_than_a_repeat_still_counts() -> None:
    gpu = PretendGpu()
    repeats = gpu.run({(OURS, RANDOM): lambda: 900.0, (CUBLAS, RANDOM): lambda: 5.0}, 1.0)
    slow = [repeat for repeat in repeats if repeat.contender == OURS]
    assert all(len(repeat.batch_ms) == 1 and repeat.unsettled == 0 for repeat in slow)
    assert all(repeat.tflops == pytest.approx(FLOPS / 900.0 * 1e-9) for repeat in slow)


def test_work_that_takes_no_time_is_refused() -> None:
    with pytest.raises(MeasurementError, match="ours on random: 1 calls took"):
        PretendGpu().run({(OURS, RANDOM): lambda: 0.0}, 2.0)
