"""What is asked of the driver, with a driver made up for the purpose; a real GPU is queried in tests/gpu."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
from types import SimpleNamespace
from typing import Any

import pytest

from tilewave.device import driver, get_spec, query_device, require_driver
from tilewave.errors import DeviceError, ToolchainError

H200 = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "CLOCK_RATE": 1980000,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
    "MAX_REGISTERS_PER_BLOCK": 65536,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233472,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    "RESERVED_SHARED_MEMORY_PER_BLOCK": 1024,
    "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
    "MAX_THREADS_PER_BLOCK": 1024,
    "MAX_BLOCKS_PER_MULTIPROCESSOR": 32,
    "L2_CACHE_SIZE": 62914560,
    "WARP_SIZE": 32,
    "MEMORY_CLOCK_RATE": 3201000,
    "GLOBAL_MEMORY_BUS_WIDTH": 6144,
}


class Result(enum.Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_DEVICE = 100


def made_up_driver(
    attributes: dict[str, int],
    *,
    name: str = "NVIDIA H200",
    version: int = 13000,
    count: int = 1,
    init: Result = Result.CUDA_SUCCESS,
) -> Any:
    ok = Result.CUDA_SUCCESS
    names = SimpleNamespace(**{f"CU_DEVICE_ATTRIBUTE_{key}": key for key in attributes})

    def cuInit(flags: int) -> tuple[Result]:
        return (init,)

    return SimpleNamespace(
        CUdevice_attribute=names,
        cuInit=cuInit,
        cuDriverGetVersion=lambda: (ok, version),
        cuDeviceGetCount=lambda: (ok, count),
        cuDeviceGet=lambda ordinal: (ok, ordinal),
        cuDeviceGetName=lambda size, device: (ok, name.encode() + b"\0" * (size - len(name))),
        cuDeviceGetAttribute=lambda key, device: (ok, attributes[key]),
    )


def put(monkeypatch: pytest.MonkeyPatch, fake: Any) -> None:
    monkeypatch.setattr(driver, "bindings", lambda: fake)
    monkeypatch.setattr(driver.ProcessState, "initialised", False)


def test_a_known_gpu_equals_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, made_up_driver(H200))
    queried, known = query_device(), get_spec("H200")
    assert dataclasses.replace(queried, name="H200", bandwidth_gb_s=4800) == known
    assert queried.name == "NVIDIA H200"
    assert queried.bandwidth_gb_s == pytest.approx(3201e6 * 2 * 6144 / 8 / 1e9)
    assert queried.sources["sms"] == "the driver"
    assert queried.sources["fp32_lanes_per_sm"] == known.sources["fp32_lanes_per_sm"]
    assert queried.sources["power_w"] == known.sources["power_w"]


def test_counts_and_limits_are_the_drivers_not_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a GPU (MIG), or a variant of a known name, has other figures than the table."""
    part = H200 | {
        "MULTIPROCESSOR_COUNT": 16,
        "L2_CACHE_SIZE": 7 << 20,
        "MAX_THREADS_PER_MULTIPROCESSOR": 1536,
        "MAX_BLOCKS_PER_MULTIPROCESSOR": 24,
        "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 102400,
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 101376,
        "CLOCK_RATE": 1755000,
    }
    put(monkeypatch, made_up_driver(part))
    spec = query_device()
    assert (spec.sms, spec.l2_bytes, spec.threads_per_sm, spec.blocks_per_sm) == (16, 7 << 20, 1536, 24)
    assert (spec.shared_per_sm, spec.shared_per_block, spec.clock_mhz) == (102400, 101376, 1755)


def test_an_unknown_gpu_of_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    future = H200 | {"COMPUTE_CAPABILITY_MAJOR": 14, "MULTIPROCESSOR_COUNT": 300}
    put(monkeypatch, made_up_driver(future, name="NVIDIA X900"))
    spec = query_device()
    assert (spec.name, spec.arch, spec.sms, spec.power_w) == ("NVIDIA X900", "sm_140", 300, None)
    assert spec.fp32_lanes_per_sm == 128


def test_an_integrated_gpu_tells_no_memory_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GB10's memory is the CPU's: the table knows its bandwidth; of an unknown GPU nobody does."""
    integrated = H200 | {
        "COMPUTE_CAPABILITY_MAJOR": 12,
        "COMPUTE_CAPABILITY_MINOR": 1,
        "MEMORY_CLOCK_RATE": 0,
    }
    put(monkeypatch, made_up_driver(integrated, name="NVIDIA GB10"))
    assert query_device().bandwidth_gb_s == 273
    put(monkeypatch, made_up_driver(integrated, name="NVIDIA Unheard"))
    assert math.isnan(query_device().bandwidth_gb_s)


@pytest.mark.parametrize("ordinal", [-1, 2, 17])
def test_a_gpu_that_is_not_there(ordinal: int, monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, made_up_driver(H200, count=2))
    with pytest.raises(DeviceError, match=f"no GPU {ordinal}: the driver sees 2"):
        query_device(ordinal)


def test_a_failing_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, made_up_driver(H200, init=Result.CUDA_ERROR_NO_DEVICE))
    with pytest.raises(DeviceError, match="cuInit failed: CUDA_ERROR_NO_DEVICE"):
        query_device()


@pytest.mark.parametrize("version", [12040, 12090])
def test_a_driver_older_than_580_is_refused(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, made_up_driver(H200, version=version))
    for call in (require_driver, query_device):
        with pytest.raises(ToolchainError) as error:
            call()
        assert f"CUDA 12.{version % 1000 // 10}" in str(error.value)
        assert "580" in str(error.value)


@pytest.mark.parametrize(("version", "pair"), [(13000, (13, 0)), (13050, (13, 5)), (14020, (14, 2))])
def test_a_new_enough_driver(version: int, pair: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, made_up_driver(H200, version=version))
    assert require_driver() == pair
    assert require_driver(pair) == pair


@pytest.mark.parametrize("kind", [RuntimeError, ImportError, OSError, SystemError])
def test_no_driver_at_all(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda.bindings raises one or the other of these without libcuda, by its version."""

    def missing() -> None:
        raise kind("libcuda.so.1 not found")

    fake = made_up_driver(H200)
    fake.cuDriverGetVersion = missing
    put(monkeypatch, fake)
    with pytest.raises(ToolchainError, match=r"no NVIDIA driver was found.*580"):
        require_driver()


def test_a_fork_of_a_process_that_queried_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, made_up_driver(H200))
    for used in (False, True):
        if used:
            query_device()
        child = os.fork()
        if child == 0:
            try:
                query_device()
                os._exit(0)
            except DeviceError as error:
                os._exit(1 if "forked" in str(error) and "spawn" in str(error) else 2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == int(used)
    assert query_device().sms == 132  # the parent goes on
