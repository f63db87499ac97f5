"""Control flow of a kernel: basic blocks, liveness, and a slot for every register.

A *slot* is a row of the register file, one value per lane. Registers whose lifetimes do not overlap share a
slot, so that the file of a kernel with thousands of PTX registers stays small enough for the CPU's cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from tilewave.emulator.ptx import (
    Address,
    Entry,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    Symbol,
    TensorAddress,
    Vector,
)
from tilewave.errors import UnknownInstructionError


class End(Enum):
    """How a basic block ends."""

    FALL = "falls into the next block"
    JUMP = "jumps"
    BRANCH = "branches on a predicate"
    BARRIER = "waits at a barrier, then falls into the next block"


@dataclass
class BasicBlock:
    """Instructions `first` to `stop - 1`; a successor one past the last block means that the thread ends."""

    index: int
    first: int
    stop: int
    end: End = End.FALL
    target: int = -1  # of a jump or a taken branch
    condition: Register | None = None
    condition_negated: bool = False
    successors: tuple[int, ...] = ()
    live_in: set[Register] = field(default_factory=set)
    live_out: set[Register] = field(default_factory=set)


_NO_DESTINATION = """
    st bra ret exit bar barrier membar fence red cp prefetch prefetchu trap brkpt nanosleep griddepcontrol
    discard applypriority setmaxnreg stmatrix
"""
NO_DESTINATION = frozenset(_NO_DESTINATION.split())
BARRIERS = frozenset(["bar", "barrier"])
_ACTS = frozenset(["st", "atom", "red", "bar", "barrier", "mbarrier", "cp"])
"""Instructions that another thread may be waiting for."""


def is_block_barrier(instruction: Instruction) -> bool:
    """True for `bar.sync` and `barrier.sync`, not for `bar.warp.sync`, `bar.arrive` or a cluster's."""
    if instruction.opcode not in BARRIERS:
        return False
    return not {"warp", "arrive", "cluster"} & set(instruction.modifiers)


def may_block(instruction: Instruction) -> bool:
    """Whether a thread may have to wait at the instruction; it ends its basic block."""
    if is_block_barrier(instruction):
        return True
    if instruction.opcode == "setmaxnreg":
        return "inc" in instruction.modifiers
    return instruction.opcode == "barrier" and {"cluster", "wait"} <= set(instruction.modifiers)


def is_collective(instruction: Instruction) -> bool:
    """Whether all four warps of a warpgroup must execute the instruction together."""
    return instruction.opcode in ("wgmma", "setmaxnreg")


def has_destination(instruction: Instruction) -> bool:
    """Whether the first operand is what the instruction writes."""
    opcode, modifiers = instruction.opcode, instruction.modifiers
    if not instruction.operands or opcode in NO_DESTINATION:
        return False
    if opcode == "mbarrier":
        writes = ("arrive", "arrive_drop", "try_wait", "test_wait", "pending_count")
        return modifiers[0] in writes and not isinstance(instruction.operands[0], Address)
    if opcode == "wgmma":
        return modifiers[:1] == ("mma_async",)
    return True


def registers_of(operand: Operand) -> Iterator[Register]:
    """Registers inside an operand."""
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Negated):
        yield operand.register
    elif isinstance(operand, Address):
        if isinstance(operand.base, Register):
            yield operand.base
    elif isinstance(operand, TensorAddress):
        yield from registers_of(operand.map)
        yield from registers_of(operand.coordinates)
    elif isinstance(operand, Vector):
        for item in operand.items:
            yield from registers_of(item)
    elif isinstance(operand, Pair):
        yield from registers_of(operand.first)
        yield from registers_of(operand.second)


def written(instruction: Instruction) -> list[Register]:
    """Registers that an instruction writes."""
    if not has_destination(instruction):
        return []
    return list(registers_of(instruction.operands[0]))


def read(instruction: Instruction) -> list[Register]:
    """Registers that an instruction reads; a guarded one keeps its old result, so it reads that too."""
    registers: list[Register] = []
    # A matrix product adds to what it writes.
    first = 1 if has_destination(instruction) and instruction.opcode != "wgmma" else 0
    for operand in instruction.operands[first:]:
        registers.extend(registers_of(operand))
    if instruction.guard is not None:
        registers.append(instruction.guard)
        registers.extend(written(instruction))
    return registers


def basic_blocks(entry: Entry) -> list[BasicBlock]:
    """Split a kernel into basic blocks in program order, with their successors and live registers."""
    code = entry.instructions
    leaders = {0} | {position for position in entry.labels.values() if position < len(code)}
    acted = False
    for position, instruction in enumerate(code):
        if position in leaders:
            acted = False
        if is_collective(instruction) and acted:
            # Warps of a warpgroup meet here, and what each has done before is done.
            leaders.add(position)
            acted = False
        acted = acted or (instruction.opcode in _ACTS and not is_collective(instruction))
        if instruction.opcode in ("bra", "ret", "exit") or may_block(instruction):
            leaders.add(position + 1)
    starts = sorted(leader for leader in leaders if leader < len(code))
    blocks = [
        BasicBlock(i, first, stop)
        for i, (first, stop) in enumerate(zip(starts, [*starts[1:], len(code)], strict=True))
    ]
    block_at = {block.first: block.index for block in blocks}
    leave = len(blocks)
    for block in blocks:
        last = code[block.stop - 1]
        following = block.index + 1
        block.successors = (following,)
        if last.opcode in ("ret", "exit"):
            _end_with(block, last, leave)
        elif last.opcode == "bra":
            label = last.operands[0]
            if not isinstance(label, Symbol) or label.name not in entry.labels:
                raise UnknownInstructionError(f"PTX line {last.line}: unknown branch target: {last.text}")
            _end_with(block, last, block_at.get(entry.labels[label.name], leave))
        elif may_block(last):
            if last.guard is not None:
                raise UnknownInstructionError(f"PTX line {last.line}: a barrier with a guard: {last.text}")
            block.end = End.BARRIER
    _liveness(blocks, code)
    return blocks


def _end_with(block: BasicBlock, last: Instruction, target: int) -> None:
    block.target = target
    if last.guard is None:
        block.end = End.JUMP
        block.successors = (target,)
    else:
        block.end = End.BRANCH
        block.condition, block.condition_negated = last.guard, last.guard_negated
        block.successors = (target, block.index + 1)


def _liveness(blocks: list[BasicBlock], code: list[Instruction]) -> None:
    used: list[set[Register]] = []
    defined: list[set[Register]] = []
    for block in blocks:
        uses: set[Register] = set()
        definitions: set[Register] = set()
        for instruction in code[block.first : block.stop]:
            uses.update(r for r in read(instruction) if r not in definitions)
            definitions.update(written(instruction))
        used.append(uses)
        defined.append(definitions)
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            out: set[Register] = set()
            for successor in block.successors:
                if successor < len(blocks):
                    out |= blocks[successor].live_in
            live_in = used[block.index] | (out - defined[block.index])
            if len(live_in) != len(block.live_in) or len(out) != len(block.live_out):
                block.live_in, block.live_out = live_in, out
                changed = True


SLOT_CLASSES = (1, 16, 32, 64)
"""Widths in bits of the register file's parts; an 8-bit register lives in a 16-bit slot."""


def slot_class(register: Register) -> int:
    """The part of the register file that holds a register."""
    if register.bits not in (1, 8, 16, 32, 64):
        raise UnknownInstructionError(f"register {register.name} of {register.bits} bits cannot be emulated")
    return max(register.bits, 16) if register.bits > 1 else 1


@dataclass(frozen=True)
class Slots:
    """`of[register]` is the row of a register in its part of the file; `counts` the rows of each part."""

    of: dict[Register, int]
    counts: dict[int, int]

    def by_class(self, registers: Iterable[Register]) -> dict[int, list[int]]:
        """The slots of some registers, by the part of the file that they are in."""
        slots: dict[int, list[int]] = {}
        for register in registers:
            slots.setdefault(slot_class(register), []).append(self.of[register])
        return slots


def assign_slots(blocks: list[BasicBlock], code: list[Instruction]) -> Slots:
    """Linear scan over lifetimes; a result may take the slot of an operand that dies in its instruction."""
    starts: dict[Register, int] = {}
    ends: dict[Register, int] = {}

    def touch(register: Register, position: int) -> None:
        starts[register] = min(starts.get(register, position), position)
        ends[register] = max(ends.get(register, position), position)

    # Odd positions are writes: a value read at 2i for the last time and one written at 2i + 1 do not overlap.
    for block in blocks:
        for register in block.live_in:
            touch(register, 2 * block.first)
        for register in block.live_out:
            touch(register, 2 * block.stop)
        for position in range(block.first, block.stop):
            for register in read(code[position]):
                touch(register, 2 * position)
            for register in written(code[position]):
                touch(register, 2 * position + 1)
    free: dict[int, list[int]] = {width: [] for width in SLOT_CLASSES}
    counts = dict.fromkeys(SLOT_CLASSES, 0)
    of: dict[Register, int] = {}
    active: list[tuple[int, Register]] = []
    hints = _hints(code)
    for register in sorted(starts, key=lambda r: (starts[r], ends[r])):
        width = slot_class(register)
        still = []
        for end, other in active:
            if end < starts[register]:
                free[slot_class(other)].append(of[other])
            else:
                still.append((end, other))
        active = still
        wished = of.get(hints[register]) if register in hints else None
        if wished is not None and wished in free[width]:
            free[width].remove(wished)
            of[register] = wished
        elif free[width]:
            of[register] = free[width].pop()
        else:
            of[register] = counts[width]
            counts[width] += 1
        active.append((ends[register], register))
    return Slots(of, counts)


def _hints(code: list[Instruction]) -> dict[Register, Register]:
    """Whose slot a register would like: a sum its addend's (updated in place), a copy its source's."""
    hints: dict[Register, Register] = {}
    for instruction in code:
        if instruction.opcode in ("fma", "mad", "mov") and instruction.operands:
            result, source = instruction.operands[0], instruction.operands[-1]
            if isinstance(result, Register) and isinstance(source, Register) and result.bits == source.bits:
                hints.setdefault(result, source)
    return hints
