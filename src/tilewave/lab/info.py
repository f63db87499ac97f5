"""`tilewave info`: what this machine has, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tilewave.bench.environment import GpuState, tilewave_version
from tilewave.compiler import cache_directory
from tilewave.compiler.toolchain import compiler_version, library_path
from tilewave.device import query_device, spec_names
from tilewave.device.driver import MINIMUM_DRIVER
from tilewave.errors import TilewaveError
from tilewave.runtime.driver import Device, probe

_FRAMEWORKS = {
    "torch": ("torch",),
    "cupy": ("cupy-cuda13x", "cupy"),
    "jax": ("jax",),
}
_OPTIONAL = {
    "nvidia-ml-py": "clocks, power and temperature beside each timing",
    "nvidia-cuda-cuobjdump": "SASS of a kernel",
    "nvidia-cuda-nvdisasm": "SASS of a kernel",
}


def info_command() -> None:
    """Print what was found; nothing missing makes this fail."""
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    missing: list[str] = []
    for what, found in _lines(missing):
        table.add_row(what, Text(found))
    console.print(table)
    if missing:
        console.print("\n[bold]Missing, and how to get it[/bold]")
        remedies = Table.grid(padding=(0, 1))
        for line in missing:
            remedies.add_row("-", Text(line))
        console.print(remedies)


def _lines(missing: list[str]) -> Iterator[tuple[str, str]]:
    """(label, what was found) for each line; what is not there goes to ``missing`` with the remedy."""
    yield "tilewave", f"{tilewave_version()}, Python {platform.python_version()}, {platform.machine()}"
    yield from _gpus(missing)
    try:
        yield "compiler", f"{compiler_version()} ({_short(library_path())})"
    except TilewaveError as error:
        yield "compiler", "none"
        missing.append(f"compiler: {error}")
    yield "cache", _cache()
    yield "frameworks", _frameworks(missing)
    yield "emulated", ", ".join(spec_names())
    for package, use in _OPTIONAL.items():
        if _version(package) is None:
            missing.append(f"{package} ({use}): pip install {package}")


def _gpus(missing: list[str]) -> Iterator[tuple[str, str]]:
    found = probe()
    if found.reason is not None:
        yield "GPU", f"none: {found.reason}"
        remedy = (
            f"update the NVIDIA driver to {MINIMUM_DRIVER} or later"
            if found.outdated_driver
            else f"install an NVIDIA GPU's driver, {MINIMUM_DRIVER} or later; "
            "until then kernels run in the emulator"
        )
        missing.append(f"GPU: {remedy}")
        return
    if found.driver_cuda is not None:
        yield "driver", "CUDA {}.{}".format(*found.driver_cuda)
    for ordinal in range(found.devices):
        spec = query_device(ordinal)
        state = GpuState.read(Device(ordinal))
        yield (
            f"GPU {ordinal}",
            f"{spec.name}: {spec.arch}, {spec.sms} SMs, {spec.clock_mhz:.0f} MHz, FP32 peak "
            f"{spec.peak_fp32_tflops:.1f} TFLOP/s; now {state} ({state.source})",
        )


def _cache() -> str:
    directory = cache_directory()
    try:
        sizes = [entry.stat().st_size for entry in directory.iterdir() if entry.suffix == ".program"]
    except FileNotFoundError:
        return f"{_short(directory)}: empty"
    except OSError as error:
        return f"{_short(directory)}: cannot be read ({error.strerror})"
    return f"{_short(directory)}: {len(sizes)} programs, {sum(sizes) / 1e6:.1f} MB"


def _frameworks(missing: list[str]) -> str:
    versions = {
        name: next((version for package in packages if (version := _version(package))), None)
        for name, packages in _FRAMEWORKS.items()
    }
    if versions["torch"] is None and versions["cupy"] is None:
        missing.append("torch or cupy, to compare with cuBLAS on a GPU: pip install torch, or cupy-cuda13x")
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version) or "none"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _short(path: Path) -> str:
    """A path with the home directory as "~"."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)
