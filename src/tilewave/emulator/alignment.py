"""The low bits of each register that are the same in every thread: the alignment of addresses, provably."""

from __future__ import annotations

from dataclasses import dataclass

from tilewave.emulator.flow import written
from tilewave.emulator.layout import Layout
from tilewave.emulator.ptx import Immediate, Instruction, Operand, Register, Symbol

_ALL = 64


@dataclass(frozen=True)
class LowBits:
    """A value of which the lowest `known` bits are those of `value`; the others may be anything."""

    known: int
    value: int = 0

    def limited(self, known: int) -> LowBits:
        """The same with at most `known` bits."""
        bits = min(self.known, known)
        return LowBits(bits, self.value & ((1 << bits) - 1))

    def __add__(self, other: LowBits) -> LowBits:
        return LowBits(min(self.known, other.known), self.value + other.value)._cut()

    def __sub__(self, other: LowBits) -> LowBits:
        return LowBits(min(self.known, other.known), self.value - other.value)._cut()

    def __mul__(self, other: LowBits) -> LowBits:
        # (a + 2^i x) (b + 2^j y): the unknown x and y enter at 2^i b, 2^j a and 2^(i+j).
        first = self.known + trailing_zeros(other.value)
        second = other.known + trailing_zeros(self.value)
        known = min(first, second, self.known + other.known, _ALL)
        return LowBits(known, self.value * other.value)._cut()

    def __and__(self, other: LowBits) -> LowBits:
        known = 0
        while known < _ALL and (
            known < min(self.known, other.known) or self._is_zero(known) or other._is_zero(known)
        ):
            known += 1
        return LowBits(known, self.value & other.value)._cut()

    def join(self, other: LowBits) -> LowBits:
        """What is known of a value that is one or the other."""
        known = min(self.known, other.known, trailing_zeros(self.value ^ other.value))
        return self.limited(known)

    def shifted(self, amount: int) -> LowBits:
        """Shifted left, or right by a negative amount."""
        if amount >= 0:
            return LowBits(min(_ALL, self.known + amount), self.value << amount)._cut()
        return LowBits(max(0, self.known + amount), self.value >> -amount)

    def _is_zero(self, bit: int) -> bool:
        return bit < self.known and not self.value >> bit & 1

    def _cut(self) -> LowBits:
        return LowBits(self.known, self.value & ((1 << self.known) - 1))


_NOTHING = LowBits(0)


class KnownLowBits:
    """Low bits that each register has whatever path led to it, from all its definitions together.

    `fixed` says whether the addresses of variables are constants in the machine code: from sm_90 on they are
    not (a block's shared memory has its place within the cluster's), so that only their alignment is known.
    """

    def __init__(self, code: list[Instruction], layout: Layout, fixed: bool = False) -> None:
        self._layout = layout
        self._fixed = fixed
        self._bits: dict[Register, LowBits] = {}
        definitions = [(register, i) for i in code for register in written(i)]
        # Begin with the first definitions and widen until nothing changes: a loop's own increments then meet.
        changed = True
        while changed:
            changed = False
            for register, instruction in definitions:
                result = self._result(instruction)
                if result is None:
                    continue
                result = result.limited(register.bits)
                before = self._bits.get(register)
                after = result if before is None else before.join(result)
                if after != before:
                    self._bits[register] = after
                    changed = True

    def of(self, operand: Operand | None) -> LowBits:
        """What is known of an operand's low bits."""
        found = self._operand(operand)
        return _NOTHING if found is None else found

    def _operand(self, operand: Operand | None) -> LowBits | None:
        """None for a register that no definition has reached yet."""
        if isinstance(operand, Register):
            return self._bits.get(operand)
        if isinstance(operand, Immediate):
            return LowBits(_ALL, operand.value & ((1 << _ALL) - 1))
        if isinstance(operand, Symbol):
            address = self._layout.address(operand.name)
            if address is None:
                return _NOTHING
            return LowBits(_ALL, address) if self._fixed else LowBits(trailing_zeros(address))
        return _NOTHING

    def _result(self, instruction: Instruction) -> LowBits | None:
        opcode, modifiers = instruction.opcode, instruction.modifiers
        if (
            opcode not in _FOLLOWED
            or not modifiers
            or modifiers[-1] in ("f32", "f64", "pred")
            or "hi" in modifiers
        ):
            return _NOTHING
        sources = [self._operand(operand) for operand in instruction.operands[1:]]
        known = [source for source in sources if source is not None]
        if opcode == "selp" and len(sources) == 3:
            pair = [source for source in sources[:2] if source is not None]
            return pair[0].join(pair[-1]) if pair else None
        if len(known) < len(sources):
            return None
        if opcode in ("mov", "cvt", "cvta"):
            return self._copied(instruction, known)
        if opcode in ("shl", "shr"):
            amount = instruction.operands[2]
            if not isinstance(amount, Immediate):
                return (
                    LowBits(trailing_zeros(known[0].value)).limited(known[0].known)
                    if opcode == "shl"
                    else _NOTHING
                )
            return known[0].shifted(amount.value if opcode == "shl" else -amount.value)
        return _combine(opcode, known)

    def _copied(self, instruction: Instruction, known: list[LowBits]) -> LowBits:
        source = instruction.operands[1]
        width = source.bits if isinstance(source, Register) else _ALL
        kinds = instruction.modifiers[-2:] if instruction.opcode == "cvt" else ()
        if any(kind[0] == "f" for kind in kinds):
            return _NOTHING
        narrowest = min([width, *(int(kind[1:]) for kind in kinds)])
        return known[0].limited(narrowest)


_FOLLOWED = frozenset(
    [
        "mov",
        "cvt",
        "cvta",
        "add",
        "sub",
        "mul",
        "mad",
        "and",
        "or",
        "xor",
        "shl",
        "shr",
        "selp",
        "min",
        "max",
        "neg",
    ]
)


def _combine(opcode: str, known: list[LowBits]) -> LowBits:
    a, b = known[0], known[-1]
    if opcode == "add":
        return a + b
    if opcode == "sub":
        return a - b
    if opcode == "neg":
        return LowBits(_ALL) - a
    if opcode == "mul":
        return a * b
    if opcode == "mad":
        return known[0] * known[1] + known[2]
    if opcode == "and":
        return a & b
    if opcode in ("min", "max"):
        return a.join(b)
    bits = min(a.known, b.known)
    return LowBits(bits, a.value | b.value if opcode == "or" else a.value ^ b.value).limited(bits)


def trailing_zeros(value: int) -> int:
    """Zero bits at the end of an integer's binary form; 64 for 0."""
    return (value & -value).bit_length() - 1 if value else _ALL
