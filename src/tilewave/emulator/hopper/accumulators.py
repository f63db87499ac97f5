"""Registers that a warpgroup's product may still be using: found ahead, so that only few instructions check.

`wgmma.mma_async` works on its registers until the warpgroup has waited for its group. Which instructions may
meet such a register is a matter of data flow over the kernel; they are checked when they run. Likewise an
access to a register that a later `wgmma.mma_async` uses needs a `wgmma.fence` between the two.
"""

from __future__ import annotations

from tilewave.emulator.flow import BasicBlock, read, registers_of, written
from tilewave.emulator.ptx import Immediate, Instruction, Register

_OPEN = 0  # age of a product whose group is not committed; a committed group's age counts from 1
_Ages = dict[Register, int]
_State = tuple[_Ages, frozenset[Register]]


def product_registers(code: list[Instruction]) -> list[Register]:
    """All registers that products of the kernel use, as accumulators or as fragments of A."""
    found: dict[Register, None] = {}
    for instruction in code:
        if is_product(instruction):
            found.update(dict.fromkeys(fragments(instruction)))
    return list(found)


def is_product(instruction: Instruction) -> bool:
    """True for `wgmma.mma_async`."""
    return instruction.opcode == "wgmma" and instruction.modifiers[:1] == ("mma_async",)


def fragments(instruction: Instruction) -> list[Register]:
    """Registers that a product keeps using after it was issued: accumulators, and A if it is in registers."""
    accumulators = list(registers_of(instruction.operands[0]))
    a = list(registers_of(instruction.operands[1]))
    return accumulators + (a if len(a) > 1 else [])


def hazards(
    blocks: list[BasicBlock], code: list[Instruction]
) -> tuple[dict[int, list[Register]], dict[int, Register]]:
    """By instruction's id: registers that may be in flight there, and one that lacks a `wgmma.fence`."""
    used = frozenset(product_registers(code))
    if not used:
        return {}, {}
    entries: dict[int, _State] = {0: ({}, used)}
    in_flight: dict[int, list[Register]] = {}
    unfenced: dict[int, Register] = {}
    work = [0]
    while work:
        index = work.pop()
        ages, touched = dict(entries[index][0]), set(entries[index][1])
        block = blocks[index]
        for instruction in code[block.first : block.stop]:
            _step(instruction, ages, touched, used, in_flight, unfenced)
        for successor in block.successors:
            if successor >= len(blocks):
                continue
            merged = _merge(entries.get(successor), ages, touched)
            if merged != entries.get(successor):
                entries[successor] = merged
                work.append(successor)
    return in_flight, unfenced


def _merge(before: _State | None, ages: _Ages, touched: set[Register]) -> _State:
    if before is None:
        return dict(ages), frozenset(touched)
    merged = dict(before[0])
    for register, age in ages.items():
        merged[register] = min(age, merged.get(register, age))
    return merged, before[1] | touched


def _step(
    instruction: Instruction,
    ages: _Ages,
    touched: set[Register],
    used: frozenset[Register],
    in_flight: dict[int, list[Register]],
    unfenced: dict[int, Register],
) -> None:
    if instruction.opcode == "wgmma":
        kind = instruction.modifiers[0]
        if kind == "fence":
            touched.clear()
        elif kind == "commit_group":
            for register, age in ages.items():
                ages[register] = age + 1
        elif kind == "wait_group":
            count = instruction.operands[0]
            assert isinstance(count, Immediate)
            for register in [r for r, age in ages.items() if age > max(count.value, _OPEN)]:
                del ages[register]
        else:
            own = fragments(instruction)
            missing = [register for register in own if register in touched]
            if missing:
                unfenced[id(instruction)] = missing[0]
            ages.update(dict.fromkeys(own, _OPEN))
            touched.update(
                r for r in [*read(instruction), *written(instruction)] if r in used and r not in own
            )
        return
    accessed = [r for r in dict.fromkeys([*read(instruction), *written(instruction)]) if r in used]
    touched.update(accessed)
    busy = [register for register in accessed if register in ages]
    if busy:
        known = in_flight.setdefault(id(instruction), [])
        known.extend(register for register in busy if register not in known)
