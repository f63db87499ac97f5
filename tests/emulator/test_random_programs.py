"""Random structured programs, run by the emulator and by a plain interpreter, thread by thread.

The programs branch and loop on data, exchange values through shared memory, and end early: what they test is
liveness, the sharing of register slots, divergence and reconvergence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from ptx_kernels import kernel, run

from tilewave.emulator import Memory

MASK = 0xFFFFFFFF
VARIABLES = 7
ALL_VARIABLES = 60
THREADS = 80


@dataclass
class Assign:
    operation: str
    target: int
    left: int
    right: int | str  # a variable's index, or a constant as text


@dataclass
class If:
    variable: int
    bit: int
    then: list[Any]
    otherwise: list[Any]


@dataclass
class Loop:
    variable: int  # trip count: its lowest three bits
    serial: int
    body: list[Any]


@dataclass
class Exchange:
    variable: int
    shift: int


@dataclass
class Leave:
    variable: int
    bit: int


@dataclass
class Writer:
    """A program as PTX."""

    lines: list[str] = field(default_factory=list)
    labels: int = 0

    def label(self) -> str:
        self.labels += 1
        return f"$L{self.labels}"

    def write(self, statements: list[Any]) -> None:
        for s in statements:
            if isinstance(s, Assign):
                right = s.right if isinstance(s.right, str) else f"%v{s.right}"
                self.lines.append(f"{s.operation} %v{s.target}, %v{s.left}, {right};")
            elif isinstance(s, If):
                otherwise, end = self.label(), self.label()
                self.test(s.variable, s.bit)
                self.lines.append(f"@!%p0 bra {otherwise};")
                self.write(s.then)
                self.lines.append(f"bra.uni {end};\n{otherwise}:")
                self.write(s.otherwise)
                self.lines.append(f"{end}:")
            elif isinstance(s, Loop):
                again, end = self.label(), self.label()
                counter = f"%c{s.serial}"
                self.lines.append(f".reg .u32 {counter}; and.b32 {counter}, %v{s.variable}, 7;\n{again}:")
                self.lines.append(f"setp.eq.u32 %p0, {counter}, 0; @%p0 bra {end};")
                self.write(s.body)
                self.lines.append(f"sub.u32 {counter}, {counter}, 1; bra.uni {again};\n{end}:")
            elif isinstance(s, Exchange):
                self.lines.append(
                    f"""bar.sync 0; st.shared.u32 [%a], %v{s.variable}; bar.sync 0;
                    add.u32 %r0, %tid0, {s.shift}; rem.u32 %r0, %r0, {THREADS}; shl.b32 %r0, %r0, 2;
                    mov.u32 %r1, s; add.u32 %r0, %r0, %r1; ld.shared.u32 %v{s.variable}, [%r0];"""
                )
            elif isinstance(s, Leave):
                self.test(s.variable, s.bit)
                self.lines.append("@%p0 ret;")

    def test(self, variable: int, bit: int) -> None:
        self.lines.append(f"and.b32 %r0, %v{variable}, {1 << bit}; setp.ne.u32 %p0, %r0, 0;")


OPERATIONS = {
    "add.u32": lambda a, b: a + b & MASK,
    "sub.u32": lambda a, b: a - b & MASK,
    "mul.lo.u32": lambda a, b: a * b & MASK,
    "xor.b32": lambda a, b: a ^ b,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> min(b, 32),
    "max.u32": max,
}


def statements(
    rng: np.random.Generator, depth: int, counter: list[int], known: list[int], top: bool, exchange: bool
) -> list[Any]:
    """A random program; exchanges only where all threads pass.

    `known` are the variables that have a value here. Besides the common ones, which are assigned everywhere,
    some are assigned once and read in what follows: their lifetimes end in the middle of loops.
    """
    result: list[Any] = []
    known = list(known)
    for _ in range(int(rng.integers(2, 6))):
        kind = rng.random()
        variable, bit = int(rng.integers(VARIABLES)), int(rng.integers(0, 6))
        if depth and kind < 0.25:
            inner = [statements(rng, depth - 1, counter, known, False, exchange) for _ in range(2)]
            result.append(If(variable, bit, inner[0], inner[1] if rng.random() < 0.6 else []))
        elif depth and kind < 0.45:
            counter[0] += 1
            serial = counter[0]
            body = statements(rng, depth - 1, counter, known, False, exchange)
            result.append(Loop(variable, serial, body))
        elif top and exchange and kind < 0.6:
            result.append(Exchange(variable, int(rng.integers(1, THREADS))))
        elif not exchange and kind < 0.55:
            result.append(Leave(variable, bit))
        else:
            left = int(rng.choice(known))
            right = int(rng.choice(known)) if rng.random() < 0.7 else str(int(rng.integers(0, 40)))
            if rng.random() < 0.5 and counter[1] < ALL_VARIABLES:
                variable, counter[1] = counter[1], counter[1] + 1
                known.append(variable)
            result.append(Assign(str(rng.choice(list(OPERATIONS))), variable, left, right))
    return result


class Left(Exception):
    """The thread has ended."""


def interpret(program: list[Any], v: list[int]) -> Iterator[tuple[int, int]]:
    """Run one thread; yields (value, shift) at an exchange and is sent what it gets."""
    for s in program:
        if isinstance(s, Assign):
            right = int(s.right) if isinstance(s.right, str) else v[s.right]
            v[s.target] = OPERATIONS[s.operation](v[s.left], right)
        elif isinstance(s, If):
            yield from interpret(s.then if v[s.variable] >> s.bit & 1 else s.otherwise, v)
        elif isinstance(s, Loop):
            for _ in range(v[s.variable] & 7):
                yield from interpret(s.body, v)
        elif isinstance(s, Exchange):
            v[s.variable] = yield v[s.variable], s.shift
        elif v[s.variable] >> s.bit & 1:
            raise Left


def expected(program: list[Any], start: np.ndarray[Any, Any]) -> list[list[int]]:
    """Final variables of all threads; those that left early have none."""
    values = [[int(x) for x in row] + [0] * (ALL_VARIABLES - VARIABLES) for row in start]
    result: list[list[int]] = [[0xDEAD] * VARIABLES for _ in values]
    threads = [interpret(program, v) for v in values]
    running = list(range(len(threads)))
    inbox: list[int | None] = [None] * len(threads)
    while running:
        outbox: dict[int, tuple[int, int]] = {}
        for t in running:
            try:
                outbox[t] = threads[t].send(inbox[t])  # type: ignore[attr-defined]
            except StopIteration:
                result[t] = values[t][:VARIABLES]
            except Left:
                pass
        running = list(outbox)
        for t, (_, shift) in outbox.items():
            block = t // THREADS * THREADS
            inbox[t] = outbox[block + (t - block + shift) % THREADS][0]
    return result


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("options", [{}, {"resident": 2, "order": 9}, {"detect_races": True}])
def test_random_programs(exchange: bool, options: dict[str, Any], rng: np.random.Generator) -> None:
    for _ in range(15):
        program = statements(rng, 3, [0, VARIABLES], list(range(VARIABLES)), True, exchange)
        writer = Writer()
        writer.write(program)
        variables = "".join(f".reg .u32 %v{n};" for n in range(ALL_VARIABLES))
        loads = "".join(f"ld.global.u32 %v{n}, [%d0+{4 * n}];\n" for n in range(VARIABLES))
        stores = "".join(f"st.global.u32 [%d1+{4 * n}], %v{n};\n" for n in range(VARIABLES))
        body = f"""
        .shared .align 4 .b8 s[{4 * THREADS}];
        .reg .u32 %tid0; .reg .u32 %a; {variables}
        mov.u32 %tid0, %tid.x; shl.b32 %a, %tid0, 2; mov.u32 %r1, s; add.u32 %a, %a, %r1;
        mov.u32 %r2, %ctaid.x; mad.lo.u32 %r2, %r2, {THREADS}, %tid0; mul.wide.u32 %d2, %r2, {4 * VARIABLES};
        ld.param.u64 %d0, [q0]; add.s64 %d0, %d0, %d2; ld.param.u64 %d1, [q1]; add.s64 %d1, %d1, %d2;
        {loads}
        {chr(10).join(writer.lines)}
        {stores}
        """
        start = rng.integers(0, 1 << 32, (3 * THREADS, VARIABLES), dtype=np.uint32)
        start[rng.random(start.shape) < 0.5] %= 8
        memory = Memory()
        out = memory.put(np.full(start.shape, 0xDEAD, dtype=np.uint32))
        text = kernel(body, ".param .u64 q0, .param .u64 q1")
        run(text, [memory.put(start), out], memory, block=THREADS, grid=3, **options)
        assert memory.get(out).tolist() == expected(program, start), text
