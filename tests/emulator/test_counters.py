"""Counters against figures worked out by hand, and sampled launches against whole ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ptx_kernels import kernel, run

from tilewave.compiler import Source, compile_source
from tilewave.emulator import CLASSES, Counters, Memory, launch
from tilewave.errors import UsageError
from tilewave.lab.registry import get_rung

NAIVE = """
extern "C" __global__ void k(const float* A, const float* B, float* C, int M, int N, int K) {
  int col = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
  if (row >= M || col >= N) return;
  float sum = 0;
  #pragma unroll 1
  for (int k = 0; k < K; k++) sum += A[row * K + k] * B[k * N + col];
  C[row * N + col] = sum;
}
"""


def naive(m: int, n: int, k: int, **options: object) -> Counters:
    program = compile_source(Source.from_text("naive.cu", NAIVE), ("k",), "sm_90")
    memory = Memory()
    a, b = memory.put(np.ones((m, k), np.float32)), memory.put(np.ones((k, n), np.float32))
    args = [a, b, memory.empty((m, n)), m, n, k]
    grid = (-(-n // 32), -(-m // 8), 1)
    return launch(program.ptx, "k", grid, (32, 8, 1), args, memory, **options).counters  # type: ignore[arg-type]


def test_counts_of_a_naive_product() -> None:
    m, n, k = 16, 64, 10
    c = naive(m, n, k)
    warps = m * n // 32
    assert c.thread_fma == m * n * k
    assert c.warp_instructions_by_class["fma"] == warps * k
    assert c.global_loads == 2 * warps * k == c.warp_instructions_by_class["global_load"]
    # A row of 32 columns of B is four sectors, the one element of A is one.
    assert c.global_load_sectors == 5 * warps * k
    assert (c.global_stores, c.global_store_sectors) == (warps, 4 * warps)
    assert c.warp_instructions == sum(c.warp_instructions_by_opcode.values())
    assert c.warp_instructions == sum(c.warp_instructions_by_class.values())
    assert set(c.warp_instructions_by_class) <= set(CLASSES)
    assert c.shared_loads == c.barriers == c.local_loads == 0


def test_partial_warps_count_once() -> None:
    c = naive(3, 40, 7)
    # Three rows of two warps, one of which has 8 columns. The rows below leave at once.
    assert c.thread_fma == 3 * 40 * 7
    assert c.warp_instructions_by_class["fma"] == 6 * 7
    assert c.global_stores == 6
    assert c.global_store_sectors == 3 * (4 + 1)


def test_a_guarded_access_counts_even_if_no_lane_makes_it() -> None:
    body = """
    mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 40;
    ld.param.u64 %d0, [q0]; mul.wide.u32 %d1, %r0, 4; add.s64 %d0, %d0, %d1;
    @%p0 st.global.u32 [%d0], %r0;
    @%p0 fma.rn.f32 %r1, %r2, %r3, %r4;
    """
    memory = Memory()
    c = run(kernel(body, ".param .u64 q0"), [memory.empty(40)], memory, block=96).counters
    assert (c.global_stores, c.global_store_sectors) == (3, 5)
    assert c.warp_instructions_by_class["fma"] == 3
    assert c.thread_fma == 40


def test_local_memory_and_copies() -> None:
    body = """
    .local .align 4 .b8 stack[16]; .shared .align 16 .b8 s[2048];
    mov.u32 %r0, %tid.x; st.local.u32 [stack+4], %r0; ld.local.u32 %r1, [stack+4];
    ld.param.u64 %d0, [q0]; mul.wide.u32 %d1, %r0, 16; add.s64 %d0, %d0, %d1;
    mov.u32 %r2, s; shl.b32 %r3, %r0, 4; add.u32 %r2, %r2, %r3;
    cp.async.ca.shared.global [%r2], [%d0], 16; cp.async.wait_all;
    bar.sync 0;
    """
    memory = Memory()
    c = run(kernel(body, ".param .u64 q0"), [memory.empty((64, 4))], memory, block=64).counters
    assert (c.local_loads, c.local_load_sectors, c.local_stores, c.local_store_sectors) == (2, 8, 2, 8)
    assert (c.copies, c.copy_sectors, c.copies_by_width) == (2, 32, {16: 2})
    assert c.barriers == 2
    assert c.warp_instructions_by_class["local"] == 4


def test_addition_scaling_and_export() -> None:
    c = naive(8, 32, 3)
    assert c + c == c.scaled(2)
    assert (c + Counters()) == c
    assert c.scaled(0.5).thread_fma == c.thread_fma // 2
    data = json.loads(json.dumps(c.as_dict()))
    assert data["thread_fma"] == 8 * 32 * 3
    assert data["global_loads_by_width"] == {"4": c.global_loads}
    assert sum(data["warp_instructions_by_class"].values()) == c.warp_instructions


def test_counting_can_be_left_out() -> None:
    assert naive(8, 32, 3, count=False) == Counters()


@pytest.mark.parametrize(
    ("m", "n", "k"), [(64, 256, 8), (61, 250, 9), (8, 32, 4), (5, 7, 3), (61, 31, 5), (7, 300, 5)]
)
def test_sampled_counts_of_a_ragged_launch(m: int, n: int, k: int) -> None:
    whole = naive(m, n, k)
    for count in (1, 4, 7):
        sampled = naive(m, n, k, blocks=count)
        assert sampled.thread_fma == whole.thread_fma
        assert sampled.warp_instructions_by_class == whole.warp_instructions_by_class
        assert sampled.global_stores == whole.global_stores
        assert sampled.global_store_sectors == pytest.approx(whole.global_store_sectors, rel=0.2)


def test_chosen_blocks() -> None:
    whole = naive(61, 250, 5)
    assert naive(61, 250, 5, blocks=range(64)) == whole
    assert naive(64, 256, 5, blocks=[3, 17]).thread_fma == 64 * 256 * 5
    corner = {0: 49.0, 7: 7.0, 56: 7.0, 63: 1.0}
    weighted = naive(61, 250, 5, blocks=corner)
    assert weighted.thread_fma == whole.thread_fma
    for bad in (0, -3, [], [64], [-1]):
        with pytest.raises(UsageError, match="blocks is"):
            naive(61, 250, 5, blocks=bad)


DATA_DEPENDENT = """
extern "C" __global__ void k(const int* a, float* out, int* ticket, int n) {
  __shared__ int order[64];
  __shared__ float value[64];
  int t = threadIdx.x, i = blockIdx.x * 64 + t;
  order[(t * 5 + a[i]) % 64] = t;
  value[t] = a[i] * 0.5f;
  __syncthreads();
  float sum = 0;
  for (int j = 0; j < order[t] % 7; j++) sum = sum * 1.5f + value[(order[j] + t) % 64];
  if (atomicAdd(ticket, 1) % 3 == 0) sum += 2;
  if (sum > n) out[i] = sum;
}
"""


def test_counting_without_values() -> None:
    """Whatever decides a branch or an address is computed all the same."""
    program = compile_source(Source.from_text("test.cu", DATA_DEPENDENT), ("k",), "sm_90")
    a = np.random.default_rng(3).integers(0, 1000, 640).astype(np.int32)
    runs = []
    for values in (True, False):
        memory = Memory()
        args = [memory.put(a), memory.empty(640), memory.put(np.zeros(1, dtype=np.int32)), 100]
        runs.append(launch(program.ptx, "k", (10,), (64,), args, memory, values=values).counters)
    assert runs[0] == runs[1]
    assert runs[0].global_stores > 0
    naive_counts = naive(61, 250, 9)
    assert naive(61, 250, 9, values=False) == naive_counts


@pytest.mark.parametrize("number", [3, 8, 12, 15])
def test_counting_rungs_without_values(number: int) -> None:
    rung = get_rung(number)
    program = compile_source(rung.source(), rung.entries, "sm_90")
    m, n, k = rung.tile.bm + 5, rung.tile.bn + 4, 2 * rung.tile.bk + 4
    runs = []
    for values in (True, False):
        memory = Memory()
        args = [memory.put(np.ones((m, k), np.float32)), memory.put(np.ones((k, n), np.float32))]
        args.append(memory.empty((m, n)))
        symbol = program.kernels[rung.entry_for(m, n, k)].symbol
        result = launch(
            program.ptx, symbol, rung.grid(m, n), rung.block, [*args, m, n, k], memory, values=values
        )
        runs.append(result.counters)
        assert np.isnan(memory.get(args[2])).any() != values
    assert runs[0] == runs[1]


def test_a_large_ragged_product_is_sampled_in_seconds() -> None:
    rung = get_rung(5)
    program = compile_source(rung.source(), rung.entries, "sm_121")
    n = 2049
    memory = Memory()
    zeros = np.zeros((n, n), np.float32)
    args = [memory.put(zeros), memory.put(zeros), memory.empty((n, n)), n, n, n]
    symbol = program.kernels[rung.entry_for(n, n, n)].symbol
    result = launch(program.ptx, symbol, rung.grid(n, n), rung.block, args, memory, blocks=4)
    assert result.blocks_run <= 8
    assert result.blocks_total == 17 * 17
    slices = -(-n // 32)
    # Every thread multiplies 64 elements for 32 steps of each slice, in the ragged blocks too.
    assert result.counters.thread_fma == 17 * 17 * 256 * 64 * 32 * slices
    assert result.counters.shared_loads == 17 * 17 * 8 * 128 * slices
    assert result.counters.global_stores == 8 * 64 * 16 * 16 + stores_at_the_edges()


def stores_at_the_edges() -> int:
    """Warps of the course kernel (2 x 16 patches of 8 x 8) that store at N = 2049, per edge block."""
    # Last column: column 0 only, so the warps' one column of eight stores, for 128 rows: 8 warps x 8 rows.
    # Last row: row 0 only: the first warp stores its first row, 8 columns. The corner: one store.
    return 16 * 8 * 8 + 16 * 8 + 1
