"""float16 and bfloat16 arithmetic, alone and in pairs: each result is the exact one, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from ptx_kernels import kernel, run

from tilewave.emulator import Memory

Array = np.ndarray[Any, Any]

LARGEST = {"f16": (2 - Fraction(1, 1 << 10)) * 2**15, "bf16": (2 - Fraction(1, 1 << 7)) * 2**127}
OPERATIONS: dict[str, tuple[int, Callable[..., Fraction]]] = {
    "add": (2, lambda a, b: a + b),
    "sub": (2, lambda a, b: a - b),
    "mul": (2, lambda a, b: a * b),
    "fma": (3, lambda a, b, c: a * b + c),
    "min": (2, min),
    "max": (2, max),
}


def value(bits: int, kind: str) -> float:
    """What the bits of a half mean."""
    if kind == "f16":
        return float(np.array(bits, dtype=np.uint16).view(np.float16))
    return float(np.array(bits << 16, dtype=np.uint32).view(np.float32))


def nearest(exact: Fraction, kind: str) -> int:
    """Bits of the half nearest to a number, ties to even; a zero's sign is left out."""
    fraction_bits, smallest = (10, -14) if kind == "f16" else (7, -126)
    if exact == 0:
        return 0
    sign, size = (0x8000, -exact) if exact < 0 else (0, exact)
    exponent = max(smallest, size.numerator.bit_length() - size.denominator.bit_length() - 1)
    while size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    steps = size / Fraction(2) ** (exponent - fraction_bits)
    whole = steps.numerator // steps.denominator
    rest = steps - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2):
        whole += 1
    # A significand that rounds up to the next power of two carries into the exponent, and so to infinity.
    return sign | min(whole + ((exponent - smallest) << fraction_bits), 0x7C00 if kind == "f16" else 0x7F80)


def random_halves(rng: np.random.Generator, count: int, kind: str) -> Array:
    """Finite halves of all sizes, many of them near each other."""
    infinity = 0x7C00 if kind == "f16" else 0x7F80
    bits = rng.integers(0, infinity, count)
    near = rng.random(count) < 0.5
    bits[near] = (infinity // 2 + rng.integers(-40, 40, count)[near]) if kind == "f16" else bits[near]
    return (bits | rng.integers(0, 2, count) << 15).astype(np.uint16)


def evaluate(instruction: str, inputs: list[Array], pair: bool) -> Array:
    """Run `instruction` on registers a, b, c into d, once for each element."""
    size, register = ("b32", "r") if pair else ("b16", "h")
    memory = Memory()
    buffers = [memory.put(values) for values in inputs]
    out = memory.empty(inputs[0].shape, inputs[0].dtype)
    width = 4 if pair else 2
    loads = "".join(
        f"ld.param.u64 %d0, [q{n}]; add.s64 %d0, %d0, %d9; ld.global.{size} %{register}{n}, [%d0];\n"
        for n in range(len(inputs))
    )
    operands = ", ".join(f"%{register}{n}" for n in range(len(inputs)))
    body = f"""
    mov.u32 %r19, %tid.x; mul.wide.u32 %d9, %r19, {width};
    {loads}
    {instruction} %{register}9, {operands};
    ld.param.u64 %d0, [q{len(inputs)}]; add.s64 %d0, %d0, %d9; st.global.{size} [%d0], %{register}9;
    """
    parameters = ", ".join(f".param .u64 q{n}" for n in range(len(inputs) + 1))
    run(kernel(body, parameters), [*buffers, out], memory, block=len(inputs[0]))
    return memory.get(out)


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_results_are_rounded_once(operation: str, kind: str, pair: bool, rng: np.random.Generator) -> None:
    count, exact = OPERATIONS[operation]
    halves = [random_halves(rng, 256, kind) for _ in range(count)]
    inputs = [half.view(np.uint32) if pair else half for half in halves]
    rounding = ".rn" if operation == "fma" else ""
    result = evaluate(f"{operation}{rounding}.{kind}{'x2' if pair else ''}", inputs, pair).view(np.uint16)
    for place in range(256):
        numbers = [Fraction(value(int(half[place]), kind)) for half in halves]
        expected = nearest(exact(*numbers), kind)
        got = int(result[place])
        assert got == expected or (expected & 0x7FFF == 0 and got & 0x7FFF == 0), (numbers, got, expected)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_special_values(kind: str) -> None:
    infinity, nan, one = (0x7C00, 0x7E01, 0x3C00) if kind == "f16" else (0x7F80, 0x7FC1, 0x3F80)
    left = np.array([infinity, infinity, nan, one, 0x8000, 0], np.uint16)
    right = np.array([infinity | 0x8000, one, one, nan, 0, 0x8000], np.uint16)
    pairs = [left.view(np.uint32), right.view(np.uint32)]
    total = evaluate(f"add.{kind}x2", pairs, True).view(np.uint16)
    assert [hex(x) for x in total] == [hex(x) for x in (0x7FFF, infinity, 0x7FFF, 0x7FFF, 0, 0)]
    smaller = evaluate(f"min.{kind}x2", pairs, True).view(np.uint16)
    assert smaller.tolist() == [infinity | 0x8000, one, one, one, 0x8000, 0x8000]
    larger = evaluate(f"max.{kind}x2", pairs, True).view(np.uint16)
    assert larger.tolist() == [infinity, infinity, one, one, 0, 0]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_signs(kind: str, rng: np.random.Generator) -> None:
    bits = rng.integers(0, 1 << 16, 256).astype(np.uint16)
    assert (evaluate(f"neg.{kind}x2", [bits.view(np.uint32)], True).view(np.uint16) == bits ^ 0x8000).all()
    assert (evaluate(f"abs.{kind}x2", [bits.view(np.uint32)], True).view(np.uint16) == bits & 0x7FFF).all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_conversions_from_float32(kind: str, rng: np.random.Generator) -> None:
    scale = np.exp2(rng.integers(-26, 17, 256) if kind == "f16" else rng.integers(-135, 127, 256))
    numbers = (rng.standard_normal(256) * scale).astype(np.float32)
    # Halfway between two halves, and right beside that.
    halfway = numbers.view(np.uint32) & np.uint32(0xFFFF0000 if kind == "bf16" else 0xFFFFE000)
    halfway = halfway | np.uint32(0x8000 if kind == "bf16" else 0x1000)
    halfway[::3] += 1
    numbers[::2] = halfway.view(np.float32)[::2]
    numbers = numbers[np.isfinite(numbers)][:128]
    expected = [nearest(Fraction(float(x)), kind) for x in numbers]
    low, high = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :][: len(numbers) // 2]
    both = evaluate(f"cvt.rn.{kind}x2.f32", [high.view(np.uint32), low.view(np.uint32)], True)
    found = [*(both & 0xFFFF).tolist(), *(both >> 16).tolist()]
    wanted = expected[: 2 * len(low)]
    assert all(a == b or (b & 0x7FFF == 0 and a & 0x7FFF == 0) for a, b in zip(found, wanted, strict=True))


def test_bfloat16_alone(rng: np.random.Generator) -> None:
    bits = random_halves(rng, 64, "bf16")
    body = """
    mov.u32 %r19, %tid.x; mul.wide.u32 %d9, %r19, 2;
    ld.param.u64 %d0, [q0]; add.s64 %d0, %d0, %d9; ld.global.b16 %h0, [%d0];
    cvt.f32.bf16 %r1, %h0; cvt.rn.bf16.f32 %h1, %r1; st.global.b16 [%d0], %h1;
    ld.param.u64 %d0, [q1]; add.s64 %d0, %d0, %d9; add.s64 %d0, %d0, %d9; st.global.b32 [%d0], %r1;
    """
    memory = Memory()
    source, out = memory.put(bits), memory.empty(64, np.float32)
    run(kernel(body, ".param .u64 q0, .param .u64 q1"), [source, out], memory, block=64)
    assert memory.get(out).tolist() == [value(int(x), "bf16") for x in bits]
    assert (memory.get(source) == bits).all()
