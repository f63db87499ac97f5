"""What tests of the register-file pass share: large tiles, compiled, and products run from machine code."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewave.compiler import Program
from tilewave.compiler.sass.flow import live_before, steady_loop
from tilewave.compiler.sass.mapping import Steady, map_loop
from tilewave.compiler.sass.verify import Verifier
from tilewave.emulator import Memory, launch
from tilewave.emulator.sass import BlockResult, Cubin, Instruction, decode_function, run_blocks
from tilewave.emulator.sass.instruction import Cell
from tilewave.kernels.arguments import Pointers, pack_arguments
from tilewave.kernels.build import compile_instance
from tilewave.kernels.families import large_tile
from tilewave.kernels.instances import Contiguous, Instance
from tilewave.planner.schedules import Raster, Schedule, decompose
from tilewave.problem import GemmProblem, MatrixLayout
from tilewave.runtime.emulated import place

Generator = np.random.Generator
Floats = NDArray[np.float32]
ARCH = "sm_90a"
INSTANCES = tuple(one for one in large_tile.instances() if not one.needs_new_loop)
"""Large tiles of 16 x 8 outputs a thread."""
WIDE = tuple(one for one in large_tile.instances() if one.needs_new_loop)
MULTIPLY_ADDS = 1024
"""Of a thread in the steady loop of one of `INSTANCES`."""


@dataclass(frozen=True)
class Compiled:
    """A large tile as the compiler made it, with what the pass needs to know of its loop."""

    program: Program
    symbol: str
    code: tuple[Instruction, ...]
    registers: int
    first: int
    last: int
    live: frozenset[Cell]
    behind: frozenset[Cell]
    steady: Steady
    verifier: Verifier

    @property
    def loop(self) -> tuple[Instruction, ...]:
        return self.code[self.first : self.last + 1]


@functools.cache
def compiled(instance: Instance) -> Compiled:
    program, kernel = compile_instance(instance, ARCH)
    function = Cubin(program.cubin).function(kernel.symbol)
    code = decode_function(function, 90)
    multiply_adds = instance.tm * instance.tn * instance.bk
    found = steady_loop(code, multiply_adds)
    assert not isinstance(found, str), found
    first, last = found
    at_head, behind = live_before(code, first, last + 1)
    return Compiled(
        program,
        kernel.symbol,
        tuple(code),
        function.registers,
        first,
        last,
        at_head | behind,
        behind,
        map_loop(code[first : last + 1]),
        Verifier(code, multiply_adds),
    )


def some(rng: Generator, number: int) -> list[Instance]:
    """Some of the instances, other ones every time."""
    return [INSTANCES[i] for i in rng.permutation(len(INSTANCES))[:number]]


def shared_instance(rng: Generator) -> Instance:
    """An instance that a process's tests share, for what does not depend on which one it is."""
    if not _shared:
        _shared.extend(some(rng, 1))
    return _shared[0]


_shared: list[Instance] = []


def operands(rng: Generator, instance: Instance, kind: str, m: int, n: int, k: int) -> dict[str, Floats]:
    """A and B as the instance wants them to lie, each row (or column) followed by a gap."""

    def draw(rows: int, columns: int, access: Contiguous, along_rows: Contiguous) -> Floats:
        if kind == "integers":
            values = rng.integers(-8, 9, (rows, columns)).astype(np.float32)
        else:
            values = rng.standard_normal((rows, columns), np.float32)
        if kind == "special":
            specials = np.array([np.inf, -np.inf, np.nan, 3e38, -1e-42, -0.0, 1e-30], np.float32)
            for _ in range(5):
                values[rng.integers(rows), rng.integers(columns)] = rng.choice(specials)
        if access is along_rows:
            storage = np.zeros((rows, (columns + 3) // 4 * 4 + 4), np.float32)
            storage[:, :columns] = values
            return storage[:, :columns]
        storage = np.zeros((columns, (rows + 3) // 4 * 4 + 4), np.float32)
        storage[:, :rows] = values.T
        return storage[:, :rows].T

    assert instance.a is not None
    assert instance.b is not None
    return {
        "a": draw(m, k, instance.a.contiguous, Contiguous.K),
        "b": draw(k, n, instance.b.contiguous, Contiguous.OTHER),
    }


def ragged_sizes(rng: Generator, instance: Instance, most_k: int = 50) -> tuple[int, int, int]:
    """More than a tile each way, and several slices; whole vectors where the access is wide."""
    assert instance.a is not None
    m, n = instance.bm + int(rng.integers(1, 90)), instance.bn + int(rng.integers(1, 90))
    k = int(rng.integers(17, most_k))
    return (m // 4 * 4, n // 4 * 4, k // 4 * 4) if instance.a.width == 16 else (m, n, k)


def run(
    instance: Instance,
    image: bytes | None,
    given: dict[str, Floats],
    schedule: Schedule,
    alpha: float = 1.0,
) -> tuple[NDArray[np.uint32], Sequence[BlockResult]]:
    """The bits of A B, NaNs included, by a cubin's machine code, or (None) by the program's PTX."""
    kernel = compiled(instance)
    a, b = given["a"], given["b"]
    (m, k), n = a.shape, b.shape[1]
    memory = Memory()
    placed = [place(memory, array, name) for name, array in given.items()]
    out = memory.empty((m, n), np.float32, name="out")
    layouts = [MatrixLayout(x.strides[0] // 4, x.strides[1] // 4) for x in (a, b)]
    problem = GemmProblem(m, n, k, (), *layouts, MatrixLayout(n, 1))
    rows, columns, groups = instance.tiles(problem)
    cut = decompose(rows * columns * groups, k, instance.bk, schedule, 3)
    partials = memory.empty((max(4, cut.slots * instance.bm * instance.bn),), np.float32, name="partials")
    tickets = memory.put(np.zeros(max(1, cut.counters), np.uint32), name="tickets")
    pointers = Pointers(
        placed[0].address,
        placed[1].address,
        out.address,
        partials=partials.address,
        tickets=tickets.address,
    )
    packed = pack_arguments(problem, cut, Raster(rows, columns, 2), pointers, alpha, depth=instance.bk)
    grid, block = (cut.blocks, 1, 1), (instance.threads, 1, 1)
    results: Sequence[BlockResult] = ()
    if image is None:
        launch(
            kernel.program.ptx,
            kernel.symbol,
            grid,
            block,
            [packed],
            memory,
            dynamic_shared_bytes=instance.shared_bytes,
            exact_fma=True,
            count=False,
        )
    else:
        results = run_blocks(
            Cubin(image),
            kernel.symbol,
            grid=grid,
            block=block,
            args=[packed],
            memory=memory,
            dynamic_shared_bytes=instance.shared_bytes,
        )
    return memory.get(out).view(np.uint32), results
