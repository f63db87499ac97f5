"""PTX to Python: one function per basic block, made of NumPy operations on whole rows of lanes.

The rows are named after their slot and dtype: `r5_f4` is the 32-bit slot 5 seen as float32, `d2_u8` the
64-bit slot 2 as uint64, `h0_i2` a 16-bit one, `p3_b1` a predicate, `t1_f4` scratch space. A function takes
the context `x` (the lanes that it runs on) and the rows that it names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType
from typing import Any

import numpy as np

from tilewave.emulator import arithmetic, halves
from tilewave.emulator.flow import BasicBlock, Slots, slot_class, written
from tilewave.emulator.fma import fma_down
from tilewave.emulator.fused import fused
from tilewave.emulator.layout import Layout
from tilewave.emulator.ptx import (
    Address,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Register,
    Special,
    Symbol,
    type_bits,
)
from tilewave.errors import UnknownInstructionError

DTYPES = {"pred": "b1", "f16": "f2", "f32": "f4", "f64": "f8"}
for _bits in (8, 16, 32, 64):
    DTYPES |= {f"u{_bits}": f"u{_bits // 8}", f"b{_bits}": f"u{_bits // 8}", f"s{_bits}": f"i{_bits // 8}"}
"""NumPy dtype code of each scalar PTX type that arithmetic knows."""

_PART = {1: "p", 16: "h", 32: "r", 64: "d"}

_UFUNCS = """
    add subtract multiply divide negative absolute bitwise_and bitwise_or bitwise_xor invert left_shift
    right_shift equal not_equal less less_equal greater greater_equal logical_and logical_or logical_xor
    logical_not minimum maximum copyto where isnan
"""
NAMESPACE: dict[str, Any] = {name: getattr(np, name) for name in _UFUNCS.split()}
NAMESPACE |= {"m": arithmetic, "halves": halves, "fma_down": fma_down, "fused": fused, "np": np}


@dataclass
class Access:
    """One memory instruction: what a message needs to name it, and how it is counted.

    `counted_width` is the width in bytes of the access that ptxas makes of it, 0 if another one includes it;
    `counted_offset` is where that wide access begins, relative to this one.
    """

    instruction: Instruction
    space: str
    width: int
    store: bool
    counted_width: int
    counted_offset: int = 0


@dataclass
class Group:
    """Shared-memory accesses of one basic block with the same base register: they are checked together."""

    accesses: list[tuple[int, Access]] = field(default_factory=list)  # offset in bytes, access
    emitted: bool = False

    @cached_property
    def low(self) -> int:
        """Smallest offset."""
        return min(offset for offset, _ in self.accesses)

    @cached_property
    def high(self) -> int:
        """Offset behind the last byte."""
        return max(offset + access.width for offset, access in self.accesses)

    @cached_property
    def alignment(self) -> int:
        """Largest natural alignment among the accesses."""
        return max(access.width for _, access in self.accesses)

    @cached_property
    def odd(self) -> bool:
        """Whether some offset is misaligned for its own access."""
        return any(offset % access.width for offset, access in self.accesses)

    @cached_property
    def stores(self) -> int:
        """How many of the accesses are stores."""
        return sum(access.store for _, access in self.accesses)

    @cached_property
    def counted(self) -> Counter[tuple[bool, int]]:
        """How many accesses of each kind (is a store, width in bytes) the hardware makes."""
        kinds = [(access.store, access.counted_width) for _, access in self.accesses if access.counted_width]
        return Counter(kinds)


@dataclass(frozen=True)
class Options:
    """What the generated code must do besides computing."""

    exact_fma: bool = False
    checked: bool = False  # every shared access through the race detector
    values: bool = True  # False: leave out what no address or branch depends on


@dataclass
class BlockCode:
    """Code of one basic block and the rows that it takes."""

    function: Callable[..., None]
    names: list[str]
    condition: str | None
    source: str
    fma_count: int


def unknown(
    instruction: Instruction, why: str = "the emulator does not execute this instruction"
) -> UnknownInstructionError:
    """The error for an instruction or a form of one that is not implemented."""
    return UnknownInstructionError(f"PTX line {instruction.line}: {why}: {instruction.text}")


class Emitter:
    """Writes the Python code of one basic block."""

    def __init__(
        self,
        slots: Slots,
        layout: Layout,
        options: Options,
        accesses: dict[int, Access],
        handlers: Mapping[str, Callable[[Emitter, Instruction], None]],
        *,
        asynchronous: bool = False,
    ) -> None:
        self.handlers = handlers
        self.asynchronous = asynchronous  # the code runs on a HopperMachine
        self.in_flight: dict[int, list[Register]] = {}  # by id: registers that a product may be using
        self.unfenced: dict[int, Register] = {}  # by id of a product: a register that lacks a fence
        self.slots = slots
        self.layout = layout
        self.options = options
        self.accesses = accesses  # by id of the instruction
        self.value_only: set[int] = set()  # ids of instructions that may be left out
        self.namespace: dict[str, Any] = {}
        self.names: dict[str, None] = {}
        self.lines: list[str] = []
        self.after: list[str] = []
        self.scratch = 0
        self.scratch_rows = 0
        self.guard: str | None = None
        self.versions: dict[Register, int] = {}
        self.groups: dict[tuple[Register | None, int], Group] = {}
        self.fma_count = 0
        self.instruction: Instruction | None = None

    # -- names ----------------------------------------------------------------------------------------------

    def use(self, name: str) -> str:
        """Make a row an argument of the function."""
        self.names[name] = None
        return name

    def constant(self, value: Any) -> str:
        """A name for a constant object."""
        name = f"k{len(self.namespace)}"
        self.namespace[name] = value
        return name

    def line(self, text: str) -> None:
        """Append a line of code."""
        self.lines.append(text)

    def temporary(self, dtype: str) -> str:
        """A scratch row, valid within the current instruction."""
        name = f"t{self.scratch}_{dtype}"
        self.scratch += 1
        self.scratch_rows = max(self.scratch_rows, self.scratch)
        return self.use(name)

    def row(self, register: Register, dtype: str) -> str:
        """The row of a register, seen as a dtype not wider than the register."""
        part = slot_class(register)
        if part == 1 and dtype != "b1":
            raise self.unknown(f"predicate {register.name} used as a number")
        if int(dtype[1:]) * 8 > part and dtype != "b1":
            raise self.unknown(f"register {register.name} is too narrow")
        return self.use(f"{_PART[part]}{self.slots.of[register]}_{dtype}")

    def unknown(self, why: str = "the emulator does not execute this instruction") -> UnknownInstructionError:
        """The error for the current instruction."""
        assert self.instruction is not None
        return unknown(self.instruction, why)

    # -- operands -------------------------------------------------------------------------------------------

    def source(self, operand: Operand, dtype: str) -> str:
        """An expression for an operand's value as a dtype: a row, or a constant."""
        if isinstance(operand, Register):
            return self.row(operand, dtype)
        if isinstance(operand, Negated):
            name = self.temporary("b1")
            self.line(f"logical_not({self.row(operand.register, 'b1')}, {name})")
            return name
        if isinstance(operand, Immediate):
            return self.constant(self.literal(operand, dtype))
        if isinstance(operand, Special):
            if dtype[0] == "f":
                raise self.unknown()
            return f"x.special({operand.name!r}, {dtype!r})"
        if isinstance(operand, Symbol):
            if operand.name in self.layout.global_names:
                return f"x.variable({operand.name!r}, {dtype!r})"
            address = self.layout.address(operand.name)
            if address is None:
                raise self.unknown(f"unknown name {operand.name}")
            return self.constant(np.array(address & ((1 << 8 * int(dtype[1:])) - 1), dtype=f"u{dtype[1:]}"))
        raise self.unknown("unknown operand")

    def literal(self, immediate: Immediate, dtype: str) -> np.ndarray[Any, Any]:
        """A constant as a 0-d array."""
        size = int(dtype[1:])
        if dtype[0] == "f":
            if not immediate.float_bits:
                return np.array(immediate.value, dtype=dtype)
            value = np.array(immediate.value, dtype=f"u{immediate.float_bits // 8}").view(
                f"f{immediate.float_bits // 8}"
            )
            return np.asarray(value.astype(dtype)) if immediate.float_bits != size * 8 else value
        if dtype == "b1":
            return np.array(bool(immediate.value))
        bits = immediate.value & ((1 << 8 * size) - 1)
        return np.asarray(np.array(bits, dtype=f"u{size}").view(dtype))

    def destination(self, operand: Operand, dtype: str) -> str:
        """The row to write a result into: a scratch row under a guard or for a narrower result.

        Code must read all its sources before it writes the row, which may be that of a source.
        """
        if not isinstance(operand, Register):
            if type(operand).__name__ == "Sink":
                return self.temporary(dtype)
            raise self.unknown("unknown destination")
        part = slot_class(operand)
        size = int(dtype[1:]) * 8
        if self.guard is None and (size == part or dtype == "b1"):
            return self.row(operand, dtype)
        temporary = self.temporary(dtype)
        full = dtype if dtype == "b1" else f"{dtype[0]}{part // 8}"
        if dtype[0] == "f" and size != part:
            raise self.unknown("a floating-point result for a register of another width")
        row = self.row(operand, full)
        where = f", where={self.guard}" if self.guard else ""
        self.after.append(f"copyto({row}, {temporary}{where}, casting='unsafe')")
        return temporary

    def call(self, function: str, result: str, *arguments: str) -> None:
        """`function` is a ufunc with an `out` argument."""
        self.line(f"{function}({', '.join(arguments)}, {result})")

    def assign(self, result: str, expression: str) -> None:
        """Store an expression's value in a row, converted as a C cast does."""
        self.line(f"copyto({result}, {expression}, casting='unsafe')")

    # -- instructions ---------------------------------------------------------------------------------------

    def emit(self, instruction: Instruction) -> None:
        """Write the code of one instruction (control flow is left to the scheduler)."""
        self.instruction = instruction
        self.scratch, self.guard, self.after = 0, None, []
        emitter = self.handlers.get(instruction.opcode)
        if emitter is None:
            raise self.unknown()
        if instruction.guard is not None and instruction.opcode not in ("bra", "ret", "exit"):
            self.guard = self.row(instruction.guard, "b1")
            if instruction.guard_negated:
                guard = self.temporary("b1")
                self.line(f"logical_not({self.guard}, {guard})")
                self.guard = guard
        self.check_products(instruction)
        if id(instruction) not in self.value_only or id(instruction) in self.accesses:
            emitter(self, instruction)
            self.lines.extend(self.after)
        elif instruction.opcode == "fma":
            self.count_fma(instruction)
        for register in written(instruction):
            self.versions[register] = self.versions.get(register, 0) + 1

    def check_products(self, instruction: Instruction) -> None:
        """Have the registers checked that a product in flight may be using."""
        if not self.options.values:
            return
        if busy := self.in_flight.get(id(instruction)):
            self.line(f"x.check_in_flight({self.constant(instruction)}, {self.constant(busy)})")
        if register := self.unfenced.get(id(instruction)):
            self.line(f"x.unfenced({self.constant(instruction)}, {self.constant(register)})")

    def count_fma(self, instruction: Instruction) -> None:
        """Count a float32 FMA: by block if all lanes make it."""
        if instruction.modifiers[-1] == "f32":
            if self.guard is None:
                self.fma_count += 1
            else:
                self.line(f"x.count_fma({self.guard})")

    def find_groups(self, instructions: list[Instruction]) -> None:
        """Collect the shared-memory accesses that can be checked together: unguarded, in words of 32 bits."""
        versions: dict[Register, int] = {}
        for instruction in instructions:
            access = self.accesses.get(id(instruction))
            if access is not None and self.groupable(instruction, access):
                key, offset = self.group_key(instruction, versions)
                self.groups.setdefault(key, Group()).accesses.append((offset, access))
            for register in written(instruction):
                versions[register] = versions.get(register, 0) + 1

    def groupable(self, instruction: Instruction, access: Access) -> bool:
        """Whether an access can take the fast path."""
        if self.options.checked or access.space != "shared" or instruction.guard is not None:
            return False
        if "shared::cluster" in instruction.modifiers:
            return False
        return instruction.opcode in ("ld", "st") and type_bits(instruction.modifiers[-1]) == 32

    def group_key(
        self, instruction: Instruction, versions: dict[Register, int]
    ) -> tuple[tuple[Register | None, int], int]:
        """Base register with its version, and the offset in bytes."""
        operand = instruction.operands[1 if instruction.opcode == "ld" else 0]
        assert isinstance(operand, Address)
        base, offset = self.base_and_offset(operand)
        return (base, versions.get(base, 0) if base else 0), offset

    def base_and_offset(self, operand: Address) -> tuple[Register | None, int]:
        """Split an address; a variable's address goes into the offset."""
        if isinstance(operand.base, Symbol):
            address = self.layout.address(operand.base.name)
            if address is None:
                raise self.unknown(f"unknown name {operand.base.name}")
            return None, address + operand.offset
        return operand.base, operand.offset

    def group(self, instruction: Instruction) -> tuple[str, int]:
        """Name of the index array of the access's group, and the access's word offset into it."""
        key, offset = self.group_key(instruction, self.versions)
        group = self.groups[key]
        name = f"g{list(self.groups).index(key)}"
        if not group.emitted:
            group.emitted = True
            base = key[0]
            row = "None" if base is None else self.row(base, "i4" if base.bits == 32 else "i8")
            self.line(f"{name} = x.shared_index({self.constant(group)}, {row})")
        return name, (offset - group.low) // 4

    def finish(self, block: BasicBlock) -> BlockCode:
        """Compile what was emitted."""
        condition = self.row(block.condition, "b1") if block.condition is not None else None
        names = list(self.names)
        body = "\n    ".join(self.lines or ["pass"])
        source = f"def block_{block.index}({', '.join(['x', *names])}):\n    {body}\n"
        code: CodeType = compile(source, f"<ptx block {block.index}>", "exec")
        namespace = {**NAMESPACE, **self.namespace}
        exec(code, namespace)
        return BlockCode(namespace[f"block_{block.index}"], names, condition, source, self.fma_count)
