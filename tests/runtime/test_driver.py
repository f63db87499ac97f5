"""The driver layer against a fake driver: no GPU is needed to test what it checks and what it says."""

from __future__ import annotations

import ctypes
import enum
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tilewave.device import require_driver
from tilewave.errors import DeviceError, ToolchainError
from tilewave.runtime import driver


class FakeResult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_LAUNCH_FAILED = 719


class FakeCuda(types.ModuleType):
    """A driver with one GPU whose memory is this process's own."""

    CUresult = FakeResult

    def __init__(self) -> None:
        super().__init__("fake")
        self.failures: dict[str, FakeResult] = {}
        self.version = 13000
        self.launches: list[tuple[Any, ...]] = []
        self.freed: list[int] = []
        self._memory: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            if name in self.failures:
                return (self.failures[name],) + (None,) * (name != "cuInit")
            return (FakeResult.CUDA_SUCCESS, *self.answer(name, arguments))

        return call

    def answer(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        match name:
            case "cuDriverGetVersion":
                return (self.version,)
            case "cuDeviceGetCount":
                return (1,)
            case "cuDeviceGetName":
                return (b"Fake GPU\0\0\0",)
            case "cuDeviceGet" | "cuDevicePrimaryCtxRetain" | "cuModuleLoadData" | "cuModuleGetFunction":
                return (f"{name} handle",)
            case "cuMemGetInfo":
                return (1 << 20, 1 << 21)
            case "cuMemAlloc":
                block = (ctypes.c_char * arguments[0])()
                self._memory[ctypes.addressof(block)] = block
                return (ctypes.addressof(block),)
            case "cuMemFree":
                self.freed.append(arguments[0])
                return ()
            case "cuMemcpyHtoD" | "cuMemcpyDtoH":
                ctypes.memmove(*arguments)
                return ()
            case "cuMemsetD32":
                address, pattern, count = arguments
                (ctypes.c_uint32 * count).from_address(address)[:] = [pattern] * count
                return ()
            case "cuGetErrorString":
                return (b"as the driver explains it",)
            case "cuLaunchKernel":
                self.launches.append(arguments)
                return ()
        return ()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    monkeypatch.setattr(driver, "_bindings", lambda: fake)
    monkeypatch.setattr(driver.ProcessState, "initialised", False)
    monkeypatch.setattr(driver.ProcessState, "forked", False)
    driver.probe.cache_clear()
    yield fake
    driver.probe.cache_clear()


def test_probe_finds_the_gpu(cuda: FakeCuda) -> None:
    assert driver.probe() == driver.Probe(1, (13, 0), None)
    assert driver.require_gpu().usable
    assert driver.Device().name == "Fake GPU"


def test_probe_never_raises_without_libcuda(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    class DynamicLibNotFoundError(RuntimeError):
        pass

    def missing(*_: Any) -> Any:
        raise DynamicLibNotFoundError("no libcuda")

    monkeypatch.setattr(driver, "_bindings", lambda: types.SimpleNamespace(cuInit=missing))
    assert "libcuda" in (driver.probe().reason or "")
    with pytest.raises(DeviceError, match="no NVIDIA driver"):
        driver.Device()


def test_probe_never_raises_without_cuda_bindings(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    monkeypatch.delattr("cuda.bindings.driver", raising=False)  # what an earlier import left
    driver.probe.cache_clear()
    assert "pip install 'cuda-bindings" in (driver.probe().reason or "")


def test_an_old_driver_is_named_with_what_is_needed(cuda: FakeCuda) -> None:
    cuda.version = 12040
    found = driver.probe()
    assert found.outdated_driver
    assert "CUDA 12.4" in (found.reason or "")
    assert "580" in (found.reason or "")
    with pytest.raises(ToolchainError, match="580"):
        driver.require_gpu()
    with pytest.raises(ToolchainError) as said_before_compiling:
        require_driver((12, 4))
    assert found.reason == str(said_before_compiling.value)


def test_no_device_is_explained(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.failures["cuInit"] = FakeResult.CUDA_ERROR_NO_DEVICE
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    reason = driver.probe().reason or ""
    assert "cuInit failed with CUDA_ERROR_NO_DEVICE (100): as the driver explains it" in reason
    assert "CUDA_VISIBLE_DEVICES is '7'" in reason


def test_a_gpu_that_is_not_there_is_refused(cuda: FakeCuda) -> None:
    with pytest.raises(DeviceError, match="GPU 3 was asked for"):
        driver.Device(3)


def test_errors_name_call_code_and_meaning(cuda: FakeCuda) -> None:
    device = driver.Device()
    cuda.failures["cuMemAlloc"] = FakeResult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(
        DeviceError, match=r"cuMemAlloc failed with CUDA_ERROR_OUT_OF_MEMORY \(2\): as the driver"
    ):
        driver.DeviceArray.empty(device, (4, 4))


def test_memory_round_trip_and_release(cuda: FakeCuda, rng: np.random.Generator) -> None:
    device = driver.Device()
    host = rng.standard_normal((5, 7), dtype=np.float32)
    array = driver.DeviceArray.from_numpy(device, host)
    np.testing.assert_array_equal(array.to_numpy(), host)
    interface = array.__cuda_array_interface__
    assert interface["data"] == (array.address, False)
    assert interface["shape"] == (5, 7)
    row = array.view(14, (7,))
    np.testing.assert_array_equal(row.to_numpy(), host[2])
    row.poison()
    after = array.to_numpy()
    assert np.isnan(after[2]).all()
    assert not np.isnan(np.delete(after, 2, 0)).any()
    address = array.address
    del array
    assert cuda.freed == []  # the view keeps the memory
    del row
    assert cuda.freed == [address]


def test_views_and_copies_stay_inside(cuda: FakeCuda) -> None:
    device = driver.Device()
    array = driver.DeviceArray.empty(device, (4,))
    for offset, shape in ((-1, (2,)), (3, (2,)), (0, (5,))):
        with pytest.raises(DeviceError, match="outside"):
            array.view(offset, shape)
    with pytest.raises(DeviceError, match="does not fit"):
        array.copy_from(np.zeros(5, np.float32))
    with pytest.raises(DeviceError, match="does not fit"):
        array.copy_from(np.zeros(4))
    with pytest.raises(DeviceError, match="are free"):
        driver.DeviceArray.empty(device, (1 << 20,))


def test_launch_passes_the_arguments_as_c_values(cuda: FakeCuda) -> None:
    device = driver.Device()
    array = driver.DeviceArray.empty(device, (4,))
    function = driver.Module(device, b"cubin").function("kernel")
    stream = driver.Stream(device, handle=77)
    launch = function.prepare((3, 2, 1), (32, 8, 1), [array, -5, 2.5, ctypes.c_int64(1 << 40)], stream, 1024)
    launch()
    (handle, *geometry, shared, stream_handle, pointers, extra) = cuda.launches[0]
    assert handle == "cuModuleGetFunction handle"
    assert geometry == [3, 2, 1, 32, 8, 1]
    assert (shared, stream_handle, extra) == (1024, 77, 0)
    addresses = (ctypes.c_void_p * 4).from_address(pointers)
    assert ctypes.c_void_p.from_address(addresses[0]).value == array.address
    assert ctypes.c_int32.from_address(addresses[1]).value == -5
    assert ctypes.c_float.from_address(addresses[2]).value == 2.5
    assert ctypes.c_int64.from_address(addresses[3]).value == 1 << 40
    cuda.failures["cuLaunchKernel"] = FakeResult.CUDA_ERROR_LAUNCH_FAILED
    failing = function.prepare((1, 1, 1), (1, 1, 1), [], stream)
    with pytest.raises(DeviceError, match=r"cuLaunchKernel of kernel failed with CUDA_ERROR_LAUNCH_FAILED"):
        failing()


@pytest.mark.parametrize("bad", [1 << 31, -(1 << 31) - 1, "text", None, True])
def test_arguments_that_do_not_fit_are_refused(cuda: FakeCuda, bad: Any) -> None:
    with pytest.raises(DeviceError, match="kernel argument 1"):
        driver.PackedArguments([1, bad])


def test_a_forked_child_gets_a_clear_error(cuda: FakeCuda) -> None:
    device = driver.Device()
    array = driver.DeviceArray.empty(device, (4,))
    launch = (
        driver.Module(device, b"cubin")
        .function("kernel")
        .prepare((1, 1, 1), (1, 1, 1), [array], driver.Stream(device, handle=0))
    )
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        messages = []
        for action in (launch, array.to_numpy, driver.Device, lambda: driver.Module(device, b"")):
            try:
                action()
                messages.append("no error")
            except DeviceError as error:
                messages.append("ok" if "forked" in str(error) and "spawn" in str(error) else str(error))
        messages.append("ok" if "forked" in (driver.probe().reason or "") else "probe")
        os.write(write_end, ",".join(messages).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        assert pipe.read() == "ok,ok,ok,ok,ok"
    launch()  # the parent goes on
    assert driver.probe().usable


def test_a_fork_before_cuda_was_used_is_harmless(cuda: FakeCuda) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0 if driver.probe().usable else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_fork_of_a_process_where_another_library_used_cuda_is_suspected(cuda: FakeCuda) -> None:
    cuda.failures["cuInit"] = FakeResult.CUDA_ERROR_NOT_INITIALIZED
    reason = driver.probe().reason or ""
    assert "cuInit failed with CUDA_ERROR_NOT_INITIALIZED (3)" in reason
    assert "probably this process was forked" in reason
    driver.probe.cache_clear()
    cuda.failures["cuInit"] = FakeResult.CUDA_ERROR_NO_DEVICE
    assert "forked" not in (driver.probe().reason or "")
