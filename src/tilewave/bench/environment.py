"""What a measurement was made with: the record that stands beside every result."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import io
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tilewave.device.driver import driver_release
from tilewave.errors import ToolchainError
from tilewave.runtime.driver import Device, probe

#: Packages whose versions can change a figure.
PACKAGES = ("numpy", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cublas", "torch", "cupy-cuda13x")

_SMI_FIELDS = {
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}


@dataclass(frozen=True)
class GpuState:
    """Clocks, power and temperature at one moment; None where the machine does not tell."""

    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    throttling: list[str] = field(default_factory=list)
    source: str = "unknown"

    @classmethod
    def read(cls, device: Device | None) -> GpuState:
        """Read the state of a GPU through NVML, else through nvidia-smi. Never raises."""
        if device is None:
            return cls(source="no GPU")
        return _from_nvml(device) or _from_smi(device) or cls(source="neither NVML nor nvidia-smi answered")

    def __str__(self) -> str:
        parts = [
            f"{value:.0f} {unit}"
            for value, unit in (
                (self.sm_clock_mhz, "MHz"),
                (self.power_w, "W"),
                (self.temperature_c, "°C"),
            )
            if value is not None
        ]
        return ", ".join([*parts, *self.throttling]) or self.source


class NvmlReader:
    """One GPU's state through NVML, read as often as wanted; raises ``ToolchainError`` where there is none.

    ``averaged`` asks for the power that NVML has always told, on GPUs from Ampere on the mean of the last
    second; otherwise it is the present power where the driver tells that. ``power_kind`` says which it is.
    """

    def __init__(self, pci_bus_id: str, *, averaged: bool = False) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise ToolchainError(
                "no NVML: the package nvidia-ml-py is not installed (pip install 'tilewave[nvml]')"
            ) from error
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise ToolchainError(f"no NVML: {error}") from error
        try:
            self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id.encode())
        except pynvml.NVMLError as error:
            self.close()
            raise ToolchainError(f"NVML does not know the GPU at {pci_bus_id}: {error}") from error
        self._instant = not averaged and self._present_power() is not None
        self.power_kind = "present power" if self._instant else "power as NVML averages it"

    def __enter__(self) -> NvmlReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of NVML."""
        self._nvml.nvmlShutdown()

    def read(self) -> GpuState:
        """The state now; figures that this GPU does not tell are None."""
        nvml = self._nvml
        limit = self._ask("nvmlDeviceGetEnforcedPowerLimit")
        if self._instant:
            power = self._present_power()
        else:
            averaged = self._ask("nvmlDeviceGetPowerUsage")
            power = None if averaged is None else averaged / 1000
        reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return GpuState(
            sm_clock_mhz=self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            power_w=power,
            power_limit_w=None if limit is None else limit / 1000,
            temperature_c=self._ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            throttling=_throttle_names(int(reasons or 0)),
            source="NVML",
        )

    def _ask(self, function: str, *arguments: Any) -> float | None:
        try:
            return float(getattr(self._nvml, function)(self._handle, *arguments))
        except (self._nvml.NVMLError, AttributeError):  # not told by this GPU, or unknown to this pynvml
            return None

    def _present_power(self) -> float | None:
        """The power in W at this moment; None where the driver, or this pynvml, has no such figure."""
        nvml = self._nvml
        try:
            (field_value,) = nvml.nvmlDeviceGetFieldValues(self._handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
            if field_value.nvmlReturn != nvml.NVML_SUCCESS:
                return None
            kind = _FIELD_VALUE_KINDS[int(field_value.valueType)]
            return float(getattr(field_value.value, kind)) / 1000
        except (nvml.NVMLError, AttributeError, LookupError, ValueError):
            return None


#: The member of NVML's union of values for each of its types, in the order of nvmlValueType_t.
_FIELD_VALUE_KINDS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal")


def _from_nvml(device: Device) -> GpuState | None:
    try:
        with NvmlReader(device.pci_bus_id, averaged=True) as reader:
            return reader.read()
    except ToolchainError:
        return None


def _throttle_names(mask: int) -> list[str]:
    """The reasons, among those that slow a busy GPU down, that are set in NVML's bit mask."""
    known = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "thermal slowdown", 0x40: "hardware thermal",
             0x80: "power brake"}  # fmt: skip
    return [name for bit, name in known.items() if mask & bit]


def _from_smi(device: Device) -> GpuState | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, f"--query-gpu={','.join(_SMI_FIELDS.values())}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            [*query, f"--id={device.pci_bus_id}"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    row = next(csv.reader(io.StringIO(answer)), [])
    values: dict[str, float | None] = {}
    for name, text in zip(_SMI_FIELDS, row, strict=False):
        try:
            values[name] = float(text)
        except ValueError:  # "[N/A]", "[Not Supported]"
            values[name] = None
    return GpuState(**values, source="nvidia-smi") if values else None  # type: ignore[arg-type]


@dataclass(frozen=True)
class Environment:
    """Everything about machine and software that a figure may depend on; no names of hosts or users."""

    date: str
    tilewave: str
    commit: str | None
    command: str
    python: str
    platform: str
    compiler: str | None
    packages: dict[str, str]
    gpu: str | None = None
    gpu_details: dict[str, Any] = field(default_factory=dict)
    driver: str | None = None
    driver_cuda: str | None = None

    @classmethod
    def capture(
        cls,
        *,
        device: Device | None = None,
        compiler: str | None = None,
        gpu_details: dict[str, Any] | None = None,
        command: Sequence[str] | None = None,
    ) -> Environment:
        """Record the present environment; ``device`` is None where no GPU takes part."""
        found = probe() if device is not None else None
        cuda = found.driver_cuda if found else None
        return cls(
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            tilewave=tilewave_version(),
            commit=_commit(),
            command=_anonymous(sys.argv if command is None else command),
            python=platform.python_version(),
            platform=f"{platform.system()} {platform.machine()}",
            compiler=compiler,
            packages=package_versions(PACKAGES),
            gpu=device.name if device else None,
            gpu_details=gpu_details or {},
            driver=driver_release() if device else None,
            driver_cuda=f"{cuda[0]}.{cuda[1]}" if cuda else None,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data for a JSON file."""
        return asdict(self)


def package_versions(names: Sequence[str]) -> dict[str, str]:
    """Versions of the installed ones among these distributions."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def tilewave_version() -> str:
    """The version of the installed package, or of the source tree that it runs from uninstalled."""
    try:
        return importlib.metadata.version("tilewave")
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        project = tomllib.loads((_source_root() / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return f"{project['version']}+source" if project["name"] == "tilewave" else "unknown"
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return "unknown"


def _source_root() -> Path:
    """Where the repository would be if this file lay in its source tree."""
    return Path(__file__).resolve().parents[3]


def _commit() -> str | None:
    """The git commit of the source tree this runs from ("+" marks local changes), or None."""
    root = _source_root()
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-c", f"safe.directory={root}", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "src")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _anonymous(command: Sequence[str]) -> str:
    """The command line with every path cut to its last part: where files lie is nobody's business."""
    return shlex.join(Path(word).name if os.sep in word else word for word in command)
