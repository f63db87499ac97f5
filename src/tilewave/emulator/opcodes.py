"""How each PTX opcode becomes NumPy code. Anything not listed here is an `UnknownInstructionError`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilewave.emulator.codegen import DTYPES, Emitter
from tilewave.emulator.layout import LOCAL_WINDOW, SHARED_WINDOW
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

EMITTERS: dict[str, Callable[[Emitter, Instruction], None]] = {}

Handler = Callable[[Emitter, Instruction], None]


def opcode(*names: str) -> Callable[[Handler], Handler]:
    """Register the emitter of some opcodes."""

    def register(handler: Handler) -> Handler:
        for name in names:
            EMITTERS[name] = handler
        return handler

    return register


def dtype_of(e: Emitter, name: str) -> str:
    """NumPy dtype code of a PTX type."""
    if name not in DTYPES:
        raise e.unknown(f"type .{name} is not emulated")
    return DTYPES[name]


def form(e: Emitter, i: Instruction, allowed: str = "", operands: int | None = None) -> tuple[str, set[str]]:
    """The type (an instruction's last modifier), and the other modifiers, which must be known."""
    if not i.modifiers:
        raise e.unknown()
    others = set(i.modifiers[:-1])
    if others - set(allowed.split()):
        raise e.unknown(f"modifier .{min(others - set(allowed.split()))} is not emulated")
    if operands is not None and len(i.operands) != operands:
        raise e.unknown(f"expected {operands} operands")
    return dtype_of(e, i.modifiers[-1]), others


# -- arithmetic ---------------------------------------------------------------------------------------------


def float_sources(e: Emitter, i: Instruction, dtype: str, others: set[str]) -> list[str]:
    """Source operands; with `.ftz` subnormal ones are flushed to zero."""
    sources = [e.source(operand, dtype) for operand in i.operands[1:]]
    if "ftz" in others:
        if dtype != "f4":
            raise e.unknown(".ftz of this type is not emulated")
        sources = [f"m.flush({source})" for source in sources]
    return sources


def float_result(e: Emitter, result: str, others: set[str]) -> None:
    """Finish a floating-point result: flush, saturate."""
    if "ftz" in others:
        e.assign(result, f"m.flush({result})")
    if "sat" in others:
        e.assign(result, f"m.saturate({result})")


@opcode("add", "sub")
def _add(e: Emitter, i: Instruction) -> None:
    dtype, others = form(e, i, "rn ftz sat" if i.modifiers[-1][0] == "f" else "", 3)
    sources = float_sources(e, i, dtype, others)
    result = e.destination(i.operands[0], dtype)
    e.call("add" if i.opcode == "add" else "subtract", result, *sources)
    float_result(e, result, others)


@opcode("mul")
def _mul(e: Emitter, i: Instruction) -> None:
    if i.modifiers[-1][0] == "f":
        dtype, others = form(e, i, "rn ftz sat", 3)
        sources = float_sources(e, i, dtype, others)
        result = e.destination(i.operands[0], dtype)
        e.call("multiply", result, *sources)
        float_result(e, result, others)
    else:
        integer_product(e, i, None)


@opcode("mad")
def _mad(e: Emitter, i: Instruction) -> None:
    if i.modifiers[-1][0] == "f":
        _fma(e, i)
    else:
        integer_product(e, i, i.operands[3])


def integer_product(e: Emitter, i: Instruction, addend: Operand | None) -> None:
    """`mul` and `mad` of integers: `.lo`, `.hi` or `.wide`."""
    dtype, others = form(e, i, "lo hi wide", 3 if addend is None else 4)
    a, b = e.source(i.operands[1], dtype), e.source(i.operands[2], dtype)
    if others == {"wide"}:
        wide = f"{dtype[0]}{2 * int(dtype[1:])}"
        if wide.endswith("16"):
            raise e.unknown()
        product = e.destination(i.operands[0], wide) if addend is None else e.temporary(wide)
        e.line(f"multiply({a}, {b}, {product}, dtype={wide!r})")
        dtype = wide
    elif others == {"lo"}:
        product = e.destination(i.operands[0], dtype) if addend is None else e.temporary(dtype)
        e.call("multiply", product, a, b)
    elif others == {"hi"}:
        product = e.destination(i.operands[0], dtype) if addend is None else e.temporary(dtype)
        e.assign(product, f"m.multiply_high({a}, {b})")
    else:
        raise e.unknown("which half of the product is not said")
    if addend is not None:
        e.call("add", e.destination(i.operands[0], dtype), product, e.source(addend, dtype))


@opcode("mul24", "mad24", "sad", "addc", "subc", "madc")
def _refused(e: Emitter, i: Instruction) -> None:
    raise e.unknown()


@opcode("fma")
def _fma(e: Emitter, i: Instruction) -> None:
    dtype, others = form(e, i, "rn ftz sat", 4)
    if dtype not in ("f4", "f8"):
        raise e.unknown()
    a, b, c = float_sources(e, i, dtype, others)
    result = e.destination(i.operands[0], dtype)
    e.count_fma(i)
    if e.options.exact_fma and dtype == "f4":
        e.line(f"fused({a}, {b}, {c}, {result}, {e.temporary('f8')}, {e.temporary('u8')})")
    else:
        product = e.temporary(dtype)
        e.call("multiply", product, a, b)
        e.call("add", result, product, c)
    float_result(e, result, others)


@opcode("div")
def _div(e: Emitter, i: Instruction) -> None:
    if i.modifiers[-1][0] == "f":
        # Approximate forms are computed with full accuracy: the hardware's bits are not documented.
        dtype, others = form(e, i, "rn approx full ftz", 3)
        sources = float_sources(e, i, dtype, others)
        result = e.destination(i.operands[0], dtype)
        e.call("divide", result, *sources)
        float_result(e, result, others)
    else:
        dtype, _ = form(e, i, "", 3)
        a, b = (e.source(operand, dtype) for operand in i.operands[1:])
        e.assign(e.destination(i.operands[0], dtype), f"m.divide({a}, {b})")


@opcode("rem")
def _rem(e: Emitter, i: Instruction) -> None:
    dtype, _ = form(e, i, "", 3)
    a, b = (e.source(operand, dtype) for operand in i.operands[1:])
    e.assign(e.destination(i.operands[0], dtype), f"m.remainder({a}, {b})")


@opcode("abs", "neg")
def _sign(e: Emitter, i: Instruction) -> None:
    dtype, others = form(e, i, "ftz", 2)
    sources = float_sources(e, i, dtype, others)
    result = e.destination(i.operands[0], dtype)
    e.call("absolute" if i.opcode == "abs" else "negative", result, *sources)
    float_result(e, result, others)


@opcode("min", "max")
def _extreme(e: Emitter, i: Instruction) -> None:
    name = "minimum" if i.opcode == "min" else "maximum"
    if i.modifiers[-1][0] == "f":
        dtype, others = form(e, i, "ftz NaN", 3)
        a, b = float_sources(e, i, dtype, others)
        suffix = "_nan" if "NaN" in others else ""
        e.assign(e.destination(i.operands[0], dtype), f"m.{name}{suffix}({a}, {b})")
    else:
        dtype, _ = form(e, i, "", 3)
        a, b = (e.source(operand, dtype) for operand in i.operands[1:])
        # NumPy deprecates the positional output of these two.
        e.line(f"{name}({a}, {b}, out={e.destination(i.operands[0], dtype)})")


_FUNCTIONS = {
    "sqrt": "np.sqrt({})",
    "rcp": "1 / {}",
    "rsqrt": "1 / np.sqrt({}.astype('f8'))",
    "ex2": "np.exp2({}.astype('f8'))",
    "lg2": "np.log2({}.astype('f8'))",
    "sin": "np.sin({}.astype('f8'))",
    "cos": "np.cos({}.astype('f8'))",
    "tanh": "np.tanh({}.astype('f8'))",
}


@opcode(*_FUNCTIONS)
def _function(e: Emitter, i: Instruction) -> None:
    # As with division: `.approx` is computed to the last bit or nearly so, which the hardware does not do.
    dtype, others = form(e, i, "rn approx ftz", 2)
    if dtype not in ("f4", "f8"):
        raise e.unknown()
    (source,) = float_sources(e, i, dtype, others)
    result = e.destination(i.operands[0], dtype)
    e.assign(result, _FUNCTIONS[i.opcode].format(source))
    float_result(e, result, others)


# -- bits ---------------------------------------------------------------------------------------------------


@opcode("and", "or", "xor")
def _logic(e: Emitter, i: Instruction) -> None:
    dtype, _ = form(e, i, "", 3)
    a, b = (e.source(operand, dtype) for operand in i.operands[1:])
    prefix = "logical_" if dtype == "b1" else "bitwise_"
    e.call(prefix + i.opcode, e.destination(i.operands[0], dtype), a, b)


@opcode("not")
def _not(e: Emitter, i: Instruction) -> None:
    dtype, _ = form(e, i, "", 2)
    source = e.source(i.operands[1], dtype)
    e.call("logical_not" if dtype == "b1" else "invert", e.destination(i.operands[0], dtype), source)


@opcode("shl", "shr")
def _shift(e: Emitter, i: Instruction) -> None:
    dtype, _ = form(e, i, "", 3)
    value, amount = i.operands[1], i.operands[2]
    bits = int(dtype[1:]) * 8
    source, result = e.source(value, dtype), e.destination(i.operands[0], dtype)
    if isinstance(amount, Immediate):
        # NumPy shifts by the width or more as PTX does: to 0, or to the sign.
        count = e.constant(np.array(min(amount.value & 0xFFFFFFFF, bits), dtype=dtype))
        e.call("left_shift" if i.opcode == "shl" else "right_shift", result, source, count)
    else:
        function = "shift_left" if i.opcode == "shl" else "shift_right"
        e.assign(result, f"m.{function}({source}, {e.source(amount, 'u4')})")


@opcode("shf")
def _funnel(e: Emitter, i: Instruction) -> None:
    form(e, i, "l r wrap clamp", 4)
    low, high, amount = (e.source(operand, "u4") for operand in i.operands[1:])
    options = f"left={'l' in i.modifiers}, wrap={'wrap' in i.modifiers}"
    e.assign(e.destination(i.operands[0], "u4"), f"m.funnel_shift({low}, {high}, {amount}, {options})")


@opcode("bfe")
def _bfe(e: Emitter, i: Instruction) -> None:
    dtype, _ = form(e, i, "", 4)
    a = e.source(i.operands[1], dtype)
    position, length = (e.source(operand, "u4") for operand in i.operands[2:])
    e.assign(e.destination(i.operands[0], dtype), f"m.extract_bits({a}, {position}, {length})")


@opcode("bfi")
def _bfi(e: Emitter, i: Instruction) -> None:
    dtype, _ = form(e, i, "", 5)
    a, b = (e.source(operand, dtype) for operand in i.operands[1:3])
    position, length = (e.source(operand, "u4") for operand in i.operands[3:])
    e.assign(e.destination(i.operands[0], dtype), f"m.insert_bits({a}, {b}, {position}, {length})")


@opcode("prmt")
def _prmt(e: Emitter, i: Instruction) -> None:
    form(e, i, "", 4)
    a, b, selector = (e.source(operand, "u4") for operand in i.operands[1:])
    e.assign(e.destination(i.operands[0], "u4"), f"m.permute_bytes({a}, {b}, {selector})")


@opcode("lop3")
def _lop3(e: Emitter, i: Instruction) -> None:
    form(e, i, "", 5)
    a, b, c = (e.source(operand, "u4") for operand in i.operands[1:4])
    table = i.operands[4]
    if not isinstance(table, Immediate):
        raise e.unknown()
    e.assign(e.destination(i.operands[0], "u4"), f"m.logic3({a}, {b}, {c}, {table.value & 0xFF})")


@opcode("popc", "clz", "brev")
def _bits(e: Emitter, i: Instruction) -> None:
    dtype, _ = form(e, i, "", 2)
    name = {"popc": "count_ones", "clz": "count_leading_zeros", "brev": "reverse_bits"}[i.opcode]
    result = e.destination(i.operands[0], dtype if i.opcode == "brev" else "u4")
    e.assign(result, f"m.{name}({e.source(i.operands[1], dtype)})")


# -- comparison and selection -------------------------------------------------------------------------------

_COMPARE = {"eq": "equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}
_COMPARE |= {"lo": "less", "ls": "less_equal", "hi": "greater", "hs": "greater_equal"}
_NEGATED = {"equ": "ne", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}


def compare(e: Emitter, comparison: str, dtype: str, a: str, b: str, result: str) -> None:
    """Write `result = a <comparison> b`; the forms that end in `u` are true if an operand is NaN."""
    is_float = dtype[0] == "f"
    if comparison == "ne" and not is_float:
        e.call("not_equal", result, a, b)
    elif comparison in _COMPARE:
        e.call(_COMPARE[comparison], result, a, b)
    elif not is_float:
        raise e.unknown(f"comparison .{comparison} of integers")
    elif comparison == "neu":
        e.call("not_equal", result, a, b)
    elif comparison == "ne":
        e.assign(result, f"less({a}, {b}) | greater({a}, {b})")
    elif comparison == "equ":
        e.assign(result, f"~(less({a}, {b}) | greater({a}, {b}))")
    elif comparison in _NEGATED:
        e.assign(result, f"~{_COMPARE[_NEGATED[comparison]]}({a}, {b})")
    elif comparison == "num":
        e.assign(result, f"~(isnan({a}) | isnan({b}))")
    elif comparison == "nan":
        e.assign(result, f"isnan({a}) | isnan({b})")
    else:
        raise e.unknown(f"comparison .{comparison}")


@opcode("setp")
def _setp(e: Emitter, i: Instruction) -> None:
    modifiers = [modifier for modifier in i.modifiers if modifier != "ftz"]
    if len(modifiers) not in (2, 3):
        raise e.unknown()
    dtype = dtype_of(e, modifiers[-1])
    flush = "m.flush({})" if "ftz" in i.modifiers else "{}"
    a, b = (flush.format(e.source(operand, dtype)) for operand in i.operands[1:3])
    combined = len(modifiers) == 3
    if combined != (len(i.operands) == 4) or (combined and modifiers[1] not in ("and", "or", "xor")):
        raise e.unknown()
    other = e.source(i.operands[3], "b1") if combined else None
    targets = i.operands[0]
    both = [targets.first, targets.second] if isinstance(targets, Pair) else [targets]
    if not combined and len(both) == 1:
        compare(e, modifiers[0], dtype, a, b, e.destination(both[0], "b1"))
        return
    outcome = e.temporary("b1")
    compare(e, modifiers[0], dtype, a, b, outcome)
    results = []
    for negate, target in zip((False, True), both, strict=False):
        value = f"logical_not({outcome})" if negate else outcome
        scratch = e.temporary("b1")
        e.assign(scratch, f"logical_{modifiers[1]}({value}, {other})" if combined else value)
        results.append((target, scratch))
    for target, scratch in results:
        if not isinstance(target, Sink):
            e.assign(e.destination(target, "b1"), scratch)


@opcode("set")
def _set(e: Emitter, i: Instruction) -> None:
    if len(i.modifiers) != 3 or len(i.operands) != 3:
        raise e.unknown()
    comparison, target, kind = i.modifiers
    dtype, result_type = dtype_of(e, kind), dtype_of(e, target)
    outcome = e.temporary("b1")
    compare(e, comparison, dtype, e.source(i.operands[1], dtype), e.source(i.operands[2], dtype), outcome)
    true = (
        "1.0"
        if result_type[0] == "f"
        else ("-1" if result_type[0] == "i" else str((1 << 8 * int(result_type[1:])) - 1))
    )
    e.assign(
        e.destination(i.operands[0], result_type),
        f"where({outcome}, np.{np.dtype(result_type).name}({true}), 0)",
    )


@opcode("selp")
def _selp(e: Emitter, i: Instruction) -> None:
    dtype, _ = form(e, i, "", 4)
    a, b = (e.source(operand, dtype) for operand in i.operands[1:3])
    e.assign(e.destination(i.operands[0], dtype), f"where({e.source(i.operands[3], 'b1')}, {a}, {b})")


# -- moves and conversions ----------------------------------------------------------------------------------


@opcode("mov")
def _mov(e: Emitter, i: Instruction) -> None:
    dtype, _ = form(e, i, "", 2)
    target, source = i.operands
    if isinstance(source, Vector):
        pack(e, target, source, dtype)
    elif isinstance(target, Vector):
        unpack(e, target, source, dtype)
    else:
        value, result = e.source(source, dtype), e.destination(target, dtype)
        if value != result:  # a copy within one slot
            e.assign(result, value)


def pack(e: Emitter, target: Operand, source: Vector, dtype: str) -> None:
    """`mov.b64 %rd, {%r1, %r2}`: the first item becomes the low bits."""
    size = int(dtype[1:]) // len(source.items)
    whole = e.temporary(f"u{dtype[1:]}")
    for position, item in enumerate(source.items):
        e.line(f"{whole}.view('u{size}')[{position}::{len(source.items)}] = {e.source(item, f'u{size}')}")
    e.assign(e.destination(target, dtype), whole)


def unpack(e: Emitter, target: Vector, source: Operand, dtype: str) -> None:
    """`mov.b64 {%r1, %r2}, %rd`."""
    size = int(dtype[1:]) // len(target.items)
    whole = e.temporary(f"u{dtype[1:]}")
    e.assign(whole, e.source(source, f"u{dtype[1:]}"))
    for position, item in enumerate(target.items):
        if not isinstance(item, Sink):
            e.assign(
                e.destination(item, f"u{size}"), f"{whole}.view('u{size}')[{position}::{len(target.items)}]"
            )


@opcode("cvt")
def _cvt(e: Emitter, i: Instruction) -> None:
    if len(i.modifiers) < 2 or len(i.operands) != 2:
        raise e.unknown()
    target, kind = dtype_of(e, i.modifiers[-2]), dtype_of(e, i.modifiers[-1])
    others = set(i.modifiers[:-2])
    if others - {"rn", "rni", "rzi", "rmi", "rpi", "sat", "ftz"}:
        raise e.unknown()
    source, result = e.source(i.operands[1], kind), e.destination(i.operands[0], target)
    rounding = next((r for r in ("rni", "rzi", "rmi", "rpi") if r in others), None)
    if "ftz" in others and kind == "f4":
        source = f"m.flush({source})"
    if kind[0] == "f" and target[0] == "f":
        if rounding and kind == target:
            source = f"m.round_to_integral({source}, {rounding!r})"
        elif rounding:
            raise e.unknown()
    elif kind[0] == "f":
        if rounding is None:
            raise e.unknown("a conversion to an integer needs a rounding mode")
        source = f"m.float_to_integer({source}, {rounding!r}, {target!r})"
    elif target[0] != "f" and "sat" in others:
        source = f"m.saturate_integer({source}, {target!r})"
    e.assign(result, source)
    if target[0] == "f":
        float_result(e, result, others & {"sat"} | ({"ftz"} if "ftz" in others and target == "f4" else set()))


@opcode("cvta")
def _cvta(e: Emitter, i: Instruction) -> None:
    dtype, others = form(e, i, "to global shared local const param", 2)
    window = SHARED_WINDOW if "shared" in others else LOCAL_WINDOW if "local" in others else 0
    if dtype != "u8":
        raise e.unknown()
    source, result = e.source(i.operands[1], dtype), e.destination(i.operands[0], dtype)
    if window:
        e.call(
            "subtract" if "to" in others else "add", result, source, e.constant(np.array(window, dtype="u8"))
        )
    elif source != result:
        e.assign(result, source)


@opcode("isspacep")
def _isspacep(e: Emitter, i: Instruction) -> None:
    source = e.source(i.operands[1], "u8")
    e.assign(e.destination(i.operands[0], "b1"), f"x.is_space({source}, {i.modifiers[-1]!r})")


# -- memory -------------------------------------------------------------------------------------------------

_CACHE_HINTS = """
    ca cg cs lu cv wb wt nc weak volatile relaxed acquire release cta gpu sys cluster mmio
    L1::evict_last L1::evict_first L1::no_allocate L1::evict_normal L1::evict_unchanged
    L2::64B L2::128B L2::256B L2::evict_last L2::evict_first L2::evict_normal
"""
_HINTS = frozenset(_CACHE_HINTS.split())
SPACES = frozenset(["global", "shared", "local", "const", "param", "shared::cta"])


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
    """`ld.param`: the same value for all lanes."""
    address = i.operands[1]
    if not isinstance(address, Address) or isinstance(address.base, Register) or address.base is None:
        raise e.unknown()
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
