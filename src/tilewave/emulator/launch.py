"""Launching a kernel in the emulator: arguments, choice of blocks, batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewave.emulator.codegen import Options
from tilewave.emulator.counters import Counters
from tilewave.emulator.machine import Machine, Shape
from tilewave.emulator.memory import Buffer, Memory
from tilewave.emulator.passes import PatternMemo
from tilewave.emulator.program import Program, translate
from tilewave.emulator.ptx import Module, Parameter, parse_ptx
from tilewave.errors import UsageError

BATCH_LANES = 8192
"""Threads that run together: enough to hide NumPy's cost per call, few enough for the CPU's cache."""

_MAX_THREADS = 1024


@dataclass(frozen=True)
class LaunchResult:
    """What a launch did; `counters` are scaled to all `blocks_total` blocks if only `blocks_run` ran."""

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
    blocks: int | Sequence[int] | None = None,
    count: bool = True,
    detect_races: bool = False,
    allow_exited_at_barrier: bool = False,
    step_limit: int = 50_000_000,
) -> LaunchResult:
    """Run a kernel on the CPU.

    `ptx` is text or a parsed module, `symbol` the entry's name, `grid` and `block` are (x, y, z), and `args`
    hold one value a parameter: buffers of `memory` for pointers, numbers otherwise.

    `blocks` picks the blocks that run: linear indices, or how many to spread evenly over the grid; counters
    are scaled to the whole launch. `exact_fma` rounds every float32 FMA once, as the hardware does; without
    it the product is rounded, then the sum. `detect_races` makes a `RaceError` of shared memory that two
    warps touch without a barrier between them. A block some of whose threads have ended cannot pass a
    barrier unless `allow_exited_at_barrier` is set: the hardware (since Volta) counts only threads that have
    not ended, but the PTX ISA asks for all threads of a warp, and CUDA for all threads of the block.
    """
    started = time.perf_counter()
    module = parse_ptx(ptx) if isinstance(ptx, str) else ptx
    program = translate(module, symbol, Options(exact_fma=exact_fma, checked=detect_races))
    grid, block = _shape(grid, "grid"), _shape(block, "block")
    threads = block[0] * block[1] * block[2]
    if threads > _MAX_THREADS:
        raise UsageError(f"a block of {block} has {threads} threads; at most {_MAX_THREADS} are accepted")
    parameters = _pack(program, args)
    total = grid[0] * grid[1] * grid[2]
    chosen = _choose(blocks, total)
    counters = Counters()
    memo = PatternMemo()
    batch = max(1, BATCH_LANES // threads)
    with np.errstate(all="ignore"):
        for start in range(0, len(chosen), batch):
            machine = Machine(
                program,
                memory,
                grid,
                block,
                parameters,
                chosen[start : start + batch],
                dynamic_shared_bytes=dynamic_shared_bytes,
                counting=count,
                memo=memo,
                detect_races=detect_races,
                allow_exited_at_barrier=allow_exited_at_barrier,
                step_limit=step_limit,
            )
            machine.run()
            if count:
                counters += machine.totals()
    if len(chosen) != total:
        counters = counters.scaled(total / len(chosen))
    return LaunchResult(counters, len(chosen), total, time.perf_counter() - started)


def _shape(values: Sequence[int], name: str) -> Shape:
    sizes = tuple(int(value) for value in values)
    sizes += (1,) * (3 - len(sizes))
    if len(sizes) != 3 or min(sizes) < 1:
        raise UsageError(f"{name} is {tuple(values)}; accepted are one to three sizes of at least 1")
    return sizes[0], sizes[1], sizes[2]


def _choose(blocks: int | Sequence[int] | None, total: int) -> list[int]:
    if blocks is None:
        return list(range(total))
    if isinstance(blocks, int):
        if blocks < 1:
            raise UsageError(f"blocks is {blocks}; accepted is 1 or more")
        count = min(blocks, total)
        return [(2 * i + 1) * total // (2 * count) for i in range(count)]
    chosen = sorted({int(index) for index in blocks})
    if not chosen or chosen[0] < 0 or chosen[-1] >= total:
        raise UsageError(f"blocks is {list(blocks)}; accepted are linear indices from 0 to {total - 1}")
    return chosen


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
