"""Profiling on a real GPU: counters where they may be read, times where not, and both say so."""

from __future__ import annotations

import pytest

from tilewave.bench.baseline import find_baseline
from tilewave.device import DeviceSpec
from tilewave.errors import ToolchainError
from tilewave.lab.ladder import Gpu
from tilewave.lab.profile.records import EMULATOR, HARDWARE, NCU, TIMING
from tilewave.lab.profile.run import profile_rungs, profiled, timed
from tilewave.lab.profile.table import disagreements
from tilewave.lab.registry import get_rung
from tilewave.runtime.driver import Device

pytestmark = pytest.mark.gpu
SIZE = 512


@pytest.fixture(scope="module")
def gpu(device: Device) -> Gpu:
    return Gpu(device, find_baseline()[0])


def test_times_stand_in_for_counters(gpu: Gpu, spec: DeviceSpec) -> None:
    found = timed([get_rung(12)], SIZE, spec, gpu, "counters are forbidden")
    assert found.how == TIMING
    assert found.notes == ("times only, no counters: counters are forbidden",)
    figures = found.rungs[12].figures
    assert figures["tflops"] == pytest.approx(2 * SIZE**3 / figures["milliseconds"] * 1e-9)
    assert 0 < figures["tflops"] < spec.peak_fp32_tflops
    assert len(found.library) == (gpu.baseline is not None)


def test_the_profiler_counts_what_the_emulator_counts(gpu: Gpu, spec: DeviceSpec) -> None:
    try:
        hardware = profiled([get_rung(5), get_rung(12)], SIZE, 90.0)
    except ToolchainError as error:
        pytest.skip(str(error))
    made = profile_rungs([get_rung(5), get_rung(12)], SIZE, spec, hardware=hardware)
    assert made.how == NCU
    for kernel in made.kernels:
        figures = kernel.readings[HARDWARE].figures
        assert figures["thread_fma"] == kernel.readings[EMULATOR].figures["thread_fma"] == SIZE**3
        assert figures["registers"] == kernel.readings[EMULATOR].figures["registers"]
        assert 0 < figures["fma_pipe_percent"] < 100
        assert 0 < figures["issue_percent"] < 100
        assert sum(kernel.readings[HARDWARE].stalls.values()) == pytest.approx(1.0)
    if spec.compute_capability == (9, 0):  # where docs/truth-table.md was read
        # Where the compiler spills, as NVRTC 13.0.88 does in rung 12, reads need some more passes:
        # 0.5 % more were read at 2048, and no rule tells how many.
        whole = [line for line in disagreements(made) if "shared reads" in line and "12 " not in line]
        assert not whole
        rung_12 = next(kernel for kernel in made.kernels if kernel.rung == 12)
        passes = [rung_12.readings[by].figures["shared_load_passes"] for by in (EMULATOR, HARDWARE)]
        assert passes[0] <= passes[1] <= 1.01 * passes[0]
    if gpu.baseline is not None:
        assert made.library
        assert all(kernel.threads for kernel in made.library)
