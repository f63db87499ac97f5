"""The emulator's speed: a whole product of N = 1024 by a 128x256-tile kernel, with all counters."""

from __future__ import annotations

import time

import numpy as np

from tilewave.compiler import compile_source
from tilewave.emulator import Memory, launch, parse_ptx
from tilewave.lab.registry import get_rung
from tilewave.precision import error_in_bounds

LIMIT_S = 4.0
"""Of CPU time: a machine that is busy otherwise must not fail the test."""


def test_a_whole_product_of_1024(rng: np.random.Generator) -> None:
    n = 1024
    rung = get_rung(15)
    program = compile_source(rung.source(), rung.entries, "sm_90")
    module = parse_ptx(program.ptx)
    a, b = rng.standard_normal((n, n), np.float32), rng.random((n, n), np.float32)
    memory = Memory()
    args = [memory.put(a), memory.put(b), memory.empty((n, n))]
    symbol = program.kernels[rung.entry_for(n, n, n)].symbol
    start = time.process_time()
    result = launch(module, symbol, rung.grid(n, n), rung.block, [*args, n, n, n], memory)
    seconds = time.process_time() - start
    assert error_in_bounds(memory.get(args[2]), a, b) <= 1
    assert result.counters.thread_fma == n**3
    assert seconds < LIMIT_S
