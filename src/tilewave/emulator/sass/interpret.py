"""Executes one thread block of a kernel from its cubin: the instructions that the GPU would run.

The interpreter follows what the compiler promised the hardware. A loaded register reads as NaN until its
scoreboard was waited for, a fixed-latency result until its latency has passed, counted in stall cycles of its
own instruction stream; a reuse flag returns the cached operand; a copy's shared memory is NaN until it was
waited for. Each such case is recorded as a `Hazard`, and the poison shows in the results.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from tilewave.emulator.memory import Buffer, Memory
from tilewave.emulator.sass.decode import decode_function
from tilewave.emulator.sass.elf import Cubin, Function
from tilewave.emulator.sass.execution import BlockResult, Execution, step_of
from tilewave.emulator.sass.machine import Machine
from tilewave.errors import EmulationError, UsageError

_TURN = 20_000
"""Instructions that a block may issue before the next one has its turn."""


def run_block(
    cubin: Cubin,
    kernel: str,
    *,
    grid: Sequence[int],
    block: Sequence[int],
    block_index: Sequence[int],
    args: Sequence[Buffer | int | float | bytes],
    memory: Memory,
    dynamic_shared_bytes: int = 0,
    max_instructions: int = 50_000_000,
) -> BlockResult:
    """Execute one block of a kernel; see `run_blocks`."""
    x, y, z = (int(n) for n in block_index)
    return run_blocks(
        cubin,
        kernel,
        grid=grid,
        block=block,
        blocks=[(x, y, z)],
        args=args,
        memory=memory,
        dynamic_shared_bytes=dynamic_shared_bytes,
        max_instructions=max_instructions,
    )[0]


def run_blocks(
    cubin: Cubin,
    kernel: str,
    *,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Buffer | int | float | bytes],
    memory: Memory,
    blocks: Sequence[tuple[int, int, int]] | None = None,
    dynamic_shared_bytes: int = 0,
    max_instructions: int = 50_000_000,
) -> list[BlockResult]:
    """Execute blocks of a kernel, all of the grid by default, and return what became of each.

    All blocks are resident, and take turns in order of their index, so that one may wait for a flag that
    another sets.

    `grid`, `block` and the indices are (x, y, z); `args` are buffers of `memory`, integers and floats,
    packed by the sizes that the cubin declares. Raises `UnknownInstructionError` for what the interpreter
    lacks, `MemoryFault` with the instruction for a bad access, `BarrierError` for a deadlock, and
    `EmulationError` for an instruction that the GPU may stop at (`Instruction.fault`).
    """
    function = cubin.function(kernel)
    code = decode_function(function, cubin.sm)
    for instruction in code:
        if fault := instruction.fault(function.registers):
            raise EmulationError(f"{instruction.text} at {instruction.address:#x} {fault}")
    extent = tuple(int(n) for n in grid)
    shape = tuple(int(n) for n in block)
    if len(extent) != 3 or min(extent) < 1:
        raise UsageError(f"grid is {tuple(grid)}; it should be (x, y, z) of at least 1")
    if len(shape) != 3 or min(shape) < 1 or int(np.prod(shape)) > 1024:
        raise UsageError(f"block is {tuple(block)}; it should be (x, y, z) with 1 to 1024 threads")
    constants = function.constants | {0: _bank_0(cubin, function, extent, shape, args)}
    steps = [step_of(instruction) for instruction in code]
    if blocks is None:
        blocks = [(x, y, z) for z in range(extent[2]) for y in range(extent[1]) for x in range(extent[0])]
    executions = [
        Execution(
            Machine(
                threads=int(np.prod(shape)),
                block_dim=(shape[0], shape[1], shape[2]),
                block_index=index,
                memory=memory,
                shared_bytes=function.shared_bytes + dynamic_shared_bytes,
                local_bytes=function.local_bytes,
                constants=constants,
            ),
            steps,
            max_instructions,
        )
        for index in blocks
    ]
    running = list(executions)
    while running:
        running = [execution for execution in running if not execution.run(_TURN)]
    return [execution.result() for execution in executions]


def _bank_0(
    cubin: Cubin,
    function: Function,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Buffer | int | float | bytes],
) -> bytes:
    """Constant bank 0 as the driver fills it: block and grid size, stack pointer, parameters."""
    if len(args) != len(function.parameters):
        raise UsageError(
            f"kernel '{function.name}' takes {len(function.parameters)} parameters; given were {len(args)}"
        )
    bank = bytearray(function.constants.get(0, b""))
    block_at, grid_at, stack_at = (0x360, 0x370, 0x37C) if cubin.sm >= 100 else (0x0, 0xC, 0x28)
    struct.pack_into("<3I", bank, block_at, *block)
    struct.pack_into("<3I", bank, grid_at, *(int(n) for n in grid))
    struct.pack_into("<I", bank, stack_at, function.local_bytes)
    for parameter, argument in zip(function.parameters, args, strict=True):
        at = function.parameter_base + parameter.offset
        if isinstance(argument, Buffer):
            struct.pack_into("<Q", bank, at, argument.address)
        elif isinstance(argument, bytes):
            if len(argument) != parameter.size:
                raise UsageError(
                    f"parameter {parameter.ordinal} of '{function.name}' has {parameter.size} bytes; given "
                    f"were {len(argument)}"
                )
            bank[at : at + parameter.size] = argument
        elif isinstance(argument, float):
            struct.pack_into("<f" if parameter.size == 4 else "<d", bank, at, argument)
        else:
            value = int(argument) & ((1 << 8 * parameter.size) - 1)
            bank[at : at + parameter.size] = value.to_bytes(parameter.size, "little")
    return bytes(bank)
