"""A sustained run: throughput beside clocks, power and temperature, ours against cuBLAS, and a verdict."""

from tilewave.lab.power.records import PowerRun, Repeat, Sample, Summary, Verdict, load_power_run

__all__ = ["PowerRun", "Repeat", "Sample", "Summary", "Verdict", "load_power_run"]
