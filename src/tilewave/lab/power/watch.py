"""Clocks, power and temperature beside a run: a thread that asks NVML again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from tilewave.bench.environment import GpuState
from tilewave.errors import ToolchainError
from tilewave.lab.power.records import Sample

INTERVAL_S = 0.1
"""Time from one sample to the next. NVML renews power and clocks at about this rate."""


class Watch(Protocol):
    """What looks at the GPU while a run goes on."""

    @property
    def samples(self) -> list[Sample]:
        """What was seen so far, in order."""
        ...

    def running(self, contender: str, data: str) -> None:
        """Tell what runs from now on; empty names for nothing."""
        ...


class Blind:
    """A watch that sees nothing: the machine has no NVML."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def running(self, contender: str, data: str) -> None:
        """Nothing."""

    def __enter__(self) -> Blind:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing."""


class SamplingThread:
    """Samples the GPU's state every ``interval_s`` seconds from entering to leaving the context.

    ``read`` tells the state, ``now`` the seconds since the run began. A state that cannot be read any more
    ends the sampling; ``failure`` then says why.
    """

    def __init__(
        self,
        read: Callable[[], GpuState],
        now: Callable[[], float],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.samples: list[Sample] = []
        self.failure: str | None = None
        self._read, self._now, self._interval_s = read, now, interval_s
        self._what = ("", "")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="tilewave-power", daemon=True)

    def running(self, contender: str, data: str) -> None:
        """Tell what runs from now on."""
        self._what = (contender, data)

    def __enter__(self) -> SamplingThread:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            seconds, what = self._now(), self._what
            try:
                state = self._read()
            except Exception as error:  # a thread's exception has no other way to the user
                self.failure = f"sampling ended after {seconds:.1f} s: {error}"
                return
            self.samples.append(
                Sample(
                    seconds,
                    *what,
                    sm_clock_mhz=state.sm_clock_mhz,
                    memory_clock_mhz=state.memory_clock_mhz,
                    power_w=state.power_w,
                    temperature_c=state.temperature_c,
                    throttling=tuple(state.throttling),
                )
            )
            due = max(due + self._interval_s, time.monotonic())
            self._stop.wait(due - time.monotonic())


def open_nvml(pci_bus_id: str) -> tuple[Callable[[], GpuState] | None, Callable[[], None], str]:
    """How to read the GPU's state, how to let go of NVML, and where figures come from.

    Without NVML there is nothing to read (None), and the sentence says why.
    """
    from tilewave.bench.environment import NvmlReader

    try:
        reader = NvmlReader(pci_bus_id)
    except ToolchainError as error:
        return None, lambda: None, f"{error}; throughput only, no clocks, power or temperature"
    return reader.read, reader.close, f"NVML, {reader.power_kind}"
