"""One rung without a GPU: compiled, checked and counted in the emulator."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from tilewave.compiler import Kernel, Program, compile_source, occupancy
from tilewave.device import DeviceSpec, get_spec
from tilewave.emulator import Buffer, Counters, LaunchResult, Memory, launch
from tilewave.lab.launches import RungLaunch, launch_of, sample_of_cut
from tilewave.lab.records import Build, Check, Counted
from tilewave.lab.registry import Rung
from tilewave.lab.walk_counts import count_walk
from tilewave.precision import error_in_bounds

#: Blocks executed of each kind (inner, right edge, bottom edge, corner) when a launch is sampled.
SAMPLED_BLOCKS = 2
#: Launches of so few threads are executed whole, unless each walks a long way.
FULL_THREADS = 16_384
#: Walkers that multiply so few slices between them are executed whole.
FULL_SLICES = 512
_DEFAULT_GPU = "GB10"


def build(rung: Rung, spec: DeviceSpec, arch: str, size: int) -> tuple[Program, Kernel, Build]:
    """Compile a rung, and work out how its kernel for N = M = K = ``size`` fits on an SM of ``spec``."""
    program = compile_source(rung.source(), rung.entries, arch)
    entry = launch_of(rung, size, size, size, spec).entry
    kernel = program.kernels[entry]
    resources = kernel.resources
    threads = rung.threads_of(entry)
    fit = occupancy(resources, threads, spec)
    return (
        program,
        kernel,
        Build(
            arch=program.arch,
            compiler=program.compiler,
            registers=resources.registers,
            stack_bytes=resources.stack_bytes,
            spill_store_bytes=resources.spill_store_bytes,
            spill_load_bytes=resources.spill_load_bytes,
            shared_bytes=resources.static_shared_bytes,
            threads=threads,
            blocks_per_sm=fit.blocks_per_sm,
            occupancy=fit.fraction,
            limited_by=fit.limiting,
            fma_per_step=rung.independent_fmas,
        ),
    )


def ragged_shapes(rung: Rung) -> tuple[tuple[int, int, int], ...]:
    """Small M, N, K with full tiles, partial tiles in each direction and a partial last slice.

    One is odd in everything; a rung that has a kernel of its own for sizes that suit wide loads gets a second
    one with partial tiles that this kernel takes.
    """
    tile = rung.tile
    odd = (tile.bm + 3, 2 * tile.bn + 5, 2 * tile.bk + 3)
    if rung.needs is None:
        return (odd,)
    n, k = rung.needs.n_multiple, rung.needs.k_multiple
    small = (odd, (tile.bm + 3, tile.bn // n * n + n, tile.bk // k * k + k))
    if rung.alternative is None:
        return small
    # On 48 SMs a selector takes its large tile for 45 tiles of few slices, and its small one for the others.
    return (*small, (8 * tile.bm + 1, 4 * tile.bn + 1, tile.bk + 3), (8 * tile.bm + 1, 4 * tile.bn + n, k))


def check(
    rung: Rung, program: Program, rng: np.random.Generator, spec: DeviceSpec | None = None
) -> tuple[Check, ...]:
    """Execute ragged products in full, on N(0,1) data and on all-positive data, and compare with float64."""
    checks = []
    for m, n, k in ragged_shapes(rung):
        normal = [rng.standard_normal(shape, dtype=np.float32) for shape in ((m, k), (k, n))]
        positive = [rng.random(shape, dtype=np.float32) for shape in ((m, k), (k, n))]
        for data, (a, b) in {"N(0,1)": normal, "U(0,1)": positive}.items():
            c = product(rung, program, a, b, spec)
            checks.append(Check(f"emulator, {data}", (m, n, k), error_in_bounds(c, a, b), rung.tolerance))
    return tuple(checks)


def product(
    rung: Rung,
    program: Program,
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    spec: DeviceSpec | None = None,
    *,
    exact_fma: bool = False,
) -> NDArray[np.float32]:
    """a @ b as the rung computes it on ``spec``, in the emulator; elements that it never writes stay NaN.

    ``spec`` (the GB10 by default) matters to rungs whose schedule depends on the GPU.
    """
    (m, k), n = a.shape, b.shape[1]
    planned = launch_of(rung, m, n, k, spec or get_spec(_DEFAULT_GPU))
    memory = Memory()
    out = memory.empty((m, n), np.float32, name="C")
    arguments = [memory.put(a, name="A"), memory.put(b, name="B"), out, m, n, k]
    arguments += workspace_arguments(planned, memory)
    symbol = program.kernels[planned.entry].symbol
    launch(
        program.ptx, symbol, planned.grid, planned.block, arguments, memory, exact_fma=exact_fma, count=False
    )
    return memory.get(out)


def workspace_arguments(planned: RungLaunch, memory: Memory) -> list[Buffer | int]:
    """The arguments behind M, N and K: workspace of NaN, counters of 0, the schedule's integers."""
    if planned.cut is None:
        return []
    partials = memory.empty((max(1, planned.partial_floats),), np.float32, name="partials")
    tickets = memory.put(np.zeros(max(1, planned.tickets), np.uint32), name="tickets")
    return planned.arguments(partials, tickets)


def count(rung: Rung, program: Program, kernel: Kernel, size: int, spec: DeviceSpec | None = None) -> Counted:
    """Counters of the launch at N = M = K = ``size`` on ``spec`` (the GB10 by default).

    A launch of many blocks is sampled: most blocks differ only in whether they touch the right or the bottom
    edge, so a few of each kind are executed and weighted by how many of that kind there are. Walkers are each
    different: `tilewave.lab.walk_counts` tells how they are counted. Passes and conflicts of copies depend on
    addresses, so those of a sample are an estimate (a few percent off); the others are the whole launch's.
    """
    planned = launch_of(rung, size, size, size, spec or get_spec(_DEFAULT_GPU))
    total_blocks = planned.blocks
    memory = Memory()
    matrix = np.zeros((size, size), np.float32)  # no counter depends on the values
    operands = [memory.put(matrix, name="A"), memory.put(matrix, name="B")]
    operands.append(memory.empty((size, size), np.float32, name="C"))

    def run(
        one: RungLaunch, workspace: list[Buffer | int], blocks: Mapping[int, float], m: int, n: int
    ) -> LaunchResult:
        arguments = [*operands, m, n, size, *workspace]
        return launch(
            program.ptx, kernel.symbol, one.grid, one.block, arguments, memory, blocks=blocks, values=False
        )

    if planned.cut is not None and planned.cut.walkers and _slices(planned) > FULL_SLICES:
        kept: dict[tuple[int, ...], Buffer] = {}

        def count_walker(
            one: RungLaunch, m: int, n: int, walker: int, tickets: dict[int, int]
        ) -> dict[str, float]:
            if one.grid not in kept:
                kept[one.grid] = memory.empty((one.partial_floats,), np.float32, name="partials")
            before = np.zeros(one.tickets, np.uint32)
            before[list(tickets)] = list(tickets.values())
            workspace = one.arguments(kept[one.grid], memory.put(before, name="tickets"))
            return _flat(run(one, workspace, {walker: 1}, m, n).counters)

        walk = count_walk(planned, (size, size), rung.tile, count_walker)
        return _counted(walk.counters, walk.blocks_run, total_blocks)

    if _small(planned):
        kinds = [BlockKind(tuple(range(total_blocks)), total_blocks)]
    elif planned.cut is None:
        kinds = block_kinds(planned.grid)
    else:
        kinds = [BlockKind(*kind) for kind in sample_of_cut(planned, SAMPLED_BLOCKS)]
    workspace = workspace_arguments(planned, memory)
    total: dict[str, float] = {}
    blocks_run = 0
    for kind in kinds:
        # Rounding comes last: a kind is executed as it is and weighted afterwards.
        result = run(planned, workspace, dict.fromkeys(kind.representatives, 1), size, size)
        blocks_run += result.blocks_run
        for name, value in _flat(result.counters).items():
            total[name] = total.get(name, 0.0) + value * kind.number / len(kind.representatives)
    return _counted(total, blocks_run, total_blocks)


def _slices(planned: RungLaunch) -> int:
    """Slices that all blocks of a scheduled launch multiply together."""
    return 0 if planned.cut is None else planned.cut.tiles * planned.cut.slices


def _small(planned: RungLaunch) -> bool:
    """Whether all blocks are executed: few threads, or walkers with few slices between them."""
    if planned.cut is not None and planned.cut.walkers:
        return _slices(planned) <= FULL_SLICES
    return planned.blocks * math.prod(planned.block) <= FULL_THREADS


def _counted(counters: Mapping[str, float], blocks_run: int, blocks_total: int) -> Counted:
    """The record of counters that may be estimates."""
    whole = {name: round(value) for name, value in counters.items()}
    return Counted(blocks_run=blocks_run, blocks_total=blocks_total, **whole)


@dataclass(frozen=True)
class BlockKind:
    """Blocks that do the same: which of them to execute (linear indices), and how many there are."""

    representatives: Sequence[int]
    number: int


def block_kinds(grid: tuple[int, int, int], sample: int = SAMPLED_BLOCKS) -> list[BlockKind]:
    """Split a grid into inner blocks, last column, last row and corner, with a few samples of each."""
    columns, rows, layers = grid
    spans = [(range(columns - 1), range(columns - 1, columns)), (range(rows - 1), range(rows - 1, rows))]
    kinds = []
    for ys in spans[1]:
        for xs in spans[0]:
            number = len(xs) * len(ys) * layers
            if number:
                picks = sorted({(2 * i + 1) * number // (2 * sample) for i in range(sample)})
                kinds.append(BlockKind(tuple(_linear(pick, xs, ys, grid) for pick in picks), number))
    return kinds


def _linear(pick: int, xs: range, ys: range, grid: tuple[int, int, int]) -> int:
    """The linear block index of the ``pick``-th block in a rectangle of the grid."""
    layer, rest = divmod(pick, len(xs) * len(ys))
    row, column = divmod(rest, len(xs))
    return xs[column] + grid[0] * (ys[row] + grid[1] * layer)


def _flat(counters: Counters) -> dict[str, float]:
    """The counters that a ladder row keeps, by the names that both records share."""
    derived = {"wide_shared_loads": counters.shared_loads_by_width.get(16, 0)}
    kept = [
        field.name for field in fields(Counted) if field.name not in {*derived, "blocks_run", "blocks_total"}
    ]
    return derived | {name: getattr(counters, name) for name in kept}
