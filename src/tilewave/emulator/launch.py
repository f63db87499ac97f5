"""Launching a kernel in the emulator: arguments, choice of blocks, batches, resident blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np

from tilewave.emulator.codegen import Options
from tilewave.emulator.counters import Counters
from tilewave.emulator.hopper.machine import HopperMachine
from tilewave.emulator.machine import Machine, Shape
from tilewave.emulator.memory import Buffer, Memory
from tilewave.emulator.passes import PatternMemo
from tilewave.emulator.program import Program, translate
from tilewave.emulator.ptx import Module, Parameter, Variable, parse_ptx
from tilewave.emulator.trace import Trace
from tilewave.errors import UsageError

BATCH_LANES = 8192
"""Threads that run together: enough to hide NumPy's cost per call, few enough for the CPU's cache."""

_MAX_THREADS = 1024


@dataclass(frozen=True)
class LaunchResult:
    """What a launch did; `counters` stand for all `blocks_total` blocks even if only `blocks_run` ran."""

    counters: Counters
    blocks_run: int
    blocks_total: int
    seconds: float


def launch(
    ptx: str | Module,
    symbol: str,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[object],
    memory: Memory,
    *,
    dynamic_shared_bytes: int = 0,
    exact_fma: bool = False,
    blocks: int | Sequence[int] | Mapping[int, float] | None = None,
    count: bool = True,
    values: bool = True,
    resident: int | None = None,
    order: int | None = None,
    detect_races: bool = False,
    allow_exited_at_barrier: bool = False,
    step_limit: int = 1_000_000,
    trace: Trace | None = None,
    cluster: Sequence[int] | None = None,
    registers: int | None = None,
) -> LaunchResult:
    """Run a kernel on the CPU.

    `ptx` is text or a parsed module, `symbol` the entry's name, `grid` and `block` are (x, y, z), and `args`
    hold one value a parameter: buffers of `memory` for pointers, numbers otherwise.

    `blocks` picks the blocks that run, and counters are scaled to the whole launch. An integer says about how
    many: they are spread evenly over the inside of the grid, its last column, its last row and its corner,
    each of which is weighted by its size, so that ragged edges count as often as they occur. A sequence
    holds linear indices, which all weigh the same; a mapping gives each the number of blocks that it stands
    for.

    `values=False` is for counters alone: arithmetic, loads and stores on which no address, branch or atomic
    depends are counted but not executed, so that outputs stay as they were.

    `resident` blocks run at a time, each advancing by one basic block at random turns, and they start in a
    random order: `order` is the seed of both. Without `resident`, independent blocks run in batches, in
    lockstep.

    `exact_fma` rounds every float32 FMA once, as the hardware does; without it the product is rounded, then
    the sum. `detect_races` makes a `RaceError` of shared memory that two warps touch without a barrier
    between them. A block some of whose threads have ended cannot pass a barrier unless
    `allow_exited_at_barrier` is set: the hardware (since Volta) counts only threads that have not ended, but
    the PTX ISA asks for all threads of a warp, and CUDA for all threads of the block. `step_limit` bounds
    the basic blocks that a batch may run, to end endless loops. `trace` follows one warp; it sees addresses
    only with `count`.

    A kernel that uses mbarriers, bulk copies, warpgroup products or clusters runs one cluster at a time, its
    warps in a random order; `order` is the seed, and with it copies land and products are computed at random
    moments instead of as late as they may. `cluster` is the cluster's (x, y, z), if the kernel does not fix
    it; `registers` the kernel's registers a thread, for `setmaxnreg` (else what its launch bounds allow).
    """
    started = time.perf_counter()
    module = _parsed(ptx) if isinstance(ptx, str) else ptx
    program = translate(module, symbol, Options(exact_fma=exact_fma, checked=detect_races, values=values))
    grid, block = _shape(grid, "grid"), _shape(block, "block")
    threads = block[0] * block[1] * block[2]
    if threads > _MAX_THREADS:
        raise UsageError(f"a block of {block} has {threads} threads; at most {_MAX_THREADS} are accepted")
    if not values and detect_races:
        raise UsageError("detect_races needs the values: values=False cannot go with it")
    if resident is not None and resident < 1:
        raise UsageError(f"resident is {resident}; accepted is 1 or more")
    parameters = _pack(program, args)
    variables = _variables(module, memory)
    memo = PatternMemo()
    total = grid[0] * grid[1] * grid[2]

    shape = _cluster(program, cluster, grid)

    def machine(block_ids: Sequence[int]) -> Machine:
        if program.asynchronous:
            return HopperMachine(
                program,
                memory,
                grid,
                block,
                parameters,
                block_ids,
                cluster=shape,
                registers=registers,
                seed=None if order is None else int(seeds.integers(1 << 62)),
                variables=variables,
                dynamic_shared_bytes=dynamic_shared_bytes,
                counting=count,
                memo=memo,
                detect_races=detect_races,
                allow_exited_at_barrier=allow_exited_at_barrier,
                step_limit=step_limit,
                trace=trace,
            )
        return Machine(
            program,
            memory,
            grid,
            block,
            parameters,
            block_ids,
            variables=variables,
            dynamic_shared_bytes=dynamic_shared_bytes,
            counting=count,
            memo=memo,
            detect_races=detect_races,
            allow_exited_at_barrier=allow_exited_at_barrier,
            step_limit=step_limit,
            trace=trace,
        )

    seeds = np.random.default_rng(order)
    counters = Counters()
    blocks_run = 0
    with np.errstate(all="ignore"):
        for weight, chosen in _weighted(blocks, grid):
            if program.asynchronous:
                units = _clusters(chosen, grid, shape)
                weight *= len(chosen) / sum(map(len, units))
            else:
                batch = max(1, BATCH_LANES // threads) if resident is None else 1
                units = [chosen[start : start + batch] for start in range(0, len(chosen), batch)]
            blocks_run += sum(map(len, units))
            if resident is None:
                finished = _run_batches(machine(block_ids) for block_ids in units)
            else:
                finished = _run_resident(units, resident, np.random.default_rng(order), machine)
            part = Counters()
            for done in finished:
                if count:
                    part += done.totals()
            counters += part if weight == 1 else part.scaled(weight)
    return LaunchResult(counters, blocks_run, total, time.perf_counter() - started)


@lru_cache(maxsize=16)
def _parsed(text: str) -> Module:
    """Text that is launched again is neither parsed nor translated again."""
    return parse_ptx(text)


def _run_batches(machines: Iterable[Machine]) -> Iterator[Machine]:
    for machine in machines:
        machine.run()
        yield machine


def _run_resident(
    units: Sequence[Sequence[int]],
    resident: int,
    rng: np.random.Generator,
    machine: Callable[[Sequence[int]], Machine],
) -> Iterator[Machine]:
    """Keep `resident` blocks (or clusters) running, and let a random one advance by one basic block."""
    waiting = [units[i] for i in rng.permutation(len(units))]
    running: list[Machine] = []
    while waiting or running:
        while waiting and len(running) < resident:
            running.append(machine(waiting.pop()))
        turn = int(rng.integers(len(running)))
        running[turn].step()
        if running[turn].finished:
            yield running.pop(turn)


def _shape(values: Sequence[int], name: str) -> Shape:
    sizes = tuple(int(value) for value in values)
    sizes += (1,) * (3 - len(sizes))
    if len(sizes) != 3 or min(sizes) < 1:
        raise UsageError(f"{name} is {tuple(values)}; accepted are one to three sizes of at least 1")
    return sizes[0], sizes[1], sizes[2]


def _cluster(program: Program, given: Sequence[int] | None, grid: Shape) -> Shape:
    """Shape of a cluster: the kernel's own, or the launch's."""
    fixed = program.entry.directives.get("reqnctapercluster")
    if given is not None and fixed is not None and tuple(given) != (*fixed, 1, 1)[: len(given)]:
        raise UsageError(f"cluster is {tuple(given)}; {program.entry.name} is compiled for {fixed}")
    shape = _shape(given or fixed or (1,), "cluster")
    if any(extent % part for extent, part in zip(grid, shape, strict=True)):
        raise UsageError(f"the grid {grid} is no multiple of the cluster {shape}")
    if shape != (1, 1, 1) and not program.asynchronous:
        raise UsageError(f"cluster is {shape}; {program.entry.name} uses nothing that needs a cluster")
    return shape


def _clusters(chosen: Sequence[int], grid: Shape, shape: Shape) -> list[list[int]]:
    """The clusters that hold the chosen blocks: linear indices of their blocks, by rank."""
    columns, rows, _ = grid
    corners = {
        (
            index % columns // shape[0],
            index // columns % rows // shape[1],
            index // (columns * rows) // shape[2],
        )
        for index in chosen
    }
    return [
        [
            ((z * shape[2] + k) * rows + y * shape[1] + j) * columns + x * shape[0] + i
            for k in range(shape[2])
            for j in range(shape[1])
            for i in range(shape[0])
        ]
        for z, y, x in sorted(corner[::-1] for corner in corners)
    ]


def _weighted(
    blocks: int | Sequence[int] | Mapping[int, float] | None, grid: Shape
) -> list[tuple[float, list[int]]]:
    """Groups of blocks to run, and the number of blocks that each of a group's stands for."""
    total = grid[0] * grid[1] * grid[2]
    if blocks is None:
        return [(1, list(range(total)))]
    if isinstance(blocks, int):
        if blocks < 1:
            raise UsageError(f"blocks is {blocks}; accepted is 1 or more")
        return _sampled(blocks, grid)
    chosen = sorted({int(index) for index in blocks})
    if not chosen or chosen[0] < 0 or chosen[-1] >= total:
        raise UsageError(f"blocks is {list(blocks)}; accepted are linear indices from 0 to {total - 1}")
    if not isinstance(blocks, Mapping):
        return [(total / len(chosen), chosen)]
    weights: dict[float, list[int]] = {}
    for index in chosen:
        weights.setdefault(float(blocks[index]), []).append(index)
    return list(weights.items())


def _sampled(count: int, grid: Shape) -> list[tuple[float, list[int]]]:
    """About `count` blocks of the grid's inside, last column, last row and corner."""
    columns, rows, layers = grid
    total = columns * rows * layers
    groups = []
    for ys in (range(rows - 1), range(rows - 1, rows)):
        for xs in (range(columns - 1), range(columns - 1, columns)):
            size = len(xs) * len(ys) * layers
            if not size:
                continue
            picks = min(size, max(1, round(count * size / total)))
            indices = []
            for place in ((2 * i + 1) * size // (2 * picks) for i in range(picks)):
                layer, rest = divmod(place, len(xs) * len(ys))
                y, x = divmod(rest, len(xs))
                indices.append((layer * rows + ys[y]) * columns + xs[x])
            groups.append((size / picks, indices))
    return groups


def _variables(module: Module, memory: Memory) -> dict[str, int]:
    """Addresses of the module's global and constant variables, which a memory keeps between launches."""
    memories: WeakKeyDictionary[Memory, dict[str, Buffer]] = module.__dict__.setdefault(
        "_variables", WeakKeyDictionary()
    )
    known = memories.setdefault(memory, {})
    addresses = {}
    for variable in module.variables.values():
        if variable.space in ("global", "const"):
            if variable.name not in known:
                known[variable.name] = _place(variable, memory)
            addresses[variable.name] = known[variable.name].address
    return addresses


def _place(variable: Variable, memory: Memory) -> Buffer:
    # A variable without an initialiser is zero, as in C.
    data = (variable.data or b"").ljust(variable.nbytes, b"\0")
    values = np.frombuffer(data, dtype=np.uint8)
    return memory.put(values, name=variable.name, read_only=variable.space == "const")


def _pack(program: Program, args: Sequence[object]) -> dict[str, bytes]:
    params = program.entry.params
    if len(args) != len(params):
        raise UsageError(
            f"{program.entry.name} takes {len(params)} arguments "
            f"({', '.join(parameter.type for parameter in params) or 'none'}); {len(args)} were given"
        )
    return {
        parameter.name: _bytes(parameter, arg, i)
        for i, (parameter, arg) in enumerate(zip(params, args, strict=True))
    }


def _bytes(parameter: Parameter, arg: object, index: int) -> bytes:
    size = parameter.nbytes
    if isinstance(arg, bytes):
        if len(arg) != size:
            raise UsageError(f"argument {index} has {len(arg)} bytes; parameter {parameter.name} has {size}")
        return arg
    if isinstance(arg, Buffer):
        if size != 8:
            raise UsageError(
                f"argument {index} is a buffer; parameter {parameter.name} is a .{parameter.type}"
            )
        return arg.address.to_bytes(8, "little")
    is_float = isinstance(arg, float | np.floating)
    if parameter.type[0] == "f" or is_float:
        if size not in (4, 8) or parameter.type[0] in "us":
            raise UsageError(
                f"argument {index} is {arg!r}; parameter {parameter.name} is a .{parameter.type}"
            )
        return np.array(arg, dtype=f"f{size}").tobytes()
    if not isinstance(arg, int | np.integer) or not -(1 << (8 * size - 1)) <= int(arg) < 1 << (8 * size):
        raise UsageError(
            f"argument {index} is {arg!r}; parameter {parameter.name} is a .{parameter.type} of {size} bytes"
        )
    return (int(arg) & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
