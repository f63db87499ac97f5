"""Which instructions decide where a kernel goes and what it addresses, and which only compute values.

A run that is made for its counters alone can leave out the latter: in a matrix product that is nearly all of
the work, while every branch, barrier and address stays as it is.
"""

from __future__ import annotations

from tilewave.emulator.codegen import Access
from tilewave.emulator.flow import registers_of, written
from tilewave.emulator.ptx import Address, Instruction, Register

_ALWAYS = frozenset(["atom", "red", "shfl", "vote", "activemask", "trap", "brkpt", "mbarrier", "elect"])
"""Instructions that are executed whatever depends on them."""


def value_only(code: list[Instruction], accesses: dict[int, Access]) -> set[int]:
    """Ids of the instructions on whose results no address, branch, guard or atomic operation depends.

    Loads are among them if their results are; so are stores if no load that matters reads their state space.
    """
    needed: set[Register] = set()
    spaces: set[str] = set()  # whose contents matter
    for instruction in code:
        if instruction.guard is not None:
            needed.add(instruction.guard)
        if instruction.opcode in _ALWAYS:
            needed.update(register for operand in instruction.operands for register in registers_of(operand))
            access = accesses.get(id(instruction))
            if access is not None:
                spaces.add(access.space)
        if instruction.opcode == "cp":
            needed.update(register for operand in instruction.operands for register in registers_of(operand))
        for operand in instruction.operands:
            if isinstance(operand, Address):
                needed.update(registers_of(operand))
    changed = True
    while changed:
        before = len(needed), len(spaces)
        for instruction in code:
            access = accesses.get(id(instruction))
            if any(register in needed for register in written(instruction)):
                needed.update(
                    register for operand in instruction.operands for register in registers_of(operand)
                )
                if access is not None:
                    spaces.add(access.space)
            if access is not None and instruction.opcode in ("st", "stmatrix") and _matters(access, spaces):
                needed.update(registers_of(instruction.operands[1]))
        changed = (len(needed), len(spaces)) != before
    return {
        id(instruction)
        for instruction in code
        if instruction.opcode not in _ALWAYS and not _needed(instruction, accesses, needed, spaces)
    }


def _matters(access: Access, spaces: set[str]) -> bool:
    """Whether some load that matters may read what a store to the access's space wrote."""
    if access.space == "copy":
        return bool(spaces & {"shared", "generic"})
    return access.space in spaces or (bool(spaces) and (access.space == "generic" or "generic" in spaces))


def _needed(
    instruction: Instruction, accesses: dict[int, Access], needed: set[Register], spaces: set[str]
) -> bool:
    access = accesses.get(id(instruction))
    if access is not None and access.store:
        return _matters(access, spaces)
    results = written(instruction)
    return not results or any(register in needed for register in results)
