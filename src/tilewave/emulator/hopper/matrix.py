"""The tensor cores as wgmma uses them: descriptors, fragments, and products that work until waited for.

A product is computed as late as it may be: when its warpgroup waits for its group (with a seed: sometimes at
once). Whoever overwrites its operands in shared memory before that spoils it, as on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewave.emulator.ptx import Instruction, Register
from tilewave.errors import EmulationError, MemoryFault, RaceError
from tilewave.precision.tensor_core import (
    HOPPER_BF16,
    HOPPER_F16,
    HOPPER_TF32,
    TensorCore,
    multiply_accumulate,
)

if TYPE_CHECKING:
    from tilewave.emulator.hopper.lanes import HopperLanes
    from tilewave.emulator.hopper.machine import HopperMachine

Array = npt.NDArray[Any]

GROUP = 128
ROWS = 64
_SWIZZLE_OF_MODE = (0, 128, 64, 32)


@dataclass(frozen=True)
class Format:
    """Element type of A and B: `k` elements a product, in `nbytes` each."""

    core: TensorCore
    k: int
    nbytes: int

    def values(self, raw: Array) -> Array:
        """Numbers of the bits in 16-byte pieces (or words), seen as elements of `nbytes`."""
        if self is F16:
            return raw.view(np.float16).astype(np.float64)
        if self is BF16:
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        # The hardware ignores the low 13 bits of a float32.
        return (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


F16 = Format(HOPPER_F16, 16, 2)
BF16 = Format(HOPPER_BF16, 16, 2)
TF32 = Format(HOPPER_TF32, 8, 4)


@dataclass(frozen=True)
class Descriptor:
    """A matrix in shared memory as a product reads it; offsets in bytes."""

    start: int
    leading: int
    stride: int
    swizzle: int

    @classmethod
    def of(cls, bits: int) -> Descriptor:
        """Take a 64-bit descriptor apart."""
        if bits >> 49 & 7:
            raise EmulationError(f"the matrix descriptor {bits:#x} has a base offset, which is not emulated")
        return cls(
            (bits & 0x3FFF) << 4,
            (bits >> 16 & 0x3FFF) << 4,
            (bits >> 32 & 0x3FFF) << 4,
            _SWIZZLE_OF_MODE[bits >> 62],
        )

    def pieces(self, extent: int, *, transposed: bool) -> Array:
        """Byte address of each 16-byte piece of a matrix of `extent` rows.

        K-major: (extent, 2), two pieces along K a row. MN-major (`transposed`): (extent / 8, 16), a piece
        holds eight rows of one k. Layouts as in the PTX ISA's table of canonical layouts.
        """
        width = self.swizzle or 16
        if not transposed:
            row, part = np.arange(extent)[:, None], np.arange(2)
            step = 16 if self.swizzle else self.leading
            address = row // 8 * self.stride + row % 8 * width + part * step
        else:
            part, k = np.arange(extent // 8)[:, None], np.arange(16)
            each = width // 16
            if self.swizzle:
                across, along = part // each * self.leading, k // 8 * self.stride
            else:
                across, along = part * self.stride, k // 8 * self.leading
            address = across + part % each * 16 + along + k % 8 * width
        address = address + self.start
        if self.swizzle:
            address ^= ((address >> 7) & (self.swizzle // 16 - 1)) << 4
        return address


@dataclass
class Product:
    """One `wgmma.mma_async` of one warpgroup, issued and not yet computed."""

    instruction: Instruction
    lanes: npt.NDArray[np.int64]
    slot: int
    format: Format
    columns: int
    accumulators: list[Array]  # rows of the register file
    a: Descriptor | list[Array]
    b: Descriptor
    transposed: tuple[bool, bool]
    negated: tuple[bool, bool]
    adds: bool
    registers: frozenset[Register]


@dataclass
class _Group:
    """Products of one warpgroup: those of the open group, and of each committed one, oldest first."""

    open: list[Product] = field(default_factory=list)
    committed: list[list[Product]] = field(default_factory=list)
    waited: int = 0  # groups that are done

    def registers(self) -> set[Register]:
        return {r for group in [*self.committed, self.open] for product in group for r in product.registers}

    def queue(self) -> list[Product]:
        return [product for group in [*self.committed, self.open] for product in group]


class MatrixUnits:
    """Products in flight of all warpgroups of a machine."""

    def __init__(self, machine: HopperMachine) -> None:
        self._machine = machine
        self._groups: dict[int, _Group] = {}  # by the id of a warpgroup's first lane
        self._computed: set[int] = set()  # ids of products in flight that are computed already

    def _of(self, first: int) -> _Group:
        return self._groups.setdefault(first, _Group())

    def issue(self, product: Product) -> None:
        """Add a product to its warpgroup's open group."""
        machine = self._machine
        group = self._of(int(product.lanes[0]))
        group.open.append(product)
        for operand, extent, transposed in (
            (product.a, ROWS, product.transposed[0]),
            (product.b, product.columns, product.transposed[1]),
        ):
            if isinstance(operand, Descriptor):
                pieces = self._pieces(product, operand, extent, transposed)
                if machine.ordering is not None:
                    machine.ordering.product_read(
                        product.lanes,
                        product.slot,
                        pieces,
                        group.waited + len(group.committed),
                        machine.current_line,
                        product.instruction.line,
                    )
        if machine.scatters and machine.rng.random() < 0.25:
            self._compute_up_to(group, product)

    def commit(self, ids: Array) -> None:
        """`wgmma.commit_group`."""
        for first in ids[::GROUP].tolist():
            group = self._of(first)
            group.committed.append(group.open)
            group.open = []

    def wait(self, ids: Array, newest: int) -> None:
        """`wgmma.wait_group`: compute all committed groups but the `newest`."""
        for first in ids[::GROUP].tolist():
            group = self._of(first)
            done = group.committed[: len(group.committed) - newest] if newest else group.committed
            for products in done:
                for product in products:
                    self._compute(product)
                    self._computed.discard(id(product))
            group.waited += len(done)
            group.committed = group.committed[len(done) :]
            if self._machine.ordering is not None:
                self._machine.ordering.products_done(np.arange(first, first + GROUP), group.waited)

    def check(self, lanes: HopperLanes, instruction: Instruction, registers: list[Register]) -> None:
        """A fault if one of the registers belongs to a product that has not been waited for."""
        firsts = np.unique(lanes.ids - lanes.threads % GROUP).tolist()
        for first in firsts:
            group = self._groups.get(first)
            if group is None:
                continue
            busy = group.registers()
            for register in registers:
                if register in busy:
                    product = next(p for p in group.queue() if register in p.registers)
                    raise RaceError(
                        f"PTX line {instruction.line}: {instruction.text}: {lanes.where(0)} touches "
                        f"{register.name}, which the product of PTX line {product.instruction.line} may "
                        f"still be using: no wgmma.wait_group has waited for it"
                    )

    def _compute_up_to(self, group: _Group, last: Product) -> None:
        for product in group.queue():
            self._compute(product)
            if product is last:
                return

    def _pieces(self, product: Product, operand: Descriptor, extent: int, transposed: bool) -> Array:
        pieces = operand.pieces(extent, transposed=transposed)
        machine = self._machine
        if int(pieces.min()) < machine.shared_start or int(pieces.max()) + 16 > machine.shared_end:
            i = product.instruction
            raise MemoryFault(
                f"PTX line {i.line}: {i.text}: a matrix from byte {operand.start} on, whose last is "
                f"{int(pieces.max()) + 15}, is not in {machine.shared.extent}; descriptors hold addresses as "
                f"the program's variables have them",
                lane=0,
                address=int(pieces.max()),
            )
        return pieces >> 4

    def _matrix(self, product: Product, operand: Descriptor, extent: int, transposed: bool) -> Array:
        """(extent, k) numbers of a matrix in shared memory."""
        machine = self._machine
        pieces = self._pieces(product, operand, extent, transposed)
        stride = machine.shared_stride // 4
        shared = machine.shared_words[product.slot * stride : (product.slot + 1) * stride].reshape(-1, 4)
        values = product.format.values(shared[pieces])
        if not transposed:
            return values.reshape(extent, product.format.k)
        # (extent / 8, k, 8): eight rows of one k lie together.
        return values.transpose(0, 2, 1).reshape(extent, product.format.k)

    def _compute(self, product: Product) -> None:
        if id(product) in self._computed:
            return
        self._computed.add(id(product))
        if isinstance(product.a, Descriptor):
            a = self._matrix(product, product.a, ROWS, product.transposed[0])
        else:
            a = fragment_of_a(product.format.values(np.stack(product.a)), product.format)
        b = self._matrix(product, product.b, product.columns, product.transposed[1])
        a = -a if product.negated[0] else a
        b = -b if product.negated[1] else b
        c = accumulator_matrix(np.stack(product.accumulators)) if product.adds else None
        result = multiply_accumulate(a, b.T, c, product.format.core)
        for row, values in zip(product.accumulators, accumulator_rows(result), strict=True):
            row[...] = values


def accumulator_matrix(rows: Array) -> Array:
    """(registers, 128) values of a warpgroup's accumulators as the (64, 2 * registers) matrix."""
    # Register i of thread t: row 16 warp + lane / 4 (+ 8), columns 8 (i / 4) + 2 (lane % 4) + i % 2.
    parts = rows.reshape(
        -1, 2, 2, 4, 8, 4
    )  # (n / 8, upper or lower eight rows, column, warp, lane / 4, lane % 4)
    return parts.transpose(3, 1, 4, 0, 5, 2).reshape(ROWS, -1)


def accumulator_rows(matrix: Array) -> Array:
    """The inverse of `accumulator_matrix`."""
    parts = matrix.reshape(4, 2, 8, -1, 4, 2)
    return parts.transpose(3, 1, 5, 0, 2, 4).reshape(-1, GROUP)


def fragment_of_a(values: Array, form: Format) -> Array:
    """The (64, k) matrix A of a warpgroup's four registers; `values` is (4, 128 * elements a register)."""
    each = 4 // form.nbytes
    # (columns 8 on, rows 8 on, warp, lane / 4, lane % 4, element)
    parts = values.reshape(2, 2, 4, 8, 4, each)
    return parts.transpose(2, 1, 3, 0, 4, 5).reshape(ROWS, form.k)
