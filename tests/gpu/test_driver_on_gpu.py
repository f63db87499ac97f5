"""The driver layer on a real GPU."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest

from tilewave.compiler import Source, compile_source
from tilewave.errors import DeviceError
from tilewave.runtime.driver import Device, DeviceArray, Module, Stream

pytestmark = pytest.mark.gpu

SCALE = """
extern "C" __global__ void scale(float* data, float factor, int count) {
  extern __shared__ float staging[];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  staging[threadIdx.x] = i < count ? data[i] : 0.0f;
  if (i < count) data[i] = staging[threadIdx.x] * factor;
}
extern "C" __global__ void trap() { asm volatile("trap;"); }
"""


def test_launch_with_much_dynamic_shared_memory(
    device: Device, stream: Stream, arch: str, rng: np.random.Generator
) -> None:
    program = compile_source(Source.from_text("scale.cu", SCALE), ["scale"], arch)
    function = Module(device, program.cubin).function("scale")
    host = rng.standard_normal(1000, dtype=np.float32)
    array = DeviceArray.from_numpy(device, host)
    launch = function.prepare((4, 1, 1), (256, 1, 1), [array, 2.5, 1000], stream, 60 * 1024)
    launch()
    stream.synchronize()
    launch()
    np.testing.assert_array_equal(array.to_numpy(), host * np.float32(2.5) * np.float32(2.5))


def test_poison_and_views(device: Device) -> None:
    array = DeviceArray.from_numpy(device, np.zeros((4, 8), np.float32))
    array.view(8, (2, 8)).poison()
    back = array.to_numpy()
    assert np.isnan(back[1:3]).all()
    assert (back[[0, 3]] == 0).all()
    free, total = device.memory()
    assert 0 < free < total
    with pytest.raises(DeviceError, match="are free"):
        DeviceArray.empty(device, (total,))


def test_memory_is_given_back(device: Device) -> None:
    _, total = device.memory()
    for _ in range(8):  # twice the GPU's memory in all
        DeviceArray.empty(device, (total // 16,))


def test_a_module_without_the_kernel_says_so(device: Device, arch: str) -> None:
    program = compile_source(Source.from_text("scale.cu", SCALE), ["scale"], arch)
    with pytest.raises(DeviceError, match=r"cuModuleGetFunction failed with CUDA_ERROR_NOT_FOUND \(500\)"):
        Module(device, program.cubin).function("no_such_kernel")


def run_python(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_child_gets_a_clear_error(device: Device) -> None:
    output = run_python(
        """
        import os
        from tilewave.errors import DeviceError
        from tilewave.runtime.driver import Device, DeviceArray, probe
        device = Device()
        array = DeviceArray.empty(device, (8,))
        if os.fork() == 0:
            for action in (Device, array.to_numpy, array.poison):
                try:
                    action()
                    print("no error", flush=True)
                except DeviceError as error:
                    print("spawn" in str(error), flush=True)
            print(probe().usable, flush=True)
            del array, device
            os._exit(0)
        os.wait()
        array.poison()
        print(array.to_numpy().shape)
        """
    )
    assert output.split("\n")[:5] == ["True", "True", "True", "False", "(8,)"]


def test_a_failing_kernel_is_named_at_the_next_call(device: Device) -> None:
    # In a process of its own: a trap ruins the context.
    output = run_python(
        f"""
        from tilewave.compiler import Source, choose_arch, compile_source
        from tilewave.device import query_device
        from tilewave.errors import DeviceError
        from tilewave.runtime.driver import Device, Module, Stream
        device = Device()
        arch = choose_arch(query_device().compute_capability).arch
        program = compile_source(Source.from_text("trap.cu", {SCALE!r}), ["trap"], arch)
        stream = Stream(device)
        Module(device, program.cubin).function("trap").prepare((1, 1, 1), (1, 1, 1), [], stream)()
        try:
            stream.synchronize()
        except DeviceError as error:
            print(error)
        """
    )
    assert "cuStreamSynchronize failed with CUDA_ERROR_" in output
