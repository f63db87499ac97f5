"""A kernel made ready to run: blocks with their Python code, register slots, memory layout, static counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tilewave.emulator import half_opcodes, memory_opcodes, opcodes, warp_matrix
from tilewave.emulator.codegen import Access, BlockCode, Emitter, Options, unknown
from tilewave.emulator.counters import classify
from tilewave.emulator.flow import (
    BasicBlock,
    End,
    Slots,
    assign_slots,
    basic_blocks,
    is_block_barrier,
    is_collective,
)
from tilewave.emulator.hopper import opcodes as hopper_opcodes
from tilewave.emulator.hopper.accumulators import hazards, product_registers
from tilewave.emulator.layout import RESERVED_SHARED_BYTES, Layout
from tilewave.emulator.memory_opcodes import space_of, vector_of
from tilewave.emulator.ptx import Entry, Immediate, Instruction, Module, Register, Vector, type_bits
from tilewave.emulator.slicing import value_only
from tilewave.emulator.widening import widen
from tilewave.errors import UnknownInstructionError, UsageError

HANDLERS = {
    **opcodes.opcode,
    **half_opcodes.opcode,
    **memory_opcodes.opcode,
    **warp_matrix.opcode,
    **hopper_opcodes.opcode,
}
"""All opcodes that the emulator executes."""


@dataclass
class Program:
    """One entry of a module, translated for one set of options."""

    entry: Entry
    options: Options
    blocks: list[BasicBlock]
    slots: Slots
    scratch_rows: int
    layout: Layout
    codes: list[BlockCode]
    accesses: list[Access]
    opcode_counts: list[Counter[str]]  # by basic block
    class_counts: list[Counter[str]]
    has_global_atomics: bool
    entry_slots: list[
        dict[int, list[int]]
    ]  # by basic block: slots of the registers that are live at its begin
    exit_slots: list[dict[int, list[int]]]  # ... and at its end
    barriers: dict[int, tuple[int, int | None, bool]]  # by basic block: see `barrier_of`
    asynchronous: bool  # runs on a HopperMachine; for it, by basic block:
    collective: npt.NDArray[np.bool_]  # whether warpgroups run it together
    convergent: npt.NDArray[np.bool_]  # whether warps should run it together

    @property
    def source(self) -> str:
        """The generated Python code, for reading."""
        return "\n".join(code.source for code in self.codes)


def translate(module: Module, symbol: str, options: Options) -> Program:
    """Translate an entry of a module; raises `UnknownInstructionError` for what cannot be executed."""
    if symbol not in module.entries:
        known = ", ".join(module.entries) or "none"
        raise UsageError(f"the PTX has no entry {symbol!r}; its entries are: {known}")
    cache: dict[tuple[str, Options], Program] = module.__dict__.setdefault("_programs", {})
    key = (symbol, options)
    if key not in cache:
        cache[key] = _translate(module.entries[symbol], module.target, options)
    return cache[key]


def _translate(entry: Entry, target: str, options: Options) -> Program:
    code = entry.instructions
    if not code:
        raise UnknownInstructionError(f"PTX line {entry.line}: entry {entry.name} has no instructions")
    asynchronous = any(is_asynchronous(instruction) for instruction in code)
    if products := product_registers(code):
        # A product in flight writes its registers when it is waited for: they stay occupied until then.
        hidden = Vector(tuple(products))
        code[:] = [
            replace(i, operands=(*i.operands, hidden))
            if i.opcode == "wgmma" and i.modifiers[0] == "wait_group" and hidden not in i.operands
            else i
            for i in code
        ]
    blocks = basic_blocks(entry)
    slots = assign_slots(blocks, code)
    layout = Layout(entry, RESERVED_SHARED_BYTES if asynchronous else 0)
    accesses = {id(i): access for i in code if (access := memory_access(i)) is not None}
    widen(blocks, code, accesses, layout, target)
    left_out = set() if options.values else value_only(code, accesses)
    in_flight, unfenced = hazards(blocks, code)
    codes = []
    scratch_rows = 0
    for block in blocks:
        emitter = Emitter(slots, layout, options, accesses, HANDLERS, asynchronous=asynchronous)
        emitter.in_flight, emitter.unfenced = in_flight, unfenced
        body = code[block.first : block.stop]
        emitter.value_only = left_out
        emitter.find_groups(body)
        for instruction in body:
            emitter.emit(instruction)
        emitter.namespace["wm"] = warp_matrix
        codes.append(emitter.finish(block))
        scratch_rows = max(scratch_rows, emitter.scratch_rows)
    return Program(
        entry,
        options,
        blocks,
        slots,
        scratch_rows,
        layout,
        codes,
        list(accesses.values()),
        [Counter(".".join([i.opcode, *i.modifiers]) for i in code[b.first : b.stop]) for b in blocks],
        [Counter(classify(i) for i in code[b.first : b.stop]) for b in blocks],
        any(a.instruction.opcode in ("atom", "red") and a.space != "shared" for a in accesses.values()),
        [slots.by_class(block.live_in) for block in blocks],
        [slots.by_class(block.live_out) for block in blocks],
        {
            block.index: barrier_of(block, code)
            for block in blocks
            if block.end is End.BARRIER and not asynchronous
        },
        asynchronous,
        np.array([any(map(is_collective, code[b.first : b.stop])) for b in blocks]),
        np.array([any(map(is_convergent, code[b.first : b.stop])) for b in blocks]),
    )


_ASYNCHRONOUS = frozenset(["mbarrier", "wgmma", "setmaxnreg", "elect", "mapa"])
_WARP_WIDE = frozenset(["shfl", "vote", "elect", "ldmatrix", "stmatrix", "mma", "match"])


def is_asynchronous(instruction: Instruction) -> bool:
    """Whether an instruction needs warps that run independently, or a cluster."""
    opcode, modifiers = instruction.opcode, instruction.modifiers
    if opcode in ("bar", "barrier"):
        computed = any(isinstance(operand, Register) for operand in instruction.operands)
        return bool({"arrive", "cluster"} & set(modifiers)) or (computed and "warp" not in modifiers)
    return opcode in _ASYNCHRONOUS or (opcode == "cp" and bool({"bulk", "mbarrier"} & set(modifiers)))


def is_convergent(instruction: Instruction) -> bool:
    """Whether the lanes of a warp should meet at an instruction."""
    if instruction.opcode in ("bar", "barrier"):
        return "warp" in instruction.modifiers
    return instruction.opcode in _WARP_WIDE


def memory_access(instruction: Instruction) -> Access | None:
    """The memory access that an instruction makes; None for others and for parameters."""
    opcode, modifiers = instruction.opcode, instruction.modifiers
    if opcode in ("ld", "ldu", "st"):
        space = space_of(instruction)
        if space == "param":
            if opcode == "st":
                raise unknown(instruction)
            return None
        try:
            width = type_bits(modifiers[-1]) // 8 * vector_of(instruction)
        except (KeyError, IndexError):
            raise unknown(instruction) from None
        return Access(instruction, space, width, opcode == "st", width)
    if opcode in ("ldmatrix", "stmatrix"):
        return Access(instruction, "shared", 16, opcode == "stmatrix", 16)
    if opcode in ("atom", "red"):
        try:
            width = type_bits(modifiers[-1]) // 8
        except (KeyError, IndexError):
            raise unknown(instruction) from None
        return Access(instruction, space_of(instruction), width, True, width)
    if (
        opcode == "cp"
        and modifiers[:1] == ("async",)
        and "bulk" not in modifiers
        and len(instruction.operands) >= 3
    ):
        size = instruction.operands[2]
        if isinstance(size, Immediate):
            return Access(instruction, "copy", size.value, True, size.value)
    return None


def barrier_of(block: BasicBlock, code: list[Instruction]) -> tuple[int, int | None, bool]:
    """Number, thread count (None: all) and whether it is aligned, of the barrier that ends a block."""
    instruction = code[block.stop - 1]
    assert is_block_barrier(instruction)
    numbers = [operand.value for operand in instruction.operands if isinstance(operand, Immediate)]
    aligned = instruction.opcode == "bar" or "aligned" in instruction.modifiers
    return numbers[0], numbers[1] if len(numbers) > 1 else None, aligned
