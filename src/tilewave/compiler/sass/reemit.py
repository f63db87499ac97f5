"""The register-file pass from end to end: find the loop, emit it anew, prove it, put it into the cubin."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from tilewave.compiler.records import Program
from tilewave.compiler.sass.emit import Order, Spacing, emit
from tilewave.compiler.sass.flow import live_before, steady_loop
from tilewave.compiler.sass.mapping import UnsuitableLoop, map_loop
from tilewave.compiler.sass.patch import with_words
from tilewave.compiler.sass.register_file import RegisterFileScore, score
from tilewave.compiler.sass.verify import Rejected, Verifier
from tilewave.emulator.sass import Cubin, decode, decode_function
from tilewave.errors import EmulationError

OFF_SWITCH = "TILEWAVE_SASS_PASS"
"""Environment variable: 0 leaves every kernel as the compiler made it, 1 lets the library use the pass."""

KNOWN_COMPILERS = ("NVRTC 13.0.88", "NVRTC 13.5.37")
"""Compilers whose output the tests put through the pass."""
KNOWN_ARCHITECTURES = ("sm_90", "sm_90a")
"""Architectures whose register file was measured."""
KNOWN_KERNELS = {"_ZN8tilewave10large_tileI": 1024}
"""How symbols of kernels begin that are written for the pass, and the multiply-adds of their steady loop."""

_DEFAULT_SPACING = Spacing()
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


def reemit(program: Program, symbol: str, spacing: Spacing = _DEFAULT_SPACING) -> Reemitted:
    """Emit the steady loop of the kernel `symbol` anew; `spacing` is for experiments.

    Nothing is raised for a kernel that the pass cannot take: the outcome's `reason` says why.
    """
    reason = refusal(program, symbol)
    if reason is not None:
        return Reemitted(None, reason)
    return _reemit(program.cubin, symbol, spacing)


def image_to_load(program: Program, symbol: str) -> bytes:
    """The machine code to load: re-emitted where the switch is 1 and the pass takes the kernel.

    The switch is off by default until bits and speed are confirmed on the GPUs that it is for.
    """
    if os.environ.get(OFF_SWITCH) != "1":
        return program.cubin
    return reemit(program, symbol).cubin or program.cubin


def refusal(program: Program, symbol: str) -> str | None:
    """Why the pass does not even look at a kernel, or None."""
    if os.environ.get(OFF_SWITCH) == "0":
        return f"the register-file pass is switched off by {OFF_SWITCH}=0"
    if program.arch not in KNOWN_ARCHITECTURES:
        known = " and ".join(KNOWN_ARCHITECTURES)
        return f"the register file of {program.arch} was not measured, only that of {known}"
    if program.compiler not in KNOWN_COMPILERS:
        known = " and ".join(KNOWN_COMPILERS)
        return f"the pass was not tested with {program.compiler}, only with {known}"
    if not symbol.startswith(tuple(KNOWN_KERNELS)):
        return "the kernel is not written for the register-file pass"
    return None


@functools.lru_cache(maxsize=128)
def _reemit(image: bytes, symbol: str, spacing: Spacing) -> Reemitted:
    multiply_adds = next(n for prefix, n in KNOWN_KERNELS.items() if symbol.startswith(prefix))
    try:
        return _attempt(Cubin(image), symbol, multiply_adds, spacing)
    except UnsuitableLoop as error:
        return Reemitted(None, f"the steady loop has not the form that the pass knows: {error}")
    except Rejected as error:
        return Reemitted(None, f"the new loop is not proved right: {error}")
    except EmulationError as error:
        return Reemitted(None, f"the machine code is not understood: {error}")


def _attempt(cubin: Cubin, symbol: str, multiply_adds: int, spacing: Spacing) -> Reemitted:
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
    for held in steady.sides:
        words = emit(loop, steady, at_head | behind, Order(held, spacing))
        predicted = score([decode(word, 0, cubin.sm) for word in words])
        if best is None or predicted.cycles < best[0].cycles:
            best = predicted, words
    assert best is not None
    predicted, words = best
    before = score(loop)
    if predicted.cycles >= before.cycles:
        return Reemitted(None, "no order of the loop is predicted to be faster than the compiler's")
    used = 1 + max(
        index
        for word in words
        for one in [decode(word, 0, cubin.sm)]
        for kind, index in one.writes + one.reads
        if kind == "R"
    )
    # More registers than the compiler took cost nothing within the step by which they are allocated.
    limit = min(_MOST_REGISTERS, -(-function.registers // _ALLOCATED_BY) * _ALLOCATED_BY)
    if used > limit:
        raise UnsuitableLoop(f"{used} registers are needed, which would let fewer blocks share an SM")
    new = with_words(cubin, symbol, first, words, used)
    registers = new.function(symbol).registers
    verifier.check(decode_function(new.function(symbol), new.sm), registers)
    return Reemitted(new.image, None, Report(before, predicted, registers))
