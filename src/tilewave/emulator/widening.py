"""Which shared-memory accesses ptxas merges into wider ones: they are counted as the hardware sees them.

NVRTC's PTX often holds scalar loads that ptxas joins afterwards. The rule below was found by compiling small
kernels with NVRTC 13.0.88 and 13.5.37 and reading their SASS; the tests repeat that for every rung.

* Accesses belong together if their addresses have the same base (a register, or what a chain of additions of
  constants makes of it) within one basic block, and no predicate.
* The alignment must be provable from the code: the address's known low bits, not its value when run.
* Loads meet across anything but a shared-memory store or atomic, a fence, a barrier, and `cp.async` with its
  waits. Of an aligned 16-byte window, three or four words become one 16-byte load (three read a word too
  many); else the two words of an aligned 8-byte half become one 8-byte load; single words stay.
* Stores meet only if no other shared access stands between them: both words of an 8-byte half become one,
  both halves of a window one 16-byte store.
* Volatile accesses stay as they are; so do global ones, whose pointers' alignment ptxas does not know.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tilewave.emulator.alignment import KnownLowBits, LowBits
from tilewave.emulator.codegen import Access
from tilewave.emulator.flow import BasicBlock, written
from tilewave.emulator.layout import Layout
from tilewave.emulator.ptx import Address, Immediate, Instruction, Register, Symbol, type_bits

_Base = tuple[Register | None, int]  # a register and which of its values in the block; None: absolute


@dataclass
class _Item:
    """A shared access at a known base and offset."""

    access: Access
    base: _Base
    offset: int
    bits: LowBits  # of the address


def widen(
    blocks: Iterable[BasicBlock],
    code: list[Instruction],
    accesses: dict[int, Access],
    layout: Layout,
    target: str,
) -> None:
    """Set `counted_width` and `counted_offset` of all accesses that ptxas merges for a target (`sm_90`)."""
    number = re.match(r"sm_(\d+)", target)
    fixed = number is not None and int(number.group(1)) < 90
    low_bits = KnownLowBits(code, layout, fixed)
    for block in blocks:
        _widen_block(code[block.first : block.stop], accesses, layout, low_bits)


def _widen_block(
    instructions: list[Instruction], accesses: dict[int, Access], layout: Layout, low_bits: KnownLowBits
) -> None:
    loads: list[_Item] = []
    run: list[_Item] = []  # stores in one 16-byte window, nothing between them
    values = _Values(layout)
    for instruction in instructions:
        access = accesses.get(id(instruction))
        item = None
        if access is not None and access.space == "shared" and instruction.opcode in ("ld", "st"):
            item = _item(instruction, access, values, low_bits)
        if _is_shared(instruction, access) and (item is None or access is None or not access.store):
            _merge_stores(run)
            run = []
        if _blocks_loads(instruction, access):
            _merge_loads(loads)
            loads = []
        if item is not None:
            if not item.access.store:
                loads.append(item)
            else:
                if run and not _same_window(run[-1], item):
                    _merge_stores(run)
                    run = []
                run.append(item)
        values.follow(instruction)
    _merge_loads(loads)
    _merge_stores(run)


class _Values:
    """Follows registers through a block: each is some base plus a constant."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._known: dict[Register, tuple[_Base, int]] = {}
        self._versions = 0

    def of(self, register: Register) -> tuple[_Base, int]:
        return self._known.get(register, ((register, 0), 0))

    def address(self, operand: Address) -> tuple[_Base, int] | None:
        if isinstance(operand.base, Symbol):
            address = self._layout.address(operand.base.name)
            return None if address is None else ((None, 0), address + operand.offset)
        if operand.base is None:
            return (None, 0), operand.offset
        base, offset = self.of(operand.base)
        return base, offset + operand.offset

    def follow(self, instruction: Instruction) -> None:
        result = None
        if instruction.opcode in ("add", "sub", "mov") and instruction.guard is None:
            source, *rest = instruction.operands[1:]
            if isinstance(source, Register) and all(isinstance(operand, Immediate) for operand in rest):
                base, offset = self.of(source)
                change = sum(operand.value for operand in rest if isinstance(operand, Immediate))
                result = base, offset + (-change if instruction.opcode == "sub" else change)
        for register in written(instruction):
            self._versions += 1
            self._known[register] = result if result is not None else ((register, self._versions), 0)


def _item(instruction: Instruction, access: Access, values: _Values, low_bits: KnownLowBits) -> _Item | None:
    if instruction.guard is not None or {"volatile", "relaxed", "acquire", "release"} & set(
        instruction.modifiers
    ):
        return None
    if type_bits(instruction.modifiers[-1]) not in (32, 64):
        return None
    operand = instruction.operands[1 if instruction.opcode == "ld" else 0]
    assert isinstance(operand, Address)
    found = values.address(operand)
    if found is None:
        return None
    base, offset = found
    bits = low_bits.of(operand.base) if operand.base is not None else LowBits(64)
    bits = bits + LowBits(64, operand.offset)
    return _Item(access, base, offset, bits)


def _is_shared(instruction: Instruction, access: Access | None) -> bool:
    """Whether an instruction may touch shared memory or order accesses to it."""
    if access is not None:
        return access.space in ("shared", "generic", "copy")
    return instruction.opcode in ("cp", "membar", "fence", "bar", "barrier")


def _blocks_loads(instruction: Instruction, access: Access | None) -> bool:
    """Whether loads before and after an instruction cannot be merged."""
    return _is_shared(instruction, access) and not (access is not None and not access.store)


def _start(item: _Item, width: int) -> int | None:
    """Offset at which the aligned window of an access begins; None if its alignment is not known."""
    known = width.bit_length() - 1
    return item.offset - item.bits.value % width if item.bits.known >= known else None


def _same_window(first: _Item, second: _Item) -> bool:
    width = 16 if first.bits.known >= 4 else 8
    return first.base == second.base and _start(first, width) == _start(second, width)


def _windows(items: list[_Item], width: int) -> dict[tuple[_Base, int], list[_Item]]:
    windows: dict[tuple[_Base, int], list[_Item]] = {}
    for item in items:
        start = _start(item, width)
        if start is not None:
            windows.setdefault((item.base, start), []).append(item)
    return windows


def _merge_loads(items: list[_Item]) -> None:
    merged: set[int] = set()
    for (_, start), members in _windows(items, 16).items():
        if len(_words(members)) >= 3:
            _merge(members, start, 16)
            merged.update(id(item) for item in members)
    _merge_halves([item for item in items if id(item) not in merged])


def _merge_stores(items: list[_Item]) -> None:
    for (_, start), members in _windows(items, 16).items():
        if len(_words(members)) == 4:
            _merge(members, start, 16)
            return
    _merge_halves(items)


def _merge_halves(items: list[_Item]) -> None:
    for (_, start), members in _windows(items, 8).items():
        if len(_words(members)) == 2:
            _merge(members, start, 8)


def _words(members: list[_Item]) -> set[int]:
    """Word offsets that accesses cover."""
    return {item.offset + 4 * word for item in members for word in range(item.access.width // 4)}


def _merge(members: list[_Item], start: int, width: int) -> None:
    """Count the first access as a wide one and the others not at all."""
    if any(item.access.width >= width for item in members):
        return
    for position, item in enumerate(members):
        item.access.counted_width = width if position == 0 else 0
        item.access.counted_offset = start - item.offset
