"""One machine instruction: the record that the decoder makes, and its control bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from tilewave.emulator.sass.operands import Address, Constant, Immediate, Operand, Predicate, Register
from tilewave.errors import EmulationError

NO_SCOREBOARD = 7
"""The value of a scoreboard field that names none."""
SCOREBOARDS = 6

_LONGEST_UNYIELDING = 11
_CONTROL_BIT = 105
_CONTROL_WIDTH = 21
_WORD_MASK = (1 << 128) - 1


@dataclass(frozen=True)
class Control:
    """What the compiler tells the scheduler, in bits 105 to 125 of the word.

    `stall`: cycles until this warp's next instruction may issue. `write_barrier`: the scoreboard that counts
    down when the result is there, `read_barrier`: the one that counts down when the sources have been read
    (7: none). `wait_mask`: bit i makes the instruction wait until scoreboard i is at zero. `reuse`: bit i
    keeps the operand of slot i in its reuse cache. `yield_bit` is the raw bit; 0 lets the scheduler prefer
    another warp, and then the bits of `reuse` are no reuse flags (`fault`).
    """

    stall: int = 1
    yield_bit: int = 1
    write_barrier: int = NO_SCOREBOARD
    read_barrier: int = NO_SCOREBOARD
    wait_mask: int = 0
    reuse: int = 0

    @property
    def fault(self) -> str | None:
        """Why no compiler gives an instruction these bits; None where one may.

        Stall, yield bit and the first three reuse flags are one field, and not every value has a meaning.
        nvdisasm refuses a yield bit of 1 beside a stall of 0 or of more than 11. Where the yield bit is 0 it
        takes the flags for marks of a batch of instructions, which ptxas does not set.
        """
        if not self.yield_bit:
            return "has reuse flags beside a yield bit of 0" if self.reuse else None
        if not 1 <= self.stall <= _LONGEST_UNYIELDING:
            return f"stalls for {self.stall} beside a yield bit of 1"
        return None

    @staticmethod
    def of_word(word: int) -> Control:
        """The control bits of a 128-bit instruction word."""
        bits = word >> _CONTROL_BIT
        return Control(
            bits & 15, bits >> 4 & 1, bits >> 5 & 7, bits >> 8 & 7, bits >> 11 & 63, bits >> 17 & 15
        )

    def into_word(self, word: int) -> int:
        """The word with its control bits replaced by these."""
        limits = (
            ("stall", self.stall, 15, 0),
            ("yield_bit", self.yield_bit, 1, 4),
            ("write_barrier", self.write_barrier, 7, 5),
            ("read_barrier", self.read_barrier, 7, 8),
            ("wait_mask", self.wait_mask, 63, 11),
            ("reuse", self.reuse, 15, 17),
        )
        bits = 0
        for name, value, largest, shift in limits:
            if not 0 <= value <= largest:
                raise EmulationError(f"control field {name} is {value}; accepted are 0 to {largest}")
            bits |= value << shift
        mask = ((1 << _CONTROL_WIDTH) - 1) << _CONTROL_BIT
        return (word & ~mask & _WORD_MASK) | bits << _CONTROL_BIT

    def waits(self) -> Iterator[int]:
        """The scoreboards that the instruction waits for."""
        return (i for i in range(SCOREBOARDS) if self.wait_mask >> i & 1)


RESERVED_REGISTERS = 2
"""Registers at the top of a thread's count that no instruction may name.

ptxas counts them beyond the largest that it uses. An H200 stopped (illegal instruction) in the one case in
which a loop of the register-file pass used them; without them all other loops ran.
"""

Cell = tuple[str, int]
"""A piece of architectural state: ("R", 17), ("UR", 4), ("P", 0) or ("UP", 2)."""


@dataclass(frozen=True)
class Instruction:
    """A decoded instruction.

    `address` counts bytes from the start of the kernel's code, `word` is the encoding, `opcode` the name
    without modifiers, `destinations` says how many operands (the first ones, memory operands aside) are
    written.
    """

    address: int
    word: int
    opcode: str
    modifiers: tuple[str, ...]
    guard: Predicate
    operands: tuple[Operand, ...]
    destinations: frozenset[int]
    hidden: frozenset[int]
    """Operands that exist but are not printed (a PT that need not be said)."""
    control: Control
    display: str = ""
    """The name that nvdisasm prints, where it has an alias for a special case (IMAD.MOV)."""

    def __str__(self) -> str:
        return self.text

    @cached_property
    def text(self) -> str:
        """The instruction as nvdisasm prints it, branch targets as addresses."""
        name = self.display or ".".join((self.opcode, *self.modifiers))
        shown = [str(operand) for i, operand in enumerate(self.operands) if i not in self.hidden]
        separator = " " if self.opcode == "RET.REL" else ", "
        guard = "" if self.guard.is_true else f"@{self.guard} "
        return f"{guard}{name} {separator.join(shown)}".rstrip()

    def has(self, modifier: str) -> bool:
        """Whether the modifier is set."""
        return modifier in self.modifiers

    @cached_property
    def reads(self) -> tuple[Cell, ...]:
        """Registers and predicates that the instruction reads, its guard included; RZ and PT are left out."""
        cells: list[Cell] = []
        if not self.guard.is_true:
            _add_predicate(cells, self.guard)
        for i, operand in enumerate(self.operands):
            if i in self.destinations:
                continue
            if isinstance(operand, Register):
                _add_register(cells, operand)
            elif isinstance(operand, Predicate):
                _add_predicate(cells, operand)
            elif isinstance(operand, Address):
                for part in (operand.base, operand.uniform, operand.descriptor):
                    _add_register(cells, part)
            elif isinstance(operand, Constant):
                _add_register(cells, operand.base)
        if self.opcode == "P2R":
            cells += self._chosen_predicates()
        return tuple(dict.fromkeys(cells))

    @cached_property
    def writes(self) -> tuple[Cell, ...]:
        """Registers and predicates that the instruction writes; RZ and PT are left out."""
        cells: list[Cell] = []
        for i in sorted(self.destinations):
            operand = self.operands[i]
            if isinstance(operand, Register):
                _add_register(cells, operand)
            elif isinstance(operand, Predicate):
                _add_predicate(cells, operand)
        if self.opcode == "R2P":
            cells += self._chosen_predicates()
        return tuple(dict.fromkeys(cells))

    def _chosen_predicates(self) -> list[Cell]:
        """The predicates that the bit mask of P2R or R2P picks."""
        mask = self.operands[-1]
        chosen = mask.value if isinstance(mask, Immediate) else 0x7F
        return [("P", i) for i in range(7) if chosen >> i & 1]

    def fault(self, registers: int) -> str | None:
        """Why no compiler gives a kernel whose threads have so many registers this instruction; or None."""
        largest = max((index for kind, index in self.reads + self.writes if kind == "R"), default=-1)
        if largest >= registers - RESERVED_REGISTERS:
            return (
                f"uses R{largest}, but a thread has {registers} registers, of which the last "
                f"{RESERVED_REGISTERS} are the hardware's"
            )
        return self.control.fault

    def with_control(self, **fields: int) -> int:
        """The word with some control fields replaced, e.g. `with_control(stall=2)`."""
        return replace(self.control, **fields).into_word(self.word)

    def with_register(self, operand: int, index: int) -> int:
        """The word with the register of one operand (by its position in `operands`) replaced.

        Of an address operand the base register is meant.
        """
        chosen = self.operands[operand]
        register = chosen.base if isinstance(chosen, Address) else chosen
        if not isinstance(register, Register):
            raise EmulationError(f"operand {operand} of '{self}' is no register")
        if not 0 <= index <= register.zero:
            raise EmulationError(f"register {index} does not exist; accepted are 0 to {register.zero}")
        return (self.word & ~(register.zero << register.field)) | index << register.field


def _add_register(cells: list[Cell], register: Register | None) -> None:
    if register is not None and not register.is_zero:
        kind = "UR" if register.uniform else "R"
        cells.extend((kind, register.index + i) for i in range(register.count))


def _add_predicate(cells: list[Cell], predicate: Predicate) -> None:
    if predicate.index != 7:
        cells.append(("UP" if predicate.uniform else "P", predicate.index))
