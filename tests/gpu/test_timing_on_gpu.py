"""The timing protocol on a real GPU: rates that can be, and that agree with each other."""

from __future__ import annotations

import numpy as np
import pytest

from tilewave.bench.baseline import find_baseline
from tilewave.bench.environment import Environment, GpuState
from tilewave.bench.gpu import EventStopwatch, can_capture
from tilewave.bench.timing import Contender, interleave
from tilewave.device import DeviceSpec
from tilewave.errors import DeviceError
from tilewave.lab import emulate
from tilewave.lab.measure import Candidate, Measurer, prepare
from tilewave.lab.registry import get_rung
from tilewave.precision import error_in_bounds
from tilewave.runtime.driver import Device, DeviceArray, Module, Stream

pytestmark = pytest.mark.gpu


def test_graphs_and_plain_launches_tell_the_same_time(
    device: Device, stream: Stream, spec: DeviceSpec, arch: str
) -> None:
    rung = get_rung(5)
    program, kernel, _ = emulate.build(rung, spec, arch, 1024)
    arrays = [DeviceArray.empty(device, (1024, 1024)) for _ in range(3)]
    for array in arrays:
        array.poison()
    launch = prepare(Candidate(rung, program, kernel), device, stream, *arrays)
    launch()
    assert can_capture(stream, [launch])
    medians = [
        interleave([Contender("rung", launch)], EventStopwatch(device, stream, graphs=graphs))["rung"]
        for graphs in (False, True)
    ]
    assert all(timing.repeats >= 8 for timing in medians)  # so that the second really used a graph
    assert medians[1].median_ms == pytest.approx(medians[0].median_ms, rel=0.1)


def test_a_capture_that_fails_is_found_and_leaves_the_stream_usable(device: Device, stream: Stream) -> None:
    def synchronises() -> None:
        stream.synchronize()  # not allowed while a graph is recorded

    assert not can_capture(stream, [synchronises])
    stream.synchronize()


def test_measured_rates_are_possible(device: Device, spec: DeviceSpec, arch: str) -> None:
    baseline, note = find_baseline()
    candidates = []
    for number in (3, 7):
        program, kernel, _ = emulate.build(get_rung(number), spec, arch, 1025)
        candidates.append(Candidate(get_rung(number), program, kernel))
    found = Measurer(device, spec, baseline).measure(1025, candidates, np.random.default_rng(), 20.0)
    for measured in found.rungs.values():
        assert measured.check.holds
        assert measured.speed is not None
        assert 0.01 < measured.speed.tflops < spec.peak_fp32_tflops
        assert measured.speed.spread < 0.5
    slow, fast = (found.rungs[number].speed for number in (3, 7))
    assert slow is not None
    assert fast is not None
    assert fast.tflops > slow.tflops
    if baseline is None:
        pytest.skip(note)
    assert found.baseline is not None
    assert found.baseline_error is not None
    assert 0 < found.baseline_error <= 1
    assert fast.over_baseline == pytest.approx(fast.tflops / found.baseline.tflops, rel=0.1)
    assert all(m.difference is not None and 0 < m.difference < 0.01 for m in found.rungs.values())


def test_the_baseline_shares_our_memory_and_stream(
    device: Device, stream: Stream, rng: np.random.Generator
) -> None:
    baseline, note = find_baseline()
    if baseline is None:
        pytest.skip(note)
    a, b = (rng.random(shape, dtype=np.float32) for shape in ((65, 130), (130, 77)))
    out = DeviceArray.empty(device, (65, 77))
    out.poison()
    left, right = DeviceArray.from_numpy(device, a), DeviceArray.from_numpy(device, b)
    baseline.prepare(left, right, out, stream)()
    assert error_in_bounds(out.to_numpy(), a, b) <= 1


def test_the_state_of_the_gpu_is_told(device: Device) -> None:
    state = GpuState.read(device)
    if state.sm_clock_mhz is None:
        pytest.skip(str(state))
    assert 100 < state.sm_clock_mhz < 4000
    record = Environment.capture(device=device).to_json()
    assert record["gpu"] == device.name
    assert record["driver_cuda"]


def test_errors_of_the_driver_are_explained(device: Device) -> None:
    with pytest.raises(DeviceError, match=r"cuModuleLoadData failed with CUDA_ERROR_\w+ \(\d+\): \w+"):
        Module(device, b"this is no cubin" * 8)
