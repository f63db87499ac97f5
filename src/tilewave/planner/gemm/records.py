"""What the product's planner answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilewave.kernels.instances import Instance
from tilewave.planner.schedules import Decomposition, Raster, Schedule
from tilewave.problem import GemmProblem

FLOAT_BYTES = 4


def workspace_of(instance: Instance, cut: Decomposition) -> tuple[int, int]:
    """Bytes of partial sums, a tile of C a slot, and of tickets; none where no tile can be cut."""
    if cut.slices == 1:
        return 0, 0
    return cut.slots * instance.bm * instance.bn * instance.items * FLOAT_BYTES, cut.counters * 4


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

    def __str__(self) -> str:
        return f"{self.instance} {self.schedule}" + (f": {self.rejected}" if self.rejected else "")


@dataclass(frozen=True, slots=True)
class Edge:
    """A strip of an output, from element (row, column) on, that a launch of its own computes.

    ``swapped``: the strip's transpose is computed, with a and b exchanged.
    """

    row: int
    column: int
    swapped: bool
    plan: GemmPlan

    @property
    def place(self) -> str:
        """Where the strip begins, in words."""
        return f"row {self.row}" if self.row else f"column {self.column}"


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """Which kernel computes a problem, how its work is dealt, and what was turned down and why.

    ``problem`` is what the kernel sees, after folding and swapping. The launch is ``cut.blocks`` blocks of
    ``instance.threads`` threads; ``notes`` name everything that a user would want to be told (a copy, a
    staging, a cap on SMs). ``sms`` is the number of SMs planned for, ``blocks_per_sm`` how many blocks one of
    them holds at once. ``mode_workspace``: the bytes of packed operands and of flags that the kernels of a
    precision other than ``ieee`` need. ``considered`` holds every candidate, the choice among them; a plan of
    `plan_gemm` works it out when it is first asked for, which takes milliseconds. ``edges`` are strips of the
    output that come after these tiles, each by a launch of its own; ``problem`` is then what is left for the
    tiles, and ``whole`` all of it. ``estimate`` is of everything.
    """

    problem: GemmProblem
    device: str
    sms: int
    instance: Instance
    schedule: Schedule
    cut: Decomposition
    raster: Raster
    estimate: GemmEstimate
    considered: Sequence[GemmCandidate] = field(compare=False, repr=False)
    notes: tuple[str, ...] = ()
    blocks_per_sm: int = 1
    mode_workspace: tuple[int, int] | None = None
    edges: tuple[Edge, ...] = ()
    whole: GemmProblem | None = None

    @property
    def covers(self) -> GemmProblem:
        """The problem that all launches of the plan compute together."""
        return self.problem if self.whole is None else self.whole

    @property
    def blocks(self) -> int:
        """Blocks of the launch."""
        return self.cut.blocks

    @property
    def waves(self) -> int:
        """Rounds of resident blocks on the busiest SM, when blocks are dealt evenly."""
        return -(-self.blocks // (self.sms * self.blocks_per_sm))

    @property
    def partial_bytes(self) -> int:
        """Bytes of workspace for partial sums, a tile of C a slot, or for packed operands."""
        return (self.mode_workspace or workspace_of(self.instance, self.cut))[0]

    @property
    def ticket_bytes(self) -> int:
        """Bytes of workspace for counters that are 0 before and after every launch."""
        return (self.mode_workspace or workspace_of(self.instance, self.cut))[1]

    @property
    def workspace_bytes(self) -> int:
        """Bytes of global memory beside the operands; launches that follow one another share them."""
        own = self.partial_bytes + self.ticket_bytes
        return max([own, *(edge.plan.workspace_bytes for edge in self.edges)])

    @property
    def rejected(self) -> tuple[GemmCandidate, ...]:
        """The candidates that were turned down, each with its reason."""
        return tuple(candidate for candidate in self.considered if candidate.rejected is not None)

    def __repr__(self) -> str:
        # Short, because plan_for answers with a tuple, which people print.
        return f"<GemmPlan {str(self).splitlines()[0]}>"

    def __str__(self) -> str:
        instance, estimate = self.instance, self.estimate
        head = f"{self.covers} on {self.device} ({self.sms} SMs): "
        if self.blocks == 0:
            return head + "nothing to compute, nothing is launched"
        rows, columns = self.raster.tiles_m, self.raster.tiles_n
        groups = self.cut.tiles // max(1, rows * columns)
        tiles = f"{rows} x {columns}" + (f" x {groups}" if groups > 1 else "")
        items = f" of {instance.items} items" if instance.items > 1 else ""
        workspace = f"{self.workspace_bytes:,} bytes" if self.workspace_bytes else "none"
        slices = f"{self.cut.slices} slice{'s' if self.cut.slices > 1 else ''}"
        lines = [
            f"{head}{instance} {self.schedule}",
            f"  tiles {tiles} of {instance.bm} x {instance.bn}{items}, {slices} of K each",
            f"  launch {self.blocks:,} blocks of {instance.threads} threads, {self.blocks_per_sm} an SM at "
            f"once, waves {self.waves}, workspace {workspace}",
            f"  predicted {estimate.total:.4g} us, bound by {estimate.limit} (compute "
            f"{estimate.compute:.4g}, memory {estimate.memory:.4g}, combining {estimate.combining:.4g}, "
            f"launch {estimate.launch:.4g})",
        ]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)
