"""One call of NVRTC: cubin, PTX, symbols, resources, and errors that help."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable

import pytest
from compiler_kernels import COPY, fresh_source

from tilewave.compiler import ARCHITECTURES, Source, compile_source, compiler_version, program
from tilewave.errors import CompileError, UsageError

SPILLING = r"""
extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* p, int n) {
  float x[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) x[i] = p[i * 1024 + threadIdx.x];
  for (int r = 0; r < n; ++r) {
#pragma unroll
    for (int i = 0; i < 96; ++i) x[i] = x[i] * x[(i * 7 + 3) % 96] + 1.0f;
  }
#pragma unroll
  for (int i = 0; i < 96; ++i) p[i * 1024 + threadIdx.x] = x[i];
}
extern "C" __global__ void shared(float* p) {
  __shared__ float tile[33 * 32];
  tile[threadIdx.x] = p[threadIdx.x];
  __syncthreads();
  p[threadIdx.x] = tile[1055 - threadIdx.x];
}
template <int N, typename T> __global__ void fill(T* p) { p[threadIdx.x] = T(N); }
namespace inner { __device__ int helper() { return 1; } }
"""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture(arch: str) -> None:
    built = compile_source(Source.from_text("copy.cu", COPY), ["copy"], arch)
    assert built.arch == arch
    assert built.compiler == compiler_version()
    assert built.cubin[:4] == b"\x7fELF"
    assert f".target {arch}" in built.ptx
    assert re.search(r"\.entry copy\(", built.ptx)
    assert built.kernels["copy"].symbol == "copy"
    assert 4 <= built.kernels["copy"].resources.registers <= 32


@pytest.mark.parametrize(
    ("spelling", "arch"), [("90", "sm_90"), (" SM_90a ", "sm_90a"), ("sm_103", "sm_103"), ("120a", "sm_120a")]
)
def test_spellings_of_an_architecture(spelling: str, arch: str) -> None:
    assert compile_source(Source.from_text("copy.cu", COPY), ["copy"], spelling).arch == arch


@pytest.mark.parametrize(
    "arch", ["", "sm90x", "compute_90", "ampere", "sm_9", "sm_90 --use_fast_math", None, 90]
)
def test_an_unknown_architecture(arch: str) -> None:
    with pytest.raises(UsageError, match=re.escape(repr(arch)) + r".*sm_75.*sm_121"):
        compile_source(Source.from_text("copy.cu", COPY), ["copy"], arch)


def test_an_architecture_that_this_compiler_does_not_know() -> None:
    with pytest.raises(UsageError, match="sm_70"):
        compile_source(Source.from_text("copy.cu", COPY), ["copy"], "sm_70")


def test_resources_of_every_kernel() -> None:
    source = Source.from_text("several.cu", SPILLING)
    names = ["spill", "shared", "fill<3, float>", "fill<4, double>"]
    kernels = compile_source(source, names, "sm_90").kernels
    assert list(kernels) == names
    spill = kernels["spill"].resources
    assert spill.registers == 32  # 65536 / (2 * 1024)
    assert spill.stack_bytes >= 4 * 64
    assert spill.spill_store_bytes > 0
    assert spill.spill_load_bytes > 0
    shared = kernels["shared"].resources
    assert (shared.static_shared_bytes, shared.barriers, shared.spill_store_bytes) == (33 * 32 * 4, 1, 0)
    symbols = {kernels[name].symbol for name in names}
    assert len(symbols) == 4
    assert all(
        re.search(rf"\.entry {re.escape(s)}\(", compile_source(source, names, "sm_90").ptx) for s in symbols
    )


def test_defaults_are_exact_arithmetic() -> None:
    text = """
    extern "C" __global__ void k(float* p) { p[0] = p[1] / p[2] + sqrtf(p[3]) * p[4]; }
    """
    source = Source.from_text("exact.cu", text)
    ptx = compile_source(source, ["k"], "sm_90").ptx
    assert "div.rn.f32" in ptx
    assert "sqrt.rn.f32" in ptx
    assert "fma.rn.f32" in ptx
    assert ".ftz" not in ptx
    fast = compile_source(source, ["k"], "sm_90", ["--ftz=true", "--fmad=false"]).ptx
    assert "ftz" in fast
    assert "fma.rn" not in fast
    assert "div.approx.ftz" in compile_source(source, ["k"], "sm_90", ["--use_fast_math"]).ptx


def test_options_reach_the_compiler() -> None:
    source = Source.from_text("o.cu", 'extern "C" __global__ void k(int* p) { p[0] = VALUE; }')
    assert "4711" in compile_source(source, ["k"], "sm_90", ["-DVALUE=4711"]).ptx
    with pytest.raises(UsageError, match="--no-such-option"):
        compile_source(source, ["k"], "sm_90", ["--no-such-option"])


@pytest.mark.parametrize(
    "option",
    ["-I/tmp", "--include-path=/tmp", "-arch=sm_80", "--gpu-architecture=sm_80", "-dc", "--pch", "-rdc=true",
     "--relocatable-device-code=true", "-dlto", "--pre-include=x.h", "--time=x.csv"],
)  # fmt: skip
def test_options_that_would_bypass_the_record(option: str) -> None:
    with pytest.raises(UsageError, match=re.escape(option)):
        compile_source(Source.from_text("copy.cu", COPY), ["copy"], "sm_90", [option])


@pytest.mark.parametrize("entries", [[], "copy", [""], ["copy", None], [b"copy"]])
def test_entries_that_make_no_sense(entries: list[str]) -> None:
    with pytest.raises(UsageError, match="entries"):
        compile_source(Source.from_text("copy.cu", COPY), entries, "sm_90")


def test_a_mistake_shows_file_and_line() -> None:
    text = COPY + "\n\n__global__ void broken(float* p) { p[0] = undefined_name; }\n"
    with pytest.raises(CompileError) as error:
        compile_source(Source.from_text("kernels/broken.cu", text), ["copy"], "sm_90")
    assert "kernels/broken.cu(4): error" in str(error.value)
    assert "undefined_name" in error.value.log
    assert compiler_version() in str(error.value)
    assert "sm_90" in str(error.value)


def test_a_mistake_in_a_header_shows_the_header() -> None:
    source = Source.from_text("k.cu", '#include "h.cuh"\n' + COPY, {"h.cuh": "int good;\nbad bad;\n"})
    with pytest.raises(CompileError, match=r"h\.cuh\(2\): error"):
        compile_source(source, ["copy"], "sm_90")


@pytest.mark.parametrize("entry", ["missing", "fill<float>", "inner::helper", "3 +"])
def test_an_entry_that_is_no_kernel(entry: str) -> None:
    with pytest.raises(CompileError, match=re.escape(entry)):
        compile_source(Source.from_text("several.cu", SPILLING), [entry], "sm_90")


def test_an_assembler_error_is_shown() -> None:
    text = 'extern "C" __global__ void k() { asm volatile("nonsense.f32 %r1;"); }'
    with pytest.raises(CompileError, match="nonsense"):
        compile_source(Source.from_text("asm.cu", text), ["k"], "sm_90")


def test_a_failure_is_not_remembered() -> None:
    bad = Source.from_text("twice.cu", "not CUDA")
    for _ in range(2):
        with pytest.raises(CompileError):
            compile_source(bad, ["k"], "sm_90")


def test_compiled_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = fresh_source()
    first = compile_source(source, ["k"], "sm_90")
    monkeypatch.setattr(program, "compile_with_nvrtc", None)
    assert compile_source(source, ["k"], "sm_90") is first


def in_threads(count: int, work: Callable[[int], object]) -> list[object]:
    """The results of ``work(0)``, ``work(1)``, ... run at once; the first exception if there is one."""
    results: list[object] = [None] * count
    start = threading.Barrier(count)

    def run(index: int) -> None:
        start.wait()
        try:
            results[index] = work(index)
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_sixteen_threads_one_kernel_one_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = program.compile_with_nvrtc
    monkeypatch.setattr(program, "compile_with_nvrtc", lambda *a: calls.append(a) or real(*a))
    source, number = fresh_source()
    built = in_threads(16, lambda _: compile_source(source, ["k"], "sm_90"))
    assert len(calls) == 1
    assert all(one is built[0] for one in built)
    assert str(number) in built[0].ptx  # type: ignore[attr-defined]


def test_sixteen_threads_sixteen_kernels() -> None:
    sources = [fresh_source() for _ in range(16)]
    built = in_threads(16, lambda i: compile_source(sources[i][0], ["k"], "sm_90"))
    for (_, number), one in zip(sources, built, strict=True):
        assert f"{number};" in one.ptx  # type: ignore[attr-defined]


def test_a_failing_kernel_leaves_no_thread_waiting() -> None:
    bad = Source.from_text("bad.cu", f"not CUDA {secrets.token_hex(4)}")

    def expect_failure(_: int) -> None:
        with pytest.raises(CompileError):
            compile_source(bad, ["k"], "sm_90")

    in_threads(8, expect_failure)
