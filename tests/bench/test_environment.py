"""The record of the environment, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tilewave.bench import environment
from tilewave.bench.environment import Environment, GpuState


class FakeDevice:
    name = "NVIDIA Example"
    pci_bus_id = "0000:01:00.0"


def test_record_without_a_gpu_is_plain_json() -> None:
    record = Environment.capture(compiler="NVRTC 13.5.37", command=["tilewave", "ladder"]).to_json()
    assert json.loads(json.dumps(record)) == record
    assert record["gpu"] is None
    assert record["compiler"] == "NVRTC 13.5.37"
    assert record["command"] == "tilewave ladder"
    assert record["packages"]["numpy"]
    assert record["date"].endswith("+00:00")


def test_no_path_of_the_machine_is_recorded() -> None:
    record = Environment.capture(command=["/home/someone/bin/tilewave", "ladder", "--json", "/data/x y.json"])
    assert record.command == "tilewave ladder --json 'x y.json'"


def test_without_nvml_and_nvidia_smi_the_state_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    state = GpuState.read(FakeDevice())  # type: ignore[arg-type]
    assert state.sm_clock_mhz is None
    assert "neither" in str(state)
    assert GpuState.read(None).source == "no GPU"


def test_nvidia_smi_stands_in_for_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, "1980, 3201, 655.12, [N/A], 61\n", "")

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(environment.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(environment.subprocess, "run", run)
    state = GpuState.read(FakeDevice())  # type: ignore[arg-type]
    assert (state.sm_clock_mhz, state.memory_clock_mhz, state.power_w) == (1980.0, 3201.0, 655.12)
    assert state.power_limit_w is None
    assert state.temperature_c == 61.0
    assert state.source == "nvidia-smi"
    assert str(state) == "1980 MHz, 655 W, 61 °C"
    assert f"--id={FakeDevice.pci_bus_id}" in asked[0]


def test_throttle_reasons_are_named() -> None:
    assert environment._throttle_names(0x4 | 0x20) == ["power cap", "thermal slowdown"]
    assert environment._throttle_names(0x1) == []  # idle is no throttling
