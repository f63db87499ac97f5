"""A parser for the PTX that NVRTC writes: text in, plain records out.

The parser knows the language's grammar, not its opcodes: which of them can be executed, and in which forms,
is decided by the code generator. It accepts typed (`.f32`) and untyped (`.b32`) registers alike, since a
register is only a number of bits.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

from tilewave.errors import EmulationError


@dataclass(frozen=True, eq=False)
class Register:
    """A virtual register; `bits` is 1 for a predicate. One object stands for it throughout its entry."""

    name: str
    bits: int


@dataclass(frozen=True)
class Immediate:
    """A literal: an integer, or the bit pattern of a floating-point constant (`float_bits` wide)."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True)
class Special:
    """A read-only special register such as `%tid.x`."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """The name of a variable, a parameter or a label."""

    name: str


@dataclass(frozen=True)
class Address:
    """`[base + offset]`; base is None for an absolute address."""

    base: Register | Symbol | None
    offset: int


@dataclass(frozen=True)
class TensorAddress:
    """`[map, {x, y, ...}]`: a tensor map's address and the coordinates of a tile in its tensor."""

    map: Address
    coordinates: Vector


@dataclass(frozen=True)
class Vector:
    """`{a, b, ...}`."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Negated:
    """`!%p`."""

    register: Register


@dataclass(frozen=True)
class Pair:
    """`%p|%q`: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Sink:
    """`_`: a destination or a source that does not matter."""


Operand = Register | Immediate | Special | Symbol | Address | TensorAddress | Vector | Negated | Pair | Sink


@dataclass(frozen=True)
class Instruction:
    """One instruction: `@guard opcode.modifiers operands;` on line `line` of the PTX."""

    line: int
    text: str
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None = None
    guard_negated: bool = False


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter: `type` as PTX writes it (`u64`), `nbytes` its size, `align` its alignment."""

    name: str
    type: str
    nbytes: int
    align: int
    pointer_align: int | None = None


@dataclass(frozen=True)
class Variable:
    """A variable in shared, local, global or constant memory; an `extern` shared one has size 0."""

    name: str
    space: str
    nbytes: int
    align: int
    extern: bool = False
    data: bytes | None = None


@dataclass
class Entry:
    """One kernel; `labels` maps a label to the index of the instruction behind it."""

    name: str
    line: int
    params: list[Parameter] = field(default_factory=list)
    registers: dict[str, Register] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass
class Module:
    """A parsed PTX file."""

    version: str
    target: str
    entries: dict[str, Entry]
    variables: dict[str, Variable]
    text: str


SPECIAL_REGISTERS = frozenset(
    [f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"]
    + [f"%lanemask_{kind}" for kind in ("eq", "lt", "le", "gt", "ge")]
    + ["%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%clock", "%clock64", "%globaltimer"]
    + ["%dynamic_smem_size", "%total_smem_size", "%gridid"]
    + [
        f"%{name}.{axis}"
        for name in ("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
        for axis in "xyz"
    ]
    + ["%cluster_ctarank", "%cluster_nctarank"]
)

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_NAME = r"[A-Za-z_$%][\w$]*"
_LABEL = re.compile(rf"({_NAME})\s*:(?!:)")
_GUARD = re.compile(r"@(!?)\s*([\w$%]+)\s+(.*)", re.DOTALL)
_OPCODE = re.compile(r"([a-z][\w]*)((?:\s*(?:\.|::)\s*[\w]+)*)\s*(.*)", re.DOTALL)
_INTEGER = re.compile(r"([+-]?)\s*(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?$")
_DECIMAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+)([eE][+-]?\d+)?$")
_REGISTERS = re.compile(r"\.reg\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(.*)", re.DOTALL)
_TYPE_BITS = {"pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16}
_TYPE_BITS |= {"b32": 32, "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32}
_TYPE_BITS |= {"b64": 64, "u64": 64, "s64": 64, "f64": 64, "b128": 128}


def type_bits(name: str) -> int:
    """Width in bits of a PTX type such as `u32`; KeyError if it is none."""
    return _TYPE_BITS[name]


class PtxSyntaxError(EmulationError):
    """The text is not PTX, or uses a construct that the parser does not know."""


def parse_ptx(text: str) -> Module:
    """Parse PTX as NVRTC writes it; raises `PtxSyntaxError` with line number and text."""
    return _Parser(text).module()


def _blank_comments(text: str) -> str:
    """Replace comments by spaces, keeping line numbers."""
    return _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


class _Parser:
    def __init__(self, text: str) -> None:
        self.original = text
        self.text = _blank_comments(text.rstrip("\0 \n"))
        self.position = 0
        self._line_position = 0
        self._line = 1

    # -- reading ------------------------------------------------------------------------------------------

    def line_of(self, position: int) -> int:
        """Line number of a position; positions only grow, so counting goes on where it stopped."""
        if position < self._line_position:
            return self.text.count("\n", 0, position) + 1
        self._line += self.text.count("\n", self._line_position, position)
        self._line_position = position
        return self._line

    def fail(self, message: str, position: int) -> PtxSyntaxError:
        line = self.line_of(position)
        source = self.original.split("\n")[line - 1].strip()
        return PtxSyntaxError(f"PTX line {line}: {message}: {source!r}")

    def skip_space(self) -> bool:
        """Move to the next character that is not white space; False at the end."""
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1
        return self.position < len(self.text)

    def read_until(self, stops: str) -> str:
        """Text up to one of the characters of `stops`, which is left unread."""
        start = self.position
        quoted = False
        for index in range(start, len(self.text)):
            character = self.text[index]
            if character == '"':
                quoted = not quoted
            elif not quoted and character in stops:
                self.position = index
                return self.text[start:index]
        raise self.fail(f"expected one of {stops!r}", start)

    # -- module level -------------------------------------------------------------------------------------

    def module(self) -> Module:
        version = target = ""
        entries: dict[str, Entry] = {}
        variables: dict[str, Variable] = {}
        while self.skip_space():
            start = self.position
            if match := re.compile(r"\.version\s+([\d.]+)").match(self.text, start):
                version, self.position = match.group(1), match.end()
            elif match := re.compile(r"\.target\s+([\w, ]+)").match(self.text, start):
                target, self.position = match.group(1).strip(), match.end()
            elif match := re.compile(r"\.address_size\s+(\d+)").match(self.text, start):
                if match.group(1) != "64":
                    raise self.fail("only 64-bit addresses are known", start)
                self.position = match.end()
            elif match := re.compile(r"(?:\.(?:visible|weak|extern)\s+)*\.(entry|func)\b").match(
                self.text, start
            ):
                self.position = match.end()
                entry = self.entry(match.group(1), start, variables)
                if entry is not None:
                    entries[entry.name] = entry
            elif match := re.compile(r"\.(file|loc|pragma)\b[^\n]*").match(self.text, start):
                self.position = match.end()
            elif match := re.compile(r"\.section\b").match(self.text, start):
                self.read_until("{")
                self.skip_braces()
            else:
                statement = self.read_until(";")
                self.position += 1
                variable = self.variable(statement, start)
                variables[variable.name] = variable
        if not version:
            raise PtxSyntaxError("not PTX: there is no .version directive")
        return Module(version, target, entries, variables, self.original)

    def skip_braces(self) -> None:
        depth = 0
        while True:
            self.read_until("{}")
            depth += 1 if self.text[self.position] == "{" else -1
            self.position += 1
            if depth == 0:
                return

    def entry(self, kind: str, start: int, shared: dict[str, Variable]) -> Entry | None:
        """Parse a kernel from behind its `.entry`; device functions are skipped (a call is an error)."""
        if kind == "func":
            self.read_until("{;")
            if self.text[self.position] == "{":
                self.skip_braces()
            else:
                self.position += 1
            return None
        header = self.read_until("{")
        match = re.match(rf"\s*({_NAME})\s*(?:\((.*?)\))?(.*)", header, re.DOTALL)
        if match is None:
            raise self.fail("an .entry without a name", start)
        entry = Entry(match.group(1), self.line_of(start), variables=dict(shared))
        for text in filter(None, (part.strip() for part in (match.group(2) or "").split(","))):
            entry.params.append(self.parameter(text, start))
        for name, values in re.findall(r"\.(\w+)\s+([\d,\s]+)", match.group(3)):
            entry.directives[name] = tuple(int(value) for value in values.split(",") if value.strip())
        self.position += 1
        _Body(self, entry).parse()
        return entry

    def parameter(self, text: str, start: int) -> Parameter:
        match = re.match(
            rf"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s*((?:\.\w+\s*(?:\d+\s+)?)*)({_NAME})\s*(?:\[(\d+)\])?$",
            text,
        )
        if match is None or match.group(2) not in _TYPE_BITS:
            raise self.fail(f"unknown form of parameter {text!r}", start)
        size = type_bits(match.group(2)) // 8
        pointer = re.search(r"\.ptr.*\.align\s+(\d+)", match.group(3))
        return Parameter(
            name=match.group(4),
            type=match.group(2),
            nbytes=size * int(match.group(5) or 1),
            align=int(match.group(1) or size),
            pointer_align=int(pointer.group(1)) if pointer else None,
        )

    def variable(self, statement: str, start: int) -> Variable:
        """`.extern .shared .align 16 .b8 name[];`, with initialisers for global and constant variables."""
        declaration, _, initial = statement.partition("=")
        match = re.match(
            rf"\s*((?:\.\w+\s+)*?)\.(shared|local|global|const)\s+(?:\.attribute\(\w+\)\s*)?(?:\.align\s+(\d+)\s+)?"
            rf"\.(\w+)\s+({_NAME})\s*((?:\[\d*\])*)\s*$",
            declaration,
        )
        if match is None or match.group(4) not in _TYPE_BITS:
            raise self.fail("unknown directive", start)
        qualifiers, space, align, kind, name, dimensions = match.groups()
        size = type_bits(kind) // 8
        count = 1
        for dimension in re.findall(r"\[(\d*)\]", dimensions):
            count *= int(dimension or 0)
        data = self.initial(initial, kind, start) if initial.strip() else None
        return Variable(name, space, size * count, int(align or size), ".extern" in qualifiers, data)

    def initial(self, text: str, kind: str, start: int) -> bytes:
        size = type_bits(kind) // 8
        data = b""
        for item in filter(None, (part.strip() for part in re.sub(r"[{}]", " ", text).split(","))):
            literal = parse_literal(item)
            if literal is None:
                raise self.fail(f"unknown initialiser {item!r}", start)
            data += (literal.value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        return data


def parse_literal(text: str) -> Immediate | None:
    """An integer or floating-point literal of PTX, or None."""
    if text[:2] in ("0f", "0F") and len(text) == 10:
        return Immediate(int(text[2:], 16), 32)
    if text[:2] in ("0d", "0D") and len(text) == 18:
        return Immediate(int(text[2:], 16), 64)
    if match := _INTEGER.match(text):
        digits = match.group(2)
        base = (
            16
            if digits[:2] in ("0x", "0X")
            else 2
            if digits[:2] in ("0b", "0B")
            else 8
            if digits[0] == "0"
            else 10
        )
        value = int(digits, base) if digits != "0" else 0
        return Immediate(-value if match.group(1) == "-" else value)
    if _DECIMAL.match(text):
        return Immediate(int.from_bytes(struct.pack("<d", float(text)), "little"), 64)
    return None


class _Body:
    """Parses the statements of one kernel; nested `{ }` scopes get their own register names and labels."""

    def __init__(self, parser: _Parser, entry: Entry) -> None:
        self.parser = parser
        self.entry = entry
        self.scopes: list[dict[str, str]] = [{}]  # names as written -> unique names
        self.ranges: list[dict[str, tuple[int, int]]] = [{}]  # prefix -> (bits, count) of `%r<10>`
        self.serial = 0

    def parse(self) -> None:
        parser = self.parser
        while True:
            if not parser.skip_space():
                raise parser.fail("the kernel has no closing brace", len(parser.text) - 1)
            start = parser.position
            character = parser.text[start]
            if character == "{":
                self.serial += 1
                self.scopes.append(self.labels_ahead(start + 1))
                self.ranges.append({})
                parser.position += 1
            elif character == "}":
                parser.position += 1
                self.scopes.pop()
                self.ranges.pop()
                if not self.scopes:
                    return
            elif match := _LABEL.match(parser.text, start):
                self.entry.labels[self.resolve(match.group(1))] = len(self.entry.instructions)
                parser.position = match.end()
            elif match := re.compile(r"\.(loc|file)\b[^\n]*").match(parser.text, start):
                parser.position = match.end()
            else:
                statement = parser.read_until(";")
                parser.position += 1
                self.statement(statement, start)

    def labels_ahead(self, start: int) -> dict[str, str]:
        """Labels of a nested scope, renamed so that a block of inline PTX may appear many times."""
        depth, end = 1, start
        while depth:
            end += 1
            if end >= len(self.parser.text):
                raise self.parser.fail("a scope has no closing brace", start)
            depth += {"{": 1, "}": -1}.get(self.parser.text[end], 0)
        labels = re.findall(rf"(?:^|[;{{}}\n])\s*({_NAME})\s*:(?!:)", self.parser.text[start:end])
        return {label: f"{label}.{self.serial}" for label in labels}

    def resolve(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def register(self, name: str) -> Register | None:
        for depth in range(len(self.scopes) - 1, -1, -1):
            if name in self.scopes[depth]:
                return self.entry.registers.get(self.scopes[depth][name])
            match = re.match(r"(.*?[^\d])(\d+)$", name)
            if match and match.group(1) in self.ranges[depth]:
                bits, count = self.ranges[depth][match.group(1)]
                if int(match.group(2)) < count:
                    return self.declare(name, bits, depth)
        return None

    def declare(self, name: str, bits: int, depth: int) -> Register:
        unique = name if depth == 0 else f"{name}.{self.serial}"
        self.scopes[depth][name] = unique
        register = Register(unique, bits)
        self.entry.registers[unique] = register
        return register

    def statement(self, text: str, start: int) -> None:
        text = text.strip()
        if not text:
            return
        if text.startswith(".reg"):
            self.registers(text, start)
        elif text.startswith(".pragma"):
            pass
        elif text.startswith("."):
            variable = self.parser.variable(text, start)
            self.entry.variables[variable.name] = variable
        else:
            self.entry.instructions.append(self.instruction(text, start))

    def registers(self, text: str, start: int) -> None:
        match = _REGISTERS.match(text)
        if match is None or match.group(1) not in _TYPE_BITS:
            raise self.parser.fail("unknown register declaration", start)
        bits = type_bits(match.group(1))
        for item in (part.strip() for part in match.group(2).split(",")):
            if ranged := re.match(r"([\w$%]+)<(\d+)>$", item):
                self.ranges[-1][ranged.group(1)] = (bits, int(ranged.group(2)))
            else:
                self.declare(item, bits, len(self.scopes) - 1)

    def instruction(self, text: str, start: int) -> Instruction:
        line = self.parser.line_of(start)
        shown = " ".join(text.split())
        guard, negated = None, False
        if match := _GUARD.match(text):
            negated = match.group(1) == "!"
            guard = self.register(match.group(2))
            if guard is None or guard.bits != 1:
                raise self.parser.fail(f"guard {match.group(2)!r} is no predicate", start)
            text = match.group(3)
        match = _OPCODE.match(text)
        if match is None:
            raise self.parser.fail("not an instruction", start)
        modifiers = tuple(re.findall(r"[\w]+(?:::[\w]+)*", match.group(2)))
        operands = tuple(self.operand(part, start) for part in _split_operands(match.group(3)))
        return Instruction(line, shown, match.group(1), modifiers, operands, guard, negated)

    def operand(self, text: str, start: int) -> Operand:
        text = text.strip()
        if text == "_":
            return Sink()
        if text.startswith(("{", "(")):
            return Vector(tuple(self.operand(part, start) for part in _split_operands(text[1:-1])))
        if text.startswith("["):
            parts = _split_operands(text[1:-1])
            if len(parts) == 2 and parts[1].startswith("{"):
                coordinates = self.operand(parts[1], start)
                assert isinstance(coordinates, Vector)
                return TensorAddress(self.address(parts[0], start), coordinates)
            return self.address(text[1:-1].strip(), start)
        if text.startswith("!"):
            register = self.register(text[1:].strip())
            if register is None:
                raise self.parser.fail(f"unknown register {text!r}", start)
            return Negated(register)
        if "|" in text:
            first, second = text.split("|", 1)
            return Pair(self.operand(first, start), self.operand(second, start))
        if text in SPECIAL_REGISTERS:
            return Special(text)
        register = self.register(text)
        if register is not None:
            return register
        literal = parse_literal(text)
        if literal is not None:
            return literal
        if text.startswith("%"):
            raise self.parser.fail(f"unknown register {text!r}", start)
        if re.fullmatch(_NAME, text):
            return Symbol(self.resolve(text))
        raise self.parser.fail(f"unknown operand {text!r}", start)

    def address(self, text: str, start: int) -> Address:
        match = re.fullmatch(r"([\w$%]+)\s*(?:([+-])\s*(.+))?", text)
        if match is None:
            raise self.parser.fail(f"unknown address {text!r}", start)
        offset = 0
        if match.group(3):
            literal = parse_literal(match.group(3).replace(" ", ""))
            if literal is None:
                raise self.parser.fail(f"unknown address {text!r}", start)
            offset = -literal.value if match.group(2) == "-" else literal.value
        base = self.operand(match.group(1), start)
        if isinstance(base, Immediate):
            return Address(None, base.value + offset)
        if not isinstance(base, Register | Symbol):
            raise self.parser.fail(f"unknown address {text!r}", start)
        return Address(base, offset)


def _split_operands(text: str) -> list[str]:
    """Split at the commas outside brackets and braces."""
    parts, depth, current = [], 0, ""
    for character in text:
        if character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        if character == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += character
    if current.strip():
        parts.append(current)
    return [part.strip() for part in parts]
