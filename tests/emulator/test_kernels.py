"""Kernels compiled from CUDA C++: divergent, ragged, with faults planted that must be found."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tilewave.compiler import Source, compile_source
from tilewave.device import get_spec
from tilewave.emulator import LaunchResult, Memory, launch
from tilewave.errors import MemoryFault, RaceError
from tilewave.lab.emulate import workspace_arguments
from tilewave.lab.launches import launch_of
from tilewave.lab.registry import Rung, load_rungs
from tilewave.precision import error_in_bounds

ARCHITECTURES = ["sm_75", "sm_90", "sm_121"]
Float32 = npt.NDArray[np.float32]


def compiled(text: str, arch: str = "sm_90", name: str = "k") -> tuple[str, str]:
    """PTX and symbol of a kernel."""
    program = compile_source(Source.from_text("test.cu", text), (name,), arch)
    return program.ptx, program.kernels[name].symbol


def run(
    kernel: tuple[str, str], grid: int, block: int, args: list[Any], memory: Memory, **options: Any
) -> LaunchResult:
    return launch(kernel[0], kernel[1], (grid, 1, 1), (block, 1, 1), args, memory, **options)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_branches_loops_and_local_arrays(arch: str, rng: np.random.Generator) -> None:
    kernel = compiled(
        """
        extern "C" __global__ void k(const int* a, int* out, int n) {
          int i = blockIdx.x * blockDim.x + threadIdx.x;
          if (i >= n) return;
          int history[8];
          for (int j = 0; j < 8; j++) history[j] = j;
          int x = a[i], steps = 0;
          while (x > 1) {
            history[steps & 7] += x;
            if (x % 2) x = 3 * x + 1; else x /= 2;
            if (++steps > 60) break;
          }
          int sum = 0;
          for (int j = 0; j < 8; j++) sum = sum * 31 + history[(j + x) & 7];
          out[i] = sum ^ (a[i] / 7 - a[i] % 5);
        }
        """,
        arch,
    )
    a = rng.integers(1, 5000, 1000).astype(np.int32)

    def reference(start: int) -> int:
        history, x, steps = list(range(8)), start, 0
        while x > 1:
            history[steps & 7] += x
            x = 3 * x + 1 if x % 2 else x // 2
            steps += 1
            if steps > 60:
                break
        total = 0
        for j in range(8):
            total = total * 31 + history[(j + x) & 7]
        total = (total + 2**31) % 2**32 - 2**31
        return total ^ (start // 7 - start % 5)

    memory = Memory()
    out = memory.put(np.full(1000, -1, dtype=np.int32))
    run(kernel, 8, 128, [memory.put(a), out, 990], memory)
    assert memory.get(out).tolist() == [*map(reference, a[:990].tolist()), *[-1] * 10]


def test_warp_and_block_reductions(rng: np.random.Generator) -> None:
    kernel = compiled(
        """
        extern "C" __global__ void k(const float* a, float* out, int n) {
          __shared__ float parts[32];
          float sum = 0;
          for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += a[i];
          for (int step = 16; step; step /= 2) sum += __shfl_down_sync(0xffffffff, sum, step);
          if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
          __syncthreads();
          if (threadIdx.x < 32) {
            sum = threadIdx.x < blockDim.x / 32 ? parts[threadIdx.x] : 0.0f;
            for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
            if (threadIdx.x == 0) atomicAdd(out, sum);
          }
        }
        """
    )
    a = rng.random(10_001, dtype=np.float32)
    for options in ({}, {"resident": 3, "order": 1}, {"detect_races": True}):
        memory = Memory()
        out = memory.put(np.zeros(1, dtype=np.float32))
        run(kernel, 7, 160, [memory.put(a), out, len(a)], memory, **options)
        np.testing.assert_allclose(memory.get(out)[0], a.sum(dtype=np.float64), rtol=1e-5)


TILED = """
constexpr int T = 16;
extern "C" __global__ void k(const float* A, const float* B, float* C, int M, int N, int K) {
  __shared__ float As[T][T], Bs[T][T];
  int x = threadIdx.x % T, y = threadIdx.x / T, tiles = (N + T - 1) / T;
  int row = blockIdx.x / tiles * T + y, col = blockIdx.x % tiles * T + x;
  float sum = 0;
  for (int k0 = 0; k0 < K; k0 += T) {
    As[y][x] = row < M && k0 + x < K ? A[row * K + k0 + x] : 0;
    Bs[y][x] = k0 + y < K && col < N ? B[(k0 + y) * N + col] : 0;
    __syncthreads();  // filled
    for (int k = 0; k < T; k++) sum += As[y][k] * Bs[k][x];
    __syncthreads();  // used
  }
  if (row < M && col < N) C[row * N + col] = sum;
}
"""


def tiled(text: str, a: Float32, b: Float32, **options: Any) -> Float32:
    (m, k), n = a.shape, b.shape[1]
    memory = Memory()
    args = [memory.put(a, name="A"), memory.put(b, name="B"), memory.empty((m, n), name="C")]
    run(compiled(text), -(-m // 16) * -(-n // 16), 256, [*args, m, n, k], memory, **options)
    return memory.get(args[2])


def operands(rng: np.random.Generator, m: int, n: int, k: int) -> tuple[Float32, Float32]:
    return rng.standard_normal((m, k), dtype=np.float32), rng.random((k, n), dtype=np.float32)


@pytest.mark.parametrize(
    "options", [{}, {"detect_races": True}, {"exact_fma": True}, {"resident": 2, "order": 5}]
)
def test_a_tiled_product_at_ragged_sizes(options: dict[str, Any], rng: np.random.Generator) -> None:
    for m, n, k in ((1, 1, 1), (16, 16, 16), (17, 31, 33), (40, 15, 50)):
        a, b = operands(rng, m, n, k)
        assert error_in_bounds(tiled(TILED, a, b, **options), a, b) <= 1


@pytest.mark.parametrize("planted", ["filled", "used"])
def test_a_missing_barrier_is_found(planted: str, rng: np.random.Generator) -> None:
    a, b = operands(rng, 32, 32, 48)
    broken = TILED.replace(f"__syncthreads();  // {planted}", "")
    with pytest.raises(RaceError, match=r"PTX line \d+: (ld|st)\.shared.* with no barrier between") as caught:
        tiled(broken, a, b, detect_races=True)
    assert ("reads" if planted == "filled" else "writes") in str(caught.value)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("row < M && k0 + x < K", "row <= M && k0 + x < K"),
        ("k0 + y < K && col < N", "k0 + y <= K && col < N"),
        ("row < M && col < N) C", "row <= M && col < N) C"),
        ("As[T][T], Bs[T][T]", "As[T][T], Bs[T][T - 1]"),
    ],
)
def test_an_index_off_by_one_is_found(right: str, wrong: str, rng: np.random.Generator) -> None:
    a, b = operands(rng, 33, 33, 33)
    assert right in TILED
    with pytest.raises(MemoryFault, match=r"thread \(\d+, 0, 0\) of block \(\d+, 0, 0\)"):
        tiled(TILED.replace(right, wrong), a, b)


COPIES = """
extern "C" __global__ void k(const float* a, float* out, int n) {
  __shared__ __align__(16) float stage[2][128];
  auto copy = [&](int s, int i) {
    unsigned to = (unsigned)__cvta_generic_to_shared(&stage[s][threadIdx.x]);
    const float* from = a + i * 128 + threadIdx.x;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(from) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  copy(0, 0);
  float sum = 0;
  for (int i = 0; i < n; i++) {
    if (i + 1 < n) { copy((i + 1) & 1, i + 1); asm volatile("cp.async.wait_group 1;" ::: "memory"); }
    else asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    sum += stage[i & 1][127 - threadIdx.x];
    __syncthreads();
  }
  out[threadIdx.x] = sum;
}
"""


def copies(text: str, a: Float32, **options: Any) -> Float32:
    memory = Memory()
    out = memory.empty(128)
    run(compiled(text), 1, 128, [memory.put(a), out, len(a)], memory, **options)
    return memory.get(out)


def test_copies_in_two_stages(rng: np.random.Generator) -> None:
    a = rng.random((5, 128), dtype=np.float32)
    for options in ({}, {"detect_races": True}):
        np.testing.assert_allclose(copies(COPIES, a, **options), a[:, ::-1].sum(axis=0), rtol=1e-6)


@pytest.mark.parametrize("wait", ["wait_group 1", "wait_group 0"])
def test_a_copy_that_is_not_waited_for_is_found(wait: str, rng: np.random.Generator) -> None:
    a = rng.random((5, 128), dtype=np.float32)
    broken = COPIES.replace(f'asm volatile("cp.async.{wait};" ::: "memory")', "")
    assert broken != COPIES
    assert np.isnan(copies(broken, a)).all()


PLAIN_RUNGS = [rung for rung in load_rungs() if rung.number < 18]
"""The rungs that need no workspace and no particular number of blocks."""


def test_a_wait_behind_the_barrier_is_found(rng: np.random.Generator) -> None:
    """Each thread waits for its own copies only: those of other warps may still be on their way."""
    a = rng.random((5, 128), dtype=np.float32)
    wait = 'asm volatile("cp.async.wait_group 1;" ::: "memory");'
    broken = COPIES.replace(wait, "").replace(
        "__syncthreads();\n    sum", f"__syncthreads(); {wait}\n    sum"
    )
    assert broken.count(wait) == 1
    with pytest.raises(RaceError, match=r"ld\.shared"):
        copies(broken, a, detect_races=True)


def some_rungs() -> list[Any]:
    """All rungs, most of them in the long tests."""
    often = (1, 3, 5, 8, 12, 13, 15, 17)
    marks = {rung: () if rung.number in often else pytest.mark.long for rung in PLAIN_RUNGS}
    return [pytest.param(rung, marks=mark, id=rung.name) for rung, mark in marks.items()]


def rungs_with_barriers() -> list[Any]:
    """Every barrier of every rung; all but a few rungs in the long tests."""
    cases = []
    for rung in PLAIN_RUNGS:
        marks = [] if rung.number in (3, 12, 13) else [pytest.mark.long]
        for i in range(rung.source().text.count("__syncthreads();")):
            cases.append(pytest.param(rung, i, marks=marks, id=f"{rung.name}-{i}"))
    return cases


def rung_product(rung: Rung, text: str, a: Float32, b: Float32, **options: Any) -> Float32:
    (m, k), n = a.shape, b.shape[1]
    program = compile_source(Source.from_text(rung.file, text), rung.entries, "sm_90")
    memory = Memory()
    out = memory.empty((m, n), name="C")
    planned = launch_of(rung, m, n, k, get_spec("GB10"))
    args = [
        memory.put(a, name="A"),
        memory.put(b, name="B"),
        out,
        m,
        n,
        k,
        *workspace_arguments(planned, memory),
    ]
    launch(
        program.ptx,
        program.kernels[planned.entry].symbol,
        planned.grid,
        planned.block,
        args,
        memory,
        **options,
    )
    return memory.get(out)


@pytest.mark.parametrize("rung", some_rungs())
def test_no_rung_has_a_race(rung: Rung, rng: np.random.Generator) -> None:
    tile = rung.tile
    a, b = operands(rng, tile.bm + 1, tile.bn + 3, 3 * tile.bk + 1)
    c = rung_product(rung, rung.source().text, a, b, detect_races=True, count=False)
    assert error_in_bounds(c, a, b) <= 1


@pytest.mark.parametrize(("rung", "barrier"), rungs_with_barriers())
def test_every_barrier_of_every_rung_is_needed(rung: Rung, barrier: int, rng: np.random.Generator) -> None:
    first, *rest = rung.source().text.split("__syncthreads();")
    broken = first + "".join(
        ("" if i == barrier else "__syncthreads();") + part for i, part in enumerate(rest)
    )
    a, b = operands(rng, rung.tile.bm, rung.tile.bn, 6 * rung.tile.bk)
    with pytest.raises(RaceError):
        rung_product(rung, broken, a, b, detect_races=True, count=False)
