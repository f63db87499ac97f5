"""From 128-bit words to `Instruction` records, and back to nvdisasm's text, without a disassembler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from tilewave.emulator.sass import opcodes
from tilewave.emulator.sass.elf import INSTRUCTION_BYTES, Function
from tilewave.emulator.sass.instruction import Control, Instruction
from tilewave.emulator.sass.opcodes import Spec
from tilewave.emulator.sass.operands import (
    TRUE_PREDICATE,
    Address,
    Constant,
    Immediate,
    Named,
    Operand,
    Predicate,
    Register,
    Special,
    Target,
)
from tilewave.errors import UnknownInstructionError

KNOWN_ARCHITECTURES = frozenset({80, 86, 87, 88, 89, 90})
"""Architectures whose encoding the tables describe, by number."""

_ACCESS_REGISTERS = {"64": 2, "S64": 2, "128": 4}

_WITH_CARRY = frozenset({"IADD3", "UIADD3", "IMAD", "UIMAD"})
"""With .X, a negated operand of these is inverted: the carry supplies the rest."""


def decode_function(function: Function, sm: int) -> list[Instruction]:
    """Every instruction of a kernel, in address order."""
    return [decode(word, i * INSTRUCTION_BYTES, sm) for i, word in enumerate(function.words())]


@functools.lru_cache(maxsize=32768)
def decode(word: int, address: int = 0, sm: int = 90) -> Instruction:
    """Decode one instruction; `UnknownInstructionError` names address and hex of what the table lacks."""
    if sm not in KNOWN_ARCHITECTURES:
        raise UnknownInstructionError(
            f"machine code of sm_{sm} is encoded in another way; the SASS decoder knows sm_80 to sm_90a"
        )
    known = opcodes.TABLE.get(word & 0xFFF)
    if known is None:
        raise UnknownInstructionError(_unknown(word, address, f"opcode {word & 0xFFF:#05x}"))
    spec, form = known
    reader = _Reader(word, address, spec, form, sm)
    modifiers = reader.modifiers()
    reader.access_registers = next((_ACCESS_REGISTERS[m] for m in modifiers if m in _ACCESS_REGISTERS), 1)
    operands: list[Operand] = []
    destinations, hidden = set(), set()
    for code in spec.operands:
        operand, written, shown = reader.operand(code)
        if operand is None:
            continue
        if written:
            destinations.add(len(operands))
        if not shown:
            hidden.add(len(operands))
        operands.append(operand)
    instruction = Instruction(
        address=address,
        word=word,
        opcode=spec.name,
        modifiers=modifiers,
        guard=Predicate(reader.bits(12, 3), spec.uniform, bool(reader.bits(15))),
        operands=tuple(operands),
        destinations=frozenset(destinations),
        hidden=frozenset(hidden),
        control=Control.of_word(word),
    )
    if spec.name == "IMAD":
        return replace(instruction, display=_imad_name(instruction))
    return instruction


def _unknown(word: int, address: int, what: str) -> str:
    return f"{what} at {address:#06x} is not known to the SASS decoder: word {word:#034x}"


def _imad_name(imad: Instruction) -> str:
    """The name nvdisasm gives an IMAD that does something simpler: MOV, IADD, SHL."""
    a, b, c = (operand for operand in imad.operands[1:4])
    parts = [m for m in imad.modifiers if m != "X"]
    special = ""
    if imad.has("X"):
        parts.append("X")
    elif (isinstance(b, Register) and not b.uniform and b.is_zero and not _is_uniform(c)) or (
        _is_zero(a) and not _is_uniform(b) and not _is_uniform(c)
    ):
        special = "MOV"
    elif isinstance(b, Immediate) and b.value == 1:
        special = "MOV" if _is_zero(c) else "IADD"
    elif isinstance(b, Immediate) and _is_zero(c) and _is_shift(b.value):
        special = "SHL"
    return ".".join(["IMAD", *([special] if special else []), *parts])


def _is_zero(operand: Operand) -> bool:
    return isinstance(operand, Register) and not operand.uniform and operand.is_zero


def _is_uniform(operand: Operand) -> bool:
    return isinstance(operand, Register) and operand.uniform


def _is_shift(value: int) -> bool:
    return 1 < value < 1 << 31 and value & (value - 1) == 0


class _Reader:
    """Reads the fields of one word."""

    def __init__(self, word: int, address: int, spec: Spec, form: int, sm: int) -> None:
        self.word = word
        self.address = address
        self.spec = spec
        self.form = form
        self.sm = sm
        self.uniform_bits = 8 if sm >= 100 else 6
        self.access_registers = 1

    def bits(self, low: int, width: int = 1) -> int:
        return self.word >> low & ((1 << width) - 1)

    def signed(self, low: int, width: int) -> int:
        value = self.bits(low, width)
        return value - (1 << width) if value >> (width - 1) else value

    def modifiers(self) -> tuple[str, ...]:
        names = []
        for modifier in self.spec.modifiers:
            value = self.bits(modifier.bit, modifier.width) | self.bits(*modifier.upper) << modifier.width
            if value not in modifier.names:
                what = f"value {value} of the field at bit {modifier.bit} of {self.spec.name}"
                raise UnknownInstructionError(_unknown(self.word, self.address, what))
            if modifier.names[value]:
                names.append(modifier.names[value])
        return tuple(names)

    def operand(self, code: str) -> tuple[Operand | None, bool, bool]:
        """The operand of a code, whether it is written, and whether it is printed; None if it is absent."""
        optional = code.endswith("?")
        code = code.removesuffix("?")
        code, _, condition = code.partition("@")
        if condition:
            needed, _, forbidden = condition.partition("!")
            if not self.bits(int(needed)) or (forbidden and self.bits(int(forbidden))):
                return None, False, False
        code, signs = (code[:-1], code[-1]) if code[-1] in "-|~" else (code, "")
        code, _, size = code.partition(":")
        if code in _SPECIAL:
            return _SPECIAL[code](self, optional, size)
        count = {"": 1, "2": 2, "m": self.access_registers, "s": 2 if self.bits(80) else 1}[size]
        if code in ("d", "ud"):
            return self.register(16, self.spec.uniform or code == "ud", count=count), True, True
        return self.source(code, signs, count), False, True

    # Registers, immediates and constants.

    def register(
        self, field: int, uniform: bool = False, count: int = 1, slot: int | None = None, suffix: str = ""
    ) -> Register:
        zero = (1 << self.uniform_bits) - 1 if uniform else 255
        index = self.bits(field, zero.bit_length())
        # Where the yield bit is 0, the bits of the reuse flags are something else.
        reuse = slot is not None and not uniform and bool(self.bits(109) and self.bits(122 + slot))
        return Register(
            index, field, uniform, count, None if uniform else slot, reuse=reuse, zero=zero, suffix=suffix
        )

    def source(self, code: str, signs: str, count: int) -> Operand:
        if code == "a":
            return self.with_signs(self.register(24, self.spec.uniform, count, slot=0), signs, 72, 73)
        slot = {"b": 1, "c": 2, "e": 2, "s": 1}[code]
        at_32 = code in ("s", "e") or (code == "c") == (self.form in (2, 3, 7))
        if not at_32:
            return self.with_signs(self.register(64, self.spec.uniform, count, slot=slot), signs, 75, 74)
        if self.form in (2, 4):
            style = "half" if self.spec.name.startswith("HFMA2") else "unsigned"
            style = "signed" if self.spec.signed_immediate else style
            return Immediate(self.bits(32, 32), "float" if self.spec.float_immediate else style)
        if self.form in (3, 5):
            return self.with_signs(Constant(self.bits(54, 5), self.bits(38, 16)), signs, 63, 62)
        uniform = self.spec.uniform or self.form in (6, 7)
        return self.with_signs(self.register(32, uniform, count, slot=slot), signs, 63, 62)

    def with_signs(self, operand: Register | Constant, signs: str, negate: int, absolute: int) -> Operand:
        if not signs:
            return operand
        if signs == "~" and isinstance(operand, Register):
            return replace(operand, invert=bool(self.bits(negate)))
        inverted = signs == "-" and self.spec.name in _WITH_CARRY and bool(self.bits(74))
        negative = bool(self.bits(negate))
        if inverted and isinstance(operand, Register):
            return replace(operand, invert=negative)
        return replace(operand, negate=negative, absolute=signs == "|" and bool(self.bits(absolute)))

    def predicate(self, low: int, negate: int | None = None, uniform: bool | None = None) -> Predicate:
        return Predicate(
            self.bits(low, 3),
            self.spec.uniform if uniform is None else uniform,
            bool(self.bits(negate)) if negate is not None else False,
        )

    # Addresses.

    def address_operand(self, uniform_field: int, *, wide: bool) -> Address:
        """[base + offset] with a 24-bit offset at bit 40 and, if bit 91 is set, a uniform register."""
        uniform = self.register(uniform_field, True) if self.bits(91) else None
        scale = 1
        if not wide:
            scale = (1, 4, 8, 16)[self.bits(78, 2)] if self.spec.name in ("LDS", "STS", "ATOMS") else 1
            return Address(self.register(24), self.signed(40, 24), uniform, scale=scale)
        suffix = ".64" if uniform else ""
        base = self.register(24, count=2 if self.bits(72) else 1, suffix=suffix)
        described = 71 if self.spec.name in ("ATOMG", "REDG") else 76
        if uniform is not None and self.bits(described):
            return self.described(base, self.signed(40, 24), uniform)
        return Address(base, self.signed(40, 24), None if uniform is None else replace(uniform, count=2))

    def described(self, base: Register, offset: int, uniform: Register) -> Address:
        """An address whose uniform register pair describes the memory; printed from sm_90 on only."""
        return Address(base, offset, descriptor=replace(uniform, count=2), named=self.sm >= 90)


def _offset_from_next(reader: _Reader, offset: int) -> Target:
    return Target(reader.address + INSTRUCTION_BYTES + offset)


def _branch_target(reader: _Reader) -> Target:
    if reader.sm < 90:
        return _offset_from_next(reader, reader.signed(32, 50))
    # From sm_90 on the offset counts words of 4 bytes: its low byte lies at bit 16, the rest at bit 34.
    return _offset_from_next(reader, (reader.signed(34, 48) << 8 | reader.bits(16, 8)) * 4)


def _copy_source(reader: _Reader) -> Address:
    uniform = reader.register(64, True, count=2)
    base = reader.register(24, count=2, suffix=".64")
    offset = reader.signed(32, 12)
    if not reader.bits(91):
        return Address(replace(base, suffix=""), offset)
    if reader.bits(76):
        return reader.described(base, offset, uniform)
    return Address(base, offset, uniform)


_Found = tuple[Operand | None, bool, bool]
"""An operand, whether it is written, and whether it is printed."""
_Read = Callable[[_Reader, bool, str], _Found]


def _destination_predicate(low: int, uniform: bool | None = None) -> _Read:
    def read(reader: _Reader, optional: bool, size: str) -> _Found:
        found = reader.predicate(low, uniform=uniform)
        return found, True, not (optional and found.index == TRUE_PREDICATE)

    return read


def _source_predicate(low: int, negate: int, uniform: bool | None = None) -> _Read:
    def read(reader: _Reader, optional: bool, size: str) -> _Found:
        found = reader.predicate(low, negate, uniform)
        return found, False, not (optional and found.is_true)

    return read


def _selectable_predicate(reader: _Reader, optional: bool, size: str) -> _Found:
    return reader.predicate(68, 71, uniform=bool(reader.bits(67))), False, True


def _load_predicate(reader: _Reader, optional: bool, size: str) -> _Found:
    # Stored inverted, so that 0 is PT.
    found = Predicate(TRUE_PREDICATE ^ reader.bits(64, 3), False, bool(reader.bits(67)))
    return found, False, not found.is_true


def _vote_destination(reader: _Reader, optional: bool, size: str) -> _Found:
    found = reader.register(16)
    return found, True, not found.is_zero


def _immediate(low: int, width: int, absent: int | None = None) -> _Read:
    def read(reader: _Reader, optional: bool, size: str) -> _Found:
        value = reader.bits(low, width)
        return Immediate(value), False, not (optional and value == absent)

    return read


def _predicate_table(reader: _Reader, optional: bool, size: str) -> _Found:
    return Immediate(reader.bits(64, 3) | reader.bits(72, 5) << 3), False, True


def _named(kind: str, low: int = 0, width: int = 0) -> _Read:
    def read(reader: _Reader, optional: bool, size: str) -> _Found:
        return Named(kind, reader.bits(low, width) if width else None), False, True

    return read


def _special_register(reader: _Reader, optional: bool, size: str) -> _Found:
    return Special(reader.bits(72, 8)), False, True


def _scoreboard_set(reader: _Reader, optional: bool, size: str) -> _Found:
    chosen = [str(i) for i in range(6) if reader.bits(32 + i)]
    return Named("{" + ",".join(chosen) + "}"), False, bool(chosen)


def _lane(reader: _Reader, optional: bool, size: str) -> _Found:
    if reader.form in (1, 2):
        return reader.register(32), False, True
    return Immediate(reader.bits(53, 5)), False, True


def _clamp(reader: _Reader, optional: bool, size: str) -> _Found:
    if reader.form in (1, 4):
        return reader.register(64), False, True
    return Immediate(reader.bits(40, 13)), False, True


def _constant(reader: _Reader, optional: bool, size: str) -> _Found:
    base = None if reader.spec.name == "ULDC" else reader.register(24)
    base = None if base is None or base.is_zero else base
    return Constant(reader.bits(54, 5), reader.signed(38, 16), base), False, True


def _memory(uniform_field: int, *, wide: bool) -> _Read:
    def read(reader: _Reader, optional: bool, size: str) -> _Found:
        return reader.address_operand(uniform_field, wide=wide), False, True

    return read


def _stored_data(reader: _Reader, optional: bool, size: str) -> _Found:
    return reader.register(32, count=reader.access_registers), False, True


def _copy_target(reader: _Reader, optional: bool, size: str) -> _Found:
    return Address(reader.register(16), reader.signed(44, 20)), False, True


def _target(reader: _Reader, optional: bool, size: str) -> _Found:
    return _branch_target(reader), False, True


def _near_target(reader: _Reader, optional: bool, size: str) -> _Found:
    return _offset_from_next(reader, reader.signed(32, 32)), False, True


_SPECIAL: dict[str, _Read] = {
    "pd": _destination_predicate(81),
    "pdv": _destination_predicate(81),
    "updv": _destination_predicate(81, uniform=True),
    "pe": _destination_predicate(84),
    "ps": _source_predicate(87, 90),
    "pt": _source_predicate(77, 80),
    "px": _source_predicate(68, 71),
    "pu": _selectable_predicate,
    "ld": _load_predicate,
    "dz": _vote_destination,
    "lut": _immediate(72, 8),
    "plut": _predicate_table,
    "plut2": _immediate(16, 8),
    "shift": _immediate(75, 5),
    "quad": _immediate(72, 4, absent=15),
    "bar": _immediate(54, 4),
    "threads": _immediate(42, 12, absent=0),
    "depth": _immediate(38, 6),
    "PR": _named("PR"),
    "B": _named("B", 16, 4),
    "SB": _named("SB", 44, 3),
    "sbset": _scoreboard_set,
    "sr": _special_register,
    "lane": _lane,
    "clamp": _clamp,
    "const": _constant,
    "global": _memory(32, wide=True),
    "global_st": _memory(64, wide=True),
    "shared": _memory(32, wide=False),
    "shared_st": _memory(64, wide=False),
    "local": _memory(32, wide=False),
    "local_st": _memory(64, wide=False),
    "data": _stored_data,
    "copy_to": _copy_target,
    "copy_from": lambda reader, optional, size: (_copy_source(reader), False, True),
    "target": _target,
    "starget": _near_target,
}
