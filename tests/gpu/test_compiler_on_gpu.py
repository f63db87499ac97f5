"""What the compiler and the tables say of kernels and GPUs, against what the driver says of a real one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tilewave.compiler import ArchChoice, Source, compile_source, compiler_version, occupancy
from tilewave.device import DeviceSpec, driver_cuda_version
from tilewave.device.catalog import find_spec
from tilewave.lab.registry import Rung, load_rungs
from tilewave.runtime.driver import Device, DeviceArray, Module, Stream

pytestmark = pytest.mark.gpu

FIXED = """
extern "C" __global__ void fixed(float* p) {
  __shared__ float tile[5000];
  tile[threadIdx.x] = p[threadIdx.x];
  __syncthreads();
  p[threadIdx.x] = tile[4999 - threadIdx.x];
}
"""
REVERSE = """
extern "C" __global__ void reverse(float* p) {
  extern __shared__ float tile[];
  tile[threadIdx.x] = p[threadIdx.x];
  __syncthreads();
  p[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}
"""


def blocks_by_driver(module: Module, symbol: str, threads: int, dynamic: int) -> int:
    from cuda.bindings import driver

    function = module.function(symbol)
    if dynamic > 48 * 1024:
        function.allow_dynamic_shared(dynamic)
    status, blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function._handle, threads, dynamic)
    assert status == driver.CUresult.CUDA_SUCCESS
    return int(blocks)


@pytest.mark.parametrize("rung", load_rungs(), ids=lambda rung: rung.name)
def test_resources_and_occupancy_of_every_rung(
    rung: Rung, device: Device, spec: DeviceSpec, arch: str
) -> None:
    program = compile_source(rung.source(), rung.entries, arch)
    module = Module(device, program.cubin)
    for kernel in program.kernels.values():
        function, told = module.function(kernel.symbol), kernel.resources
        assert function.attribute("NUM_REGS") == told.registers
        assert function.attribute("SHARED_SIZE_BYTES") == told.static_shared_bytes
        assert function.attribute("LOCAL_SIZE_BYTES") >= told.stack_bytes
        for threads in (rung.threads_of(kernel.name), 32, 96, 128, 512):
            if threads <= function.attribute("MAX_THREADS_PER_BLOCK"):
                ours = occupancy(told, threads, spec).blocks_per_sm
                assert ours == blocks_by_driver(module, kernel.symbol, threads, 0), (kernel.name, threads)


def test_occupancy_by_shared_memory(
    device: Device, spec: DeviceSpec, arch: str, rng: np.random.Generator
) -> None:
    for text, entry in ((FIXED, "fixed"), (REVERSE, "reverse")):
        program = compile_source(Source.from_text("shared.cu", text), [entry], arch)
        kernel, module = program.kernels[entry], Module(device, program.cubin)
        room = spec.shared_per_block - kernel.resources.static_shared_bytes
        for dynamic in (0, room, *map(int, rng.integers(0, room + 1, 30))):
            threads = int(rng.integers(1, 1025))
            ours = occupancy(kernel.resources, threads, spec, dynamic).blocks_per_sm
            assert ours == blocks_by_driver(module, kernel.symbol, threads, dynamic), (threads, dynamic)


def test_the_table_agrees_with_the_driver(spec: DeviceSpec) -> None:
    """Limits of a whole GPU of the table; a part of one (MIG) has fewer SMs and less L2."""
    known = find_spec(spec.name)
    if known is None:
        pytest.skip(f"{spec.name} is not in the table")
    if spec.sms != known.sms:
        pytest.skip(f"{spec.sms} SMs: not a whole {known.name}")
    free = {
        "name",
        "clock_mhz",
        "bandwidth_gb_s",
        "power_w",
        "sources",
    }  # vary with the board and its setting
    for field in dataclasses.fields(DeviceSpec):
        if field.name not in free:
            assert getattr(spec, field.name) == getattr(known, field.name), field.name
    assert spec.clock_mhz == pytest.approx(known.clock_mhz, rel=0.15)
    assert spec.bandwidth_gb_s == pytest.approx(known.bandwidth_gb_s, rel=0.05)


def test_ptx_of_an_older_architecture_runs(
    device: Device, stream: Stream, spec: DeviceSpec, rng: np.random.Generator
) -> None:
    """As on a GPU newer than the compiler: the driver translates PTX, if it is no older than the compiler."""
    older = [pair for pair in ((7, 5), (8, 9), (9, 0), (10, 0)) if pair[0] < spec.compute_capability[0]]
    if not older:
        pytest.skip("the compiler makes nothing older than this GPU's major version")
    compiler_cuda = tuple(int(part) for part in compiler_version().split()[1].split(".")[:2])
    if driver_cuda_version() < compiler_cuda:
        pytest.skip(f"this driver refuses PTX of {compiler_version()}")
    choice = ArchChoice("sm_{}{}".format(*older[-1]), "ptx")
    program = compile_source(Source.from_text("reverse.cu", REVERSE), ["reverse"], choice.arch)
    host = rng.standard_normal(256, dtype=np.float32)
    array = DeviceArray.from_numpy(device, host)
    function = Module(device, choice.image_of(program)).function("reverse")
    function.prepare((1, 1, 1), (256, 1, 1), [array], stream, 1024)()
    stream.synchronize()
    np.testing.assert_array_equal(array.to_numpy(), host[::-1])
