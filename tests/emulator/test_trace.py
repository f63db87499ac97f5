"""A warp's trace, and the map of words on banks that is made from it."""

from __future__ import annotations

import numpy as np
import pytest

from tilewave.compiler import Source, compile_source
from tilewave.emulator import Memory, launch
from tilewave.emulator.banks import bank_map
from tilewave.emulator.passes import shared_passes
from tilewave.emulator.trace import Trace, Traced
from tilewave.errors import UsageError

KERNEL = """
extern "C" __global__ void mix(const float* x, float* y, int stride) {
  __shared__ float s[1024];
  const int t = threadIdx.x;
  s[t * stride] = x[blockIdx.x * blockDim.x + t];
  __syncthreads();
  if (t < 40) y[blockIdx.x * blockDim.x + t] = s[(t + 1) * stride];
}
"""


def traced(block: int, warp: int, stride: int = 3) -> tuple[list[Traced], int]:
    program = compile_source(Source.from_text("mix.cu", KERNEL), ["mix"], "sm_90")
    memory = Memory()
    x = memory.put(np.ones(4 * 64, np.float32), name="x")
    y = memory.empty((4 * 64,), np.float32, name="y")
    trace = Trace(block, warp)
    launch(program.ptx, program.kernels["mix"].symbol, (4,), (64,), [x, y, stride], memory, trace=trace)
    return list(trace.instructions()), x.address


@pytest.mark.parametrize("block", [0, 2, 3])
@pytest.mark.parametrize("warp", [0, 1])
def test_a_trace_has_the_warps_own_addresses(block: int, warp: int) -> None:
    steps, x = traced(block, warp)
    accesses = [step for step in steps if step.access is not None]
    threads = 32 * warp + np.arange(32)
    load, store, read, write = accesses
    assert [step.space for step in accesses] == ["global", "shared", "shared", "global"]
    np.testing.assert_array_equal(load.addresses, x + 4 * (64 * block + threads))
    np.testing.assert_array_equal(store.addresses, 4 * 3 * threads)
    np.testing.assert_array_equal(read.addresses[read.active], 4 * 3 * (threads[threads < 40] + 1))
    np.testing.assert_array_equal(write.active, threads < 40)
    assert "bar" in [step.instruction.opcode for step in steps]
    order = [steps.index(step) for step in accesses]
    assert order == sorted(order)


def test_a_warp_that_stays_away_is_not_traced_there() -> None:
    steps, _ = traced(0, 0, stride=2)
    assert traced(1, 0, stride=2)[0][-1].instruction is steps[-1].instruction
    program_of_three = traced(0, 2)[0]
    assert program_of_three == []
    with pytest.raises(UsageError, match="from 0 on"):
        Trace(0, -1)


@pytest.mark.parametrize("width", [4, 8, 16])
@pytest.mark.parametrize("kind", ["load", "store"])
def test_the_map_agrees_with_the_passes(rng: np.random.Generator, width: int, kind: str) -> None:
    for trial in range(150):
        span = int(rng.integers(2, 200))
        addresses = width * rng.integers(0, span, 32)
        if trial % 3 == 0:  # neighbours that share, so that groups merge
            addresses = addresses[np.arange(32) & ~(1 + trial % 2)]
        active = rng.random(32) < (1.0, 0.8, 0.1)[trial % 3]
        found = bank_map(addresses, active, width, kind)  # type: ignore[arg-type]
        passes, conflicts = shared_passes(addresses[None], active[None], width, kind)  # type: ignore[arg-type]
        assert (found.passes, found.conflicts) == (passes[0], conflicts[0])
        assert max((word.number for word in found.words), default=-1) + 1 == passes[0]
        assert found.passes - len(found.groups) == found.conflicts
        places = {(word.number, word.bank) for word in found.words}
        assert len(places) == len(found.words)  # a bank gives one word a pass
        for lane in range(32):
            mine = sorted(word.address for word in found.words if lane in word.lanes)
            wanted = [addresses[lane] + 4 * i for i in range(width // 4)] if active[lane] else []
            assert mine == wanted
        assert all(word.bank == word.address // 4 % 32 for word in found.words)
        crowded = {word for word in found.words if found.in_conflict(word)}
        assert bool(crowded) == bool(conflicts[0])


def test_the_map_wants_one_warp() -> None:
    with pytest.raises(UsageError, match=r"\(32,\)"):
        bank_map(np.zeros((2, 32)), None, 4)
