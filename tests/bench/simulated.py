"""A GPU of the tests' own: a clock that falls with work and recovers at rest, an L2 cache, and noise."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from tilewave.bench.environment import GpuState

FULL_MHZ = 1980.0


class SimulatedGpu:
    """A stopwatch whose time passes only through work.

    ``loss`` is the share of the clock that continuous work costs in the end, over ``settles_ms``; ``noise``
    the standard deviation of a sample, as a share. ``l2_bytes`` of what was touched last are found in cache.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        loss: float = 0.0,
        settles_ms: float = 500.0,
        noise: float = 0.0,
        l2_bytes: int = 0,
    ) -> None:
        self._rng, self._loss, self._settles_ms, self._noise = rng, loss, settles_ms, noise
        self._l2_bytes = l2_bytes
        self._cached: OrderedDict[object, int] = OrderedDict()
        self._heat = 0.0
        self._elapsed = 0.0
        self.wall_ms = 0.0

    @property
    def clock_mhz(self) -> float:
        return FULL_MHZ * (1 - self._loss * self._heat)

    def state(self) -> GpuState:
        throttled = ["power cap"] if self._heat * self._loss > 0.02 else []
        return GpuState(sm_clock_mhz=self.clock_mhz, power_w=650.0, throttling=throttled, source="simulated")

    def rest(self, milliseconds: float) -> None:
        self.wall_ms += milliseconds
        self._heat *= 0.5 ** (milliseconds / self._settles_ms)

    def product(self, milliseconds: float) -> Callable[[], None]:
        """A call that takes so long at the full clock."""
        return lambda: self._run(milliseconds)

    def on_sets(
        self, sets: Sequence[object], nbytes: int, cold_ms: float, warm_ms: float
    ) -> Callable[[], None]:
        """A call for each set of operands, quicker on those that are in the cache."""

        def work() -> None:
            for one in sets:
                self._run(warm_ms if self._touch(one, nbytes) else cold_ms)

        return work

    def elapsed_ms(self, work: Callable[[], None], repeats: int) -> float:
        self._elapsed = 0.0
        for _ in range(repeats):
            work()
        return self._elapsed * float(1 + self._noise * self._rng.standard_normal())

    def _run(self, milliseconds: float) -> None:
        taken = milliseconds * FULL_MHZ / self.clock_mhz
        self._heat += (1 - self._heat) * min(1.0, taken / self._settles_ms)
        self._elapsed += taken
        self.wall_ms += taken

    def _touch(self, what: object, nbytes: int) -> bool:
        found = what in self._cached
        self._cached[what] = nbytes
        self._cached.move_to_end(what)
        while sum(self._cached.values()) > self._l2_bytes:
            self._cached.popitem(last=False)
        return found
