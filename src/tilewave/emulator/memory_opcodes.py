"""How PTX's memory accesses, copies, atomics, control flow and warp-wide instructions become NumPy code."""

from __future__ import annotations

from tilewave.emulator.codegen import Emitter
from tilewave.emulator.handlers import Handlers, dtype_of
from tilewave.emulator.ptx import (
    Address,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Symbol,
    Vector,
)

opcode = Handlers()
"""The opcodes of this file."""

# -- memory -------------------------------------------------------------------------------------------------

_CACHE_HINTS = """
    ca cg cs lu cv wb wt nc weak volatile relaxed acquire release cta gpu sys cluster mmio
    L1::evict_last L1::evict_first L1::no_allocate L1::evict_normal L1::evict_unchanged
    L2::64B L2::128B L2::256B L2::evict_last L2::evict_first L2::evict_normal
"""
_HINTS = frozenset(_CACHE_HINTS.split())
SPACES = frozenset(["global", "shared", "local", "const", "param", "shared::cta", "shared::cluster"])


def space_of(i: Instruction) -> str:
    """State space of a memory instruction; `generic` if it names none."""
    found = [modifier.split("::")[0] for modifier in i.modifiers if modifier in SPACES]
    return found[0] if found else "generic"


def vector_of(i: Instruction) -> int:
    """Number of elements of a vector access."""
    return next((int(m[1]) for m in i.modifiers if m in ("v2", "v4", "v8")), 1)


def memory_form(e: Emitter, i: Instruction) -> tuple[str, int]:
    """Element dtype and number of elements of a load or store."""
    strange = [m for m in i.modifiers[:-1] if m not in _HINTS | SPACES | {"v2", "v4"}]
    if strange:
        raise e.unknown(f"modifier .{strange[0]} is not emulated")
    return dtype_of(e, i.modifiers[-1]), vector_of(i)


def items_of(e: Emitter, operand: Operand, count: int) -> list[Operand]:
    """Registers of a load's result or a store's source."""
    items: list[Operand] = list(operand.items) if isinstance(operand, Vector) else [operand]
    if len(items) != count:
        raise e.unknown(f"expected {count} registers")
    return items


def address_source(e: Emitter, operand: Operand) -> str:
    """Expression for the byte addresses of an access, as int64 or uint64."""
    if not isinstance(operand, Address):
        raise e.unknown("expected an address")
    if isinstance(operand.base, Symbol) and operand.base.name in e.layout.global_names:
        return f"x.constant_address(int(x.variable({operand.base.name!r})) + {operand.offset})"
    base, offset = e.base_and_offset(operand)
    if base is None:
        return f"x.constant_address({offset})"
    # 32-bit addresses are taken as signed: base and offset may lie on either side of 0 and still meet inside.
    return f"x.address({e.row(base, 'i4' if base.bits == 32 else 'i8')}, {offset})"


@opcode("ld", "ldu")
def _ld(e: Emitter, i: Instruction) -> None:
    dtype, count = memory_form(e, i)
    items = items_of(e, i.operands[0], count)
    size = int(dtype[1:])
    if space_of(i) == "param":
        load_parameter(e, i, dtype, items)
        return
    access = e.accesses[id(i)]
    if e.groupable(i, access):
        index, offset = e.group(i)
        for position, item in enumerate(items):
            if not isinstance(item, Sink) and id(i) not in e.value_only:
                row = e.destination(item, "u4")
                e.line(f"x.words[{offset + position}].take({index}, None, {row}, 'clip')")
        return
    address = address_source(e, i.operands[1])
    guard = e.guard
    if id(i) in e.value_only:
        e.line(f"x.only_count({e.constant(access)}, {address}, {guard})")
        return
    words = [e.temporary("u4") for _ in range(max(1, size * count // 4))]
    e.line(f"x.load({e.constant(access)}, {address}, [{', '.join(words)}], {guard})")
    for position, item in enumerate(items):
        if isinstance(item, Sink):
            continue
        if size == 8:
            whole = e.temporary("u8")
            e.line(f"{whole}.view('u4')[0::2] = {words[2 * position]}")
            e.line(f"{whole}.view('u4')[1::2] = {words[2 * position + 1]}")
            e.assign(e.destination(item, "u8"), whole)
        elif size == 4:
            e.assign(e.destination(item, "u4"), words[position])
        elif count > 1:
            per_word = 4 // size
            part = f"{words[position // per_word]}.view('{dtype}')[{position % per_word}::{per_word}]"
            e.assign(widened(e, item, dtype), part)
        else:
            e.assign(widened(e, item, dtype), f"{words[0]}.view('{dtype}')[::{4 // size}]")


def widened(e: Emitter, item: Operand, dtype: str) -> str:
    """Destination of a narrow load: the register's whole width, sign- or zero-extended."""
    if not isinstance(item, Register):
        raise e.unknown()
    kind = dtype[0] if dtype[0] != "f" else "u"
    return e.destination(item, f"{kind}{max(2, item.bits // 8)}" if dtype[0] != "f" else dtype)


def load_parameter(e: Emitter, i: Instruction, dtype: str, items: list[Operand]) -> None:
    """`ld.param`: the same value for all lanes, unless the address is computed."""
    address = i.operands[1]
    if not isinstance(address, Address) or address.base is None:
        raise e.unknown()
    if isinstance(address.base, Register):
        size = int(dtype[1:])
        where = address_source(e, address)
        for position, item in enumerate(items):
            value = e.temporary(dtype)
            e.line(f"x.parameter_at({e.constant(i)}, {where}, {position * size}, {value}, {e.guard})")
            e.assign(widened(e, item, dtype) if size < 4 else e.destination(item, dtype), value)
        return
    for position, item in enumerate(items):
        offset = address.offset + position * int(dtype[1:])
        result = widened(e, item, dtype) if int(dtype[1:]) < 4 else e.destination(item, dtype)
        e.assign(result, f"x.parameter({address.base.name!r}, {offset}, {dtype!r})")


@opcode("st")
def _st(e: Emitter, i: Instruction) -> None:
    dtype, count = memory_form(e, i)
    items = items_of(e, i.operands[1], count)
    size = int(dtype[1:])
    access = e.accesses[id(i)]
    if e.groupable(i, access):
        index, offset = e.group(i)
        if id(i) not in e.value_only:
            for position, item in enumerate(items):
                e.line(f"x.words[{offset + position}][{index}] = {e.source(item, 'u4')}")
        return
    if id(i) in e.value_only:
        e.line(f"x.only_count({e.constant(access)}, {address_source(e, i.operands[0])}, {e.guard})")
        return
    words = []
    if size == 8:
        for item in items:
            whole = e.temporary("u8")
            e.assign(whole, e.source(item, "u8"))
            words += [f"{whole}.view('u4')[0::2]", f"{whole}.view('u4')[1::2]"]
    elif size == 4:
        for item in items:
            words.append(
                e.source(item, "u4") if isinstance(item, Register) else f"x.spread({e.source(item, 'u4')})"
            )
    else:
        per_word = 4 // size
        for first in range(0, count, per_word):
            word = e.temporary("u4")
            e.line(f"{word}.fill(0)")
            for position, item in enumerate(items[first : first + per_word]):
                e.line(f"{word}.view('u{size}')[{position}::{per_word}] = {e.source(item, f'u{size}')}")
            words.append(word)
    address = address_source(e, i.operands[0])
    e.line(f"x.store({e.constant(access)}, {address}, [{', '.join(words)}], {e.guard})")


@opcode("membar", "fence", "prefetch", "prefetchu", "nanosleep", "discard", "griddepcontrol", "applypriority")
def _nothing(e: Emitter, i: Instruction) -> None:
    """Hints, and fences: the emulator's memory is sequentially consistent."""


@opcode("bra", "ret", "exit")
def _control(e: Emitter, i: Instruction) -> None:
    """The scheduler follows the block's end."""
    if i.opcode == "bra" and set(i.modifiers) - {"uni"}:
        raise e.unknown()


@opcode("trap", "brkpt")
def _trap(e: Emitter, i: Instruction) -> None:
    e.line(f"x.trap({e.constant(i)}, {e.guard})")


@opcode("bar", "barrier")
def _bar(e: Emitter, i: Instruction) -> None:
    modifiers = [m for m in i.modifiers if m not in ("cta", "aligned")]
    if modifiers == ["warp", "sync"]:
        return  # the lanes of a warp run in lockstep within a basic block
    if modifiers != ["sync"] or not 1 <= len(i.operands) <= 2:
        raise e.unknown()
    if not all(isinstance(operand, Immediate) for operand in i.operands):
        raise e.unknown("a barrier whose number or thread count is not a constant")


@opcode("cp")
def _cp(e: Emitter, i: Instruction) -> None:
    if not i.modifiers or i.modifiers[0] != "async" or "bulk" in i.modifiers or "mbarrier" in i.modifiers:
        raise e.unknown()
    modifiers = i.modifiers[1:]
    if modifiers == ("commit_group",):
        e.line("x.commit_copies()")
    elif modifiers == ("wait_all",):
        e.line("x.wait_copies(None)")
    elif modifiers == ("wait_group",):
        if len(i.operands) != 1 or not isinstance(i.operands[0], Immediate):
            raise e.unknown()
        e.line(f"x.wait_copies({i.operands[0].value})")
    elif "shared" in (m.split("::")[0] for m in modifiers) and "global" in modifiers:
        start_copy(e, i)
    else:
        raise e.unknown()


def start_copy(e: Emitter, i: Instruction) -> None:
    """`cp.async.{ca,cg}.shared.global [dst], [src], size{, src-size}`."""
    strange = [m for m in i.modifiers[1:] if m not in _HINTS | SPACES]
    if strange or not 3 <= len(i.operands) <= 4 or not isinstance(i.operands[2], Immediate):
        raise e.unknown()
    size = i.operands[2].value
    if size not in ((16,) if "cg" in i.modifiers else (4, 8, 16)):
        raise e.unknown(f"a copy of {size} bytes does not exist")
    given = "None"
    if len(i.operands) == 4:
        last = i.operands[3]
        if (isinstance(last, Register) and last.bits == 1) or isinstance(last, Negated):
            raise e.unknown("a copy with an ignore-src predicate")
        given = e.source(last, "u4")
    target, source = address_source(e, i.operands[0]), address_source(e, i.operands[1])
    moves = id(i) not in e.value_only
    arguments = f"{target}, {source}, {size}, {given}, {e.guard}, {moves}"
    e.line(f"x.copy_async({e.constant(e.accesses[id(i)])}, {arguments})")


_ATOMIC = frozenset(["add", "exch", "cas", "inc", "dec", "min", "max", "and", "or", "xor"])


@opcode("atom", "red")
def _atom(e: Emitter, i: Instruction) -> None:
    dtype = dtype_of(e, i.modifiers[-1])
    operation = next((m for m in i.modifiers if m in _ATOMIC), None)
    strange = [m for m in i.modifiers[:-1] if m not in _HINTS | SPACES | _ATOMIC | {"acq_rel"}]
    if operation is None or strange or int(dtype[1:]) not in (4, 8):
        raise e.unknown()
    has_result = i.opcode == "atom"
    operands = i.operands[1:] if has_result else i.operands
    address = address_source(e, operands[0])
    values = [f"x.spread({e.source(operand, dtype)})" for operand in operands[1:]]
    if len(values) != (2 if operation == "cas" else 1):
        raise e.unknown()
    result = e.temporary(dtype)
    arguments = f"{address}, {operation!r}, {dtype!r}, [{', '.join(values)}], {result}, {e.guard}"
    e.line(f"x.atomic({e.constant(e.accesses[id(i)])}, {arguments})")
    if has_result and not isinstance(i.operands[0], Sink):
        e.assign(e.destination(i.operands[0], dtype), result)


# -- warps --------------------------------------------------------------------------------------------------


@opcode("shfl")
def _shfl(e: Emitter, i: Instruction) -> None:
    if (
        i.modifiers[:1] != ("sync",)
        or len(i.modifiers) != 3
        or i.modifiers[1] not in ("up", "down", "bfly", "idx")
    ):
        raise e.unknown()
    value, lane, clamp, members = (e.source(operand, "u4") for operand in i.operands[1:])
    target = i.operands[0]
    both = [target.first, target.second] if isinstance(target, Pair) else [target]
    result, valid = e.temporary("u4"), e.temporary("b1")
    arguments = f"{value}, {lane}, {clamp}, {members}, {e.guard}, {result}, {valid}"
    e.line(f"x.shuffle({e.constant(i)}, {i.modifiers[1]!r}, {arguments})")
    for operand, name, dtype in zip(both, (result, valid), ("u4", "b1"), strict=False):
        if not isinstance(operand, Sink):
            e.assign(e.destination(operand, dtype), name)


@opcode("vote")
def _vote(e: Emitter, i: Instruction) -> None:
    if (
        i.modifiers[:1] != ("sync",)
        or len(i.modifiers) != 3
        or i.modifiers[1] not in ("all", "any", "uni", "ballot")
    ):
        raise e.unknown()
    mode = i.modifiers[1]
    predicate, members = e.source(i.operands[1], "b1"), e.source(i.operands[2], "u4")
    result = e.destination(i.operands[0], "u4" if mode == "ballot" else "b1")
    e.assign(result, f"x.vote({e.constant(i)}, {mode!r}, {predicate}, {members}, {e.guard})")


@opcode("activemask")
def _activemask(e: Emitter, i: Instruction) -> None:
    e.assign(e.destination(i.operands[0], "u4"), f"x.active_mask({e.guard})")
