"""The figures of the article, one test each, on its own GPU's architecture (GB10, sm_121), without a GPU.

"The article" is Optimizing Matrix Multiply on CUDA, Part 2. Its sizes are N = 2048 where it counts passes and
N = 1025 where it counts blocks. Register figures belong to one compiler and are skipped under another.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections import Counter
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from rung_helpers import GB10, changed, count, multiply, program

from tilewave.compiler import compile_source, compiler_version, occupancy
from tilewave.device import get_spec
from tilewave.emulator import Counters
from tilewave.lab.registry import RESOURCES, Prediction, Rung, get_rung, load_rungs

N = 2048
FIGURES_OF = "NVRTC 13.5.37"
# The rungs that launch a block a tile; later ones deal tiles by a schedule and have tests of their own.
PLAIN_RUNGS = tuple(rung for rung in load_rungs() if rung.number <= 17)

with_the_figures_compiler = pytest.mark.skipif(
    compiler_version() != FIGURES_OF, reason=f"register figures are those of {FIGURES_OF}"
)


@cache
def counters(number: int, size: int = N) -> Counters:
    """Counters at M = N = K = ``size``, from two blocks: at such sizes all blocks do the same."""
    return count(get_rung(number), size, size, size, blocks=2).counters


def compiled(number: int) -> dict[str, float]:
    """Figures of the rung's kernel on the GB10, by their names in predictions."""
    rung = get_rung(number)
    resources = program(rung).kernels[rung.entry].resources
    fit = occupancy(resources, rung.threads, get_spec("GB10"))
    return {
        "registers": resources.registers,
        "spill_store_bytes": resources.spill_store_bytes,
        "static_shared_bytes": resources.static_shared_bytes,
        "blocks_per_sm": fit.blocks_per_sm,
    }


@with_the_figures_compiler
def test_the_course_kernel_takes_168_registers_and_one_block_fits() -> None:
    rung = get_rung(5)
    resources = program(rung).kernels[rung.entry].resources
    fit = occupancy(resources, rung.threads, get_spec("GB10"))
    assert (resources.registers, resources.spill_store_bytes) == (168, 0)
    assert (fit.blocks_per_sm, fit.limiting) == (1, ("registers",))
    assert fit.limits["shared memory"] >= 2  # "Shared memory can accommodate two blocks"


@with_the_figures_compiler
def test_two_blocks_take_128_registers_and_72_bytes_of_spills() -> None:
    figures = compiled(6)
    assert figures["registers"] == 128
    assert figures["blocks_per_sm"] == 2
    assert figures["spill_store_bytes"] == 72


@pytest.mark.parametrize("number", range(6, 13))
def test_the_register_cap_stays_up_to_rung_12(number: int) -> None:
    figures = compiled(number)
    assert figures["registers"] <= 128
    assert figures["blocks_per_sm"] == 2


@pytest.mark.parametrize("number", [7, 8])
def test_128_wide_reads_per_thread_and_slice_with_and_without_the_transpose(number: int) -> None:
    rung = get_rung(number)
    reads = counters(number).shared_loads_by_width
    warps_and_slices = math.prod(rung.grid(N, N)) * rung.threads // 32 * (N // rung.tile.bk)
    assert dict(reads) == {16: 128 * warps_and_slices}


@pytest.mark.parametrize("number", range(3, 18))
def test_shared_reads_are_those_of_the_machine_code(number: int, tmp_path: Path) -> None:
    """ptxas merges scalar reads of the PTX: the emulator must count what ptxas made, width by width.

    A slice's loop is unrolled whole, so the listing holds each read of a slice once.
    """
    rung = get_rung(number)
    reads = Counter(re.findall(r"\bLDS(?:\.\d+)?(?= R\d)", sass(rung, tmp_path)))  # not the idle LDS RZ
    listed = {{"LDS": 4, "LDS.64": 8, "LDS.128": 16}[name]: times for name, times in reads.items()}
    if 5 <= number <= 10:
        assert listed == {16: 128}
    size = 4 * rung.tile.bk
    found = count(rung, rung.tile.bm, rung.tile.bn, size).counters.shared_loads_by_width
    assert {width: times / (rung.threads // 32 * 4) for width, times in found.items()} == listed


@pytest.mark.parametrize("number", [5, 7, 8])
def test_16_8_million_shared_reads(number: int) -> None:
    assert counters(number).shared_loads == 16_777_216


@pytest.mark.parametrize(("number", "passes"), [(5, 5.0), (8, 5.0), (9, 3.0)])
def test_passes_per_read_fall_from_five_to_three(number: int, passes: float) -> None:
    assert counters(number).shared_load_passes / counters(number).shared_loads == passes


def test_conflicts_fall_from_33_6_million_to_none() -> None:
    assert counters(8).shared_load_conflicts == 33_554_432
    assert counters(9).shared_load_conflicts == 0  # the article's profiler still saw 54 thousand


@pytest.mark.parametrize(("number", "distinct"), [(9, 144), (10, 96)])
def test_the_warp_tile_needs_96_instead_of_144_distinct_values(number: int, distinct: int) -> None:
    """Found by letting every element of C hold the number of the warp that computes it."""
    rung = get_rung(number)
    marked = changed(rung, ("= sum[i][j];", "= tid / 32;"))
    ones = np.ones((rung.tile.bm, 4), np.float32)
    owner = multiply(rung, ones, ones.T[:, : rung.tile.bn].copy(), compile_source(marked, rung.entries, GB10))
    for warp in range(rung.threads // 32):
        rows, columns = np.nonzero(owner == warp)
        assert len(rows) == rung.tile.wm * rung.tile.wn
        assert len(set(rows)) + len(set(columns)) == distinct


def test_the_warp_tile_leaves_the_passes_at_50_million() -> None:
    assert counters(9).shared_load_passes == counters(10).shared_load_passes == 50_331_648


@pytest.mark.parametrize(("number", "passes"), [(10, 8.0), (11, 4.0)])
def test_passes_of_the_transposed_store_halve_with_the_slice_depth(number: int, passes: float) -> None:
    stores_of_b = "*(float4*)&Bs[r][c] ="
    rung = get_rung(number)
    assert dict(counters(number).shared_stores_by_width).keys() == {4, 16}
    only_a = compile_source(changed(rung, (stores_of_b, "if (k0 < 0) " + stores_of_b)), rung.entries, GB10)
    found = count(rung, 256, 256, 256, blocks=1, built=only_a).counters
    assert set(found.shared_stores_by_width) == {4}
    assert found.shared_store_passes / found.shared_stores == passes


def test_81_blocks_on_48_sms_at_1025() -> None:
    rung = get_rung(12)
    blocks = math.prod(rung.grid(1025, 1025))
    assert blocks == 81
    sms = get_spec("GB10").sms
    assert sms == 48
    assert -(-blocks // sms) == 2  # "so some SMs must process two blocks"
    # Two resident blocks hold all of them at once.
    assert compiled(12)["blocks_per_sm"] * sms >= blocks


@with_the_figures_compiler
def test_the_large_patch_takes_about_237_registers_and_one_block_fits() -> None:
    rung = get_rung(15)
    resources = program(rung).kernels[rung.entry].resources
    fit = occupancy(resources, rung.threads, get_spec("GB10"))
    assert (
        resources.registers == 233
    )  # the article: 237; no spelling that was tried gives both 237 and its stores
    assert resources.spill_store_bytes == 0
    assert fit.blocks_per_sm == 1
    assert "registers" in fit.limiting


@pytest.mark.parametrize(("number", "values", "multiply_adds"), [(13, 16, 64), (15, 24, 128)])
def test_values_read_for_the_multiply_adds_of_a_step(number: int, values: int, multiply_adds: int) -> None:
    """16 values for 64 multiply-adds against 24 for 128, hence 4 against 3 for 16."""
    found = counters(number)
    assert set(found.shared_loads_by_width) == {16}
    warp_fmas = found.thread_fma // 32
    assert 4 * found.shared_loads * multiply_adds == values * warp_fmas


def test_32_tiles_for_48_sms_at_1024_and_a_third_without_work() -> None:
    blocks = math.prod(get_rung(15).grid(1024, 1024))
    sms = get_spec("GB10").sms
    assert blocks == 32
    assert 3 * (sms - blocks) == sms


def test_one_useful_column_in_the_last_tile_column_at_2049() -> None:
    rung = get_rung(15)
    columns, _, _ = rung.grid(2049, 2049)
    assert 2049 - (columns - 1) * rung.tile.bn == 1
    # Blocks of the last column store one column: one sector for each row, whose neighbours lie elsewhere.
    last = count(rung, rung.tile.bm, 257, 4, blocks=[1]).counters
    assert last.global_store_sectors == 2 * rung.tile.bm


def test_the_transposed_a_takes_4_byte_copies_and_b_16_byte_ones() -> None:
    found = counters(15)
    slices = (
        math.prod(get_rung(15).grid(N, N)) * 8 * (N // 16 + 1)
    )  # warps and slices, one slice beyond the last
    assert dict(found.copies_by_width) == {4: 8 * slices, 16: 4 * slices}


def test_the_plain_a_takes_16_byte_copies_without_conflicts() -> None:
    assert set(counters(17).copies_by_width) == {16}
    assert counters(17).copy_conflicts == 0
    assert counters(15).copy_conflicts > 0


def test_the_tall_tile_copies_twice_the_rows_of_a() -> None:
    def copies_of_a_per_slice(number: int) -> float:
        rung = get_rung(number)
        return counters(number).copies_by_width[4] * 32 / math.prod(rung.grid(N, N)) / (N // rung.tile.bk + 1)

    assert copies_of_a_per_slice(15) == 128 * 16
    assert copies_of_a_per_slice(16) == 256 * 16


def test_only_multiply_adds_that_the_product_needs() -> None:
    """Full tiles at N = 2048: N^3 multiply-adds, on every rung."""
    for rung in PLAIN_RUNGS:
        size = 512 if rung.number < 4 else N  # one-element threads take long in the emulator
        assert counters(rung.number, size).thread_fma == size**3


predictions = pytest.mark.parametrize(
    ("rung", "prediction"),
    [(rung, prediction) for rung in PLAIN_RUNGS for prediction in rung.predictions],
    ids=lambda item: item.name if isinstance(item, Rung) else item.counter,
)


@predictions
def test_every_prediction_of_the_registry_comes_true(rung: Rung, prediction: Prediction) -> None:
    def figure(number: int) -> float:
        if prediction.counter in RESOURCES:
            return compiled(number)[prediction.counter]
        return float(getattr(counters(number, prediction.size), prediction.counter))

    found = figure(rung.number)
    if prediction.value is not None:
        assert found == pytest.approx(prediction.value, rel=1e-6)
    else:
        assert rung.builds_on is not None
        assert found / figure(rung.builds_on) == pytest.approx(prediction.ratio, rel=1e-4)


def sass(rung: Rung, directory: Path) -> str:
    """nvdisasm's listing of the rung's kernel for sizes that are multiples of four."""
    try:
        wheel = metadata.distribution("nvidia-cuda-nvdisasm")
    except metadata.PackageNotFoundError:
        pytest.skip("the nvdisasm wheel is not installed")
    tool = next(wheel.locate_file(item) for item in wheel.files or () if item.name.startswith("nvdisasm"))
    built = program(rung)
    cubin = directory / "kernel.cubin"
    cubin.write_bytes(built.cubin)
    command = [str(tool), "-c", str(cubin)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, marker, rest = listing.partition(f".text.{built.kernels[rung.entry].symbol}:")
    assert marker, "the kernel is not in the listing"
    return re.split(r"\n\s*\.section", rest)[0]
