"""Emits a steady loop anew, in the order that the register file likes.

In each slice of K two neighbouring values of one operand, which lie in opposite banks, are held in operand
slot 1, while the other operand's values pass through slot 0, back and forth. Each of these meets the two
held ones in turn, first the one whose sum lies in the other bank than itself, so that a pair of multiply-adds
reads three registers in two cycles, never more than two from one bank. Operands of consecutive slices are
kept in two sets of quads; a load is issued every 16 multiply-adds or so, on scoreboards of its own. All other
instructions keep their order; their control bits are worked out afresh.

Nothing here is trusted: the verifier, which knows nothing of this module, judges what comes out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewave.compiler.sass.mapping import QUAD, Steady, is_fragment_load, require
from tilewave.compiler.sass.registers import FreeRegisters, kept_registers, rename_temporaries
from tilewave.emulator.sass import Control, Instruction, decode
from tilewave.emulator.sass.instruction import NO_SCOREBOARD, SCOREBOARDS, Cell
from tilewave.emulator.sass.latency import ALU, FMA, needs_scoreboard, pipe_of
from tilewave.emulator.sass.operands import Register

_COPIES, _SOURCES, _LOADED, _STORED, _FRAGMENTS = 0, 1, 2, 3, 4
"""Scoreboards: copies of a slice (the compiler's own choice), addresses read, global loads, stores' sources
read, and the fragments of even slices (those of odd ones have the next)."""
_ALL = (1 << SCOREBOARDS) - 1
_FIRST_OTHER = 4
_LATEST_OTHER = 0.55
"""Share of the loop by which what starts the next slice's loads is out, so that they have time to arrive."""
_BEFORE_BRANCH = 14
"""Multiply-adds between the last other instruction and the branch: more than any fixed latency."""


@dataclass(frozen=True)
class Spacing:
    """Multiply-adds from one instruction to the next of its kind, at most; all are even.

    `loads` of a slice, the first of them `first_load` multiply-adds into the slice before; `others` before
    the stores; `stores` up to the barrier, which stands `barrier` multiply-adds into the last slice; and
    loads `behind_barrier`, which must be back by the loop's end.
    """

    loads: int = 16
    first_load: int = 8
    others: int = 12
    stores: int = 8
    barrier: int = 4
    behind_barrier: int = 14


@dataclass(frozen=True)
class Order:
    """One of the orders that the emitter can give a loop; `held` is the side that is held in slot 1."""

    held: int
    spacing: Spacing = Spacing()


@dataclass
class _Slot:
    """An instruction on its way: its word, and what its control bits will be."""

    one: Instruction
    control: Control
    copied: bool = False

    @property
    def multiplies(self) -> bool:
        return self.one.opcode == "FFMA"


def emit(loop: Sequence[Instruction], steady: Steady, live: frozenset[Cell], order: Order) -> list[int]:
    """The words of the loop, as many as it had, its closing branch last.

    `live`: cells whose value at the end of an iteration matters to the next one or behind the loop. Raises
    `UnsuitableLoop`.
    """
    others = [loop[i] for i in steady.others]
    live_registers = frozenset(index for kind, index in live if kind == "R")
    sums = set(steady.sums.values())
    homes = {home + part for quads in steady.homes.values() for home in quads for part in range(QUAD)}
    live_others = live_registers - sums - homes
    kept = kept_registers(others, live_others)
    require(not kept & (sums | homes), "another instruction shares a register with a sum or an operand")
    free = FreeRegisters(live_registers | sums | homes | kept)
    second = {}
    for side in steady.sides:
        second[side] = tuple(free.quads(len(steady.homes[side])))
    fragments = _Fragments((steady.homes, second))
    renamed = rename_temporaries(others, live_others, free)
    slots = _arranged(loop, steady, order, fragments, [decode(word, 0, 90) for word in renamed])
    branch = loop[-1]
    slots.append(_Slot(branch, replace(branch.control, yield_bit=1, wait_mask=_ALL, reuse=0)))
    _set_waits(slots)
    slots[0].control = replace(slots[0].control, wait_mask=_ALL)
    _set_reuse(slots)
    require(len(slots) == len(loop), "the loop's length changes")
    return [slot.control.into_word(slot.one.word) for slot in slots]


@dataclass(frozen=True)
class _Fragments:
    """Where the operands of even and of odd slices are."""

    sets: tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]

    def register(self, slice_: int, side: int, index: int) -> int:
        return self.quad(slice_, side, index // QUAD) + index % QUAD

    def quad(self, slice_: int, side: int, position: int) -> int:
        return self.sets[slice_ % 2][side][position]


def _arranged(
    loop: Sequence[Instruction],
    steady: Steady,
    order: Order,
    fragments: _Fragments,
    others: Sequence[Instruction],
) -> list[_Slot]:
    """All but the branch in their order, with stalls and scoreboards but without waits."""
    require(steady.depth % 2 == 0, "the loop's depth is odd")
    template = next(one for one in loop if one.opcode == "FFMA")
    multiply_adds = [
        _multiply_add(template, *registers)
        for slice_ in range(steady.depth)
        for registers in _products(steady, order, fragments, slice_)
    ]
    inserted = _places(loop, steady, order, fragments, others)
    slots: list[_Slot] = []
    for position, one in enumerate(multiply_adds):
        slots += inserted.pop(position, [])
        slots.append(_Slot(one, Control()))
    require(not inserted, "there is not enough room for the other instructions")
    return slots


def _products(steady: Steady, order: Order, fragments: _Fragments, slice_: int) -> list[tuple[int, int, int]]:
    """(sum, operand in slot 0, operand in slot 1) of every multiply-add of a slice."""
    held = order.held
    (swept,) = (side for side in steady.sides if side != held)
    first = held == steady.sides[0]
    found = []
    for pair in range(steady.extent[held] // 2):
        sweep = range(steady.extent[swept])
        for i in sweep if (pair + slice_) % 2 == 0 else reversed(sweep):
            passing = fragments.register(slice_, swept, i)
            both = []
            for h in (2 * pair, 2 * pair + 1):
                total = steady.sums[(h, i) if first else (i, h)]
                both.append((total, passing, fragments.register(slice_, held, h)))
            found += sorted(both, key=lambda one: (one[0] % 2 == passing % 2, one[2] % 2))
    return found


def _multiply_add(template: Instruction, total: int, passing: int, held: int) -> Instruction:
    word = template.word
    for position, register in enumerate((total, passing, held, total)):
        word = decode(word, 0, 90).with_register(position, register)
    return decode(Control().into_word(word), 0, 90)


def _places(
    loop: Sequence[Instruction],
    steady: Steady,
    order: Order,
    fragments: _Fragments,
    others: Sequence[Instruction],
) -> dict[int, list[_Slot]]:
    """What stands before each multiply-add, by its number in the loop."""
    width = len(steady.sums)
    total = steady.depth * width
    spacing = order.spacing
    places: dict[int, list[_Slot]] = defaultdict(list)

    def load(index: int, slice_: int) -> _Slot:
        one = loop[index]
        side = next(s for s in steady.sides if index in steady.loads[s, slice_])
        position = steady.loads[side, slice_].index(index)
        word = one.with_register(0, fragments.quad(slice_, side, position))
        control = Control(write_barrier=_FRAGMENTS + slice_ % 2)
        return _Slot(decode(word, 0, 90), control)

    def in_order_of_need(slice_: int) -> list[int]:
        (swept,) = (side for side in steady.sides if side != order.held)
        first, *rest = steady.loads[order.held, slice_]
        return [first, *steady.loads[swept, slice_], *rest]

    head, tail, toggles, rest = _parts(others, steady)
    for slice_ in range(1, steady.depth):
        # The last loads before the barrier leave room for the stores that must follow them.
        room = width - 2 * max(spacing.first_load, len(tail) if slice_ == steady.depth - 1 else 0)
        every = min(spacing.loads, even(room // len(in_order_of_need(slice_))))
        require(every >= 2, "there is no room for the loads of a slice")
        for i, index in enumerate(in_order_of_need(slice_)):
            places[(slice_ - 1) * width + spacing.first_load + every * i].append(load(index, slice_))
    last_load = max(places)

    barrier = (steady.depth - 1) * width + spacing.barrier
    every = min(spacing.stores, even((barrier - last_load - 2) // len(tail)))
    require(every >= 2, "there is no room for the stores before the barrier")
    stores = barrier - every * (len(tail) - 1)
    for i, one in enumerate(tail):
        places[stores + every * i].append(_other(one))

    units = _glued(head)
    every = min(spacing.others, even(int(_LATEST_OTHER * total) // max(1, len(units))))
    require(every >= 4 and _FIRST_OTHER + every * len(units) < stores, "too many other instructions")
    for i, unit in enumerate(units):
        places[_FIRST_OTHER + every * i] += [_other(one) for one in unit]

    at = barrier + 4
    for one in toggles:
        places[at].append(_other(one))
        at += 2
    at += 6
    for index in in_order_of_need(steady.depth):
        places[at].append(load(index, steady.depth))
        at += spacing.behind_barrier
    require(
        at - spacing.behind_barrier < total - 2 * spacing.behind_barrier, "too many loads follow the barrier"
    )
    room = total - _BEFORE_BRANCH - (barrier + 6)
    every = min(spacing.others, max(2, even(room // max(1, len(rest)))))
    require(every * len(rest) <= room, "too many other instructions follow the barrier")
    for i, one in enumerate(rest):
        places[barrier + 6 + every * i].append(_other(one))
    return places


def even(number: int) -> int:
    """The largest even number that is not larger."""
    return number // 2 * 2


def _parts(
    others: Sequence[Instruction], steady: Steady
) -> tuple[list[Instruction], list[Instruction], list[Instruction], list[Instruction]]:
    """The others: before the stores, from the first store to the barrier, the toggles of the loads'
    addresses, and behind the barrier."""
    bases = {("R", side) for side in steady.sides}
    toggles = [one for one in others if bases & set(one.writes)]
    for one in toggles:
        private = set(one.reads) | set(one.writes) <= bases and one.guard.is_true
        require(private, f"the loads' address is changed by {one.text}")
    rest = [one for one in others if one not in toggles]
    require(not any(bases & set(one.reads) for one in rest), "the loads' address is used otherwise")
    barriers = [i for i, one in enumerate(rest) if one.opcode == "BAR"]
    require(len(barriers) == 1, f"the loop has {len(barriers)} barriers, not one")
    first = next(i for i, one in enumerate(rest) if one.opcode in ("STS", "DEPBAR", "BAR"))
    require(first <= barriers[0], "a store follows the barrier")
    return rest[:first], rest[first : barriers[0] + 1], toggles, rest[barriers[0] + 1 :]


def _glued(head: Sequence[Instruction]) -> list[list[Instruction]]:
    """Instructions that never happen stay right before what follows them: ptxas means something by them."""
    units: list[list[Instruction]] = []
    open_unit = False
    for one in head:
        if open_unit:
            units[-1].append(one)
        else:
            units.append([one])
        open_unit = _never(one)
    return units


def _never(one: Instruction) -> bool:
    return one.guard.index == 7 and one.guard.negate


def _other(one: Instruction) -> _Slot:
    write = read = NO_SCOREBOARD
    stall = 1
    match one.opcode:
        case "LDGSTS":
            read, stall = _SOURCES, one.control.stall
        case "LDGDEPBAR":
            write, stall = _COPIES, one.control.stall
            require(one.control.write_barrier == _COPIES, "copies are counted by another scoreboard")
        case "LDG":
            read, write = _SOURCES, _LOADED
        case "STS":
            read = _STORED
        case "DEPBAR":
            stall = one.control.stall
        case "LDS" if _never(one):
            pass
        case name:
            known = name == "BAR" or pipe_of(name) in (FMA, ALU)
            require(known and not needs_scoreboard(one), f"{one.text} is not foreseen in a steady loop")
    stall = max(1, min(stall, 4))
    control = Control(stall=stall, write_barrier=write, read_barrier=read)
    return _Slot(decode(control.into_word(one.word), 0, 90), control)


def _set_waits(slots: Sequence[_Slot]) -> None:
    """Let every instruction wait for what it reads or overwrites, the iteration before counted in."""
    results: dict[int, set[Cell]] = defaultdict(set)
    sources: dict[int, set[Cell]] = defaultdict(set)
    for _ in range(2):
        for slot in slots:
            one, control = slot.one, slot.control
            reads, writes = set(one.reads), set(one.writes)
            mask = control.wait_mask
            for board in range(SCOREBOARDS):
                if results[board] & (reads | writes) or sources[board] & writes:
                    mask |= 1 << board
            for board in range(SCOREBOARDS):
                if mask >> board & 1:
                    results[board] = set()
                    sources[board] = set()
            slot.control = replace(control, wait_mask=mask)
            if control.write_barrier not in (NO_SCOREBOARD, _COPIES):
                results[control.write_barrier] |= writes
                sources[control.write_barrier] |= {cell for cell in reads if cell[0] == "R"}
            if control.read_barrier != NO_SCOREBOARD:
                sources[control.read_barrier] |= {cell for cell in reads if cell[0] == "R"}


def _set_reuse(slots: Sequence[_Slot]) -> None:
    """Flag an operand that the slot's next reader of that bank reads again, only loads between them."""
    for i, slot in enumerate(slots):
        if not slot.multiplies:
            continue
        reuse = 0
        for position in (1, 2):
            register = _register(slot.one, position)
            for other in slots[i + 1 :]:
                if not other.multiplies:
                    if is_fragment_load(other.one) and ("R", register) not in other.one.writes:
                        continue
                    break
                if other.control.wait_mask:
                    break
                if _register(other.one, position) % 2 == register % 2:
                    if _register(other.one, position) == register:
                        reuse |= 1 << (position - 1)
                    break
        slot.control = replace(slot.control, reuse=reuse)


def _register(multiply_add: Instruction, position: int) -> int:
    operand = multiply_add.operands[position]
    assert isinstance(operand, Register)
    return operand.index
