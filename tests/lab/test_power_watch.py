"""Sampling: the thread that looks, NVML through a pretend library, and machines that have none."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable

import pytest

from tilewave.bench.environment import GpuState, NvmlReader
from tilewave.errors import ToolchainError
from tilewave.lab.power.watch import Blind, SamplingThread, open_nvml

BUS = "0000:3B:00.0"


class NvmlError(Exception):
    pass


def pretend_nvml(**changes: object) -> types.ModuleType:
    """A module as nvidia-ml-py is, for a GPU that tells everything; a change of None takes a member away."""
    module = types.ModuleType("pynvml")

    def field_values(handle: object, fields: list[int]) -> list[object]:
        assert (handle, fields) == ("handle", [186])
        value = types.SimpleNamespace(uiVal=651_500, dVal=-1.0)
        return [types.SimpleNamespace(nvmlReturn=0, valueType=1, value=value)]

    members: dict[str, object] = {
        "NVMLError": NvmlError,
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_FI_DEV_POWER_INSTANT": 186,
        "NVML_SUCCESS": 0,
        "opened": 0,
        "nvmlDeviceGetHandleByPciBusId": lambda bus: "handle",
        "nvmlDeviceGetFieldValues": field_values,
        "nvmlDeviceGetPowerUsage": lambda handle: 640_000,
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x4 | 0x1,
        "nvmlDeviceGetClockInfo": lambda handle, which: {1: 1965, 2: 3201}[which],
        "nvmlDeviceGetTemperature": lambda handle, which: 61,
        **changes,
    }
    for name, member in members.items():
        if member is not None:
            setattr(module, name, member)

    def count(step: int) -> Callable[[], None]:
        def call() -> None:
            module.opened += step

        return call

    if "nvmlInit" not in changes:
        module.nvmlInit = count(1)
    module.nvmlShutdown = count(-1)
    return module


def fail(*_: object) -> None:
    raise NvmlError("not supported")


def use(monkeypatch: pytest.MonkeyPatch, module: types.ModuleType | None) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)


def test_everything_that_nvml_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pretend_nvml()
    use(monkeypatch, module)
    with NvmlReader(BUS) as reader:
        assert reader.power_kind == "present power"
        assert (
            reader.read()
            == reader.read()
            == GpuState(1965.0, 3201.0, 651.5, 700.0, 61.0, ["power cap"], "NVML")
        )
        assert module.opened == 1
    assert module.opened == 0


@pytest.mark.parametrize(
    "change",
    [
        {"nvmlDeviceGetFieldValues": None},  # an older package
        {"NVML_FI_DEV_POWER_INSTANT": None},
        {"nvmlDeviceGetFieldValues": fail},  # an older driver
        {
            "nvmlDeviceGetFieldValues": lambda handle, fields: [
                types.SimpleNamespace(nvmlReturn=3, valueType=1, value=None)
            ]
        },
    ],
)
def test_where_the_present_power_is_not_told_the_average_is(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    use(monkeypatch, pretend_nvml(**change))
    with NvmlReader(BUS) as reader:
        assert "averages" in reader.power_kind
        assert reader.read().power_w == 640.0


def test_the_environment_record_keeps_to_the_average(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, pretend_nvml())
    device = types.SimpleNamespace(pci_bus_id=BUS)
    assert GpuState.read(device).power_w == 640.0  # type: ignore[arg-type]


def test_what_a_gpu_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("FieldValues", "PowerUsage", "EnforcedPowerLimit", "CurrentClocksThrottleReasons", "ClockInfo")
    use(monkeypatch, pretend_nvml(**{f"nvmlDeviceGet{name}": fail for name in names}))
    with NvmlReader(BUS) as reader:
        assert reader.read() == GpuState(temperature_c=61.0, source="NVML")


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (None, r"nvidia-ml-py is not installed \(pip install 'tilewave\[nvml\]'\)"),
        (pretend_nvml(nvmlInit=fail), "no NVML: not supported"),
        (pretend_nvml(nvmlDeviceGetHandleByPciBusId=fail), f"NVML does not know the GPU at {BUS}"),
    ],
)
def test_without_nvml_the_reason_is_told_and_nothing_is_left_open(
    monkeypatch: pytest.MonkeyPatch, module: types.ModuleType | None, said: str
) -> None:
    use(monkeypatch, module)
    with pytest.raises(ToolchainError, match=said):
        NvmlReader(BUS)
    assert module is None or module.opened == 0
    read, close, telemetry = open_nvml(BUS)
    close()
    assert read is None
    assert telemetry.endswith("throughput only, no clocks, power or temperature")


def test_the_thread_samples_what_runs_until_it_is_stopped() -> None:
    begun = time.monotonic()
    reads = []

    def read() -> GpuState:
        reads.append(None)
        return GpuState(sm_clock_mhz=1980.0 - len(reads), power_w=600.0, throttling=["power cap"])

    with SamplingThread(read, lambda: time.monotonic() - begun, interval_s=0.01) as watch:
        time.sleep(0.1)
        watch.running("ours", "random")
        time.sleep(0.15)
        watch.running("", "")
    seen = len(reads)
    time.sleep(0.05)
    assert len(reads) == seen == len(watch.samples)
    labels = [(sample.contender, sample.data) for sample in watch.samples]
    assert labels.count(("ours", "random")) >= 3
    assert labels[0] == ("", "")
    assert [sample.sm_clock_mhz for sample in watch.samples] == [1980.0 - i for i in range(1, seen + 1)]
    moments = [sample.seconds for sample in watch.samples]
    assert moments == sorted(moments)
    for sample in watch.samples:
        if sample.contender:
            assert 0.09 < sample.seconds < 0.4
    assert watch.samples[0].throttling == ("power cap",)
    assert watch.failure is None


def test_a_reader_that_fails_ends_the_sampling_and_is_told() -> None:
    states = iter([GpuState(power_w=1.0), GpuState(power_w=2.0)])

    def read() -> GpuState:
        try:
            return next(states)
        except StopIteration:
            raise NvmlError("GPU is lost") from None

    with SamplingThread(read, lambda: 7.0, interval_s=0.001) as watch:
        watch._thread.join(5)
    assert [sample.power_w for sample in watch.samples] == [1.0, 2.0]
    assert watch.failure == "sampling ended after 7.0 s: GPU is lost"


def test_a_blind_watch_sees_nothing() -> None:
    with Blind() as watch:
        watch.running("ours", "random")
    assert watch.samples == []
