"""Records for tests of the report: the committed ladder, and a made-up power run and profile."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tilewave.lab.power.records import PowerRun, Repeat, Sample, Summary, Verdict
from tilewave.lab.profile.records import (
    EMULATOR,
    HARDWARE,
    NCU,
    PREDICTION,
    KernelProfile,
    LibraryKernel,
    Profile,
    Reading,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LADDER, POWER, PROFILE = (
    RESULTS / name for name in ("ladder-h200.json", "power_h200.json", "profile_h200.json")
)


def made_up_power(rng: np.random.Generator, rounds: int = 4) -> PowerRun:
    """A run of three contenders in turn, a second each, sampled ten times a second."""
    turns = [
        ("ours", "random"),
        ("cublas", "random"),
        ("ours", "zeros"),
        ("cublas", "zeros"),
        ("ffma", "registers"),
    ]
    repeats, samples = [], []
    for number in range(rounds * len(turns)):
        contender, data = turns[number % len(turns)]
        rate = float(rng.uniform(40, 60))
        repeats.append(
            Repeat(contender, data, number // len(turns), float(number), number + 1.0, 10,
                   (number + 0.5, number + 1.0), (2.0, 2.1), 0, rate,
                   600.0, 1.2, 1950.0, 3201.0, 60.0, {"power cap": 0.1})
        )  # fmt: skip
        samples += [
            Sample(number + tenth / 10, contender, data, float(rng.uniform(1900, 1980)), 3201.0,
                   float(rng.uniform(350, 698)), float(rng.uniform(40, 65)))
            for tenth in range(10)
        ]  # fmt: skip
    summaries = tuple(
        Summary(contender, data, rounds, 50.0, 0.01, None, 600.0, 1.2, 1950.0, 60.0, {})
        for contender, data in turns
    )
    return PowerRun(
        "NVIDIA H200", 4096, 21, float(len(repeats)), 66.9, 700.0,
        {"ours": "rung 21 stream k", "cublas": "cuBLAS", "ffma": "FFMA on registers"}, "NVML", {},
        tuple(samples), tuple(repeats), summaries,
        (Verdict("ours", "random", "cublas", "random", 0.86, 0.01, "behind", 14.0, "Behind by 14 %."),),
    )  # fmt: skip


def made_up_profile(rng: np.random.Generator) -> Profile:
    """Two rungs whose hardware counters differ from the emulator's by up to 2 %, and the library's kernel."""
    kernels = []
    for rung, title in ((9, "09 split groups"), (15, "15 large patch")):
        counted = {
            name: float(rng.integers(1 << 20, 1 << 28))
            for name in ("shared_loads", "shared_load_passes", "barriers", "thread_fma")
        }
        read = {name: value * float(rng.uniform(0.98, 1.02)) for name, value in counted.items()}
        readings = {
            PREDICTION: Reading({"shared_load_passes": counted["shared_load_passes"]}),
            EMULATOR: Reading(counted),
            HARDWARE: Reading(read | {"fma_pipe_percent": 79.0}, {"short scoreboard": 0.4}),
        }
        kernels.append(KernelProfile(rung, title, f"sgemm_{rung:02d}", readings))
    library = LibraryKernel(
        "ampere_sgemm_128x64_tn", Reading({"registers": 254.0}), 256, 512, (256, 128, 8), 128.0
    )
    return Profile("NVIDIA H200", 4096, NCU, {}, tuple(kernels), "cuBLAS", (library,), "ncu 2025.3")
