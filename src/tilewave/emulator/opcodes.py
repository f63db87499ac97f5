"""How arithmetic, comparisons and conversions of PTX become NumPy code."""

from __future__ import annotations

import numpy as np

from tilewave.emulator.codegen import Emitter
from tilewave.emulator.handlers import Handlers, dtype_of, form
from tilewave.emulator.layout import LOCAL_WINDOW, PARAMETER_WINDOW, SHARED_WINDOW
from tilewave.emulator.ptx import Immediate, Instruction, Operand, Pair, Sink, Vector

opcode = Handlers()
"""The opcodes of this file."""

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
    dtype, others = form(e, i, "rn rm ftz sat", 4)
    if dtype not in ("f4", "f8") or (dtype == "f8" and "rm" in others):
        raise e.unknown()
    a, b, c = float_sources(e, i, dtype, others)
    result = e.destination(i.operands[0], dtype)
    e.count_fma(i)
    if "rm" in others:
        e.assign(result, f"fma_down({a}, {b}, {c})")
    elif e.options.exact_fma and dtype == "f4":
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


@opcode("copysign")
def _copysign(e: Emitter, i: Instruction) -> None:
    # The first source gives the sign, the second the magnitude.
    dtype, _ = form(e, i, "", 3)
    if dtype[0] != "f":
        raise e.unknown()
    sign, magnitude = (e.source(operand, dtype) for operand in i.operands[1:])
    e.assign(e.destination(i.operands[0], dtype), f"np.copysign({magnitude}, {sign})")


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
    windows = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAMETER_WINDOW}
    window = next((windows[space] for space in windows if space in others), 0)
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
