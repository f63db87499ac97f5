"""Measuring: the timing protocol, the baseline to compare with, and the record of the environment."""

from tilewave.bench.baseline import Baseline, find_baseline
from tilewave.bench.environment import Environment, GpuState
from tilewave.bench.timing import Contender, Stopwatch, Timing, check_rate, interleave

__all__ = [
    "Baseline",
    "Contender",
    "Environment",
    "GpuState",
    "Stopwatch",
    "Timing",
    "check_rate",
    "find_baseline",
    "interleave",
]
