"""The handed cases about honest benchmarks, with simulated clocks."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import numpy as np
import pytest
from simulated import FULL_MHZ, SimulatedGpu

from tilewave.bench.products.measure import sets_for, time_in_turn
from tilewave.bench.products.records import COLD, WARM, Reading, Result
from tilewave.bench.products.verdicts import choice, drift, flags, outcome, ratio_interval
from tilewave.bench.suite import SuiteProduct

HERE = Path(__file__)
CASES = json.loads(HERE.with_name("handed_cases.json").read_text(encoding="utf-8"))
L2 = 50 * 2**20
BANDWIDTH = 4800.0


def timed(gpu: SimulatedGpu, works, rounds: int = 5, calls: int = 1) -> dict[str, Reading]:
    return time_in_turn(
        works,
        gpu,
        {word: Reading(word) for word in works},
        flops=1e9,
        peak_tflops=67.0,
        launch_floor_us=1.0,
        rounds=rounds,
        calls=calls,
        state=gpu.state,
    )


def test_every_handed_case_has_its_test() -> None:
    tree = ast.parse(HERE.read_text(encoding="utf-8"))
    tested = {node.name[5:9].upper() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert {case["id"] for case in CASES} == {name for name in tested if name.startswith("H0")}


def test_h088_cold_is_cold_and_warm_is_said_to_be_warm(rng: np.random.Generator) -> None:
    """Operands freshly written lie in the cache: only rotation through more than it holds makes them cold."""
    product = SuiteProduct("small", "t", 512, 512, 768)
    assert product.nbytes == 4 * 2**20
    cold_us, warm_us, found = 20.0, 12.0, {}
    for mode in (COLD, WARM):
        count = sets_for(product, mode, L2)
        sets = [object() for _ in range(count)]
        gpu = SimulatedGpu(rng, l2_bytes=L2)
        work = gpu.on_sets(sets, product.nbytes, cold_us / 1e3, warm_us / 1e3)
        work()  # creating the operands leaves them, or the last of them, in the cache
        readings = timed(gpu, {"ours": lambda work=work: work()})
        per_product = tuple(time / count for time in readings["ours"].rounds_us)
        result = Result(product, mode, count, True, (Reading("ours", per_product),))
        found[mode] = per_product[0]
        assert result.mode == mode
        assert flags(result, BANDWIDTH, L2) == ()
    assert found[COLD] == pytest.approx(cold_us)
    assert found[WARM] == pytest.approx(warm_us)


def test_h088_a_cold_run_that_is_warm_in_part_is_flagged() -> None:
    product = SuiteProduct("small", "t", 512, 512, 768)
    few = Result(product, COLD, 3, True, (Reading("ours", (20.0,) * 5),))
    assert any(flag.startswith("warm in part: 3 sets") for flag in flags(few, BANDWIDTH, L2))
    quick = Result(product, COLD, 40, True, (Reading("ours", (0.5,) * 5),))
    assert any("above the memory's peak" in flag for flag in flags(quick, BANDWIDTH, L2))


def test_h089_falling_clocks_are_reported_and_meet_all_contenders_alike(rng: np.random.Generator) -> None:
    gpu = SimulatedGpu(rng, loss=0.15, settles_ms=1500)
    works = {"ours": gpu.product(10.0), "other": gpu.product(12.0)}
    found = timed(gpu, works, rounds=100)
    result = Result(SuiteProduct("p", "t", 9, 9, 9), WARM, 1, True, tuple(found.values()))
    said = flags(result, BANDWIDTH, L2)
    for word in works:
        assert drift(found[word].rounds_us) > 0.03
        assert any(flag.startswith(f"drift: {word} became ") and "MHz" in flag for flag in said)
        assert any(flag == f"throttled: {word} (power cap)" for flag in said)
        clocks = found[word].clocks_mhz
        assert len(clocks) == 100
        assert FULL_MHZ > clocks[0] > clocks[-1]
    assert not any(flag.startswith("clocks apart") for flag in said)
    ratio = ratio_interval(found["ours"], found["other"])
    assert ratio.middle == pytest.approx(1.2, rel=0.005)
    assert ratio.high - ratio.low < 0.02
    # One after the other instead, the second pays for the heat of the first.
    apart = SimulatedGpu(rng, loss=0.15, settles_ms=1500)
    first = timed(apart, {"ours": apart.product(10.0)}, rounds=100)["ours"]
    second = timed(apart, {"other": apart.product(12.0)}, rounds=100)["other"]
    assert second.microseconds / first.microseconds > 1.21
    both = Result(result.product, WARM, 1, True, (first, second))
    assert any(flag.startswith("clocks apart: ours ") for flag in flags(both, BANDWIDTH, L2))


def test_h089_with_gaps_there_is_no_drift(rng: np.random.Generator) -> None:
    gpu = SimulatedGpu(rng, loss=0.15, settles_ms=200)
    times, clocks = [], []
    for _ in range(100):
        gpu.rest(2000)
        times.append(gpu.elapsed_ms(gpu.product(10.0), 1))
        clocks.append(gpu.clock_mhz)
    assert abs(drift(times)) < 0.01
    assert min(clocks) > 0.98 * FULL_MHZ


def test_h090_two_names_for_one_kernel_are_a_tie_every_time(rng: np.random.Generator) -> None:
    chosen, fastest = set(), set()
    for _ in range(20):
        gpu = SimulatedGpu(rng, noise=0.01)
        found = timed(gpu, {"first": gpu.product(1.0), "second": gpu.product(1.0)})
        ratio = ratio_interval(found["first"], found["second"])
        assert ratio.low <= ratio.middle <= ratio.high
        assert ratio.coverage > 0.9
        assert f"({ratio.low:.3f} to {ratio.high:.3f})" in str(ratio)
        best, tied = choice([found["first"], found["second"]])
        if outcome(found["first"], found["second"]) == "tie":
            assert len(tied) == 2
            chosen.add(best.contender)
        fastest.add(min(found.values(), key=lambda one: one.microseconds).contender)
    assert chosen == {"first"}
    assert fastest == {"first", "second"}  # by medians alone, the winner changes


def test_h090_ties_are_nearly_all_and_real_differences_are_none(rng: np.random.Generator) -> None:
    ties = differences = 0
    for _ in range(100):
        gpu = SimulatedGpu(rng, noise=0.005)
        works = {"one": gpu.product(1.0), "same": gpu.product(1.0), "slower": gpu.product(1.05)}
        found = timed(gpu, works)
        ties += outcome(found["one"], found["same"]) == "tie"
        differences += outcome(found["one"], found["slower"]) == "ahead"
        best, tied = choice(list(found.values()))
        assert found["slower"] not in tied or best is not found["slower"]
    assert ties >= 97
    assert differences >= 95
