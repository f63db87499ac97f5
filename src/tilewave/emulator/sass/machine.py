"""The state of one thread block: registers, predicates, memories, and how operands are read and written.

All threads of the block are lanes of NumPy arrays. A *uniform* array has one element a warp. Handlers of
instructions see a `Machine`, the instruction and the mask of the threads that execute it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewave.emulator.memory import POISON, LocalMemory, Mask, Memory, SharedMemory
from tilewave.emulator.sass.instruction import Cell, Instruction
from tilewave.emulator.sass.operands import (
    Address,
    Constant,
    Immediate,
    Operand,
    Predicate,
    Register,
    Special,
)
from tilewave.errors import UnknownInstructionError

WARP = 32

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]

_SIGN = np.uint32(0x80000000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_NO_WORDS = np.zeros(1, dtype=np.uint32)


class Machine:
    """Registers and memories of one block of `threads` threads, `warps` warps of 32 (the last one padded)."""

    def __init__(
        self,
        *,
        threads: int,
        block_dim: tuple[int, int, int],
        block_index: tuple[int, int, int],
        memory: Memory,
        shared_bytes: int,
        local_bytes: int,
        constants: dict[int, bytes],
    ) -> None:
        self.warps = -(-threads // WARP)
        self.lanes = self.warps * WARP
        self.exists: Mask = np.arange(self.lanes) < threads
        # Nothing has been written yet: every register reads as NaN, every predicate as false.
        self.registers: list[U32] = list(np.full((256, self.lanes), POISON, dtype=np.uint32))
        self.registers[255] = np.zeros(self.lanes, dtype=np.uint32)
        self.uniform: list[U32] = list(np.full((256, self.warps), POISON, dtype=np.uint32))
        self.predicates: list[Mask] = list(np.zeros((8, self.lanes), dtype=np.bool_))
        self.predicates[7] = np.ones(self.lanes, dtype=np.bool_)
        self.uniform_predicates: list[Mask] = list(np.zeros((8, self.warps), dtype=np.bool_))
        self.uniform_predicates[7] = np.ones(self.warps, dtype=np.bool_)
        self.memory = memory
        self.shared = SharedMemory(1, shared_bytes, self.lanes)
        self.local = LocalMemory(self.lanes, local_bytes)
        self.constants = constants
        self._banks = {bank: _padded(data) for bank, data in constants.items()}
        self.block_dim = block_dim
        self.block_index = block_index
        self.old_operands: dict[tuple[int, int], U32] = {}
        """Stale values that a reuse cache supplies to the current instruction, by operand slot and part."""
        self.started_copies: list[Callable[[Mask], None]] = []
        """Asynchronous copies of the instruction that has just executed: each makes its data arrive."""
        linear = np.arange(self.lanes, dtype=np.uint32)
        x, y, _ = block_dim
        self._thread_index = (linear % x, linear // x % y, linear // (x * y))

    # Masks.

    def guarded(self, instruction: Instruction, threads: Mask) -> Mask:
        """The threads that execute: those of the group whose guard holds."""
        guard = instruction.guard
        if guard.is_true:
            return threads
        active: Mask = threads & self.predicate(guard, per_thread=True)
        return active

    def warps_of(self, threads: Mask) -> Mask:
        """The warps that have a thread in the mask."""
        some: Mask = np.logical_or.reduce(threads.reshape(-1, WARP), axis=1)
        return some

    # Reading.

    def predicate(self, operand: Predicate, *, per_thread: bool) -> Mask:
        """A predicate's value, for every thread or (a uniform one, for uniform instructions) every warp."""
        value: Mask = (self.uniform_predicates if operand.uniform else self.predicates)[operand.index]
        if operand.uniform and per_thread:
            value = np.repeat(value, WARP)
        if operand.negate:
            value = np.logical_not(value)
        return value

    def raw(self, operand: Operand, part: int = 0, *, per_thread: bool = True) -> U32:
        """The bits of a source operand (its `part`-th register) before signs; not to be modified."""
        if isinstance(operand, Register):
            index = operand.zero if operand.is_zero else operand.index + part
            if operand.uniform:
                value = self.uniform_row(index, operand.zero)
                return np.repeat(value, WARP) if per_thread else value
            if self.old_operands and operand.slot is not None:
                return self.old_operands.get((operand.slot, part), self.registers[index])
            return self.registers[index]
        count = self.lanes if per_thread else self.warps
        if isinstance(operand, Immediate):
            return np.full(count, operand.value if part == 0 else 0, dtype=np.uint32)
        if isinstance(operand, Constant) and operand.base is None:
            return np.full(
                count, self.constant_word(operand.bank, operand.offset + 4 * part), dtype=np.uint32
            )
        raise UnknownInstructionError(f"the SASS interpreter cannot read operand {operand}")

    def uniform_row(self, index: int, zero: int) -> U32:
        """A uniform register of every warp."""
        return np.zeros(self.warps, dtype=np.uint32) if index == zero else self.uniform[index]

    def integer(self, operand: Operand, part: int = 0, *, per_thread: bool = True) -> U32:
        """A source operand as an integer, with its sign or inversion applied modulo 2^32."""
        value = self.raw(operand, part, per_thread=per_thread)
        if getattr(operand, "negate", False):
            return np.negative(value)
        if getattr(operand, "invert", False):
            return np.invert(value)
        return value

    def float32(self, operand: Operand) -> F32:
        """A source operand as float32, with absolute value and sign applied."""
        value = self.raw(operand)
        if getattr(operand, "absolute", False):
            value = value & _MAGNITUDE
        if getattr(operand, "negate", False):
            value = value ^ _SIGN
        return value.view(np.float32)

    def pair(self, operand: Operand, *, per_thread: bool = True) -> U64:
        """Two consecutive registers as a 64-bit integer; an immediate or RZ is extended with zeros."""
        low = self.raw(operand, 0, per_thread=per_thread).astype(np.uint64)
        high = self.raw(operand, 1, per_thread=per_thread).astype(np.uint64)
        value: U64 = low | high << np.uint64(32)
        return np.negative(value) if getattr(operand, "negate", False) else value

    def constant_word(self, bank: int, offset: int) -> int:
        """A 32-bit word of a constant bank; an error names what lies outside."""
        words = self._banks.get(bank, _NO_WORDS)
        if offset % 4 or not 0 <= offset < 4 * len(words):
            raise UnknownInstructionError(
                f"c[{bank:#x}][{offset:#x}] is outside the constant bank, which has {4 * len(words)} bytes"
            )
        return int(words[offset // 4])

    def address(self, operand: Address) -> npt.NDArray[np.int64]:
        """The byte address of every thread: 64 bits wide for a register pair, else 32."""
        base = operand.base
        if base is None:
            total = np.zeros(self.lanes, dtype=np.int64)
        elif base.count == 2:
            total = self.pair(base).view(np.int64)
        else:
            total = self.raw(base).view(np.int32).astype(np.int64) * operand.scale
        if operand.uniform is not None:
            if operand.uniform.count == 2:
                total = total + self.pair(operand.uniform).view(np.int64)
            else:
                total = total + self.raw(operand.uniform).view(np.int32)
        return total + operand.offset

    def special(self, operand: Special, *, per_thread: bool) -> U32:
        """A special register; an `UnknownInstructionError` for one that has no meaning here."""
        name = str(operand)
        axis = "XYZ".find(name[-1])
        if name.startswith("SR_TID.") and per_thread:
            return self._thread_index[axis].astype(np.uint32)
        count = self.lanes if per_thread else self.warps
        if name.startswith("SR_CTAID."):
            return np.full(count, self.block_index[axis], dtype=np.uint32)
        if name == "SR_LANEID" and per_thread:
            return (np.arange(self.lanes) % WARP).astype(np.uint32)
        if name in ("SRZ", "SR_CgaCtaId"):
            return np.zeros(count, dtype=np.uint32)
        masks: dict[str, Callable[[int], int]] = {
            "SR_EQMASK": lambda lane: 1 << lane,
            "SR_LTMASK": lambda lane: (1 << lane) - 1,
            "SR_LEMASK": lambda lane: (2 << lane) - 1,
            "SR_GTMASK": lambda lane: 0xFFFFFFFF & -(2 << lane),
            "SR_GEMASK": lambda lane: 0xFFFFFFFF & -(1 << lane),
        }
        if name in masks and per_thread:
            return np.array([masks[name](lane % WARP) for lane in range(self.lanes)], dtype=np.uint32)
        raise UnknownInstructionError(f"the SASS interpreter has no value for special register {name}")

    # Writing.

    def write(self, operand: Operand, value: npt.NDArray[Any], threads: Mask, part: int = 0) -> None:
        """Write a register (RZ swallows it) in the threads, or the warps, of the mask."""
        if not isinstance(operand, Register):
            raise UnknownInstructionError(f"the SASS interpreter cannot write operand {operand}")
        if operand.is_zero:
            return
        row = (self.uniform if operand.uniform else self.registers)[operand.index + part]
        np.copyto(row, value if value.dtype == np.uint32 else value.view(np.uint32), where=threads)

    def write_pair(self, operand: Operand, value: U64, threads: Mask) -> None:
        """Write a 64-bit value into two consecutive registers."""
        self.write(operand, value.astype(np.uint32), threads)
        self.write(operand, (value >> np.uint64(32)).astype(np.uint32), threads, 1)

    def write_predicate(self, operand: Operand, value: Mask, threads: Mask) -> None:
        """Write a predicate (PT swallows it)."""
        if not isinstance(operand, Predicate):
            raise UnknownInstructionError(f"the SASS interpreter cannot write operand {operand}")
        if operand.index != 7:
            rows = self.uniform_predicates if operand.uniform else self.predicates
            np.copyto(rows[operand.index], value, where=threads)

    def cells(self, kinds: Sequence[Cell]) -> list[npt.NDArray[Any]]:
        """The arrays behind some cells."""
        tables: dict[str, list[Any]] = {
            "R": self.registers,
            "UR": self.uniform,
            "P": self.predicates,
            "UP": self.uniform_predicates,
        }
        return [tables[kind][index] for kind, index in kinds]


def _padded(data: bytes) -> U32:
    return np.frombuffer(data + b"\0" * (-len(data) % 4), dtype="<u4")
