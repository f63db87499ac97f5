"""What the CUDA driver says: its version, and the GPUs that it sees."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewave.device.catalog import architecture_figures, figure_sources, find_spec
from tilewave.device.spec import DeviceSpec
from tilewave.errors import DeviceError, ToolchainError

MINIMUM_DRIVER = 580
"""The oldest driver branch that tilewave runs on: the first that supports CUDA 13."""

_MINIMUM_CUDA = (13, 0)
_NEED = f"tilewave needs driver {MINIMUM_DRIVER} or later (CUDA {_MINIMUM_CUDA[0]}.{_MINIMUM_CUDA[1]})"

FORKED = (
    "this process was forked from one that had already used CUDA, and CUDA does not survive a fork: start "
    "worker processes with multiprocessing's 'spawn' or 'forkserver' method, or use CUDA in the children only"
)


class ProcessState:
    """Whether tilewave initialised CUDA here, and whether this process is a fork of one where it did."""

    initialised = False
    forked = False


def _after_fork_in_child() -> None:
    ProcessState.forked = ProcessState.forked or ProcessState.initialised


os.register_at_fork(after_in_child=_after_fork_in_child)


def bindings() -> Any:
    """The module ``cuda.bindings.driver``, imported on first use (tests put another in its place).

    Raises ``ToolchainError`` that says how to install it.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ToolchainError(
            f"cuda.bindings cannot be imported ({error}): pip install 'cuda-bindings>=13.0,<14'"
        ) from error
    return driver


def _call(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
    """The value of a driver call; a ``DeviceError`` that names call and result when it fails."""
    status, *values = function(*arguments)
    if status.value != 0:
        raise DeviceError(f"{function.__name__} failed: {status.name}")
    return values[0] if values else None


def driver_cuda_version() -> tuple[int, int]:
    """The CUDA version that the installed driver supports, such as (13, 0).

    Raises ``ToolchainError`` when there is no driver.
    """
    driver = bindings()
    try:
        version = _call(driver.cuDriverGetVersion)
    except DeviceError:
        raise
    except Exception as error:  # without libcuda, cuda.bindings raises one type or another by its version
        raise ToolchainError(f"no NVIDIA driver was found ({error}); {_NEED}") from error
    return cuda_version_of(version)


def cuda_version_of(number: int) -> tuple[int, int]:
    """Major and minor of a CUDA version as the driver writes it: 13050 is (13, 5)."""
    return number // 1000, number % 1000 // 10


def require_driver(cuda_version: tuple[int, int] | None = None) -> tuple[int, int]:
    """Check, before anything is compiled, that the driver can load what will be compiled.

    ``cuda_version`` is what the driver supports, asked for when left out; it is returned. Raises
    ``ToolchainError`` for a driver older than 580, or none.
    """
    found = driver_cuda_version() if cuda_version is None else cuda_version
    if found < _MINIMUM_CUDA:
        raise ToolchainError(
            f"the NVIDIA driver is too old: it supports CUDA {found[0]}.{found[1]}, but {_NEED}"
        )
    return found


def driver_release() -> str | None:
    """The driver's own version, such as "580.159.04"; None where neither NVML nor the kernel module tells."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
        finally:
            pynvml.nvmlShutdown()
        return version.decode() if isinstance(version, bytes) else str(version)
    except Exception:  # without NVML the kernel module's own file may still tell
        pass
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
        return next(word for word in words if word.count(".") >= 1 and word[0].isdigit())
    except (OSError, StopIteration):
        return None


def query_device(ordinal: int = 0) -> DeviceSpec:
    """The GPU that CUDA numbers ``ordinal``, as its driver describes it.

    SMs, clock, registers, shared memory, thread and block limits, L2 and bandwidth are the driver's. What it
    does not tell (FP32 lanes, allocation units, power) comes from the table, as ``sources`` says. Raises
    ``ToolchainError`` without a driver of 580 or later, ``DeviceError`` when there is no such GPU, or in a
    fork of a process that had used CUDA.
    """
    if ProcessState.forked:
        raise DeviceError(FORKED)
    require_driver()
    driver = bindings()
    _call(driver.cuInit, 0)
    ProcessState.initialised = True
    count = _call(driver.cuDeviceGetCount)
    if not 0 <= ordinal < count:
        raise DeviceError(f"there is no GPU {ordinal}: the driver sees {count}, numbered from 0")
    device = _call(driver.cuDeviceGet, ordinal)
    name = _call(driver.cuDeviceGetName, 128, device).split(b"\0")[0].decode()

    def attribute(suffix: str) -> int:
        key = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{suffix}")
        return int(_call(driver.cuDeviceGetAttribute, key, device))

    capability = (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR"))
    queried: dict[str, Any] = {
        "sms": attribute("MULTIPROCESSOR_COUNT"),
        "clock_mhz": attribute("CLOCK_RATE") / 1000,
        "registers_per_sm": attribute("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        "registers_per_block": attribute("MAX_REGISTERS_PER_BLOCK"),
        "shared_per_sm": attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        "shared_per_block": attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        "shared_reserved_per_block": attribute("RESERVED_SHARED_MEMORY_PER_BLOCK"),
        "threads_per_sm": attribute("MAX_THREADS_PER_MULTIPROCESSOR"),
        "threads_per_block": attribute("MAX_THREADS_PER_BLOCK"),
        "blocks_per_sm": attribute("MAX_BLOCKS_PER_MULTIPROCESSOR"),
        "l2_bytes": attribute("L2_CACHE_SIZE"),
        "warp_size": attribute("WARP_SIZE"),
    }
    # Two transfers a clock: kHz * bits / 8 * 2 = bytes per ms.
    bandwidth = attribute("MEMORY_CLOCK_RATE") * attribute("GLOBAL_MEMORY_BUS_WIDTH") / 4 / 1e6
    if bandwidth > 0:
        queried["bandwidth_gb_s"] = bandwidth
    known = find_spec(name)
    figures = architecture_figures(capability)
    sources = figure_sources(figures)
    if known is not None:
        product = {"bandwidth_gb_s": known.bandwidth_gb_s, "power_w": known.power_w}
        figures |= product
        sources |= {field: known.sources[field] for field in product if field in known.sources}
    figures.setdefault("power_w", None)
    figures.setdefault("bandwidth_gb_s", float("nan"))
    figures |= queried | {"arch": "sm_{}{}".format(*capability)}
    sources |= dict.fromkeys(queried, "the driver")
    return DeviceSpec(name=name, compute_capability=capability, sources=sources, **figures)
