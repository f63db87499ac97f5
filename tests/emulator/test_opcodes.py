"""Every opcode class against a NumPy or plain Python reference, on random and special values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from ptx_kernels import DTYPES, evaluate, kernel, run

from tilewave.emulator import Memory, parse_ptx
from tilewave.emulator.fma import fma
from tilewave.errors import UnknownInstructionError

Array = npt.NDArray[Any]
COUNT = 777


def integers(rng: np.random.Generator, kind: str, count: int = COUNT) -> Array:
    """Random bits, small numbers, and the ends of the range."""
    dtype = np.dtype(DTYPES[kind])
    limits = np.iinfo(dtype)
    values = rng.integers(0, 256, (count, dtype.itemsize), dtype=np.uint8).view(dtype).reshape(-1)
    small = rng.integers(-3 if dtype.kind == "i" else 0, 70, count).astype(dtype)
    values = np.where(rng.random(count) < 0.4, small, values)
    corners = np.array([limits.min, limits.max, 0, 1, limits.max // 2], dtype=dtype)
    return np.where(rng.random(count) < 0.2, rng.choice(corners, count), values)


def floats(rng: np.random.Generator, kind: str, count: int = COUNT) -> Array:
    """Normal numbers, every bit pattern, and special values."""
    dtype = np.dtype(DTYPES[kind])
    bits = rng.integers(0, 256, (count, dtype.itemsize), dtype=np.uint8).view(dtype).reshape(-1)
    values = rng.standard_normal(count).astype(dtype)
    tiny = np.finfo(dtype).smallest_subnormal
    special = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, 1.5, 2.5, tiny, 7 * tiny], dtype=dtype
    )
    values = np.where(rng.random(count) < 0.3, bits, values)
    return np.where(rng.random(count) < 0.3, rng.choice(special, count), values).astype(dtype)


def draw(rng: np.random.Generator, kind: str) -> Array:
    if kind == "pred":
        return rng.integers(0, 2, COUNT).astype(np.uint8)
    return floats(rng, kind) if kind[0] == "f" else integers(rng, kind)


def check(found: Array, expected: Array, shown: str) -> None:
    """Same bits, except that one NaN is as good as another."""
    expected = np.asarray(expected).astype(found.dtype)
    if found.dtype.kind == "f":
        same = (found == expected) & (np.signbit(found) == np.signbit(expected))
        same |= np.isnan(found) & np.isnan(expected)
    else:
        same = found == expected
    assert same.all(), (
        f"{shown}: {found[~same][:5]} instead of {expected[~same][:5]} at {np.flatnonzero(~same)[:5]}"
    )


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def truncated_quotient(a: Array, b: Array) -> Array:
    return np.array(
        [
            int(x) // int(y) if (x < 0) == (y < 0) else -(abs(int(x)) // abs(int(y)))
            for x, y in zip(a, b, strict=True)
        ],
        dtype=object,
    )


def shifted(a: Array, b: Array, kind: str, left: bool) -> list[int]:
    bits = int(kind[1:])
    result = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        if left:
            result.append((x << y) & ((1 << bits) - 1) if y < bits else 0)
        else:
            result.append(x >> min(y, bits))
    return result


def bit_field(a: Array, position: Array, length: Array, kind: str) -> list[int]:
    """`bfe` bit by bit, as the PTX ISA describes it."""
    msb = int(kind[1:]) - 1
    result = []
    for x, p, n in zip(a.tolist(), position.tolist(), length.tolist(), strict=True):
        x, p, n = x & ((1 << (msb + 1)) - 1), p & 0xFF, n & 0xFF
        if kind[0] == "u" or n == 0:
            sign = 0
        else:
            sign = x >> min(p + n - 1, msb) & 1
        value = 0
        for i in range(msb + 1):
            bit = (x >> (p + i)) & 1 if i < n and p + i <= msb else sign
            value |= bit << i
        result.append(signed(value, msb + 1) if kind[0] == "s" else value)
    return result


def inserted(a: Array, b: Array, position: Array, length: Array, bits: int) -> list[int]:
    """`bfi` bit by bit."""
    result = []
    for x, y, p, n in zip(a.tolist(), b.tolist(), position.tolist(), length.tolist(), strict=True):
        p, n = p & 0xFF, n & 0xFF
        for i in range(n):
            if p + i < bits:
                y = y & ~(1 << (p + i)) | (x >> i & 1) << (p + i)
        result.append(y)
    return result


def permuted(a: Array, b: Array, c: Array) -> list[int]:
    result = []
    for x, y, s in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
        data = [x >> 8 * i & 0xFF for i in range(4)] + [y >> 8 * i & 0xFF for i in range(4)]
        value = 0
        for i in range(4):
            nibble = s >> 4 * i & 0xF
            byte = data[nibble & 7]
            value |= ((0xFF if byte & 0x80 else 0) if nibble & 8 else byte) << 8 * i
        result.append(value)
    return result


def double_product(a: Array, b: Array, kind: str) -> list[int]:
    return [int(x) * int(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]


def high_product(a: Array, b: Array, kind: str) -> list[int]:
    return [product >> int(kind[1:]) for product in double_product(a, b, kind)]


def py_min(a: Array, b: Array, sign: int) -> list[float]:
    result = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        if math.isnan(x) or math.isnan(y):
            result.append(y if math.isnan(x) else x)
        elif x == y:
            lower, upper = sorted((x, y), key=lambda v: math.copysign(1, v))
            result.append(lower if sign < 0 else upper)
        else:
            result.append(min(x, y) if sign < 0 else max(x, y))
    return result


Case = tuple[str, str, list[str], Callable[..., Any]]
CASES: list[Case] = []


def case(instruction: str, result: str, operands: list[str], reference: Callable[..., Any]) -> None:
    CASES.append((instruction, result, operands, reference))


for k in ("u16", "s16", "u32", "s32", "u64", "s64"):
    case(f"add.{k}", k, [k, k], lambda a, b: a + b)
    case(f"sub.{k}", k, [k, k], lambda a, b: a - b)
    case(f"mul.lo.{k}", k, [k, k], lambda a, b: a * b)
    case(f"mad.lo.{k}", k, [k, k, k], lambda a, b, c: a * b + c)
    case(f"min.{k}", k, [k, k], np.minimum)
    case(f"max.{k}", k, [k, k], np.maximum)
for k in ("u32", "s32", "u64", "s64"):
    case(f"mul.hi.{k}", k, [k, k], lambda a, b, k=k: np.array(high_product(a, b, k), dtype=object))
for k, wide in (("u16", "u32"), ("s16", "s32"), ("u32", "u64"), ("s32", "s64")):
    case(f"mul.wide.{k}", wide, [k, k], lambda a, b, k=k: np.array(double_product(a, b, k), dtype=object))
    case(
        f"mad.wide.{k}",
        wide,
        [k, k, wide],
        lambda a, b, c, k=k, w=wide: np.array(double_product(a, b, k), dtype=object).astype(DTYPES[w]) + c,
    )
for k in ("s32", "s64"):
    case(f"neg.{k}", k, [k], lambda a: -a)
    case(f"abs.{k}", k, [k], np.abs)
for k in ("b16", "b32", "b64"):
    case(f"and.{k}", k, [k, k], np.bitwise_and)
    case(f"or.{k}", k, [k, k], np.bitwise_or)
    case(f"xor.{k}", k, [k, k], np.bitwise_xor)
    case(f"not.{k}", k, [k], np.invert)
    case(f"shl.{k}", k, [k, "u32"], lambda a, b, k=k: np.array(shifted(a, b, k, True), dtype=np.uint64))
for k in ("u16", "s16", "u32", "s32", "u64", "s64"):
    case(f"shr.{k}", k, [k, "u32"], lambda a, b, k=k: np.array(shifted(a, b, k, False), dtype=object))
for k in ("u32", "s32", "u64", "s64"):
    case(f"bfe.{k}", k, [k, "u32", "u32"], lambda a, p, n, k=k: np.array(bit_field(a, p, n, k), dtype=object))
for k in ("b32", "b64"):
    case(
        f"bfi.{k}",
        k,
        [k, k, "u32", "u32"],
        lambda a, b, p, n, k=k: np.array(inserted(a, b, p, n, int(k[1:])), dtype=np.uint64),
    )
    case(f"popc.{k}", "u32", [k], lambda a: np.array([int(x).bit_count() for x in a]))
    case(f"clz.{k}", "u32", [k], lambda a, k=k: np.array([int(k[1:]) - int(x).bit_length() for x in a]))
    case(
        f"brev.{k}",
        k,
        [k],
        lambda a, k=k: np.array([int(f"{int(x):0{k[1:]}b}"[::-1], 2) for x in a], dtype=np.uint64),
    )
case("prmt.b32", "b32", ["b32", "b32", "b32"], lambda a, b, c: np.array(permuted(a, b, c)))
case("lop3.b32", "b32", ["b32", "b32", "b32", "=0x96"], lambda a, b, c: a ^ b ^ c)
case("lop3.b32", "b32", ["b32", "b32", "b32", "=0xF8"], lambda a, b, c: a | (b & c))
case(
    "shf.l.wrap.b32",
    "b32",
    ["b32", "b32", "u32"],
    lambda a, b, c: np.array(
        [
            (((y << 32 | x) << (s & 31)) >> 32) & 0xFFFFFFFF
            for x, y, s in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
        ]
    ),
)
case(
    "shf.r.clamp.b32",
    "b32",
    ["b32", "b32", "u32"],
    lambda a, b, c: np.array(
        [
            ((y << 32 | x) >> min(s, 32)) & 0xFFFFFFFF
            for x, y, s in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
        ]
    ),
)
for k in ("f32", "f64"):
    case(f"add.{k}", k, [k, k], lambda a, b: a + b)
    case(f"add.rn.{k}", k, [k, k], lambda a, b: a + b)
    case(f"sub.{k}", k, [k, k], lambda a, b: a - b)
    case(f"mul.{k}", k, [k, k], lambda a, b: a * b)
    case(f"div.rn.{k}", k, [k, k], lambda a, b: a / b)
    case(f"neg.{k}", k, [k], lambda a: -a)
    case(f"abs.{k}", k, [k], np.abs)
    case(f"sqrt.rn.{k}", k, [k], np.sqrt)
    case(f"rcp.rn.{k}", k, [k], lambda a: 1 / a)
    case(f"min.{k}", k, [k, k], lambda a, b: np.array(py_min(a, b, -1)))
    case(f"max.{k}", k, [k, k], lambda a, b: np.array(py_min(a, b, 1)))
    case(f"fma.rn.{k}", k, [k, k, k], lambda a, b, c: a * b + c)
    case(f"copysign.{k}", k, [k, k], lambda a, b: np.copysign(b, a))
case("add.ftz.f32", "f32", ["f32", "f32"], lambda a, b: flushed(flushed(a) + flushed(b)))
case("mul.ftz.f32", "f32", ["f32", "f32"], lambda a, b: flushed(flushed(a) * flushed(b)))
case(
    "add.sat.f32",
    "f32",
    ["f32", "f32"],
    lambda a, b: np.where(np.isnan(a + b), 0, np.clip(a + b, 0, 1)) + 0.0,
)
case("selp.b32", "b32", ["b32", "b32", "pred"], lambda a, b, p: np.where(p, a, b))
case("selp.f64", "f64", ["f64", "f64", "pred"], lambda a, b, p: np.where(p, a, b))
case("and.pred", "pred", ["pred", "pred"], np.bitwise_and)
case("or.pred", "pred", ["pred", "pred"], np.bitwise_or)
case("xor.pred", "pred", ["pred", "pred"], np.bitwise_xor)
case("not.pred", "pred", ["pred"], lambda a: 1 - a)
case("set.lt.u32.f32", "u32", ["f32", "f32"], lambda a, b: np.where(a < b, 0xFFFFFFFF, 0))
case("set.ge.f32.s32", "f32", ["s32", "s32"], lambda a, b: np.where(a >= b, 1.0, 0.0))


def flushed(a: Array) -> Array:
    return np.where(np.abs(a) < 2.0**-126, np.copysign(np.float32(0), a), a)


COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
for k in ("u16", "s32", "u32", "s64", "u64", "f32", "f64"):
    for comparison, reference in COMPARISONS.items():
        case(f"setp.{comparison}.{k}", "pred", [k, k], reference)
for comparison, reference in COMPARISONS.items():
    case(
        f"setp.{comparison}u.f32",
        "pred",
        ["f32", "f32"],
        lambda a, b, r=reference: r(a, b) | np.isnan(a) | np.isnan(b),
    )
case("setp.num.f32", "pred", ["f32", "f32"], lambda a, b: ~(np.isnan(a) | np.isnan(b)))
case("setp.nan.f32", "pred", ["f32", "f32"], lambda a, b: np.isnan(a) | np.isnan(b))
for name, reference in {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}.items():
    case(f"setp.{name}.u32", "pred", ["u32", "u32"], reference)
for combination, function in {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.items():
    case(
        f"setp.lt.{combination}.s32",
        "pred",
        ["s32", "s32", "pred"],
        lambda a, b, p, f=function: f(a < b, p.astype(bool)),
    )

for source in ("u16", "s16", "u32", "s32", "u64", "s64"):
    for target in ("u16", "s16", "u32", "s32", "u64", "s64"):
        if source != target:
            case(f"cvt.{target}.{source}", target, [source], lambda a, t=target: a.astype(DTYPES[t]))
    for target in ("f32", "f64"):
        case(f"cvt.rn.{target}.{source}", target, [source], lambda a, t=target: a.astype(DTYPES[t]))
for source in ("f32", "f64"):
    for target in ("s32", "u32", "s64", "u64"):
        for rounding, function in {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}.items():
            case(
                f"cvt.{rounding}.{target}.{source}",
                target,
                [source],
                lambda a, t=target, f=function: np.array(
                    [
                        0
                        if math.isnan(x)
                        else int(min(max(x, np.iinfo(DTYPES[t]).min), np.iinfo(DTYPES[t]).max))
                        for x in f(a).tolist()
                    ],
                    dtype=object,
                ),
            )
case("cvt.f64.f32", "f64", ["f32"], lambda a: a.astype("f8"))
case("cvt.rn.f32.f64", "f32", ["f64"], lambda a: a.astype("f4"))
case("cvt.rn.f16.f32", "f16", ["f32"], lambda a: a.astype("f2"))
case("cvt.f32.f16", "f32", ["f16"], lambda a: a.astype("f4"))
case("cvt.rni.f32.f32", "f32", ["f32"], np.rint)
case("cvt.sat.u16.s32", "u16", ["s32"], lambda a: np.clip(a, 0, 65535))
case("cvt.sat.s16.u64", "s16", ["u64"], lambda a: np.minimum(a, 32767))
case("cvt.u32.u8", "u32", ["u32"], lambda a: a & 0xFF)
case("cvt.s32.s8", "s32", ["u32"], lambda a: (a & 0xFF).astype("u1").view("i1"))
for k in ("b16", "b32", "b64", "f32", "f64"):
    case(f"mov.{k}", k, [k], lambda a: a)


@pytest.mark.parametrize(("instruction", "result", "operands", "reference"), CASES, ids=[c[0] for c in CASES])
def test_instruction(
    instruction: str,
    result: str,
    operands: list[str],
    reference: Callable[..., Any],
    rng: np.random.Generator,
) -> None:
    inputs = {f"i{n}": (k, draw(rng, k)) for n, k in enumerate(operands) if k[0] != "="}
    if instruction.startswith(("shl", "shr")):
        inputs["i1"] = (
            "u32",
            np.where(rng.random(COUNT) < 0.8, rng.integers(0, 70, COUNT), integers(rng, "u32")),
        )
    names = [k[1:] if k[0] == "=" else f"%i{n}" for n, k in enumerate(operands)]
    found = evaluate(f"{instruction} %out, {', '.join(names)};", {"out": result}, inputs)["out"]
    with np.errstate(all="ignore"):
        expected = reference(*(values for _, values in inputs.values()))
    expected = np.asarray(expected)
    if expected.dtype == object:
        expected = np.array([int(x) & ((1 << 64) - 1) for x in expected.tolist()], dtype=np.uint64)
    check(found, expected, instruction)


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64", "s16"])
def test_division(kind: str, rng: np.random.Generator) -> None:
    a, b = integers(rng, kind), integers(rng, kind)
    b[b == 0] = 3
    found = evaluate(
        f"div.{kind} %q, %a, %b; rem.{kind} %r, %a, %b;",
        {"q": kind, "r": kind},
        {"a": (kind, a), "b": (kind, b)},
    )
    quotient = truncated_quotient(a, b)
    wrap = (1 << 64) - 1
    check(found["q"], np.array([int(q) & wrap for q in quotient], dtype=np.uint64), "div")
    remainders = [int(x) - int(q) * int(y) for x, y, q in zip(a, b, quotient, strict=True)]
    check(found["r"], np.array([r & wrap for r in remainders], dtype=np.uint64), "rem")


def test_immediates_of_every_kind(rng: np.random.Generator) -> None:
    a, f = integers(rng, "u32"), floats(rng, "f32")
    found = evaluate(
        """
        add.s32 %w, %a, -7;
        and.b32 %x, %a, 0xFF00;
        shl.b32 %y, %a, 40;
        add.f32 %z, %f, 0f40490FDB;
        mov.b32 %v, 0fBF800000;
        shr.s32 %u, %a, 31;
        """,
        {"w": "u32", "x": "u32", "y": "u32", "z": "f32", "v": "f32", "u": "s32"},
        {"a": ("u32", a), "f": ("f32", f)},
    )
    check(found["w"], a - np.uint32(7), "add")
    check(found["x"], a & 0xFF00, "and")
    check(found["y"], np.zeros_like(a), "shl")
    with np.errstate(all="ignore"):
        check(found["z"], f + np.float32(np.pi), "add.f32")
    assert (found["v"] == -1).all()
    check(found["u"], np.where(a >> 31, -1, 0), "shr")


def test_packing(rng: np.random.Generator) -> None:
    a, b, d = integers(rng, "b32"), integers(rng, "b32"), integers(rng, "b64")
    found = evaluate(
        "mov.b64 %p, {%a, %b}; mov.b64 {%x, %y}, %d; mov.b32 {%h0, %h1}, %a; mov.b32 %z, {%h1, %h0};",
        {"p": "b64", "x": "b32", "y": "b32", "z": "b32"},
        {"a": ("b32", a), "b": ("b32", b), "d": ("b64", d)},
    )
    check(found["p"], a.astype("u8") | b.astype("u8") << np.uint64(32), "pack")
    check(found["x"], d & 0xFFFFFFFF, "unpack low")
    check(found["y"], d >> np.uint64(32), "unpack high")
    check(found["z"], a >> 16 | a << 16, "16-bit halves")


def test_two_predicates_at_once(rng: np.random.Generator) -> None:
    a, b, c = integers(rng, "s32"), integers(rng, "s32"), rng.integers(0, 2, COUNT)
    found = evaluate(
        "setp.lt.and.s32 %p|%q, %a, %b, !%c;",
        {"p": "pred", "q": "pred"},
        {"a": ("s32", a), "b": ("s32", b), "c": ("pred", c)},
    )
    check(found["p"], (a < b) & (c == 0), "p")
    check(found["q"], (a >= b) & (c == 0), "q")


@pytest.mark.parametrize("negated", [False, True])
def test_guards_keep_the_old_value(negated: bool, rng: np.random.Generator) -> None:
    a, b, p = floats(rng, "f32"), floats(rng, "f32"), rng.integers(0, 2, COUNT)
    body = f"mov.f32 %x, %a; @{'!' if negated else ''}%p add.f32 %x, %a, %b; @%p mul.wide.u16 %y, 3, 5;"
    found = evaluate(
        "mov.u32 %y, 9;" + body,
        {"x": "f32", "y": "u32"},
        {"a": ("f32", a), "b": ("f32", b), "p": ("pred", p)},
    )
    with np.errstate(all="ignore"):
        check(found["x"], np.where((p == 1) != negated, a + b, a), "guarded add")
    check(found["y"], np.where(p == 1, 15, 9), "guarded mul")


def test_exact_fma_is_rounded_once() -> None:
    # (1 + 2^-12)^2 - (1 + 2^-11) = 2^-24: the product alone rounds it away.
    a = np.full(COUNT, 1 + 2.0**-12, dtype=np.float32)
    c = np.full(COUNT, -(1 + 2.0**-11), dtype=np.float32)
    inputs = {"a": ("f32", a), "c": ("f32", c)}
    assert (
        evaluate("fma.rn.f32 %x, %a, %a, %c;", {"x": "f32"}, inputs, exact_fma=True)["x"] == 2.0**-24
    ).all()
    assert (evaluate("fma.rn.f32 %x, %a, %a, %c;", {"x": "f32"}, inputs)["x"] == 0).all()


def test_exact_fma_of_every_kind_of_number(rng: np.random.Generator) -> None:
    for scale in (1.0, 2.0**-70, 2.0**-63):  # products around and below the smallest subnormal
        with np.errstate(all="ignore"):
            a, b, c = (floats(rng, "f32") * np.float32(scale) for _ in range(3))
            inputs = {"a": ("f32", a), "b": ("f32", b), "c": ("f32", c * np.float32(scale))}
        found = evaluate("fma.rn.f32 %x, %a, %b, %c;", {"x": "f32"}, inputs, exact_fma=True)["x"]
        check(found, fma(*(values for _, values in inputs.values())), "fma")


def test_approximate_functions_are_accurate(rng: np.random.Generator) -> None:
    a = rng.uniform(0.1, 4, COUNT).astype(np.float32)
    functions: dict[str, Callable[[Array], Array]] = {
        "ex2.approx.f32": np.exp2,
        "lg2.approx.f32": np.log2,
        "rsqrt.approx.f32": lambda x: 1 / np.sqrt(x),
        "sin.approx.f32": np.sin,
        "cos.approx.f32": np.cos,
        "rcp.approx.ftz.f32": lambda x: 1 / x,
    }
    for name, function in functions.items():
        found = evaluate(f"{name} %x, %a;", {"x": "f32"}, {"a": ("f32", a)})["x"]
        np.testing.assert_allclose(found, function(a.astype("f8")), rtol=2e-7, atol=2e-7, err_msg=name)


@pytest.mark.parametrize(
    "instruction",
    [
        "frobnicate.f32 %r1, %r2;",
        "add.rz.f32 %r1, %r2, %r3;",
        "add.cc.u32 %r1, %r2, %r3;",
        "mul.u32 %r1, %r2, %r3;",
        "setp.approx.f32 %p1, %r1, %r2;",
        "shfl.sync.left.b32 %r1, %r2, 1, 31, -1;",
        "ld.shared.v3.f32 {%r1, %r2, %r3}, [%r4];",
        "cp.async.cg.shared.global [%r1], [%d1], 8;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d1], [%r1], 16;",
        "atom.global.mul.u32 %r1, [%d1], %r2;",
        "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {%r1, %r2}, %d1, %d2, %r3, 0, 1, 1, 1;",
        "call.uni foo, (%r1);",
        "bar.red.popc.u32 %r1, 0, %p1;",
        "mov.u32 %r1, nothing;",
        "mov.u32 %r1, %d1;add.u64 %d1, %r1, %r2;",
    ],
)
def test_unknown_instructions_name_their_line(instruction: str) -> None:
    text = kernel(f"\n    {instruction}\n")
    line = next(
        n for n, content in enumerate(text.split("\n"), 1) if instruction.split(";")[-2].strip() in content
    )
    with pytest.raises(
        UnknownInstructionError,
        match=rf"PTX line {line}: .*{instruction.split(';')[-2].split('.')[0].strip()}",
    ):
        run(text, [], Memory())


def test_code_that_is_never_reached_is_checked_too() -> None:
    text = kernel("bra $end;\n    frobnicate.f32 %r1, %r2;\n$end:")
    with pytest.raises(UnknownInstructionError, match="frobnicate"):
        run(parse_ptx(text).text, [], Memory())


def test_undefined_registers_are_nan() -> None:
    text_in = {"a": ("f32", np.ones(64, dtype=np.float32))}
    found = evaluate("{ .reg .f32 %u; add.f32 %x, %a, %u; }", {"x": "f32"}, text_in)
    assert np.isnan(found["x"]).all()
