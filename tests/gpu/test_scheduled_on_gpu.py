"""Rungs with a schedule on a real GPU: they end on any part of it, with the same bits every time."""

from __future__ import annotations

import ctypes
import time
from dataclasses import replace

import numpy as np
import pytest
from guarded import program_of

from tilewave.compiler import Source, compile_source
from tilewave.device import DeviceSpec
from tilewave.lab.launches import launch_of
from tilewave.lab.measure import Candidate, prepare
from tilewave.lab.registry import Rung, load_rungs
from tilewave.precision import error_in_bounds
from tilewave.runtime.driver import Device, DeviceArray, Event, Module, Stream

pytestmark = pytest.mark.gpu

SCHEDULED = pytest.mark.parametrize(
    "rung", [rung for rung in load_rungs() if rung.schedule is not None], ids=lambda rung: rung.name
)
SHAPE = (1025, 1300, 700)
HELD_MS = 700

HOLD = """
extern "C" __global__ void hold(unsigned* started, long long nanoseconds) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  if (threadIdx.x == 0) atomicAdd(started, 1u);
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  while (now - begin < nanoseconds);
}
"""


class Prepared:
    """A launch of a rung, ready: what it needs is in the device's memory before anything is held."""

    def __init__(
        self,
        rung: Rung,
        device: Device,
        spec: DeviceSpec,
        stream: Stream,
        arch: str,
        rng: np.random.Generator,
    ) -> None:
        m, n, k = SHAPE
        self.a, self.b = rng.standard_normal((m, k), np.float32), rng.random((k, n), np.float32)
        program = program_of(rung, arch)
        kernel = program.kernels[launch_of(rung, m, n, k, spec).entry]
        operands = [DeviceArray.from_numpy(device, matrix) for matrix in (self.a, self.b)]
        self.out = DeviceArray.empty(device, (m, n))
        self.out.poison()
        self.launch = prepare(Candidate(rung, program, kernel, spec), device, stream, *operands, self.out)


@SCHEDULED
@pytest.mark.parametrize("free", [1, 0.5], ids=["one SM free", "half of the SMs free"])
def test_ends_while_another_kernel_holds_the_other_sms(
    rung: Rung,
    free: float,
    device: Device,
    spec: DeviceSpec,
    stream: Stream,
    arch: str,
    rng: np.random.Generator,
) -> None:
    """The other kernel takes all shared memory of its SMs, so no block of ours fits beside it."""
    held = spec.sms - 1 if free == 1 else spec.sms // 2
    prepared = Prepared(rung, device, spec, stream, arch, rng)
    program = compile_source(Source.from_text("hold.cu", HOLD), ["hold"], arch)
    started = DeviceArray.from_numpy(device, np.zeros(1, np.uint32))
    other = Stream(device)
    hold = (
        Module(device, program.cubin)
        .function("hold")
        .prepare(
            (held, 1, 1),
            (32, 1, 1),
            [started, ctypes.c_longlong(HELD_MS * 1_000_000)],
            other,
            spec.shared_per_block,
        )
    )
    prepared.launch()  # once alone, so that nothing is set up while the SMs are held
    prepared.out.poison()
    begin, end, released = Event(device), Event(device), Event(device)
    begin.record(other)
    hold()
    released.record(other)
    time.sleep(0.05)  # until the holding blocks are resident
    prepared.launch()
    end.record(stream)
    end.synchronize()
    released.synchronize()
    assert end.milliseconds_since(begin) < HELD_MS, "the rung waited for the SMs that were held"
    assert started.to_numpy()[0] == held
    c = prepared.out.to_numpy()
    assert error_in_bounds(c, prepared.a, prepared.b) <= rung.tolerance


@SCHEDULED
def test_a_thousand_launches_on_one_workspace_give_the_same_bits(
    rung: Rung, device: Device, spec: DeviceSpec, stream: Stream, arch: str, rng: np.random.Generator
) -> None:
    prepared = Prepared(rung, device, spec, stream, arch, rng)
    prepared.launch()
    first = prepared.out.to_numpy()
    assert error_in_bounds(first, prepared.a, prepared.b) <= rung.tolerance
    for _ in range(10):
        prepared.out.poison()
        for _ in range(100):
            prepared.launch()
        found = prepared.out.to_numpy()
        np.testing.assert_array_equal(found.view(np.uint32), first.view(np.uint32))


@SCHEDULED
@pytest.mark.parametrize("sms", [1, 7, 1000])
def test_planned_for_another_number_of_sms(
    rung: Rung,
    sms: int,
    device: Device,
    spec: DeviceSpec,
    stream: Stream,
    arch: str,
    rng: np.random.Generator,
) -> None:
    prepared = Prepared(rung, device, replace(spec, sms=sms), stream, arch, rng)
    prepared.launch()
    assert error_in_bounds(prepared.out.to_numpy(), prepared.a, prepared.b) <= rung.tolerance
