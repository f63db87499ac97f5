"""The operand reuse cache: one entry for each operand slot and register bank of one instruction stream.

An instruction whose reuse flag is set for a slot leaves the register that it read there in the slot's cache,
in the entry of the register's bank (the parity of its number). The next instruction that reads a register of
that bank in that slot takes the cached operand if it is the same register, and the entry ends unless it sets
the flag again. The cache does not see writes: an operand overwritten in between comes back with its old
value. An instruction whose yield bit is 0 has no flags.

These rules were measured on an H200 with hand-patched FFMA sequences. Memory instructions do not read through
these slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewave.emulator.sass.hazards import Hazard
from tilewave.emulator.sass.instruction import Cell, Instruction
from tilewave.emulator.sass.machine import U32, Machine
from tilewave.emulator.sass.operands import Register

_BANKS = 2


@dataclass
class _Entry:
    register: int
    keeper: Instruction
    old: U32 | None = None
    """The register's value before the first write since it was cached; None while it is unchanged."""


def cached_reads(instruction: Instruction) -> tuple[tuple[int, Register], ...]:
    """The operands that go through a reuse cache: (slot, register)."""
    return tuple(
        (operand.slot, operand)
        for i, operand in enumerate(instruction.operands)
        if i not in instruction.destinations
        and isinstance(operand, Register)
        and operand.slot is not None
        and not operand.is_zero
    )


class ReuseCache:
    """The cache of one group of threads."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int], _Entry] = {}

    @property
    def has_entries(self) -> bool:
        """Whether anything is cached."""
        return bool(self._entries)

    def read(
        self, instruction: Instruction, reads: tuple[tuple[int, Register], ...], found: list[Hazard]
    ) -> dict[tuple[int, int], U32]:
        """Old values that the cache supplies, by slot and part of the operand; each is added to `found`.

        Updates the entries as the instruction's reads and flags say.
        """
        supplied: dict[tuple[int, int], U32] = {}
        for slot, register in reads:
            for part in range(register.count):
                index = register.index + part
                key = (slot, index % _BANKS)
                entry = self._entries.pop(key, None)
                if entry is not None and entry.register == index and entry.old is not None:
                    found.append(_stale(instruction, index, entry.keeper))
                    supplied[slot, part] = entry.old
                if register.reuse:
                    old = entry.old if entry is not None and entry.register == index else None
                    self._entries[key] = _Entry(index, instruction, old)
        return supplied

    @staticmethod
    def untouched(reads: tuple[tuple[int, Register], ...], supplied: dict[tuple[int, int], U32]) -> set[Cell]:
        """Registers that the instruction does not read at all, as the cache supplies every use of them."""
        uses = [(slot, part, ("R", r.index + part)) for slot, r in reads for part in range(r.count)]
        read = {cell for slot, part, cell in uses if (slot, part) not in supplied}
        return {cell for _, _, cell in uses} - read

    def before_write(self, machine: Machine, cells: tuple[Cell, ...]) -> None:
        """Save cached registers that are about to change."""
        if not self._entries:
            return
        for kind, index in cells:
            if kind != "R":
                continue
            for entry in self._entries.values():
                if entry.register == index and entry.old is None:
                    entry.old = machine.registers[index].copy()

    def fork(self) -> ReuseCache:
        """A copy for a group that goes its own way."""
        other = ReuseCache()
        other._entries = {key: _Entry(e.register, e.keeper, e.old) for key, e in self._entries.items()}
        return other

    def merge(self, other: ReuseCache, threads: np.ndarray) -> None:
        """Join the cache of another group of `threads`; an entry survives if one of the two has it stale.

        An entry that only one group has is kept if it is stale, as a hazard of that group, else dropped.
        """
        for key, entry in list(self._entries.items()):
            twin = other._entries.get(key)
            if (twin is None or twin.register != entry.register) and entry.old is None:
                del self._entries[key]
        for key, entry in other._entries.items():
            mine = self._entries.get(key)
            if entry.old is None:
                continue
            if mine is not None and mine.register == entry.register and mine.old is not None:
                mine.old = np.where(threads, entry.old, mine.old)
            elif mine is None:
                self._entries[key] = entry


def _stale(instruction: Instruction, index: int, keeper: Instruction) -> Hazard:
    return Hazard(
        "stale reuse", ("R", index), instruction.address, instruction.text, keeper.address, keeper.text
    )
