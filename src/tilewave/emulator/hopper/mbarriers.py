"""Mbarriers: counters in shared memory that threads and bulk copies count down, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tilewave.errors import BarrierError

MAX_COUNT = (1 << 20) - 1
"""Largest number of arrivals, and of bytes, that an mbarrier can count (PTX ISA, mbarrier contents)."""


@dataclass
class Mbarrier:
    """One mbarrier: `phase` counts the phases completed; a new one begins when nothing is pending."""

    slot: int
    offset: int
    count: int
    line: int  # of the PTX that made it
    pending: int = 0
    bytes: int = 0  # expected minus arrived
    phase: int = 0
    waiters: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pending = self.count

    def parity_done(self, parity: int) -> bool:
        """Whether the phase of this parity, the current one or the one before, has completed."""
        return (self.phase & 1) != parity

    def expect(self, count: int) -> None:
        """Let the phase wait for more bytes."""
        self.bytes += count
        self._in_range()

    def arrive(self, count: int = 1) -> None:
        """Count arrivals; the caller completes the phase."""
        if count > self.pending:
            raise BarrierError(
                f"{count} more arrivals at {self.name()}, whose phase {self.phase} waits for {self.pending} "
                f"of {self.count}"
            )
        self.pending -= count

    def land(self, count: int) -> None:
        """Count bytes that have arrived."""
        self.bytes -= count
        self._in_range()

    def try_complete(self) -> bool:
        """Begin the next phase if nothing is pending."""
        if self.pending or self.bytes:
            return False
        self.phase += 1
        self.pending = self.count
        return True

    def _in_range(self) -> None:
        if abs(self.bytes) > MAX_COUNT:
            raise BarrierError(f"{self.name()} counts {self.bytes} bytes: at most {MAX_COUNT} can be counted")

    def name(self) -> str:
        """How messages name it."""
        return f"the mbarrier at byte {self.offset} of shared memory (made at PTX line {self.line})"

    def state(self) -> str:
        """What its current phase waits for, in words."""
        parts = []
        if self.pending:
            parts.append(f"{self.pending} of {self.count} arrivals")
        if self.bytes > 0:
            parts.append(f"{self.bytes} bytes that were expected")
        if self.bytes < 0:
            parts.append(f"{-self.bytes} bytes to be expected that have already come")
        return f"phase {self.phase} (parity {self.phase & 1}) lacks {' and '.join(parts)}"
