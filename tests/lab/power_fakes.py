"""A pretend GPU for power runs: a clock of its own, loads of known length, a watch that sees all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tilewave.lab.power.records import CUBLAS, FFMA, OURS, RANDOM, REGISTERS, ZEROS, PowerRun, Repeat, Sample
from tilewave.lab.power.rounds import Load, run_rounds

SIZE = 4096
FLOPS = 2.0 * SIZE**3
NAMES = {OURS: "rung 17 plain a", CUBLAS: "cuBLAS through torch 2.11.0", FFMA: "multiply-adds on registers"}


@dataclass
class PretendGpu:
    """Time passes only while a load runs; ``state`` says what the watch sees.

    It is given the load and the seconds since that load had its turn.
    """

    state: Callable[[str, str, float], dict[str, object]] = lambda contender, data, since: {}
    seconds: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    order: list[tuple[str, str]] = field(default_factory=list)
    what: tuple[str, str] = ("", "")
    turned_s: float = 0.0

    def now(self) -> float:
        return self.seconds

    def running(self, contender: str, data: str) -> None:
        self.what, self.turned_s = (contender, data), self.seconds
        if contender:
            self.order.append(self.what)

    def elapsed_ms(self, work: Callable[[], float], repeats: int) -> float:
        total = 0.0
        for _ in range(repeats):
            ms = work()
            total += ms
            self.seconds += ms / 1e3
            seen = self.state(*self.what, self.seconds - self.turned_s)
            self.samples.append(Sample(self.seconds, *self.what, **seen))
        return total

    def run(self, milliseconds: dict[tuple[str, str], Callable[[], float]], seconds: float) -> list[Repeat]:
        """Run loads that take so long a call."""
        loads = [Load(*key, work, FLOPS) for key, work in milliseconds.items()]  # type: ignore[arg-type]
        return run_rounds(loads, self, self, self.now, seconds)  # type: ignore[arg-type]


def repeat(contender: str, data: str, index: int, tflops: float, **figures: object) -> Repeat:
    """A repeat with nothing but its rate, unless more is given."""
    return Repeat(contender, data, index, 0.0, 1.0, 1, (1.0,), (FLOPS / tflops * 1e-9,), 0, tflops, **figures)  # type: ignore[arg-type]


def power_run(rates: dict[tuple[str, str], Sequence[float]], **changes: object) -> PowerRun:
    """A run with these rates in its rounds."""
    repeats = [
        repeat(contender, data, index, rate)
        for (contender, data), series in rates.items()
        for index, rate in enumerate(series)
    ]
    values: dict[str, object] = {
        "device": "H200",
        "size": SIZE,
        "rung": 17,
        "seconds": 50.0,
        "peak_tflops": 66.9,
        "power_limit_w": 700.0,
        "names": NAMES,
        "telemetry": "NVML, present power",
        "environment": {},
        "repeats": tuple(repeats),
    }
    return PowerRun(**{**values, **changes})  # type: ignore[arg-type]


ALL_LOADS = ((OURS, RANDOM), (CUBLAS, RANDOM), (OURS, ZEROS), (CUBLAS, ZEROS), (FFMA, REGISTERS))
