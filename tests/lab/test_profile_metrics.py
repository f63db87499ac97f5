"""From the profiler's metrics to figures, and from a library kernel's name to its tile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilewave.errors import UsageError
from tilewave.lab.ncu import KernelCounters
from tilewave.lab.probe_profile import STALLS
from tilewave.lab.profile.metrics import (
    derived,
    library_kernel,
    reading_of,
    rung_of,
    tile_in_name,
    wanted_metrics,
)
from tilewave.lab.profile.records import FIGURES, load_profile
from tilewave.lab.registry import load_rungs

H200 = Path(__file__).parents[2] / "benchmarks" / "results" / "profile_h200.json"


@pytest.mark.parametrize(
    ("kernel", "tile"),
    [
        # Names that cuBLAS gives its FP32 kernels, by how they are made.
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(T1::Params)", (256, 128, 8)),
        ("cutlass_80_simt_sgemm_64x32_8x5_tn_align1", (64, 32, 8)),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize128x64x8_stage3_warpsize2x2x1_ffma_aligna4_execute",
            (128, 64, 8),
        ),
        ("ampere_sgemm_128x128_nn", (128, 128)),
        ("volta_sgemm_32x128_tn", (32, 128)),
        ("maxwell_sgemm_128x64_raggedMn_nt", (128, 64)),
        (
            "void cutlass::Kernel<Gemm<GemmShape<(int)128, (int)32, (int)8>, GemmShape<(int)64>>>",
            (128, 32, 8),
        ),
        ("void gemmSN_NN_kernel<float, (int)128, (int)2, (int)4, (int)8>(cublasGemmSmallNParams)", None),
        ("void cublasLt::splitKreduce_kernel<(int)32, (int)16, int, float>(T5 *)", None),
    ],
)
def test_the_tile_is_read_from_the_name(kernel: str, tile: tuple[int, ...] | None) -> None:
    assert tile_in_name(kernel) == tile


def test_every_rung_is_known_by_its_kernel_and_no_library_is() -> None:
    for rung in load_rungs():
        for entry in rung.entries:
            name = entry.partition("<")[0]
            for kernel in (name, f"void {name}<(bool)1>(const float *, int)", f"{name}(const float *)"):
                assert rung_of(kernel) == rung.number
    for kernel in ("ampere_sgemm_128x128_nn", "cutlass_80_simt_sgemm_256x128_8x4_nn_align1", "sgemm_kernel"):
        assert rung_of(kernel) is None


@pytest.mark.parametrize(
    ("unit", "milliseconds"),
    [("ns", 0.4), ("nsecond", 0.4), ("us", 400.0), ("msecond", 4e5), ("second", 4e8)],
)
def test_times_are_understood_in_every_unit(unit: str, milliseconds: float) -> None:
    counters = KernelCounters("k", {"gpu__time_duration.sum": 4e5}, {"gpu__time_duration.sum": unit})
    figures = reading_of(counters, 1024).figures
    assert figures["milliseconds"] == pytest.approx(milliseconds)
    assert figures["tflops"] == pytest.approx(2 * 1024**3 / milliseconds * 1e-9)


def test_an_unknown_unit_is_refused() -> None:
    counters = KernelCounters("k", {"gpu__time_duration.sum": 4e5}, {"gpu__time_duration.sum": "fortnight"})
    with pytest.raises(UsageError, match="times in 'fortnight'; ns, us, ms, s are understood"):
        reading_of(counters, 1024)


def test_a_launch_as_the_profiler_shows_it() -> None:
    stalls = {f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio": 0.0 for name in STALLS}
    stalls["smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio"] = 0.3
    stalls["smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"] = 0.1
    stalls["smsp__average_warps_issue_stalled_selected_per_issue_active.ratio"] = 1.0
    metrics = {
        "smsp__inst_executed.sum": 1000.0,
        "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum": 28_800.0,
        "smsp__inst_executed_op_shared_ld.sum": 40.0,
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": 120.0,
        "smsp__issue_active.avg.pct_of_peak_sustained_active": 77.0,
        "launch__registers_per_thread": 235.0,
        "launch__occupancy_limit_registers": 1.0,
        "launch__occupancy_limit_warps": 8.0,
        "launch__occupancy_limit_barriers": 0.0,  # no limit
        **stalls,
    }
    reading = reading_of(KernelCounters("k", metrics), 64)
    assert reading.figures == {
        "warp_instructions": 1000.0,
        "thread_fma": 28_800.0,
        "shared_loads": 40.0,
        "shared_load_passes": 120.0,
        "issue_percent": 77.0,
        "registers": 235.0,
        "blocks_per_sm": 1.0,
        "passes_per_read": 3.0,
        "fma_share": pytest.approx(0.9),
    }
    assert {name: share for name, share in reading.stalls.items() if share} == {
        "short_scoreboard": pytest.approx(0.75),
        "wait": pytest.approx(0.25),
    }
    assert set(reading.figures) <= set(FIGURES)


def test_nothing_follows_from_nothing() -> None:
    assert derived({}) == {}
    assert derived({"shared_loads": 0.0, "shared_load_passes": 0.0}) == {}
    assert reading_of(KernelCounters("k", {}), 64).figures == {}


def test_outputs_of_a_thread_are_derived_and_the_grid_has_its_say() -> None:
    def outputs(name: str, blocks: float, size: int, threads: float = 256.0) -> tuple[float | None, str]:
        metrics = {"launch__block_size": threads, "launch__grid_size": blocks}
        kernel = library_kernel(KernelCounters(name, metrics), size)
        assert kernel.reading.figures.get("outputs_per_thread") == kernel.outputs_per_thread
        return kernel.outputs_per_thread, kernel.derivation

    found, words = outputs("ampere_sgemm_128x64_nn", 16 * 32, 2048, 128)
    assert found == 64.0
    assert words.endswith("512 such blocks are just what N = 2048 takes")
    found, words = outputs("ampere_sgemm_128x64_nn", 17 * 33, 2049, 128)  # partial tiles count too
    assert found == 64.0
    assert words.endswith("561 such blocks are just what N = 2049 takes")
    found, words = outputs("ampere_sgemm_128x64_nn", 4 * 512, 2048, 128)  # split along K
    assert found == 64.0
    assert "takes 512 such tiles and the grid has 2048 blocks, so blocks share tiles" in words
    assert outputs("void gemmSN_NN_kernel<float>", 8, 64) == (None, "the kernel's name tells no tile")
    kernel = library_kernel(KernelCounters("ampere_sgemm_128x64_nn", {}), 2048)
    assert kernel.outputs_per_thread is None
    assert kernel.derivation.endswith("its threads are not known")


def test_the_profile_of_an_h200_reads_and_says_what_cublas_chose() -> None:
    profile = load_profile(H200)
    (library,) = profile.library
    assert tile_in_name(library.kernel) == library.tile == (256, 128, 8)
    assert library.outputs_per_thread == 256 * 128 / library.threads == 128
    raw = json.loads(H200.read_text())
    for kernel in raw["kernels"]:
        for reading in kernel["readings"].values():
            assert set(reading["figures"]) <= {*FIGURES, "wide_shared_loads"}


def test_what_is_asked_of_the_profiler_has_no_doubles() -> None:
    names = wanted_metrics()
    assert len(names) == len(set(names))
    assert all("__" in name and "." in name for name in names)
