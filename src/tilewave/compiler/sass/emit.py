"""Emits a steady loop anew, in the order that the register file likes.

In each slice of K two neighbouring values of one operand, which lie in opposite banks, are held in operand
slot 1, while the other operand's values pass through slot 0, back and forth. Each of these meets the two
held ones in turn, first the one whose sum lies in the other bank than itself, so that a pair of multiply-adds
reads three registers in two cycles, never more than two from one bank. Operands of consecutive slices are
kept in two sets of quads; a load is issued every 14 multiply-adds or so, on scoreboards of its own. All other
instructions keep their order; their control bits are worked out afresh.

Where the sums leave too few registers for two sets, the held operand's quads but the last are *renewed* in
place: a quad of the next slice is loaded as soon as the products with the old one are done. Where sums of
neighbouring held values do not lie in opposite banks, two held values meet two swept ones in *squares*. Moves
by which ptxas shuffled sums and operands are dropped, and the room is used to bring other values out of the
way before the loop.

Nothing here is trusted: the verifier, which knows nothing of this module, judges what comes out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tilewave.compiler.sass.mapping import QUAD, Steady, is_fragment_load, require
from tilewave.compiler.sass.meaning import copied_register
from tilewave.compiler.sass.registers import (
    FreeRegisters,
    kept_registers,
    moved_out_of_the_way,
    rename_temporaries,
    with_registers_moved,
)
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
_STORES = ("STS", "DEPBAR", "BAR")
_BEFORE_RENEWAL = 4
"""Multiply-adds between the last with an old operand and the load of the one that takes its place."""
_MOVE_STALL = 6
"""Cycles after a move beside the loop: more than its latency."""
_SQUARE = ((0, 1), (0, 0), (1, 1), (1, 0))
"""Products of two held and two swept values, in an order that holds one of either from each to the next."""


@dataclass(frozen=True)
class Spacing:
    """Multiply-adds from one instruction to the next of its kind, at most; all are even.

    `loads` of a slice, the first of them `first_load` multiply-adds into the slice before; `others` before
    the stores; `stores` up to the barrier, which stands `barrier` multiply-adds into the last slice; and
    loads `behind_barrier`, which must be back by the loop's end.
    """

    loads: int = 14
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
    renews: bool = False
    squares: bool = False


@dataclass
class _Slot:
    """An instruction on its way: its word, and what its control bits will be."""

    one: Instruction
    control: Control
    copied: bool = False

    @property
    def multiplies(self) -> bool:
        return self.one.opcode == "FFMA"


def emit(
    loop: Sequence[Instruction], steady: Steady, live: frozenset[Cell], behind: frozenset[Cell], order: Order
) -> list[int]:
    """The words of the loop and of moves at its sides, together as many as the loop had.

    `live`: cells whose value at the end of an iteration matters to the next one or behind the loop; `behind`:
    those that matter behind it. Raises `UnsuitableLoop`.
    """
    others = [loop[i] for i in steady.others]
    live_registers = _registers_in(live)
    sums = set(steady.sums.values())
    homes = {home + part for quads in steady.homes.values() for home in quads for part in range(QUAD)}
    kept = kept_registers(others, live_registers - sums - homes)
    require(not kept & (sums | homes), "another instruction shares a register with a sum or an operand")
    added = {side: len(steady.homes[side]) for side in steady.sides}
    if order.renews:
        added[order.held] = 1
    staged = any(one.opcode == "LDG" for one in others)
    moved = moved_out_of_the_way(
        live_registers | sums | homes | kept,
        kept - _registers_in(behind) - set(steady.sides),
        most=len(steady.moves),
        quads=sum(added.values()) + staged,
    )
    others = [with_registers_moved(one, moved) for one in others]
    live_others = frozenset(moved.get(i, i) for i in live_registers - sums - homes)
    busy = {moved.get(i, i) for i in live_registers | kept}
    free = FreeRegisters(busy | sums | homes)
    second = {
        side: (*homes_of[: len(homes_of) - added[side]], *free.quads(added[side]))
        for side, homes_of in steady.homes.items()
    }
    fragments = _Fragments((steady.homes, second))
    renamed = rename_temporaries(others, live_others, free)
    slots = _arranged(loop, steady, order, fragments, [decode(word, 0, 90) for word in renamed])
    branch = loop[-1]
    slots.append(_Slot(branch, replace(branch.control, yield_bit=1, wait_mask=_ALL, reuse=0)))
    _set_waits(slots)
    slots[0].control = replace(slots[0].control, wait_mask=_ALL)
    _set_reuse(slots)
    words = [slot.control.into_word(slot.one.word) for slot in slots]
    require(len(words) + len(steady.moves) == len(loop), "the loop's length changes")
    return words if not steady.moves else _between_moves(words, loop, steady, moved)


def _registers_in(cells: frozenset[Cell]) -> frozenset[int]:
    return frozenset(index for kind, index in cells if kind == "R")


def _between_moves(
    words: list[int], loop: Sequence[Instruction], steady: Steady, moved: dict[int, int]
) -> list[int]:
    """The loop behind moves of `moved` registers, and before moves that change nothing and fill its place."""
    template = loop[steady.moves[0]]
    source = copied_register(template)
    assert source is not None
    places = [place for place, operand in enumerate(template.operands) if operand == source]

    def move(target: int, register: int, *, waits: bool = False) -> int:
        word = template.with_register(0, target)
        word = decode(word, 0, 90).with_register(places[-1], register)
        return Control(stall=_MOVE_STALL, wait_mask=_ALL if waits else 0).into_word(word)

    before = [move(new, old, waits=not i) for i, (old, new) in enumerate(moved.items())]
    filling = len(steady.moves) - len(before)
    at = loop[-1].address - 16 * filling
    branch = _retargeted(words[-1], at, at - 16 * (len(words) - 1))
    still = min(steady.sums.values())
    return [*before, *words[:-1], branch, *[move(still, still)] * filling]


def _retargeted(branch: int, address: int, target: int) -> int:
    """A branch at an address, going to a target."""
    distance = (target - address - 16) // 4
    mask = 0xFF << 16 | ((1 << 48) - 1) << 34
    return branch & ~mask | (distance & 0xFF) << 16 | ((distance >> 8) & ((1 << 48) - 1)) << 34


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

    def product(h: int, i: int) -> tuple[int, int, int]:
        total = steady.sums[(h, i) if first else (i, h)]
        return total, fragments.register(slice_, swept, i), fragments.register(slice_, held, h)

    found = []
    step = 2 if order.squares else 1
    for pair in range(steady.extent[held] // 2):
        sweep = range(0, steady.extent[swept], step)
        forth = (pair + slice_) % 2 == 0
        for i in sweep if forth else reversed(sweep):
            if order.squares:
                found += [product(2 * pair + h, i + (s if forth else 1 - s)) for h, s in _SQUARE]
            else:
                both = [product(2 * pair + h, i) for h in (0, 1)]
                found += sorted(both, key=lambda one: (one[0] % 2 == one[1] % 2, one[2] % 2))
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

    def load_places(slice_: int, begin: int, every: int) -> list[tuple[int, int]]:
        """Where each load of a slice stands in the slice before, from its multiply-add `begin` on."""
        (swept,) = (side for side in steady.sides if side != order.held)
        held = steady.loads[order.held, slice_]
        if not order.renews:
            in_order_of_need = [held[0], *steady.loads[swept, slice_], *held[1:]]
            return [(begin + every * i, index) for i, index in enumerate(in_order_of_need)]
        of_quad = QUAD * steady.extent[swept]
        waiting = [(of_quad * (q + 1) + _BEFORE_RENEWAL, index) for q, index in enumerate(held[:-1])]
        anytime = [*steady.loads[swept, slice_], held[-1]]
        found, at = [], begin
        while waiting or anytime:
            if waiting and (at >= waiting[0][0] or not anytime):
                earliest, index = waiting.pop(0)
                at = max(at, earliest)
            else:
                index = anytime.pop(0)
            found.append((at, index))
            at += every
        return found

    early, head, tail, toggles, rest = _parts(others, steady)
    per_slice = sum(steady.extent.values()) // QUAD
    for slice_ in range(1, steady.depth):
        # The last loads before the barrier leave room for the stores that must follow them.
        room = width - 2 * max(spacing.first_load, len(tail) if slice_ == steady.depth - 1 else 0)
        every = min(spacing.loads, even(room // per_slice))
        require(every >= 2, "there is no room for the loads of a slice")
        for at, index in load_places(slice_, spacing.first_load, every):
            places[(slice_ - 1) * width + at].append(load(index, slice_))
    last_load = max(places)

    barrier = (steady.depth - 1) * width + spacing.barrier
    every = min(spacing.stores, even((barrier - last_load - 2) // len(tail)))
    require(every >= 2, "there is no room for the stores before the barrier")
    stores = barrier - every * (len(tail) - 1)
    for i, one in enumerate(tail):
        places[stores + every * i].append(_other(one))

    def place_units(units: list[list[Instruction]], begin: int, end: int) -> None:
        every = min(spacing.others, even((end - begin) // max(1, len(units))))
        require(every >= 4 or not units, "too many other instructions")
        for i, unit in enumerate(units):
            places[begin + every * i] += [_other(one) for one in unit]

    begin = _FIRST_OTHER
    for slice_, before, group in early:
        # Behind the loads of the slices up to this one, and before those of the next.
        at = slice_ * width - 2 * spacing.first_load
        place_units(_glued(before), begin, at)
        every = min(spacing.stores, even((3 * spacing.first_load - 2) // len(group)))
        require(every >= 2, "there is no room for the stores between two slices")
        for i, one in enumerate(group):
            places[at + every * i].append(_other(one))
        begin = at + every * len(group)
    latest = stores if early else min(stores, int(_LATEST_OTHER * total))
    place_units(_glued(head), begin, latest)

    at = barrier + 4
    for one in toggles:
        places[at].append(_other(one))
        at += 2
    at += 6
    base = (steady.depth - 1) * width
    for in_slice, index in load_places(steady.depth, at - base, spacing.behind_barrier):
        at = base + in_slice
        places[at].append(load(index, steady.depth))
    require(at < total - 2 * spacing.behind_barrier, "too many loads follow the barrier")
    room = total - _BEFORE_BRANCH - (barrier + 6)
    every = min(spacing.others, max(2, even(room // max(1, len(rest)))))
    require(every * len(rest) <= room, "too many other instructions follow the barrier")
    for i, one in enumerate(rest):
        places[barrier + 6 + every * i].append(_other(one))
    return places


def even(number: int) -> int:
    """The largest even number that is not larger."""
    return number // 2 * 2


class _Parts(NamedTuple):
    """The other instructions in their order."""

    early: list[tuple[int, list[Instruction], list[Instruction]]]
    """Stores long before the barrier: the slice whose loads they follow, what comes before, the stores."""
    head: list[Instruction]
    tail: list[Instruction]
    """From the first of the stores before the barrier to the barrier."""
    toggles: list[Instruction]
    """What changes the address of the loads; it stands behind the barrier."""
    rest: list[Instruction]
    """Behind the barrier."""


def _parts(others: Sequence[Instruction], steady: Steady) -> _Parts:
    bases = {("R", side) for side in steady.sides}
    toggles = [one for one in others if bases & set(one.writes)]
    for one in toggles:
        private = set(one.reads) | set(one.writes) <= bases and one.guard.is_true
        require(private, f"the loads' address is changed by {one.text}")
    numbered = [
        (one, loads) for one, loads in zip(others, steady.loads_before, strict=True) if one not in toggles
    ]
    require(not any(bases & set(one.reads) for one, _ in numbered), "the loads' address is used otherwise")
    barriers = [i for i, (one, _) in enumerate(numbered) if one.opcode == "BAR"]
    require(len(barriers) == 1, f"the loop has {len(barriers)} barriers, not one")
    rest = [one for one, _ in numbered[barriers[0] + 1 :]]
    require(not any(one.opcode in _STORES for one in rest), "a store follows the barrier")
    open_head = numbered[: barriers[0] + 1]
    last = open_head[-1][1]
    per_slice = sum(steady.extent.values()) // QUAD
    early: list[tuple[int, list[Instruction], list[Instruction]]] = []
    while True:
        first = next(i for i, (one, _) in enumerate(open_head) if one.opcode in _STORES)
        loads = open_head[first][1]
        if loads // per_slice == last // per_slice:
            head, tail = open_head[:first], open_head[first:]
            return _Parts(early, [one for one, _ in head], [one for one, _ in tail], toggles, rest)
        require(loads % per_slice == 0, "stores stand among the loads of a slice")
        before = [one for one, _ in open_head[:first]]
        group = [one for one, number in open_head[first:] if one.opcode in _STORES and number == loads]
        early.append((loads // per_slice, before, group))
        open_head = [entry for entry in open_head[first:] if entry[0] not in group]


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
