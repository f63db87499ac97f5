"""Integer and predicate instructions, of the vector and of the uniform datapath."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tilewave.emulator.memory import Mask
from tilewave.emulator.sass.instruction import Instruction
from tilewave.emulator.sass.machine import U32, U64, Machine
from tilewave.emulator.sass.operands import Immediate, Named, Operand, Predicate, Register
from tilewave.errors import UnknownInstructionError

_32 = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)

Spoil = Callable[[], None]
"""Puts poison where an instruction would have put its result, because a source changed under its hands."""
Handler = Callable[[Machine, Instruction, Mask], Spoil | None]
"""Executes an instruction for the threads (of uniform instructions: the warps) of a mask."""


def unsupported(instruction: Instruction, what: str) -> UnknownInstructionError:
    """An error for a form of a known instruction that the interpreter does not execute."""
    return UnknownInstructionError(
        f"the SASS interpreter does not execute {what}: {instruction.text} at {instruction.address:#06x}, "
        f"word {instruction.word:#034x}"
    )


def _is_vector(instruction: Instruction) -> bool:
    return not instruction.opcode.startswith("U")


def _split(instruction: Instruction) -> tuple[list[Predicate], Operand, list[Operand], list[Predicate]]:
    """Destination predicates, destination register, sources, source predicates."""
    written = [instruction.operands[i] for i in sorted(instruction.destinations)]
    read = [o for i, o in enumerate(instruction.operands) if i not in instruction.destinations]
    registers = [o for o in written if isinstance(o, Register)]
    return (
        [o for o in written if isinstance(o, Predicate)],
        registers[0] if registers else Named("none"),
        [o for o in read if not isinstance(o, Predicate)],
        [o for o in read if isinstance(o, Predicate)],
    )


def iadd3(m: Machine, i: Instruction, threads: Mask) -> None:
    """d = a + b + c (+ carries in with .X); the predicates take the carry out."""
    vector = _is_vector(i)
    carries, d, sources, carries_in = _split(i)
    total = np.zeros(m.lanes if vector else m.warps, dtype=np.uint64)
    for source in sources:
        value = m.raw(source, per_thread=vector)
        if getattr(source, "invert", False):
            total += np.invert(value)
        elif getattr(source, "negate", False):
            total += np.invert(value).astype(np.uint64) + np.uint64(1)
        else:
            total += value
    for carry in carries_in:
        total += m.predicate(carry, per_thread=vector)
    over = total >> _32
    for level, predicate in enumerate(carries, start=1):
        m.write_predicate(predicate, over >= level, threads)
    m.write(d, total.astype(np.uint32), threads)


def imad(m: Machine, i: Instruction, threads: Mask) -> None:
    """d = low 32 bits of a b + c."""
    vector = _is_vector(i)
    _, d, (a, b, c), carries_in = _split(i)
    value = m.integer(a, per_thread=vector) * m.integer(b, per_thread=vector)
    value = value + m.integer(c, per_thread=vector)
    for carry in carries_in:
        value = value + m.predicate(carry, per_thread=vector).astype(np.uint32)
    m.write(d, value, threads)


def _wide_product(m: Machine, i: Instruction, a: Operand, b: Operand, vector: bool) -> U64:
    x, y = m.integer(a, per_thread=vector), m.integer(b, per_thread=vector)
    if i.has("U32"):
        return x.astype(np.uint64) * y.astype(np.uint64)
    product: U64 = (x.view(np.int32).astype(np.int64) * y.view(np.int32).astype(np.int64)).view(np.uint64)
    return product


def _addend(m: Machine, i: Instruction, c: Operand, vector: bool) -> U64:
    value = m.pair(c, per_thread=vector)
    # An immediate addend of a signed multiply-add is extended by its sign.
    if isinstance(c, Immediate) and not i.has("U32"):
        value = value.astype(np.uint32).view(np.int32).astype(np.int64).view(np.uint64)
    return value


def _wide_sum(
    m: Machine, i: Instruction, a: Operand, b: Operand, c: Operand, vector: bool
) -> tuple[U64, Mask]:
    """a b + c in 64 bits, and the carry out of them."""
    product = _wide_product(m, i, a, b, vector)
    total = product + _addend(m, i, c, vector)
    return total, total < product


def imad_wide(m: Machine, i: Instruction, threads: Mask) -> None:
    """d (64 bits) = a b + c (64 bits); the predicate takes the carry out."""
    vector = _is_vector(i)
    carries, d, (a, b, c), carries_in = _split(i)
    if carries_in:
        raise unsupported(i, "a wide multiply-add with a carry")
    total, carry = _wide_sum(m, i, a, b, c, vector)
    m.write_predicate(carries[0], carry, threads)
    m.write_pair(d, total, threads)


def imad_hi(m: Machine, i: Instruction, threads: Mask) -> None:
    """d = high 32 bits of a b + c (64 bits); the predicate takes the carry out of all 64 bits."""
    carries, d, (a, b, c), carries_in = _split(i)
    if carries_in:
        raise unsupported(i, "a high multiply-add with a carry")
    total, carry = _wide_sum(m, i, a, b, c, True)
    m.write_predicate(carries[0], carry, threads)
    m.write(d, (total >> _32).astype(np.uint32), threads)


_COMPARISONS: dict[str, Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], Mask]] = {
    "F": lambda a, b: np.zeros(a.shape, dtype=np.bool_),
    "LT": np.less,
    "EQ": np.equal,
    "LE": np.less_equal,
    "GT": np.greater,
    "NE": np.not_equal,
    "GE": np.greater_equal,
    "T": lambda a, b: np.ones(a.shape, dtype=np.bool_),
}


def combine(i: Instruction, value: Mask, other: Mask) -> Mask:
    """A comparison joined with another predicate, as .AND, .OR or .XOR say."""
    if i.has("OR"):
        return value | other
    return value ^ other if i.has("XOR") else value & other


def isetp(m: Machine, i: Instruction, threads: Mask) -> None:
    """Compare integers; .EX is the upper word of a 64-bit comparison."""
    vector = _is_vector(i)
    (first, second), _, (a, b), (other, *lower) = _split(i)
    x, y = m.integer(a, per_thread=vector), m.integer(b, per_thread=vector)
    if not i.has("U32"):
        x, y = x.view(np.int32), y.view(np.int32)
    left, right = x.astype(np.int64), y.astype(np.int64)
    result = _COMPARISONS[i.modifiers[0]](left, right)
    if i.has("EX"):
        result = np.where(left == right, m.predicate(lower[0], per_thread=vector), result)
    joined = m.predicate(other, per_thread=vector)
    complement = combine(i, ~result, joined)
    m.write_predicate(first, combine(i, result, joined), threads)
    m.write_predicate(second, complement, threads)


def lea(m: Machine, i: Instruction, threads: Mask) -> None:
    """d = (a << shift) + b; .HI takes the upper half of the shifted pair (c, a), or of a's sign (.SX32)."""
    vector = _is_vector(i)
    carries, d, (a, b, *rest), carries_in = _split(i)
    shift = rest[-1]
    assert isinstance(shift, Immediate)
    wide = m.raw(a, per_thread=vector).astype(np.uint64)
    if i.has("SX32"):
        wide = m.raw(a, per_thread=vector).view(np.int32).astype(np.int64).view(np.uint64)
    elif i.has("HI"):
        wide = wide | m.raw(rest[0], per_thread=vector).astype(np.uint64) << _32
    if getattr(a, "negate", False):
        wide = np.negative(wide)
    shifted = wide << np.uint64(shift.value)
    if i.has("HI"):
        shifted = shifted >> _32
    total = (shifted & _LOW) + m.integer(b, per_thread=vector)
    for carry in carries_in:
        total = total + m.predicate(carry, per_thread=vector)
    m.write_predicate(carries[0], total >> _32 != 0, threads)
    m.write(d, total.astype(np.uint32), threads)


def lop3(m: Machine, i: Instruction, threads: Mask) -> None:
    """d = a bitwise function of a, b and c, given as a truth table; the predicate: is it not 0."""
    vector = _is_vector(i)
    (predicate,), d, (a, b, c, table), (other,) = _split(i)
    assert isinstance(table, Immediate)
    value = _truth_table(table.value, *(m.raw(x, per_thread=vector) for x in (a, b, c)))
    joined = m.predicate(other, per_thread=vector)
    some = value != 0
    m.write_predicate(predicate, some & joined if i.has("PAND") else some | joined, threads)
    m.write(d, value, threads)


def _truth_table(table: int, a: U32, b: U32, c: U32) -> U32:
    if table == 0xC0:
        return a & b
    value = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            term = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
            value |= term
    return value


def plop3(m: Machine, i: Instruction, threads: Mask) -> None:
    """Two predicates, each any function of three predicates."""
    (first, second), _, (table, table2), sources = _split(i)
    assert isinstance(table, Immediate)
    assert isinstance(table2, Immediate)
    values = [m.predicate(p, per_thread=True).astype(np.uint32) for p in sources]
    for predicate, wanted in ((first, table), (second, table2)):
        m.write_predicate(predicate, _truth_table(wanted.value, *values) & np.uint32(1) != 0, threads)


def shf(m: Machine, i: Instruction, threads: Mask) -> None:
    """Funnel shift of the pair (c, a) by b; .HI takes the upper word of the result."""
    vector = _is_vector(i)
    _, d, (a, b, c), _ = _split(i)
    pair = (
        m.raw(a, per_thread=vector).astype(np.uint64) | m.raw(c, per_thread=vector).astype(np.uint64) << _32
    )
    limit = np.uint32(64 if i.has("U64") or i.has("S64") else 32)
    amount = m.raw(b, per_thread=vector)
    amount = amount & (limit - np.uint32(1)) if i.has("W") else np.minimum(amount, limit)
    # Shifting 64 bits by 64 is undefined in NumPy: go in two steps.
    half = (amount >> np.uint32(1)).astype(np.uint64)
    rest = amount.astype(np.uint64) - half
    if i.has("L"):
        value = pair << half << rest
    elif i.has("S32") or i.has("S64"):
        value = (pair.view(np.int64) >> half.view(np.int64) >> rest.view(np.int64)).view(np.uint64)
    else:
        value = pair >> half >> rest
    m.write(d, (value >> _32 if i.has("HI") else value).astype(np.uint32), threads)


def minmax(m: Machine, i: Instruction, threads: Mask) -> None:
    """The smaller of a and b (VIADDMNMX: of a + b and c) where the predicate holds, else the larger.

    .RELU: at least 0.
    """
    _, d, sources, (smaller,) = _split(i)
    values = [m.integer(s) for s in sources]
    if i.opcode == "VIADDMNMX":
        values = [values[0] + values[1], values[2]]
    x, y = values if i.has("U32") else [v.view(np.int32) for v in values]
    chosen = np.where(m.predicate(smaller, per_thread=True), np.minimum(x, y), np.maximum(x, y))
    m.write(d, np.maximum(chosen, 0) if i.has("RELU") else chosen, threads)


def viadd(m: Machine, i: Instruction, threads: Mask) -> None:
    """d = a + b."""
    _, d, (a, b), _ = _split(i)
    m.write(d, m.integer(a) + m.integer(b), threads)


def iabs(m: Machine, i: Instruction, threads: Mask) -> None:
    """d = |a| (of the most negative number: itself)."""
    m.write(i.operands[0], np.abs(m.raw(i.operands[1]).view(np.int32)), threads)


def select(m: Machine, i: Instruction, threads: Mask) -> None:
    """d = a where the predicate holds, else b."""
    vector = _is_vector(i)
    _, d, (a, b), (which,) = _split(i)
    chosen = np.where(
        m.predicate(which, per_thread=vector), m.raw(a, per_thread=vector), m.raw(b, per_thread=vector)
    )
    m.write(d, chosen, threads)


def prmt(m: Machine, i: Instruction, threads: Mask) -> None:
    """d = four bytes picked from the pair (c, a) by the nibbles of b; a nibble's top bit spreads the sign."""
    if i.modifiers:
        raise unsupported(i, "a byte permutation with a mode")
    vector = _is_vector(i)
    _, d, (a, b, c), _ = _split(i)
    pair = (
        m.raw(a, per_thread=vector).astype(np.uint64) | m.raw(c, per_thread=vector).astype(np.uint64) << _32
    )
    selector = m.raw(b, per_thread=vector)
    value = np.zeros_like(selector)
    for byte in range(4):
        nibble = selector >> np.uint32(4 * byte) & np.uint32(15)
        picked = (pair >> ((nibble & np.uint32(7)) * np.uint32(8)).astype(np.uint64)).astype(np.uint32)
        picked &= np.uint32(255)
        picked = np.where(nibble & 8 != 0, np.where(picked & 0x80 != 0, np.uint32(255), np.uint32(0)), picked)
        value |= picked << np.uint32(8 * byte)
    m.write(d, value, threads)


def _bit_count(value: U32) -> U32:
    bits = np.unpackbits(value.view(np.uint8).reshape(-1, 4), axis=1).sum(axis=1)
    count: U32 = bits.astype(np.uint32)
    return count


def popc(m: Machine, i: Instruction, threads: Mask) -> None:
    """d = number of bits that are set."""
    d, a = i.operands
    m.write(d, _bit_count(m.integer(a, per_thread=_is_vector(i))), threads)


def flo(m: Machine, i: Instruction, threads: Mask) -> None:
    """d = position of the highest set bit (of a negative signed number: clear bit); all ones without one."""
    predicates, d, (a,), _ = _split(i)
    if predicates[0].index != 7:
        raise unsupported(i, "this search with a predicate")
    value = m.integer(a, per_thread=_is_vector(i))
    if not i.has("U32"):
        value = np.where(value >> np.uint32(31) != 0, ~value, value)
    _, exponent = np.frexp(value.astype(np.float64))
    position = exponent.astype(np.uint32) - np.uint32(1)
    if i.has("SH"):
        position = np.where(value != 0, np.uint32(31) - position, position)
    m.write(d, position, threads)


def brev(m: Machine, i: Instruction, threads: Mask) -> None:
    """d = a with its bits in reverse order."""
    d, a = i.operands
    bits = np.unpackbits(m.raw(a).view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    m.write(d, np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(np.uint32)[:, 0], threads)


def move(m: Machine, i: Instruction, threads: Mask) -> None:
    """d = a."""
    m.write(i.operands[0], m.raw(i.operands[1], per_thread=_is_vector(i)), threads)


def p2r(m: Machine, i: Instruction, threads: Mask) -> None:
    """d = a with the chosen bits of one of its bytes replaced by the predicates P0 to P6."""
    d, _, a, chosen = i.operands
    assert isinstance(chosen, Immediate)
    packed = np.zeros(m.lanes, dtype=np.uint32)
    for index in range(7):
        packed |= m.predicates[index].astype(np.uint32) << np.uint32(index)
    shift = np.uint32(8 * _byte_of(i))
    kept = m.raw(a) & ~np.uint32(chosen.value << int(shift) & 0xFFFFFFFF)
    m.write(d, kept | (packed & np.uint32(chosen.value)) << shift, threads)


def r2p(m: Machine, i: Instruction, threads: Mask) -> None:
    """The chosen predicates take the bits of one byte of a."""
    _, a, chosen = i.operands
    assert isinstance(chosen, Immediate)
    value = m.raw(a) >> np.uint32(8 * _byte_of(i))
    for index in range(7):
        if chosen.value >> index & 1:
            m.write_predicate(Predicate(index), value >> np.uint32(index) & np.uint32(1) != 0, threads)


def _byte_of(i: Instruction) -> int:
    return next((int(name[1]) for name in i.modifiers if name[0] == "B"), 0)


HANDLERS: dict[str, Handler] = {
    "IADD3": iadd3,
    "UIADD3": iadd3,
    "IMAD": imad,
    "UIMAD": imad,
    "IMAD.WIDE": imad_wide,
    "UIMAD.WIDE": imad_wide,
    "IMAD.HI": imad_hi,
    "ISETP": isetp,
    "UISETP": isetp,
    "LEA": lea,
    "ULEA": lea,
    "LOP3.LUT": lop3,
    "ULOP3.LUT": lop3,
    "PLOP3.LUT": plop3,
    "SHF": shf,
    "USHF": shf,
    "IMNMX": minmax,
    "VIMNMX": minmax,
    "VIADDMNMX": minmax,
    "VIADD": viadd,
    "IABS": iabs,
    "SEL": select,
    "USEL": select,
    "PRMT": prmt,
    "UPRMT": prmt,
    "POPC": popc,
    "UPOPC": popc,
    "FLO": flo,
    "UFLO": flo,
    "BREV": brev,
    "MOV": move,
    "UMOV": move,
    "P2R": p2r,
    "R2P": r2p,
}
"""What executes each opcode."""
