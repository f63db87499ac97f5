"""Registers for what a re-emitted loop adds or moves: which are free, and who gets them.

A *web* is a set of definitions and uses of registers among a loop's other instructions that must stay
together: definitions that reach a common use, and uses of a common definition. A web whose values come from
before the iteration or live beyond it keeps its registers; any other is moved to free ones, so that it is in
nobody's way and is reused as late as possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tilewave.compiler.sass.mapping import QUAD, require
from tilewave.emulator.sass import Instruction, decode
from tilewave.emulator.sass.instruction import RESERVED_REGISTERS
from tilewave.emulator.sass.operands import Address, Operand, Register

_STACK_POINTER = 1
_REGISTERS = 255 - RESERVED_REGISTERS  # R255 is RZ


class FreeRegisters:
    """The registers that a loop may overwrite."""

    def __init__(self, busy: Iterable[int]) -> None:
        self._free = set(range(_REGISTERS)) - set(busy) - {_STACK_POINTER}
        self._last_use: dict[int, int] = {}

    def quads(self, number: int) -> list[int]:
        """Take aligned quads for good."""
        found = [
            first
            for first in range(0, _REGISTERS - QUAD, QUAD)
            if all(first + part in self._free for part in range(QUAD))
        ][:number]
        require(len(found) == number, f"only {len(found)} quads of registers are free, {number} are needed")
        for first in found:
            self._free -= set(range(first, first + QUAD))
        return found

    def take(self, offsets: Iterable[int], size: int, begin: int, end: int) -> int:
        """The first register of an aligned block of `size` whose `offsets` are free from `begin` to `end`.

        Of the possible blocks, the one that was used the longest ago. Calls come in order of `begin`.
        """
        blocks = [
            first
            for first in range(0, _REGISTERS - size + 1, size)
            if all(
                first + offset in self._free and self._last_use.get(first + offset, -1) < begin
                for offset in offsets
            )
        ]
        require(blocks, f"no block of {size} registers is free for a temporary value")

        def age(first: int) -> int:
            return max(self._last_use.get(first + offset, -1) for offset in offsets)

        chosen = min(blocks, key=age)
        for offset in offsets:
            self._last_use[chosen + offset] = end
        return chosen


@dataclass
class _Web:
    cells: set[int] = field(default_factory=set)
    places: set[tuple[int, int]] = field(default_factory=set)  # (instruction, its operand)
    kept: bool = False


def register_operands(one: Instruction) -> list[tuple[int, Register]]:
    """The operands that are registers or have one for their base: (position, register), RZ left out."""
    found = []
    for position, operand in enumerate(one.operands):
        register = base_of(operand)
        if register is not None:
            found.append((position, register))
    return found


def base_of(operand: Operand) -> Register | None:
    """The register of an operand, or that of its address; None for RZ, uniform registers and the rest."""
    register = operand.base if isinstance(operand, Address) else operand
    if isinstance(register, Register) and not register.uniform and not register.is_zero:
        return register
    return None


def rename_temporaries(
    others: Sequence[Instruction], live_after: frozenset[int], free: FreeRegisters
) -> list[int]:
    """The words of the other instructions, in their order, with their temporary values in free registers.

    `live_after`: registers whose value at the end of the iteration matters.
    """
    webs = _webs(others, live_after)
    words = [one.word for one in others]
    moved = [web for web in webs if not web.kept]
    for web in sorted(moved, key=lambda web: min(web.places)):
        low, high = min(web.cells), max(web.cells)
        size = next((s for s in (1, 2, 4) if low // s == high // s), 0)
        require(size, "a temporary value takes more than an aligned quad of registers")
        first = low // size * size
        indices = [i for i, _ in web.places]
        new = free.take([cell - first for cell in sorted(web.cells)], size, min(indices), max(indices))
        for i, position in web.places:
            register = base_of(others[i].operands[position])
            assert register is not None
            words[i] = _with_register(words[i], register, new + register.index - first)
    return words


def kept_registers(others: Sequence[Instruction], live_after: frozenset[int]) -> set[int]:
    """The registers that the other instructions use and that cannot be moved."""
    return {cell for web in _webs(others, live_after) if web.kept for cell in web.cells}


def moved_out_of_the_way(busy: Iterable[int], movable: set[int], *, most: int, quads: int) -> dict[int, int]:
    """Where to move pairs of the `movable` registers so that `quads` aligned quads are free: old to new.

    At most `most` registers are moved; where that does not do, what was found is returned.
    """
    taken = {*busy, _STACK_POINTER}
    moved: dict[int, int] = {}

    def free_quads(taken: set[int]) -> int:
        return sum(
            taken.isdisjoint(range(first, first + QUAD)) for first in range(0, _REGISTERS - QUAD, QUAD)
        )

    def better() -> tuple[int, int] | None:
        pairs = range(0, _REGISTERS - 1, 2)
        for old in pairs:
            if not {old, old + 1} <= movable - moved.keys():
                continue
            for new in pairs:
                if taken.isdisjoint((new, new + 1)):
                    after = taken - {old, old + 1} | {new, new + 1}
                    if free_quads(after) > free_quads(taken):
                        return old, new
        return None

    while free_quads(taken) < quads and len(moved) + 2 <= most and (found := better()) is not None:
        old, new = found
        taken = taken - {old, old + 1} | {new, new + 1}
        moved |= {old: new, old + 1: new + 1}
    return moved


def with_registers_moved(one: Instruction, moved: Mapping[int, int]) -> Instruction:
    """The instruction with other registers in the place of those that are moved."""
    word = one.word
    for _, register in register_operands(one):
        word = _with_register(word, register, moved.get(register.index, register.index))
    return one if word == one.word else decode(word, one.address, 90)


def _with_register(word: int, register: Register, index: int) -> int:
    return (word & ~(register.zero << register.field)) | index << register.field


def _webs(others: Sequence[Instruction], live_after: frozenset[int]) -> list[_Web]:
    reaching: dict[int, _Web] = {}
    members: list[_Web] = []

    def merged(webs: Iterable[_Web]) -> _Web:
        distinct = list({id(web): web for web in webs}.values())
        first = distinct[0]
        for web in distinct[1:]:
            first.cells |= web.cells
            first.places |= web.places
            first.kept |= web.kept
            members.remove(web)
            for cell, known in reaching.items():
                if known is web:
                    reaching[cell] = first
        return first

    def of_before(cell: int) -> _Web:
        if cell not in reaching:
            reaching[cell] = _Web({cell}, set(), True)
            members.append(reaching[cell])
        return reaching[cell]

    for i, one in enumerate(others):
        operands = register_operands(one)
        for position, register in operands:
            if position not in one.destinations:
                cells = range(register.index, register.index + register.count)
                web = merged([of_before(cell) for cell in cells])
                web.places.add((i, position))
        for position, register in operands:
            if position in one.destinations:
                cells = range(register.index, register.index + register.count)
                web = _Web(set(cells), {(i, position)})
                members.append(web)
                if not one.guard.is_true:  # the old value stays where the guard is off
                    web = merged([web, *(of_before(cell) for cell in cells)])
                for cell in cells:
                    reaching[cell] = web
    for cell, web in reaching.items():
        if cell in live_after:
            web.kept = True
    return members
