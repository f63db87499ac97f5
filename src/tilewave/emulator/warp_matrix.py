"""Matrices spread over the lanes of a warp: `mma.sync`, `ldmatrix`, `stmatrix`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewave.emulator.codegen import Access, Emitter
from tilewave.emulator.handlers import Handlers
from tilewave.emulator.hopper.matrix import BF16, F16, TF32, Format
from tilewave.emulator.memory_opcodes import address_source, items_of
from tilewave.emulator.ptx import Instruction, Operand
from tilewave.errors import EmulationError
from tilewave.precision.tensor_core import multiply_accumulate

if TYPE_CHECKING:
    from tilewave.emulator.lanes import Lanes

Array = npt.NDArray[Any]

WARP = 32
opcode = Handlers()
"""The opcodes of this file."""


def _whole_warps(x: Lanes, i: Instruction) -> int:
    if not x.full_warps:
        raise EmulationError(
            f"PTX line {i.line}: {i.text}: not all lanes of the warp of {x.where(0)} are here"
        )
    return x.warps


def load_matrices(x: Lanes, access: Access, addresses: Array, transposed: bool, results: list[Array]) -> None:
    """`ldmatrix`: lane 8 m + r gives the address of row r of matrix m, which goes to register m."""
    count = len(results)
    warps = _whole_warps(x, access.instruction)
    giving = np.arange(x.n) % WARP < 8 * count
    words = [np.zeros(x.n, dtype=np.uint32) for _ in range(4)]
    x.load(access, x.spread(addresses), words, giving)
    rows = np.stack(words, axis=1).view(np.uint16).reshape(warps, WARP, 8)[:, : 8 * count]
    matrices = rows.reshape(warps, count, 8, 8)
    if transposed:
        matrices = matrices.swapaxes(2, 3)
    pairs = np.ascontiguousarray(matrices).view(np.uint32).reshape(warps, count, WARP)
    for number, result in enumerate(results):
        result[...] = pairs[:, number].reshape(-1)


def store_matrices(
    x: Lanes, access: Access, addresses: Array, transposed: bool, sources: list[Array]
) -> None:
    """`stmatrix`: the reverse of `load_matrices`."""
    count = len(sources)
    warps = _whole_warps(x, access.instruction)
    pairs = np.stack([source.reshape(warps, WARP) for source in sources], axis=1)
    matrices = np.ascontiguousarray(pairs).view(np.uint16).reshape(warps, count, 8, 8)
    if transposed:
        matrices = matrices.swapaxes(2, 3)
    rows = np.zeros((warps, WARP, 8), dtype=np.uint16)
    rows[:, : 8 * count] = matrices.reshape(warps, 8 * count, 8)
    words = rows.reshape(-1, 8).view(np.uint32).reshape(x.n, 4)
    giving = np.arange(x.n) % WARP < 8 * count
    x.store(access, x.spread(addresses), list(np.ascontiguousarray(words.T)), giving)


def multiply(
    x: Lanes, i: Instruction, form: Format, a: list[Array], b: list[Array], c: list[Array]
) -> list[Array]:
    """`mma.sync` m16n8: the four registers of the result."""
    warps = _whole_warps(x, i)
    each = 4 // form.nbytes
    depth = 2 * len(a) * each
    # Register 2 h + g of A: rows 8 g on, columns 4 each h on; register h of B: rows of K 4 each h on.
    left = form.values(np.stack(a)).reshape(-1, 2, warps, 8, 4, each)
    left = left.transpose(2, 1, 3, 0, 4, 5).reshape(warps, 16, depth)
    right = form.values(np.stack(b)).reshape(-1, warps, 8, 4, each)
    right = right.transpose(1, 0, 3, 4, 2).reshape(warps, depth, 8)
    addend = np.stack([x.spread(part) for part in c]).reshape(2, 2, warps, 8, 4)
    addend = addend.transpose(2, 0, 3, 4, 1).reshape(warps, 16, 8)
    total = multiply_accumulate(left, right, addend, form.core).reshape(warps, 2, 8, 4, 2)
    return list(total.transpose(1, 4, 0, 2, 3).reshape(4, -1))


def _matrix_form(e: Emitter, i: Instruction) -> tuple[int, bool]:
    """Number of matrices, and whether they are transposed."""
    known = {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16"}
    strange = [m for m in i.modifiers if m not in known]
    count = next((int(m[1]) for m in i.modifiers if m in ("x1", "x2", "x4")), 0)
    if strange or not count or not {"shared", "shared::cta"} & set(i.modifiers) or e.guard is not None:
        raise e.unknown()
    return count, "trans" in i.modifiers


@opcode("ldmatrix")
def _ldmatrix(e: Emitter, i: Instruction) -> None:
    count, transposed = _matrix_form(e, i)
    items = items_of(e, i.operands[0], count)
    words = [e.temporary("u4") for _ in items]
    access = e.constant(e.accesses[id(i)])
    address = address_source(e, i.operands[1])
    e.line(f"wm.load_matrices(x, {access}, {address}, {transposed}, [{', '.join(words)}])")
    for item, word in zip(items, words, strict=True):
        e.assign(e.destination(item, "u4"), word)


@opcode("stmatrix")
def _stmatrix(e: Emitter, i: Instruction) -> None:
    count, transposed = _matrix_form(e, i)
    words = ", ".join(f"x.spread({e.source(item, 'u4')})" for item in items_of(e, i.operands[1], count))
    access = e.constant(e.accesses[id(i)])
    e.line(f"wm.store_matrices(x, {access}, {address_source(e, i.operands[0])}, {transposed}, [{words}])")


_SHAPES = {
    ("m16n8k16", "f16"): (F16, 4, 2),
    ("m16n8k8", "f16"): (F16, 2, 1),
    ("m16n8k16", "bf16"): (BF16, 4, 2),
    ("m16n8k8", "bf16"): (BF16, 2, 1),
    ("m16n8k8", "tf32"): (TF32, 4, 2),
    ("m16n8k4", "tf32"): (TF32, 2, 1),
}


@opcode("mma")
def _mma(e: Emitter, i: Instruction) -> None:
    modifiers = i.modifiers
    if len(modifiers) != 9 or modifiers[:2] != ("sync", "aligned") or modifiers[3:5] != ("row", "col"):
        raise e.unknown()
    shape = _SHAPES.get((modifiers[2], modifiers[6]))
    if shape is None or modifiers[5] != "f32" or modifiers[8] != "f32" or modifiers[6] != modifiers[7]:
        raise e.unknown("products of these types and this shape are not emulated")
    if e.guard is not None or len(i.operands) != 4:
        raise e.unknown()
    form, of_a, of_b = shape

    def rows(operand: Operand, count: int, dtype: str) -> str:
        items = items_of(e, operand, count)
        return "[" + ", ".join(f"x.spread({e.source(item, dtype)})" for item in items) + "]"

    a, b, c = rows(i.operands[1], of_a, "u4"), rows(i.operands[2], of_b, "u4"), rows(i.operands[3], 4, "f4")
    e.line(f"total = wm.multiply(x, {e.constant(i)}, {e.constant(form)}, {a}, {b}, {c})")
    for number, item in enumerate(items_of(e, i.operands[0], 4)):
        e.assign(e.destination(item, "f4"), f"total[{number}]")
