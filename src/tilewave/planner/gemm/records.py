"""What the product's planner answers."""

from __future__ import annotations

from dataclasses import dataclass

from tilewave.kernels.instances import Instance
from tilewave.planner.schedules import Decomposition, Raster, Schedule
from tilewave.problem import GemmProblem

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class GemmEstimate:
    """Predicted time in microseconds and its parts; the whole is not always their sum (work overlaps
    traffic)."""

    total: float
    compute: float
    memory: float
    combining: float
    launch: float

    @property
    def limit(self) -> str:
        """The part that binds: compute, memory, combining or launch."""
        parts = {name: getattr(self, name) for name in ("compute", "memory", "combining", "launch")}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True)
class GemmCandidate:
    """An instance under a schedule as the planner weighed it; ``rejected`` is None for the choice."""

    instance: Instance
    schedule: Schedule
    estimate: GemmEstimate | None
    rejected: str | None


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """Which kernel computes a problem, how its work is dealt, and what was turned down and why.

    ``problem`` is what the kernel sees, after folding and swapping. The launch is ``cut.blocks`` blocks of
    ``instance.threads`` threads; ``notes`` name everything that a user would want to be told (a copy, a
    staging, a cap on SMs).
    """

    problem: GemmProblem
    device: str
    sms: int
    instance: Instance
    schedule: Schedule
    cut: Decomposition
    raster: Raster
    estimate: GemmEstimate
    considered: tuple[GemmCandidate, ...]
    notes: tuple[str, ...] = ()

    @property
    def blocks(self) -> int:
        """Blocks of the launch."""
        return self.cut.blocks

    @property
    def partial_bytes(self) -> int:
        """Bytes of workspace for partial sums: a tile of C a slot."""
        return self.cut.slots * self.instance.bm * self.instance.bn * self.instance.items * FLOAT_BYTES

    @property
    def ticket_bytes(self) -> int:
        """Bytes of workspace for counters that are 0 before and after every launch."""
        return self.cut.tickets * 4
