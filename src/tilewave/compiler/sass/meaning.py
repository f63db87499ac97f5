"""What a straight piece of machine code computes, as numbered values: two pieces that give every cell the
same number compute the same.

A value is numbered by the instruction that makes it (its encoding without register numbers and control bits)
and the numbers of what it reads; a plain move passes its source's number on. So neither the order of
independent instructions nor the choice of registers matters. What is loaded from shared memory also depends
on the stores and barriers before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from tilewave.emulator.sass import Instruction
from tilewave.emulator.sass.instruction import Cell
from tilewave.emulator.sass.operands import Address, Constant, Operand, Register

_CONTROL = ((1 << 21) - 1) << 105
_TARGET = 0xFF << 16 | ((1 << 48) - 1) << 34
"""Where a branch has the distance that it goes."""
_FORM = 0xE00
_REGISTER_FORM = 0x200
_FACTOR_SIGNS = 1 << 72 | 1 << 73 | 1 << 62 | 1 << 63

_COMPUTES = frozenset(
    {"FFMA", "FADD", "FMUL", "HFMA2.MMA", "IMAD", "IMAD.WIDE", "IMAD.HI", "IADD3", "VIADD"}
    | {"LEA", "LOP3.LUT", "SHF", "PRMT", "SEL", "MOV", "ISETP"}
)
"""Instructions whose results depend on nothing but their operands."""
_SYNCHRONISES = frozenset({"STS", "DEPBAR", "BAR"})
_COPIES = frozenset({"LDGSTS", "LDGDEPBAR"})


class Meaningless(Exception):
    """An instruction that the comparison does not know; the text names it."""


class Numbers:
    """The numbers that stand for values, shared by the pieces that are compared."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._cells: dict[int, Cell] = {}

    def before(self, cell: Cell) -> int:
        """The number of what a cell holds before the code that is compared."""
        number = self.of(("before", cell))
        self._cells[number] = cell
        return number

    def cell_of(self, number: int) -> Cell | None:
        """The cell that holds this value before the code, if any does."""
        return self._cells.get(number)

    def of(self, key: Hashable) -> int:
        """The number of a value, the same for equal keys."""
        return self._numbers.setdefault(key, len(self._numbers))


@dataclass(frozen=True)
class Effect:
    """Something that changes memory or synchronises: its number, whether it stands right behind the effect
    before it, and whether its guard is never true."""

    number: int
    glued: bool
    never: bool


@dataclass
class Meaning:
    """The effect of a piece of code that was interpreted from `state` on."""

    numbers: Numbers
    state: dict[Cell, int]
    """The value of every cell that was read or written."""
    effects: list[Effect] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)
    """Loads from shared memory: the value's number, and how many copies were started before."""
    global_loads: Counter[int] = field(default_factory=Counter)
    condition: int | None = None
    """What the branch at the end depends on."""
    moves: set[int] = field(default_factory=set)
    """The encodings of the plain moves, which pass their source's number on and have none of their own."""

    def value(self, cell: Cell) -> int:
        """The number of a cell's value; of one not seen yet, a number of its own."""
        if cell not in self.state:
            self.state[cell] = self.numbers.before(cell)
        return self.state[cell]


def interpret(code: Sequence[Instruction], numbers: Numbers, start: dict[Cell, int] | None = None) -> Meaning:
    """Interpret a straight piece of code, a branch at most at its end."""
    meaning = Meaning(numbers, dict(start or {}))
    copies = synchronised = 0
    last_effect = -2
    for i, one in enumerate(code):
        encoding = _encoding(one)
        if (copied := copied_register(one)) is not None:
            meaning.moves.add(encoding)
            for cell in one.writes:
                meaning.state[cell] = meaning.value(("R", copied.index))
            continue
        inputs = _inputs(one, meaning)
        if one.opcode == "BRA":
            if i != len(code) - 1:
                raise Meaningless(f"{one.text} within the code")
            meaning.condition = numbers.of((encoding & ~_TARGET, inputs))
        elif _never(one) or one.opcode in _COPIES | _SYNCHRONISES:
            number = numbers.of((encoding, inputs))
            meaning.effects.append(Effect(number, last_effect == i - 1, _never(one)))
            last_effect = i
            copies += one.opcode == "LDGSTS" and not _never(one)
            synchronised += one.opcode in _SYNCHRONISES and not _never(one)
        elif one.opcode == "LDS" and one.guard.is_true:
            number = numbers.of((encoding, inputs, synchronised))
            meaning.loads.append((number, copies))
            _write(one, meaning, number)
        elif one.opcode == "LDG" and one.has("CONSTANT") and one.guard.is_true:
            number = numbers.of((encoding, inputs))
            meaning.global_loads[number] += 1
            _write(one, meaning, number)
        elif one.opcode in _COMPUTES and one.guard.is_true:
            _write(one, meaning, numbers.of((encoding, inputs)))
        else:
            raise Meaningless(f"{one.text} is not foreseen in a steady loop")
    return meaning


def plain_moves(code: Sequence[Instruction]) -> frozenset[int]:
    """The encodings of a whole kernel's plain moves."""
    return frozenset(_encoding(one) for one in code if copied_register(one) is not None)


def _never(one: Instruction) -> bool:
    return one.guard.index == 7 and one.guard.negate


def _write(one: Instruction, meaning: Meaning, number: int) -> None:
    for part, cell in enumerate(one.writes):
        meaning.state[cell] = meaning.numbers.of((number, part))


def copied_register(one: Instruction) -> Register | None:
    """The register that a plain move copies, RZ and anything else left out."""
    if not one.guard.is_true:
        return None
    source: Operand | None = None
    if one.opcode == "MOV":
        source = one.operands[1]
    elif one.display == "IMAD.MOV.U32":
        zero, factor, source = one.operands[1:4]
        both = (zero, factor)
        if not all(isinstance(o, Register) and not o.uniform and o.is_zero for o in both):
            return None
    plain = (
        isinstance(source, Register)
        and not source.uniform
        and not source.is_zero
        and not source.negate
        and not source.invert
    )
    return source if plain and isinstance(source, Register) else None


def _registers(operand: Operand) -> tuple[Register, ...]:
    if isinstance(operand, Register):
        return (operand,)
    if isinstance(operand, Address):
        parts = (operand.base, operand.uniform, operand.descriptor)
        return tuple(part for part in parts if part is not None)
    if isinstance(operand, Constant) and operand.base is not None:
        return (operand.base,)
    return ()


def _encoding(one: Instruction) -> int:
    """The word without control bits and without the numbers of its registers."""
    word = one.word & ~_CONTROL
    for operand in one.operands:
        for register in _registers(operand):
            word &= ~(register.zero << register.field)
    return word


def _inputs(one: Instruction, meaning: Meaning) -> tuple[int | None, ...]:
    """The numbers of everything that the instruction reads; None for RZ."""
    found: list[int | None] = []
    for position, operand in enumerate(one.operands):
        if position in one.destinations:
            # A result that nobody keeps is another instruction than one that somebody does.
            kept = isinstance(operand, Register) and not operand.is_zero
            found.append(int(kept))
            continue
        for register in _registers(operand):
            kind = "UR" if register.uniform else "R"
            if register.is_zero:
                found.append(None)
            else:
                found += (meaning.value((kind, register.index + part)) for part in range(register.count))
    if one.opcode == "FFMA" and one.word & _FORM == _REGISTER_FORM and not one.word & _FACTOR_SIGNS:
        # A product does not depend on the order of its factors: a NaN that it makes is always the same one.
        found[1:3] = sorted(found[1:3], key=lambda number: -1 if number is None else number)
    found += (meaning.value(cell) for cell in one.reads if cell[0] in ("P", "UP"))
    return tuple(found)
