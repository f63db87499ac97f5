"""The instructions that the decoder knows, as data.

The 128-bit encoding is that of sm_80 to sm_90a. The low 12 bits are the opcode: nine bits of operation and
three of *form*, which say what the second and third source are:

| form | b | c |
|---|---|---|
| 1 | register at bit 32 | register at bit 64 |
| 2 / 3 / 7 | register at bit 64 | immediate / constant / uniform register at bit 32 |
| 4 / 5 / 6 | immediate / constant / uniform register at bit 32 | register at bit 64 |

Found by flipping single bits of compiled instructions and reading what nvdisasm makes of them; the tests
compare every instruction of every rung with nvdisasm.

An operand is written as a code: `d` destination at bit 16, `a` source at bit 24, `b` and `c` as above, `s`
the operand at bit 32 whatever its form; `pd`, `pe` destination predicates at bits 81 and 84; `ps`, `pt`, `px`
source predicates at bits 87, 77 and 68. Behind it may stand `-` (may be negated), `|` (negated or absolute),
`~` (inverted), `:2` (a register pair; `:m` as many registers as the memory access moves), `?` (printed only
if it is not PT or 0), `@74` (only there if bit 74 is set), `!73` (only if bit 73 is clear).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALL_FORMS = (1, 2, 3, 4, 5, 6, 7)
UNIFORM_FORMS = (1, 2, 4)
"""Forms of the uniform datapath: all its registers are uniform anyway."""


@dataclass(frozen=True)
class Modifier:
    """A field of the word whose value is printed behind the opcode, unless its name is empty.

    `upper` is where the field's upper bits lie, if it is in two pieces: (lowest bit, width).
    """

    bit: int
    width: int
    names: Mapping[int, str]
    upper: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Spec:
    """One instruction: its name, what modifies it, and its operands (see the module's text for the codes)."""

    name: str
    modifiers: tuple[Modifier, ...]
    operands: tuple[str, ...]
    uniform: bool = False
    signed_immediate: bool = False
    float_immediate: bool = False


def flag(bit: int, set_name: str, clear_name: str = "") -> Modifier:
    """A modifier of one bit."""
    return Modifier(bit, 1, {0: clear_name, 1: set_name})


def choice(bit: int, *names: str, default: int | None = None) -> Modifier:
    """A modifier whose values have names in order; that of `default` is not printed."""
    width = max(1, (len(names) - 1).bit_length())
    table = dict(enumerate(names))
    if default is not None:
        table[default] = ""
    return Modifier(bit, width, table)


TABLE: dict[int, tuple[Spec, int]] = {}
"""Opcode (the word's low 12 bits) -> its specification and its form."""


def _define(
    name: str,
    operation: int,
    forms: Sequence[int],
    modifiers: Sequence[Modifier],
    operands: str,
    *,
    uniform: bool = False,
    signed: bool = False,
    floating: bool = False,
) -> None:
    spec = Spec(name, tuple(modifiers), tuple(operands.split()), uniform, signed, floating)
    for form in forms:
        TABLE[operation | form << 9] = (spec, form)


def _define_exact(
    name: str,
    opcodes: Sequence[int],
    modifiers: Sequence[Modifier],
    operands: str,
    *,
    uniform: bool = False,
) -> None:
    spec = Spec(name, tuple(modifiers), tuple(operands.split()), uniform)
    for opcode in opcodes:
        TABLE[opcode] = (spec, opcode >> 9 & 7)


_FTZ = flag(80, "FTZ")
_SAT = flag(77, "SAT")
_ROUND = choice(78, "", "RM", "RP", "RZ")
_FMZ = flag(76, "FMZ")
_COMPARE = choice(76, "F", "LT", "EQ", "LE", "GT", "NE", "GE", "T")
_COMPARE_FLOAT = choice(
    76, "F", "LT", "EQ", "LE", "GT", "NE", "GE", "NUM", "NAN", "LTU", "EQU", "LEU", "GTU", "NEU", "GEU", "T"
)
_COMBINE = choice(74, "AND", "OR", "XOR")
_UNSIGNED = flag(73, "", "U32")
_X = flag(74, "X")

# Floating point.
_define("FFMA", 0x023, ALL_FORMS, [_FMZ, _FTZ, _ROUND, _SAT], "d a| b| c|", floating=True)
_define(
    "FMUL",
    0x020,
    (1, 4, 5, 6),
    [_FMZ, _FTZ, Modifier(84, 3, {4: ""}), _ROUND, _SAT],
    "d a| b|",
    floating=True,
)
# The second addend sits at bit 32 but is read through slot c.
_define("FADD", 0x021, (1, 2, 3, 7), [_FTZ, _ROUND, _SAT], "d a| e|", floating=True)
_define(
    "FMNMX", 0x009, (1, 4, 5, 6), [_FTZ, flag(81, "NAN"), flag(82, "XORSIGN")], "d a| b| ps", floating=True
)
_define("FSEL", 0x008, (1, 4, 5, 6), [_FTZ], "d a| b| ps", floating=True)
_define("FSETP", 0x00B, (1, 4, 5, 6), [_COMPARE_FLOAT, _FTZ, _COMBINE], "pd pe a| b| ps", floating=True)
_define("FCHK", 0x102, (1, 4, 5, 6), [], "pd a| b|", floating=True)
_MUFU = choice(74, "COS", "SIN", "EX2", "LG2", "RCP", "RSQ", "RCP64H", "RSQ64H", "SQRT", "TANH")
_define("MUFU", 0x108, (1, 4, 5, 6), [_MUFU], "d s|", floating=True)
_define("HFMA2.MMA", 0x035, (1, 2, 4), [], "d a- b c")
_define("HFMA2", 0x031, (1, 2, 4), [], "d a- b c")

# Conversions to and from float32.
_INTEGER_32 = Modifier(75, 2, {2: ""})
_define(
    "F2I",
    0x105,
    (1, 4, 5, 6),
    [_FTZ, flag(72, "", "U32"), _INTEGER_32, choice(78, "", "FLOOR", "CEIL", "TRUNC"), flag(77, "NTZ")],
    "d s|",
    floating=True,
)
_FLOAT_32 = Modifier(75, 2, {2: ""})
_FROM_FLOAT_32 = Modifier(84, 2, {2: ""})
_ROUND_INTEGRAL = choice(78, "", "FLOOR", "CEIL", "TRUNC")
_define(
    "FRND", 0x107, (1, 4, 5, 6), [_FTZ, _FLOAT_32, _FROM_FLOAT_32, _ROUND_INTEGRAL], "d s|", floating=True
)
_INTEGER = Modifier(74, 1, dict(enumerate(("U8", "S8", "U16", "S16", "U32", ""))), upper=(84, 2))
_WHOLE = Modifier(60, 2, {0: ""})
_define("I2F", 0x106, (1,), [_WHOLE, _FLOAT_32, _INTEGER, _ROUND], "d s")
_define("I2F", 0x106, (4, 5, 6), [_FLOAT_32, _INTEGER, _ROUND], "d s")
_INTEGER_64 = Modifier(74, 1, {6: "U64", 7: "S64"}, upper=(84, 2))
_define("I2F", 0x112, (1,), [_FLOAT_32, _INTEGER_64, _ROUND], "d s:2")
_define(
    "F2I",
    0x111,
    (1, 4, 5, 6),
    [
        _FTZ,
        Modifier(75, 2, {3: ""}),
        flag(72, "S64", "U64"),
        _FROM_FLOAT_32,
        _ROUND_INTEGRAL,
        flag(77, "NTZ"),
    ],
    "d:2 s|",
    floating=True,
)
_define(
    "I2FP",
    0x045,
    (1, 4, 5, 6),
    [Modifier(75, 2, {2: "F32"}), flag(74, "S32", "U32"), Modifier(84, 2, {2: ""})],
    "d s",
)

# Integers.
_define("IADD3", 0x010, ALL_FORMS, [_X], "d pd? pe? a- b- c- ps@74 pt@74", signed=True)
_define("IMAD", 0x024, ALL_FORMS, [_UNSIGNED, _X], "d a b c- ps@74", signed=True)
_define("IMAD.WIDE", 0x025, ALL_FORMS, [_UNSIGNED, _X], "d:2 pd? a b c:2- ps@74", signed=True)
_define("IMAD.HI", 0x027, ALL_FORMS, [_UNSIGNED, _X], "d pd? a b c:2- ps@74", signed=True)
_define("IABS", 0x013, (1, 4, 5, 6), [], "d s")
_define("IMNMX", 0x017, (1, 4, 5, 6), [_UNSIGNED], "d a b ps", signed=True)
_define("VIMNMX", 0x048, (1, 4, 5, 6), [flag(72, "", "U32"), flag(76, "RELU")], "d a b ps", signed=True)
_define("VIADD", 0x036, (1, 4, 5, 6), [], "d a b-")
_define("VIADDMNMX", 0x046, ALL_FORMS, [flag(72, "", "U32"), flag(76, "RELU")], "d a b- c ps", signed=True)
_define(
    "ISETP",
    0x00C,
    (1, 4, 5, 6),
    [_COMPARE, _UNSIGNED, _COMBINE, flag(72, "EX")],
    "pd pe a b ps px@72",
    signed=True,
)
_LEA = [flag(80, "HI"), _X, flag(73, "SX32")]
_define("LEA", 0x011, ALL_FORMS, _LEA, "d pd? a- b- c@80!73 shift ps@74")
_define("LOP3.LUT", 0x012, ALL_FORMS, [flag(80, "PAND")], "pd? d a b c lut ps")
_SHIFT_TYPE = choice(73, "S64", "U64", "S32", "U32")
_SHIFT = [flag(76, "R", "L"), flag(75, "W"), _SHIFT_TYPE, flag(80, "HI")]
_define("SHF", 0x019, ALL_FORMS, _SHIFT, "d a b c")
_define("PRMT", 0x016, ALL_FORMS, [choice(72, "", "F4E", "B4E", "RC8", "ECL", "ECR", "RC16")], "d a b c")
_define("POPC", 0x109, (1, 4, 5, 6), [], "d s~")
_define("FLO", 0x100, (1, 4, 5, 6), [_UNSIGNED, flag(74, "SH")], "d pd? s~")
_define("BREV", 0x101, (1, 4, 5, 6), [], "d s")

# Moves and predicates.
_define("MOV", 0x002, (1, 4, 5, 6), [], "d s quad?")
_define("SEL", 0x007, (1, 4, 5, 6), [], "d a b ps")
_define("PLOP3.LUT", 0x01C, (4,), [], "pd pe ps pt pu plut plut2")
_define("P2R", 0x003, (4,), [choice(76, "", "B1", "B2", "B3")], "d PR a b")
_define("R2P", 0x004, (4,), [choice(76, "", "B1", "B2", "B3")], "PR a b")
_define_exact("CS2R", [0x805], [flag(80, "", "32")], "d:s sr")
_define_exact("S2R", [0x919], [], "d sr")
_define_exact("R2UR", [0x3C2], [], "ud pd? a")
_define_exact("VOTE", [0x806], [choice(72, "ALL", "ANY", "EQ")], "dz? pdv ps")
_define_exact(
    "SHFL", [0x389, 0x589, 0x989, 0xF89], [choice(58, "IDX", "UP", "DOWN", "BFLY")], "pd d a lane clamp"
)

# The uniform datapath: the same encodings with bit 7 of the opcode set.
_define("UIADD3", 0x090, UNIFORM_FORMS, [_X], "d pd? pe? a- b- c- ps@74 pt@74", uniform=True, signed=True)
_define("UIMAD", 0x0A4, UNIFORM_FORMS, [_UNSIGNED, _X], "d a b c- ps@74", uniform=True, signed=True)
_define(
    "UIMAD.WIDE", 0x0A5, UNIFORM_FORMS, [_UNSIGNED, _X], "d:2 pd? a b c:2- ps@74", uniform=True, signed=True
)
_define(
    "UISETP",
    0x08C,
    (1, 4),
    [_COMPARE, _UNSIGNED, _COMBINE, flag(72, "EX")],
    "pd pe a b ps px@72",
    uniform=True,
    signed=True,
)
_define("ULEA", 0x091, UNIFORM_FORMS, _LEA, "d pd? a- b- c@80!73 shift ps@74", uniform=True)
_define("ULOP3.LUT", 0x092, UNIFORM_FORMS, [flag(80, "PAND")], "pd? d a b c lut ps", uniform=True)
_define("USHF", 0x099, UNIFORM_FORMS, _SHIFT, "d a b c", uniform=True)
_define(
    "UPRMT",
    0x096,
    UNIFORM_FORMS,
    [choice(72, "", "F4E", "B4E", "RC8", "ECL", "ECR", "RC16")],
    "d a b c",
    uniform=True,
)
_define("USEL", 0x087, (1, 4), [], "d a b ps", uniform=True)
_define("UMOV", 0x082, (4, 6), [], "d s", uniform=True)
_define("UPOPC", 0x0BF, (1, 4), [], "d s~", uniform=True)
_define("UFLO", 0x0BD, (1, 4), [_UNSIGNED, flag(74, "SH")], "d pd? s~", uniform=True)
_define_exact("S2UR", [0x9C3], [], "ud sr", uniform=True)
_define_exact("VOTEU", [0x886], [choice(72, "ALL", "ANY", "EQ")], "ud updv ps")

# Memory.
_SIZE = choice(73, "U8", "S8", "U16", "S16", "", "64", "128")
_EVICT = choice(84, "EF", "", "EL", "LU", "EU", "NA", default=1)
_E = flag(72, "E")
_PREFETCH = choice(68, "", "LTC64B", "LTC128B", "LTC256B")
_ORDER_LOAD = Modifier(
    77, 4, {0: "", 4: "CONSTANT", 5: "STRONG.SM", 6: "STRONG.GPU.PRIVATE", 7: "STRONG.GPU", 10: "STRONG.SYS"}
)
_ORDER = Modifier(
    77,
    4,
    {
        0: "",
        4: "STRONG.SM.PRIVATE",
        5: "STRONG.SM",
        6: "STRONG.GPU.PRIVATE",
        7: "STRONG.GPU",
        10: "STRONG.SYS",
    },
)
_define_exact("LDC", [0xB82], [_SIZE, choice(78, "", "IL", "IS", "ISL")], "d:m const")
_define_exact("ULDC", [0xAB9], [_SIZE], "ud:m const", uniform=True)
_define_exact("LDG", [0x381, 0x981], [_E, _EVICT, _PREFETCH, _SIZE, _ORDER_LOAD], "d:m pd? global ld?")
_define_exact("STG", [0x385, 0x386, 0x985, 0x986], [_E, _EVICT, _SIZE, _ORDER], "global_st data:m")
_define_exact("LDS", [0x984], [_SIZE], "d:m shared")
_define_exact("STS", [0x388, 0x988], [_SIZE], "shared_st data:m")
_define_exact("LDL", [0x983], [_EVICT, _SIZE], "d:m local")
_define_exact("STL", [0x387, 0x987], [_EVICT, _SIZE], "local_st data:m")
_define_exact(
    "LDGSTS",
    [0xFAE],
    [
        flag(70, "E"),
        flag(81, "", "BYPASS"),
        _EVICT,
        choice(71, "", "LTC64B", "LTC128B", "LTC256B"),
        _SIZE,
        flag(82, "ZFILL"),
    ],
    "copy_to copy_from ps?",
)
_ATOM_OP = choice(87, "ADD", "MIN", "MAX", "INC", "DEC", "AND", "OR", "XOR", "EXCH")
_ATOM_TYPE = choice(73, "", "S32", "64", "S64")
_define_exact("ATOMG", [0x3A8, 0x9A8], [_E, _ATOM_OP, _EVICT, _ATOM_TYPE, _ORDER], "pd d:m global_st data:m")
_define_exact(
    "ATOMG",
    [0x9A3],
    [_E, _ATOM_OP, _EVICT, Modifier(73, 3, {1: "F32.FTZ.RN"}), _ORDER],
    "pd d global_st data",
)
_RED_OP = choice(87, "ADD", "MIN", "MAX", "INC", "DEC", "AND", "OR", "XOR")
_define_exact("REDG", [0x98E], [_E, _RED_OP, _EVICT, _ATOM_TYPE, _ORDER], "global_st data:m")
_define_exact("ATOMS", [0x38C, 0x98C], [_ATOM_OP, _ATOM_TYPE], "d:m shared_st data:m")
_define_exact("CCTL", [0x98F], [Modifier(87, 4, {4: "IVALL"})], "")

# Control.
_define_exact("BRA", [0x947], [choice(32, "", "U", "DIV", "CONV")], "ps? target")
_define_exact("CALL.REL", [0x944], [flag(86, "NOINC")], "ps? target")
_define_exact("RET.REL", [0x950], [flag(86, "NODEC")], "ps? a target")
_define_exact("BSSY", [0x945], [], "ps? B starget")
_define_exact("BSYNC", [0x941], [], "ps? B")
_define_exact("BREAK", [0x942], [], "ps? B")
_define_exact("WARPSYNC", [0x348, 0x948], [Modifier(72, 2, {0: "", 1: "EXCLUSIVE", 2: "ALL"})], "s")
_define_exact("EXIT", [0x94D], [], "ps?")
_define_exact("NOP", [0x918], [], "")
_define_exact("YIELD", [0x946], [], "")
_define_exact(
    "BAR",
    [0xB1D],
    [
        Modifier(74, 5, {0: "SYNC", 8: "ARV", 16: "RED.POPC", 17: "RED.AND", 18: "RED.OR"}),
        flag(80, "DEFER_BLOCKING"),
    ],
    "bar threads? ps@78!77",
)
_define_exact("B2R", [0x31C], [Modifier(77, 2, {2: "RESULT"})], "d pd?")
_SCOPE = choice(76, "CTA", "SM", "GPU", "SYS", "", "VC", "CTA.PARTIAL")
_define_exact("MEMBAR", [0x992], [choice(79, "SC", "ALL", "", "MMIO"), _SCOPE], "")
_define_exact("ERRBAR", [0x9AB], [], "")
_define_exact("CGAERRBAR", [0x5AB], [], "")
_define_exact("LDGDEPBAR", [0x9AF], [], "")
_define_exact("DEPBAR", [0x91A], [flag(47, "LE")], "SB depth sbset?")
