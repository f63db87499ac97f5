"""Instructions that move data: loads, stores, asynchronous copies, constants, special registers, votes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tilewave.emulator.memory import POISON, Mask
from tilewave.emulator.sass.instruction import Instruction
from tilewave.emulator.sass.integer import Handler, Spoil, unsupported
from tilewave.emulator.sass.machine import U32, WARP, Machine
from tilewave.emulator.sass.operands import Address, Constant, Immediate, Predicate, Register, Special

_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def access_width(i: Instruction) -> int:
    """Bytes that one thread moves."""
    return next((_WIDTHS[name] for name in i.modifiers if name in _WIDTHS), 4)


def _address_of(i: Instruction) -> Address:
    return next(operand for operand in i.operands if isinstance(operand, Address))


def _extend(i: Instruction, words: Sequence[U32]) -> Sequence[U32]:
    """Bytes and halves of signed type are extended by their sign."""
    if i.has("S8"):
        return [words[0].astype(np.uint8).view(np.int8).astype(np.int32).view(np.uint32)]
    if i.has("S16"):
        return [words[0].astype(np.uint16).view(np.int16).astype(np.int32).view(np.uint32)]
    return words


def _write_words(m: Machine, d: Register, words: Sequence[U32], threads: Mask) -> None:
    for part, word in enumerate(words):
        m.write(d, word, threads, part)


def load(m: Machine, i: Instruction, threads: Mask) -> None:
    """LDG, LDS, LDL."""
    for operand in i.operands:
        if isinstance(operand, Predicate) and not operand.is_true and operand.index != 7:
            raise unsupported(i, "a load with a predicate operand")
    space = {"LDG": m.memory, "LDS": m.shared, "LDL": m.local}[i.opcode]
    words = space.load(m.address(_address_of(i)), access_width(i), threads)
    d = i.operands[0]
    assert isinstance(d, Register)
    _write_words(m, d, _extend(i, words), threads)


def store(m: Machine, i: Instruction, threads: Mask) -> Spoil:
    """STG, STS, STL."""
    space = {"STG": m.memory, "STS": m.shared, "STL": m.local}[i.opcode]
    addresses, width = m.address(_address_of(i)), access_width(i)
    data = i.operands[1]
    assert isinstance(data, Register)
    words = [m.raw(data, part) for part in range(max(1, width // 4))]
    space.store(addresses, words, width, threads)
    poison = np.full(m.lanes, POISON, dtype=np.uint32)

    def spoil() -> None:
        space.store(addresses, [poison] * len(words), width, threads)

    return spoil


def copy(m: Machine, i: Instruction, threads: Mask) -> None:
    """LDGSTS: shared memory is undefined (poisoned) from now on until the copy's group was waited for.

    The predicate operand off: zeros are copied. With .ZFILL the low bits of the global address say how many
    bytes at the end are zeros.
    """
    target, source, wanted = i.operands
    assert isinstance(target, Address)
    assert isinstance(source, Address)
    assert isinstance(wanted, Predicate)
    width = access_width(i)
    count = width // 4
    addresses, origins = m.address(target), m.address(source)
    zeros = np.zeros(m.lanes, dtype=np.int64)
    if i.has("ZFILL"):
        zeros = origins & (width - 1)
        origins = origins - zeros
    reading = threads & m.predicate(wanted, per_thread=True)
    words = _load_prefix(m, origins, width, zeros, reading)
    poison = np.full(m.lanes, POISON, dtype=np.uint32)
    m.shared.store(addresses, [poison] * count, width, threads)
    waiting = threads.copy()

    def arrive(group: Mask) -> None:
        ready = waiting & group
        if ready.any():
            m.shared.store(addresses, words, width, ready)
            waiting[ready] = False

    m.started_copies.append(arrive)


def _load_prefix(
    m: Machine, origins: npt.NDArray[np.int64], width: int, zeros: npt.NDArray[np.int64], reading: Mask
) -> Sequence[U32]:
    """`width` bytes of every reading thread, the last `zeros` of which are not read but 0."""
    whole = reading & (zeros == 0)
    words = list(m.memory.load(origins, width, whole))
    partial = reading & (zeros > 0)
    if partial.any():
        parts = np.zeros((m.lanes, width), dtype=np.uint8)
        for byte in range(width):
            here = partial & (byte < width - zeros)
            parts[:, byte] = m.memory.load(origins + byte, 1, here)[0].astype(np.uint8)
        for part, row in enumerate(np.ascontiguousarray(parts).view(np.uint32).T):
            words[part] = np.where(partial, row, words[part])
    return words


def load_constant(m: Machine, i: Instruction, threads: Mask) -> None:
    """LDC, ULDC."""
    d, source = i.operands
    assert isinstance(d, Register)
    assert isinstance(source, Constant)
    width = access_width(i)
    if width < 4 or any(i.has(mode) for mode in ("IL", "IS", "ISL")):
        raise unsupported(i, "this constant load")
    lanes = m.warps if d.uniform else m.lanes
    offsets = np.full(lanes, source.offset, dtype=np.int64)
    if source.base is not None:
        offsets = offsets + m.raw(source.base)
    for part in range(width // 4):
        words = np.zeros(lanes, dtype=np.uint32)
        for offset in np.unique(offsets[threads]):
            words[offsets == offset] = m.constant_word(source.bank, int(offset) + 4 * part)
        m.write(d, words, threads, part)


def special_register(m: Machine, i: Instruction, threads: Mask) -> None:
    """S2R, S2UR, CS2R."""
    d, source = i.operands
    assert isinstance(d, Register)
    assert isinstance(source, Special)
    value = m.special(source, per_thread=not d.uniform)
    for part in range(d.count):
        m.write(d, value if part == 0 else np.zeros_like(value), threads, part)


def vote(m: Machine, i: Instruction, threads: Mask) -> None:
    """VOTE, VOTEU: a predicate of all threads of a warp that take part, and its mask of lanes."""
    d, predicate, source = i.operands
    assert isinstance(d, Register)
    assert isinstance(source, Predicate)
    holds = (m.predicate(source, per_thread=True) & threads).reshape(-1, WARP)
    active = threads.reshape(-1, WARP)
    ballot = np.packbits(holds, axis=1, bitorder="little").view(np.uint32)[:, 0]
    everyone: Mask = np.logical_and.reduce(holds == active, axis=1)
    someone: Mask = np.logical_or.reduce(holds, axis=1)
    outcome = everyone if i.has("ALL") else someone
    if i.has("EQ"):
        outcome = everyone | np.logical_not(someone)
    if i.opcode == "VOTEU":
        warps = m.warps_of(threads)
        m.write(d, ballot, warps)
        m.write_predicate(predicate, outcome, warps)
    else:
        m.write(d, np.repeat(ballot, WARP), threads)
        m.write_predicate(predicate, np.repeat(outcome, WARP), threads)


def to_uniform(m: Machine, i: Instruction, threads: Mask) -> None:
    """R2UR: the value of the first active thread of each warp."""
    d, predicate, source = i.operands
    assert isinstance(predicate, Predicate)
    if predicate.index != 7:
        raise unsupported(i, "a move to a uniform register with a predicate")
    first = threads.reshape(-1, WARP).argmax(axis=1)
    value = m.raw(source).reshape(-1, WARP)[np.arange(m.warps), first]
    m.write(d, value, m.warps_of(threads))


def shuffle(m: Machine, i: Instruction, threads: Mask) -> None:
    """SHFL: the value of another lane of the warp."""
    predicate, d, source, lane, clamp = i.operands
    lanes = np.arange(m.lanes) % WARP
    offset = m.raw(lane).astype(np.int64) & 31
    control = m.raw(clamp).astype(np.int64)
    limit, segment = control & 31, control >> 8 & 31
    first, last = lanes & segment, (lanes & segment) | (limit & ~segment)
    if i.has("IDX"):
        picked = first | (offset & ~segment)
        valid = picked <= last
    elif i.has("UP"):
        picked = lanes - offset
        valid = picked >= last
    else:
        picked = lanes + offset if i.has("DOWN") else lanes ^ offset
        valid = picked <= last
    picked = np.where(valid, picked, lanes)
    value = m.raw(source)[picked + np.arange(m.lanes) // WARP * WARP]
    m.write(d, value, threads)
    m.write_predicate(predicate, valid, threads)


_ATOMIC: dict[str, Callable[[int, int], int]] = {
    "INC": lambda old, value: 0 if old >= value else old + 1,
    "DEC": lambda old, value: value if old == 0 or old > value else old - 1,
    "ADD": lambda old, value: old + value,
    "MIN": min,
    "MAX": max,
    "AND": lambda old, value: old & value,
    "OR": lambda old, value: old | value,
    "XOR": lambda old, value: old ^ value,
    "EXCH": lambda old, value: value,
}


def atomic(m: Machine, i: Instruction, threads: Mask) -> None:
    """ATOMG, REDG and ATOMS on 32-bit words, one thread after another."""
    name = next(n for n in i.modifiers if n in _ATOMIC)
    if any(i.has(t) for t in ("64", "S64")):
        raise unsupported(i, "this atomic operation")
    floating, signed = i.has("F32.FTZ.RN"), i.has("S32")
    space = m.shared if i.opcode == "ATOMS" else m.memory
    addresses, values = m.address(_address_of(i)), m.raw(i.operands[-1])
    results = np.zeros(m.lanes, dtype=np.uint32)
    for thread in np.flatnonzero(threads):
        only = np.zeros(m.lanes, dtype=np.bool_)
        only[thread] = True
        old = space.load(addresses, 4, only)[0][thread]
        results[thread] = old
        if floating:
            pair = np.array([old, values[thread]], dtype=np.uint32).view(np.float32)
            new = np.float32(pair[0] + pair[1]).view(np.uint32)
        else:
            operands = np.array([old, values[thread]], dtype=np.uint32)
            left, right = (operands.view(np.int32) if signed else operands).tolist()
            new = np.uint32(_ATOMIC[name](left, right) & 0xFFFFFFFF)
        space.store(addresses, [np.full(m.lanes, new, dtype=np.uint32)], 4, only)
    if i.opcode != "REDG":
        d = next(i.operands[k] for k in sorted(i.destinations) if isinstance(i.operands[k], Register))
        m.write(d, results, threads)


def _nothing(m: Machine, i: Instruction, threads: Mask) -> None:
    """An instruction that orders memory or occupies a slot: nothing to do for a single block."""


HANDLERS: dict[str, Handler] = {
    "LDG": load,
    "LDS": load,
    "LDL": load,
    "STG": store,
    "STS": store,
    "STL": store,
    "LDGSTS": copy,
    "LDC": load_constant,
    "ULDC": load_constant,
    "S2R": special_register,
    "S2UR": special_register,
    "CS2R": special_register,
    "VOTE": vote,
    "VOTEU": vote,
    "R2UR": to_uniform,
    "SHFL": shuffle,
    "ATOMG": atomic,
    "REDG": atomic,
    "ATOMS": atomic,
    **dict.fromkeys(("NOP", "YIELD", "MEMBAR", "ERRBAR", "CGAERRBAR", "CCTL", "LDGDEPBAR"), _nothing),
}
"""What executes each opcode."""


def copy_depth(i: Instruction) -> tuple[int, int]:
    """The scoreboard that DEPBAR waits for, and how many places may stay in it."""
    board, depth, others = i.operands
    index = getattr(board, "index", None)
    if index is None or not isinstance(depth, Immediate) or str(others) != "{}" or not i.has("LE"):
        raise unsupported(i, "this wait")
    return int(index), depth.value
