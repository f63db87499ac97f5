"""The operands of machine instructions: plain records that print as nvdisasm prints them."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

ZERO_REGISTER = 255
"""RZ: reads as 0, and what is written to it is lost."""
TRUE_PREDICATE = 7
"""PT and UPT: always true."""


@dataclass(frozen=True)
class Register:
    """A register operand, or the first of `count` consecutive ones.

    `slot` is the operand slot (0, 1, 2) whose reuse cache serves the read, None where there is none;
    `field` is the lowest bit of the register's number in the instruction word.
    """

    index: int
    field: int
    uniform: bool = False
    count: int = 1
    slot: int | None = None
    negate: bool = False
    absolute: bool = False
    invert: bool = False
    reuse: bool = False
    zero: int = ZERO_REGISTER
    suffix: str = ""

    @property
    def is_zero(self) -> bool:
        """Whether this is RZ or URZ."""
        return self.index == self.zero

    @property
    def name(self) -> str:
        """R17, RZ, UR4, URZ."""
        return ("UR" if self.uniform else "R") + ("Z" if self.is_zero else str(self.index))

    def __str__(self) -> str:
        text = self.name + self.suffix
        if self.absolute:
            text = f"|{text}|"
        text += ".reuse" if self.reuse else ""
        return ("-" if self.negate else "~" if self.invert else "") + text


@dataclass(frozen=True)
class Predicate:
    """A predicate operand: P0 to P6 and PT, or UP0 to UP6 and UPT."""

    index: int
    uniform: bool = False
    negate: bool = False

    @property
    def is_true(self) -> bool:
        """Whether this is PT, not negated."""
        return self.index == TRUE_PREDICATE and not self.negate

    def __str__(self) -> str:
        name = ("UP" if self.uniform else "P") + ("T" if self.index == TRUE_PREDICATE else str(self.index))
        return ("!" if self.negate else "") + name


@dataclass(frozen=True)
class Immediate:
    """A constant in the instruction: `value` holds its bits as an unsigned number.

    `style` says how it prints: unsigned, signed (32 bits), float or half (two float16 numbers).
    """

    value: int
    style: str = "unsigned"

    def __str__(self) -> str:
        if self.style == "float":
            return _float_text(struct.unpack("<f", struct.pack("<I", self.value))[0])
        if self.style == "half":
            low, high = struct.unpack("<2e", struct.pack("<I", self.value))
            return f"{_float_text(high)}, {_float_text(low)}"
        if self.style == "signed" and self.value >> 31:
            return f"-{(1 << 32) - self.value:#x}"
        return f"{self.value:#x}"


def _float_text(value: float) -> str:
    if math.isnan(value):
        return "-QNAN" if math.copysign(1.0, value) < 0 else "+QNAN"
    if math.isinf(value):
        return "-INF" if value < 0 else "+INF"
    return f"{value:.20g}"


@dataclass(frozen=True)
class Constant:
    """A word of a constant bank: c[bank][offset], the byte offset perhaps added to a register."""

    bank: int
    offset: int
    base: Register | None = None
    negate: bool = False
    absolute: bool = False

    def __str__(self) -> str:
        inner = _offset_text(self.offset, str(self.base) if self.base else "")
        text = f"c[{self.bank:#x}][{inner}]"
        if self.absolute:
            text = f"|{text}|"
        return ("-" if self.negate else "") + text


@dataclass(frozen=True)
class Address:
    """A memory address: base register (times a scale) + uniform register + byte offset.

    With a `descriptor` the uniform register pair describes the memory and is not added.
    """

    base: Register | None
    offset: int
    uniform: Register | None = None
    descriptor: Register | None = None
    scale: int = 1
    named: bool = True
    """Whether the descriptor is printed."""

    @property
    def _hides_base(self) -> bool:
        """Whether the base is an RZ that need not be printed, for there is something else to print."""
        if self.base is None or not self.base.is_zero or self.scale != 1:
            return False
        return self.uniform is not None or (bool(self.offset) and not self.base.suffix)

    def __str__(self) -> str:
        parts = []
        if self.base is not None and not self._hides_base:
            parts.append(f"{self.base}" + (f".X{self.scale}" if self.scale > 1 else ""))
        if self.uniform is not None:
            parts.append(str(self.uniform))
        inner = _offset_text(self.offset if parts else self.offset & 0xFFFFFF, "+".join(parts))
        return (f"desc[{self.descriptor}]" if self.descriptor and self.named else "") + f"[{inner}]"


def _offset_text(offset: int, prefix: str) -> str:
    if not prefix:
        return f"{offset:#x}"
    return prefix + (f"+{offset:#x}" if offset else "")


@dataclass(frozen=True)
class Special:
    """A special register, such as SR_TID.X, by its number."""

    index: int

    def __str__(self) -> str:
        return SPECIAL_REGISTERS.get(self.index, f"SR{self.index}")


@dataclass(frozen=True)
class Target:
    """The byte address, within the kernel's code, that a branch goes to."""

    address: int

    def __str__(self) -> str:
        return f"{self.address:#x}"


@dataclass(frozen=True)
class Named:
    """A numbered resource of another kind: a convergence barrier (B0), a scoreboard (SB0); or a name."""

    kind: str
    index: int | None = None

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}{self.index}"


Operand = Register | Predicate | Immediate | Constant | Address | Special | Target | Named

SPECIAL_REGISTERS = {
    0: "SR_LANEID",
    1: "SR_CLOCK",
    3: "SR_VIRTID",
    32: "SR_TID",
    33: "SR_TID.X",
    34: "SR_TID.Y",
    35: "SR_TID.Z",
    37: "SR_CTAID.X",
    38: "SR_CTAID.Y",
    39: "SR_CTAID.Z",
    40: "SR_NTID",
    50: "SR_SMEMSZ",
    56: "SR_EQMASK",
    57: "SR_LTMASK",
    58: "SR_LEMASK",
    59: "SR_GTMASK",
    60: "SR_GEMASK",
    67: "SR_VIRTUALSMID",
    80: "SR_CLOCKLO",
    81: "SR_CLOCKHI",
    82: "SR_GLOBALTIMERLO",
    83: "SR_GLOBALTIMERHI",
    136: "SR_CgaCtaId",
    255: "SRZ",
}
"""Special registers by number, as nvdisasm names them."""
