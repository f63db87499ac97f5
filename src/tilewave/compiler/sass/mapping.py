"""What a steady loop computes: its multiply-adds as (slice, row, column), its loads, and everything else.

The loop keeps a tile of sums in registers. In each slice of K every sum takes one product of a row's value
and a column's value, which quads of registers (16-byte loads from shared memory) bring. The values of the
first slice are loaded at the end of the iteration before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tilewave.compiler.sass.meaning import copied_register
from tilewave.emulator.sass import Instruction
from tilewave.emulator.sass.operands import Address, Register

Value = tuple[str, int] | tuple[int, int]
"""What a register holds: ("in", register) from before the iteration, or (index of the instruction, part)."""

QUAD = 4


class UnsuitableLoop(Exception):
    """The loop is not of the form that the pass knows; the text says why."""


@dataclass(frozen=True)
class Steady:
    """A steady loop, its instructions numbered from its first.

    The two operands are told by the register that their loads' addresses are in (`sides`). `extent` is a
    thread's number of rows or columns of a side. `sums` maps (index of the first side, index of the second)
    to the register of the sum. `loads` has, by side and slice 1 to `depth`, the loads in order of their
    index; slice `depth` is slice 0 of the next iteration, whose quads are in registers `homes` by side.
    `others` are all that is neither multiply-add nor such a load, without the closing branch and without the
    `moves`, which only take sums and operands from register to register. `loads_before` tells for each of the
    others how many of the loads it follows.
    """

    depth: int
    sides: tuple[int, int]
    extent: dict[int, int]
    sums: dict[tuple[int, int], int]
    loads: dict[tuple[int, int], tuple[int, ...]]
    homes: dict[int, tuple[int, ...]]
    others: tuple[int, ...]
    moves: tuple[int, ...]
    loads_before: tuple[int, ...]


def require(condition: object, reason: str) -> None:
    """Raise `UnsuitableLoop` unless the condition holds."""
    if not condition:
        raise UnsuitableLoop(reason)


def is_fragment_load(one: Instruction) -> bool:
    """Whether this is a 16-byte load from shared memory, of the form that brings operands."""
    if one.opcode != "LDS" or not one.has("128") or not one.guard.is_true:
        return False
    address = one.operands[1]
    return isinstance(address, Address) and address.uniform is None and address.scale == 1


def side_of(load: Instruction) -> int:
    """The register that a load's address is in."""
    address = load.operands[1]
    assert isinstance(address, Address)
    assert address.base is not None
    return address.base.index


def _offset(load: Instruction) -> int:
    address = load.operands[1]
    assert isinstance(address, Address)
    return address.offset


def map_loop(loop: Sequence[Instruction]) -> Steady:
    """Map a loop, its closing branch included; raises `UnsuitableLoop`."""
    held: dict[int, Value] = {}
    chain_of: dict[
        Value, tuple[int, int]
    ] = {}  # the value of a sum -> its register at the head, steps so far
    steps: Counter[int] = Counter()
    products: list[tuple[int, int, Value, Value]] = []  # sum, slice, factors
    loads, others = [], []

    def value(register: int) -> Value:
        return held.get(register, ("in", register))

    moves = _moves_of_operands(loop)
    for i, one in enumerate(loop[:-1]):
        if i in moves:
            held[_first_written(one)] = value(moves[i])
            continue
        if one.opcode == "FFMA":
            d, a, b, c = _registers_of(one)
            total = value(c)
            home, step = chain_of.pop(total, (total[1], 0))
            require(step > 0 or total[0] == "in", f"{one.text} adds to something that is no sum")
            products.append((home, step, value(a), value(b)))
            steps[home] += 1
            held[d] = (i, 0)
            chain_of[i, 0] = (home, step + 1)
            continue
        if is_fragment_load(one):
            loads.append(i)
        else:
            others.append(i)
        for kind, register in one.writes:
            if kind == "R":
                held[register] = (i, register - _first_written(one))
    depth = steps[products[0][0]] if products else 0
    require(depth > 1, "the loop's sums take less than two products an iteration")
    require(set(steps.values()) == {depth}, "not every sum takes as many products")
    for home in steps:
        require(chain_of.get(value(home)) == (home, depth), f"the sum in R{home} ends elsewhere")
    return _arrange(loop, depth, products, loads, others, tuple(moves), value)


def _moves_of_operands(loop: Sequence[Instruction]) -> dict[int, int]:
    """The plain moves whose value nothing of the loop but multiply-adds and such moves reads, and what
    register each copies."""
    found = {i: source.index for i, one in enumerate(loop) if (source := copied_register(one)) is not None}
    while True:
        read_otherwise = set()
        for i in found:
            ((_, target),) = [cell for cell in loop[i].writes if cell[0] == "R"]
            for j in (*range(i + 1, len(loop)), *range(i)):
                if ("R", target) in loop[j].reads and loop[j].opcode != "FFMA" and j not in found:
                    read_otherwise.add(i)
                if ("R", target) in loop[j].writes:
                    break
        if not read_otherwise:
            return found
        found = {i: source for i, source in found.items() if i not in read_otherwise}


def _registers_of(one: Instruction) -> tuple[int, int, int, int]:
    registers = []
    for operand in one.operands:
        plain = (
            isinstance(operand, Register)
            and not operand.uniform
            and not operand.is_zero
            and not operand.negate
            and not operand.absolute
        )
        require(plain, f"{one.text} has an operand that is no plain register")
        assert isinstance(operand, Register)
        registers.append(operand.index)
    require(one.guard.is_true and not one.modifiers, f"{one.text} is no plain multiply-add")
    d, a, b, c = registers
    return d, a, b, c


def _first_written(one: Instruction) -> int:
    return min(index for kind, index in one.writes if kind == "R")


def _arrange(
    loop: Sequence[Instruction],
    depth: int,
    products: Sequence[tuple[int, int, Value, Value]],
    loads: Sequence[int],
    others: Sequence[int],
    moves: tuple[int, ...],
    value: object,
) -> Steady:
    assert callable(value)
    bases = sorted({side_of(loop[i]) for i in loads})
    require(len(bases) == 2, f"operands are loaded from {len(bases)} address registers, not two")
    sides = (bases[0], bases[1])

    def loaded(factor: Value, slice_: int) -> tuple[int, int]:
        """The load and part that a factor comes from."""
        source = factor
        if factor[0] == "in":
            require(slice_ == 0, "a factor from before the iteration is used after its first slice")
            source = value(factor[1])
        require(source[0] in is_load, "a factor does not come from a 16-byte load of shared memory")
        assert isinstance(source[0], int)
        return source[0], source[1]

    is_load = set(loads)
    slice_of: dict[int, int] = {}
    factors = []
    for home, slice_, *pair in products:
        found = []
        for factor in pair:
            load, part = loaded(factor, slice_)
            for_slice = depth if factor[0] == "in" else slice_
            require(slice_of.setdefault(load, for_slice) == for_slice, "a load serves more than one slice")
            found.append((load, part))
        factors.append((home, found))
    require(set(slice_of) == is_load, "a load of the loop is not used by it")
    by_slice: dict[tuple[int, int], list[int]] = defaultdict(list)
    for load in loads:
        by_slice[side_of(loop[load]), slice_of[load]].append(load)
    place: dict[tuple[int, int], tuple[int, int]] = {}  # (load, part) -> (side, index)
    extent = {side: QUAD * len(by_slice[side, depth]) for side in sides}
    for (side, slice_), quads in by_slice.items():
        require(1 <= slice_ <= depth and QUAD * len(quads) == extent[side], "slices differ in their loads")
        quads.sort(key=lambda load: _offset(loop[load]))
        for position, load in enumerate(quads):
            for part in range(QUAD):
                place[load, part] = (side, QUAD * position + part)
    where: dict[int, tuple[int, int]] = {}
    for home, found in factors:
        at = dict(place[source] for source in found)
        require(set(at) == set(sides), "a product has both factors from one operand")
        coordinates = (at[sides[0]], at[sides[1]])
        require(where.setdefault(home, coordinates) == coordinates, f"the sum in R{home} changes its place")
    sums = {coordinates: home for home, coordinates in where.items()}
    complete = extent[sides[0]] * extent[sides[1]]
    require(len(sums) == len(where) == complete, "the sums do not fill a tile")
    homes = {side: tuple(_first_written(loop[load]) for load in by_slice[side, depth]) for side in sides}
    for side in sides:
        for load, home in zip(by_slice[side, depth], homes[side], strict=True):
            for part in range(QUAD):
                require(value(home + part) == (load, part), "a value of the next slice is moved")
    return Steady(
        depth,
        sides,
        extent,
        sums,
        {key: tuple(quads) for key, quads in by_slice.items()},
        homes,
        tuple(others),
        moves,
        tuple(sum(load < other for load in loads) for other in others),
    )
