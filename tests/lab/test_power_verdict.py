"""Verdicts in words: parity, ahead or behind, by how much, and how that compares with what varies."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from power_fakes import ALL_LOADS, NAMES, SIZE, power_run

from tilewave.errors import UsageError
from tilewave.lab.power.records import (
    CUBLAS,
    FFMA,
    OURS,
    RANDOM,
    REGISTERS,
    ZEROS,
    Sample,
    load_power_run,
    save_power_run,
)
from tilewave.lab.power.verdict import judged, spread_of, throttle_notes, verdict

OPPOSITE = {"ahead": "behind", "behind": "ahead", "parity": "parity"}
A, B = (OURS, RANDOM), (CUBLAS, RANDOM)


def series(rng: np.random.Generator, level: float, noise: float, rounds: int) -> list[float]:
    return list(level * (1 + noise * rng.uniform(-1, 1, rounds)))


def test_the_words_of_the_issue() -> None:
    ours = [43.8, 43.8 * 1.0036, 43.8]
    run = judged(power_run({A: ours, B: [ours[0] / 0.857] * 3}))
    (found,) = run.verdicts
    assert found.outcome == "behind"
    assert found.words == (
        "rung 17 plain a is behind cuBLAS through torch 2.11.0 on random data by 14.3 %, 40 times the spread "
        "from repeat to repeat of 0.36 %."
    )


def test_swapping_the_contenders_swaps_the_verdict(rng: np.random.Generator) -> None:
    outcomes = set()
    for _ in range(300):
        rounds = int(rng.integers(3, 9))
        noise = float(rng.choice([0.0005, 0.005, 0.05]))
        rates = series(rng, 50.0, noise, rounds), series(rng, 50 * rng.uniform(0.9, 1.1), noise, rounds)
        one, other = (judged(power_run({A: first, B: second})) for first, second in (rates, rates[::-1]))
        forward, backward = verdict(one, A, B), verdict(one, B, A)
        exchanged = verdict(other, A, B)
        assert backward.outcome == OPPOSITE[forward.outcome] == exchanged.outcome
        assert backward.ratio == pytest.approx(1 / forward.ratio)
        assert backward.spread == forward.spread == exchanged.spread
        outcomes.add(forward.outcome)
    assert outcomes == {"ahead", "behind", "parity"}


def test_noise_larger_than_the_difference_is_parity(rng: np.random.Generator) -> None:
    for _ in range(100):
        low, high = 50 * (1 - rng.uniform(0.02, 0.05)), 50 * (1 + rng.uniform(0.02, 0.05))
        noisy = [low, high, *rng.uniform(low, high, 3)]
        steady = [float(np.median(noisy)) * rng.uniform(0.985, 1.015)] * 5
        for rates in ({A: noisy, B: steady}, {A: steady, B: noisy}):
            (found,) = judged(power_run(rates)).verdicts
            assert found.outcome == "parity"
            assert found.words.startswith("Parity: rung 17 plain a differs from cuBLAS through torch 2.11.0")


def test_a_difference_beyond_the_noise_is_none(rng: np.random.Generator) -> None:
    for _ in range(100):
        gap = rng.uniform(0.02, 0.5)
        slow, fast = series(rng, 40.0, 0.004, 5), series(rng, 40.0 * (1 + gap), 0.004, 5)
        (found,) = judged(power_run({A: fast, B: slow})).verdicts
        assert found.outcome == "ahead"
        assert found.ratio == pytest.approx(1 + gap, rel=0.01)
        assert found.times == pytest.approx((found.ratio - 1) / found.spread)
        assert found.spread <= 0.0081


def test_drift_that_meets_both_alike_does_not_move_the_ratio() -> None:
    drift = np.linspace(1.0, 0.9, 5)
    (found,) = judged(power_run({A: list(44 * drift), B: list(50 * drift)})).verdicts
    assert found.ratio == pytest.approx(0.88)
    assert found.spread == pytest.approx(0.1 / 0.95)


def test_what_varies_between_runs_can_make_it_parity() -> None:
    run = power_run({A: [52.0, 52.1, 52.05], B: [50.0, 50.1, 50.05]})
    assert judged(run).verdicts[0].outcome == "ahead"
    earlier = judged(power_run({A: [49.0, 49.1, 49.05], B: [50.0, 50.1, 50.05]}))
    again = judged(run, [earlier])
    assert again.summary(*A).between_runs == pytest.approx(spread_of([52.05, 49.05]))
    assert again.verdicts[0].outcome == "parity"
    assert "spread between runs of" in again.verdicts[0].words
    steady = judged(power_run({A: [52.0, 52.1, 52.05], B: [50.0, 50.1, 50.05]}))
    assert judged(run, [steady]).verdicts[0].outcome == "ahead"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"size": 2048}, "N is 4096 here and 2048"),
        ({"device": "GB10"}, "GPU is H200 here and GB10"),
        ({"rung": 15}, "rung is 17 here and 15"),
        (
            {"names": {**NAMES, CUBLAS: "cuBLAS through cupy 14"}},
            "cuBLAS is cuBLAS through torch 2.11.0 here",
        ),
        ({"names": {OURS: "rung 17 plain a"}}, "and none in the earlier one"),
    ],
)
def test_other_contenders_cannot_be_compared(change: dict[str, object], said: str) -> None:
    rates = {A: [50.0] * 3, B: [51.0] * 3}
    with pytest.raises(UsageError, match=said):
        judged(power_run(rates), [replace(judged(power_run(rates)), **change)])


def test_zeros_are_held_against_random_data() -> None:
    rates = {
        A: [44.0, 44.1, 44.0],
        B: [50.0] * 3,
        (OURS, ZEROS): [48.4, 48.5, 48.4],
        (CUBLAS, ZEROS): [50.0] * 3,
    }
    found = {(v.one, v.one_data, v.other, v.other_data): v for v in judged(power_run(rates)).verdicts}
    assert set(found) == {
        (OURS, RANDOM, CUBLAS, RANDOM),
        (OURS, ZEROS, CUBLAS, ZEROS),
        (OURS, ZEROS, OURS, RANDOM),
        (CUBLAS, ZEROS, CUBLAS, RANDOM),
    }
    faster = found[OURS, ZEROS, OURS, RANDOM]
    assert faster.outcome == "ahead"
    assert faster.words.startswith("rung 17 plain a on zeros is ahead of random data by 10.0 %")
    assert found[CUBLAS, ZEROS, CUBLAS, RANDOM].outcome == "parity"


def test_without_a_rival_only_data_are_compared() -> None:
    run = judged(power_run({A: [44.0] * 3, (OURS, ZEROS): [45.0] * 3, (FFMA, REGISTERS): [66.0] * 3}))
    assert [(v.one, v.other) for v in run.verdicts] == [(OURS, OURS)]
    assert run.verdicts[0].words.endswith("no two repeats differed.")
    assert run.verdicts[0].times is None
    assert run.measured_peak_tflops == 66.0


def test_medians_over_repeats_and_shares_of_throttling() -> None:
    run = power_run({A: [40.0, 44.0, 42.0]})
    extra = [(600.0, {}), (640.0, {"power cap": 0.5}), (620.0, {"power cap": 1.0})]
    run = replace(
        run,
        repeats=tuple(
            replace(r, median_w=watts, throttled=reasons)
            for r, (watts, reasons) in zip(run.repeats, extra, strict=True)
        ),
    )
    found = judged(run).summary(*A)
    assert (found.tflops, found.median_w) == (42.0, 620.0)
    assert found.spread == pytest.approx(4 / 42)
    assert found.throttled == {"power cap": pytest.approx(0.5)}
    assert found.joules_per_call is None


def test_throttling_is_flagged_with_who_ran() -> None:
    samples = [Sample(0.0, "", "", throttling=("power cap",))]  # nothing ran: not told
    samples += [Sample(i, OURS, RANDOM, throttling=("power cap",) if i < 3 else ()) for i in range(4)]
    samples += [Sample(4 + i, CUBLAS, RANDOM) for i in range(4)]
    assert throttle_notes(NAMES, samples) == [
        "throttled (power cap) in 3 of 8 samples: 75 % of rung 17 plain a on random"
    ]
    assert throttle_notes(NAMES, samples[5:]) == []


def test_a_run_travels_to_json_and_back(tmp_path: Path, rng: np.random.Generator) -> None:
    rates = {key: series(rng, 50.0, 0.01, 3) for key in ALL_LOADS}
    samples = (Sample(0.1, OURS, RANDOM, 1980.0, 3201.0, 650.0, 61.0, ("power cap",)), Sample(0.2, "", ""))
    run = judged(power_run(rates, samples=samples, notes=("a note",)))
    path = tmp_path / "run.json"
    save_power_run(run, path)
    assert load_power_run(path) == run
    assert judged(load_power_run(path)) == run
    assert not any(isinstance(v, float) and math.isnan(v) for v in json.loads(path.read_text()).values())
    assert run.size == SIZE


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not a power run of format 1"),
        ('{"format": 2, "kind": "power"}', "not a power run of format 1"),
        ('{"format": 1, "kind": "profile"}', "not a power run of format 1"),
        ('{"format": 1, "kind": "power"}', "a damaged power run: KeyError"),
        ('{"format": 1, "kind": "power", "samples": [{"x": 1}]}', "a damaged power run: TypeError"),
    ],
)
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        load_power_run(path)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load_power_run(Path("/no/such/run.json"))
