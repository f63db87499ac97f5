"""The register-file pass from end to end: find the loop, emit it anew, prove it, put it into the cubin."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tilewave.compiler.records import Program
from tilewave.compiler.register_pass import KNOWN_KERNELS, refusal
from tilewave.compiler.sass.emit import Order, Spacing, emit
from tilewave.compiler.sass.flow import live_before, steady_loop
from tilewave.compiler.sass.mapping import Steady, UnsuitableLoop, map_loop
from tilewave.compiler.sass.patch import with_words
from tilewave.compiler.sass.register_file import RegisterFileScore, score
from tilewave.compiler.sass.verify import Rejected, Verifier
from tilewave.emulator.sass import Cubin, decode, decode_function
from tilewave.emulator.sass.instruction import RESERVED_REGISTERS
from tilewave.errors import EmulationError

_SPACING = Spacing()
_RENEWING_SPACING = Spacing(loads=24, first_load=8, behind_barrier=20)
"""For loops that renew operands in place: the fastest of those that an H200 ran
(benchmarks/results/wide_tile_h200.json)."""
_MOST_SUMS = 128
"""Sums of a thread that leave registers for two sets of operands."""
_MOST_REGISTERS = 255
_ALLOCATED_BY = 8
"""Registers of a thread are allocated in steps of so many."""


@dataclass(frozen=True)
class Report:
    """What the model of the register file says of the loop before and after, and what the loop takes."""

    before: RegisterFileScore
    after: RegisterFileScore
    registers: int
    """Registers of a thread, after."""

    def __str__(self) -> str:
        return (
            f"predicted issue slots per FFMA {self.before.cycles_per_multiply_add:.3f} -> "
            f"{self.after.cycles_per_multiply_add:.3f}; {self.registers} registers"
        )


@dataclass(frozen=True)
class Reemitted:
    """The outcome: a cubin with the new loop and a report, or the reason why there is none."""

    cubin: bytes | None
    reason: str | None
    report: Report | None = None


def reemit(program: Program, symbol: str, spacing: Spacing | None = None) -> Reemitted:
    """Emit the steady loop of the kernel `symbol` anew; a `spacing` other than the usual is for experiments.

    Nothing is raised for a kernel that the pass cannot take: the outcome's `reason` says why.
    """
    reason = refusal(program, symbol)
    if reason is not None:
        return Reemitted(None, reason)
    return _reemit(program.cubin, symbol, spacing)


@functools.lru_cache(maxsize=128)
def _reemit(image: bytes, symbol: str, spacing: Spacing | None) -> Reemitted:
    multiply_adds = next(n for prefix, n in KNOWN_KERNELS.items() if symbol.startswith(prefix))
    try:
        return _attempt(Cubin(image), symbol, multiply_adds, spacing)
    except UnsuitableLoop as error:
        return Reemitted(None, f"the steady loop has not the form that the pass knows: {error}")
    except Rejected as error:
        return Reemitted(None, f"the new loop is not proved right: {error}")
    except EmulationError as error:
        return Reemitted(None, f"the machine code is not understood: {error}")


def orders(steady: Steady, spacing: Spacing | None = None) -> list[Order]:
    """The orders that are tried for a loop."""
    if len(steady.sums) <= _MOST_SUMS:
        return [Order(held, spacing or _SPACING) for held in steady.sides]
    longer = max(steady.sides, key=lambda side: steady.extent[side])
    return [Order(longer, spacing or _RENEWING_SPACING, True, squares) for squares in (False, True)]


def _attempt(cubin: Cubin, symbol: str, multiply_adds: int, spacing: Spacing | None) -> Reemitted:
    function = cubin.function(symbol)
    code = decode_function(function, cubin.sm)
    verifier = Verifier(code, multiply_adds)
    verifier.check(code, function.registers)
    found = steady_loop(code, multiply_adds)
    if isinstance(found, str):
        raise UnsuitableLoop(found)
    first, last = found
    loop = code[first : last + 1]
    at_head, behind = live_before(code, first, last + 1)
    steady = map_loop(loop)
    best: tuple[RegisterFileScore, list[int]] | None = None
    for order in orders(steady, spacing):
        words = emit(loop, steady, at_head | behind, behind, order)
        predicted = score([decode(word, 0, cubin.sm) for word in words])
        if best is None or predicted.cycles < best[0].cycles:
            best = predicted, words
    assert best is not None
    predicted, words = best
    before = score(loop)
    if predicted.cycles >= before.cycles:
        return Reemitted(None, "no order of the loop is predicted to be faster than the compiler's")
    largest = max(
        index
        for word in words
        for one in [decode(word, 0, cubin.sm)]
        for kind, index in one.writes + one.reads
        if kind == "R"
    )
    used = largest + 1 + RESERVED_REGISTERS
    # More registers than the compiler took cost nothing within the step by which they are allocated.
    limit = min(_MOST_REGISTERS, -(-function.registers // _ALLOCATED_BY) * _ALLOCATED_BY)
    if used > limit:
        raise UnsuitableLoop(f"{used} registers are needed, which would let fewer blocks share an SM")
    new = with_words(cubin, symbol, first, words, used)
    registers = new.function(symbol).registers
    new_code = decode_function(new.function(symbol), new.sm)
    verifier.check(new_code, registers)
    after = steady_loop(new_code, multiply_adds)
    assert not isinstance(after, str)
    return Reemitted(new.image, None, Report(before, score(new_code[after[0] : after[1] + 1]), registers))
