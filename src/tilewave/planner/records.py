"""The planner's records: what is asked for, what was weighed, what was chosen."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tilewave.errors import UsageError
from tilewave.planner.cost import Estimate
from tilewave.planner.schedules import Decomposition, Raster, Schedule
from tilewave.planner.tiles import FLOAT_BYTES, Tile, Variant


@dataclass(frozen=True)
class Problem:
    """A batch of products C (m x n) = A (m x k) B (k x n). Any size may be 0."""

    m: int
    n: int
    k: int
    batch: int = 1

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise UsageError(f"{name} must be an integer, not {type(value).__name__}: {value!r}")
            if value < 0:
                raise UsageError(f"{name} must be at least 0, not {value}")

    def __str__(self) -> str:
        times = "" if self.batch == 1 else f"{self.batch} times "
        return f"{times}{self.m} x {self.n} x {self.k}"

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds that the product needs, without padding."""
        return self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Launch:
    """What a kernel launch needs: blocks, threads, and bytes of memory.

    The workspace holds ``partial_bytes`` of partial sums, one tile of C a slot, and behind them
    ``ticket_bytes`` of counters that are zero before and after every launch.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    partial_bytes: int
    ticket_bytes: int

    @property
    def workspace_bytes(self) -> int:
        """Bytes of global memory beside the operands."""
        return self.partial_bytes + self.ticket_bytes

    def __str__(self) -> str:
        workspace = f"{self.workspace_bytes} bytes" if self.workspace_bytes else "none"
        return f"{self.grid[0]} blocks of {self.block[0]} threads, workspace {workspace}"


@dataclass(frozen=True)
class Candidate:
    """A variant under a schedule, as the planner weighed it.

    ``rejected`` says why it was turned down; it is None for the chosen one. ``cut`` and ``estimate`` are None
    where the candidate could not run at all.
    """

    variant: Variant
    schedule: Schedule
    cut: Decomposition | None
    estimate: Estimate | None
    rejected: str | None

    def __str__(self) -> str:
        return f"{self.variant} {self.schedule}" + (f": {self.rejected}" if self.rejected else "")


@dataclass(frozen=True)
class Plan:
    """The planner's answer: which kernel runs, how its work is dealt, and what was turned down and why.

    ``considered`` holds every candidate, the chosen one included, in the family's order. ``family`` and
    ``costs`` name the set of candidates and the constants that were used.
    """

    problem: Problem
    device: str
    sms: int
    family: str
    costs: str
    variant: Variant
    schedule: Schedule
    cut: Decomposition
    raster: Raster
    launch: Launch
    estimate: Estimate
    considered: tuple[Candidate, ...]

    @property
    def tile(self) -> Tile:
        """The chosen variant's tile."""
        return self.variant.tile

    @property
    def rejected(self) -> tuple[Candidate, ...]:
        """The candidates that were turned down, each with its reason."""
        return tuple(candidate for candidate in self.considered if candidate.rejected is not None)

    def bare_work_ties(self) -> tuple[tuple[Candidate, ...], ...]:
        """Groups of candidates that give the busiest SM the same bare work, least work first."""
        groups: dict[int, list[Candidate]] = {}
        for candidate in self.considered:
            if candidate.estimate is not None:
                groups.setdefault(candidate.estimate.bare_work, []).append(candidate)
        return tuple(tuple(groups[work]) for work in sorted(groups) if len(groups[work]) > 1)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values that ``json.dumps`` accepts."""
        return asdict(self)

    def __str__(self) -> str:
        rows, columns = self.raster.tiles_m, self.raster.tiles_n
        estimate = self.estimate
        lines = [
            f"{self.problem} on {self.device} ({self.sms} SMs): {self.variant} {self.schedule}",
            f"  tiles {rows} x {columns}" + (f" x {self.problem.batch}" if self.problem.batch != 1 else ""),
            f"  launch {self.launch}",
            f"  waves {estimate.waves}, {estimate.idle_sms} SMs idle in the last",
            f"  busiest SM {estimate.slices} slices, cost {estimate.cost:.4g}, "
            f"{estimate.microseconds:.4g} us",
        ]
        lines += [f"  turned down {candidate}" for candidate in self.rejected]
        return "\n".join(lines)


def launch_of(variant: Variant, cut: Decomposition) -> Launch:
    """The launch of ``variant`` over ``cut``: one block index a block, along x."""
    return Launch(
        grid=(cut.blocks, 1, 1),
        block=(variant.tile.threads, 1, 1),
        shared_bytes=variant.tile.shared_bytes,
        partial_bytes=cut.slots * variant.tile.outputs * FLOAT_BYTES,
        ticket_bytes=cut.tickets * 4,
    )
