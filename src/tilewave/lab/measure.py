"""Timing rungs on a GPU: every result is checked first, then all contenders are timed in turn."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewave.bench.baseline import Baseline
from tilewave.bench.environment import GpuState
from tilewave.bench.gpu import EventStopwatch, can_capture
from tilewave.bench.timing import Contender, Timing, check_rate, interleave
from tilewave.compiler import Kernel, Program, choose_arch
from tilewave.device import DeviceSpec, query_device
from tilewave.errors import MeasurementError
from tilewave.lab.launches import RungLaunch, Shape, check_addresses, launch_of
from tilewave.lab.records import Check, Speed
from tilewave.lab.registry import Rung
from tilewave.precision import error_in_bounds
from tilewave.runtime.driver import Device, DeviceArray, Module, PreparedLaunch, Stream

#: Products of up to this many cubed multiply-adds are compared with float64 whole; of larger ones as many
#: rows as `CHECKED_ROWS`, drawn afresh. All elements of every size are compared with the baseline.
FULLY_CHECKED = 2048
CHECKED_ROWS = 512
ROUNDS = 5


@dataclass(frozen=True)
class Candidate:
    """A rung compiled for the GPU at hand.

    ``spec`` describes that GPU to rungs whose schedule depends on it; None asks the driver.
    """

    rung: Rung
    program: Program
    kernel: Kernel
    spec: DeviceSpec | None = None


@dataclass(frozen=True)
class Measured:
    """One rung: its check, its distance from the baseline, and its speed if it was right."""

    check: Check
    difference: float | None
    speed: Speed | None


@dataclass(frozen=True)
class MeasuredSize:
    """One shape: all rungs by number, the baseline, and the GPU's state before and after the timing."""

    rungs: dict[int, Measured]
    baseline: Speed | None
    baseline_error: float | None
    before: GpuState
    after: GpuState
    graphs: bool


def prepare(
    candidate: Candidate,
    device: Device,
    stream: Stream,
    a: DeviceArray,
    b: DeviceArray,
    c: DeviceArray,
    dynamic_shared_bytes: int = 0,
) -> PreparedLaunch:
    """A launch of the rung for c = a @ b, of any shape, ready to be submitted; it owns its workspace.

    Raises ``UsageError`` for sizes or addresses that the rung does not take.
    """
    (m, k), n = a.shape, b.shape[1]
    spec = candidate.spec or query_device(device.ordinal)
    planned = launch_of(candidate.rung, m, n, k, spec)
    check_addresses(candidate.rung, planned, A=a.address, B=b.address, C=c.address)
    symbol = candidate.program.kernels[planned.entry].symbol
    image = choose_arch(spec.compute_capability).image_of(candidate.program)
    function = Module(device, image).function(symbol)
    arguments = [a, b, c, m, n, k, *workspace_arguments(planned, device)]
    return function.prepare(planned.grid, planned.block, arguments, stream, dynamic_shared_bytes)


def workspace_arguments(planned: RungLaunch, device: Device) -> list[DeviceArray | int]:
    """The arguments behind M, N and K: workspace of NaN, counters of 0, the schedule's integers."""
    if planned.cut is None:
        return []
    partials = DeviceArray.empty(device, (max(1, planned.partial_floats),))
    partials.poison()
    tickets = DeviceArray.from_numpy(device, np.zeros(max(1, planned.tickets), np.uint32))
    return planned.arguments(partials, tickets)


class Measurer:
    """Times rungs against a baseline on one GPU."""

    def __init__(self, device: Device, spec: DeviceSpec, baseline: Baseline | None) -> None:
        self._device = device
        self._spec = spec
        self._baseline = baseline
        self._stream = Stream(device)

    def measure(
        self,
        size: int,
        candidates: Sequence[Candidate],
        rng: np.random.Generator,
        budget_s: float | None = None,
    ) -> MeasuredSize:
        """Check and time the candidates at N = M = K = ``size`` on fresh N(0,1) data."""
        return self.measure_shape((size, size, size), candidates, rng, budget_s)

    def measure_shape(
        self,
        shape: Shape,
        candidates: Sequence[Candidate],
        rng: np.random.Generator,
        budget_s: float | None = None,
    ) -> MeasuredSize:
        """Check and time the candidates at ``shape`` (M, N, K) on fresh N(0,1) data."""
        started = time.monotonic()
        m, n, k = shape
        a, b = (rng.standard_normal(extent, dtype=np.float32) for extent in ((m, k), (k, n)))
        left, right = DeviceArray.from_numpy(self._device, a), DeviceArray.from_numpy(self._device, b)
        out = DeviceArray.empty(self._device, (m, n))
        every_row = m * n * k <= FULLY_CHECKED**3 or m <= CHECKED_ROWS
        rows = None if every_row else np.sort(rng.choice(m, CHECKED_ROWS, replace=False))

        contenders: list[Contender] = []
        reference: NDArray[np.float32] | None = None
        baseline_error: float | None = None
        if self._baseline is not None:
            work = self._baseline.prepare(left, right, out, self._stream)
            contenders.append(Contender(self._baseline.name, work))
            reference = self._result(contenders[-1], out)
            baseline_error = error_in_bounds(reference, a, b, rows)
            if not baseline_error <= 1.0:
                raise MeasurementError(
                    f"{self._baseline.name} is off by {baseline_error:.3g} times what FP32 may be off by "
                    f"at {m} x {n} x {k}: it did not compute in FP32 (is NVIDIA_TF32_OVERRIDE set?)"
                )

        checks: dict[int, tuple[Check, float | None]] = {}
        names: dict[int, str] = {}
        for candidate in candidates:
            launch = prepare(candidate, self._device, self._stream, left, right, out)
            contender = Contender(candidate.rung.title, launch)
            result = self._result(contender, out)
            error = error_in_bounds(result, a, b, rows)
            check = Check("GPU", shape, error, candidate.rung.tolerance)
            difference = None if reference is None else float(np.max(np.abs(result - reference)))
            checks[candidate.rung.number] = check, difference
            if check.holds:
                contenders.append(contender)
                names[candidate.rung.number] = contender.name

        graphs = can_capture(self._stream, [contender.work for contender in contenders])
        stopwatch = EventStopwatch(self._device, self._stream, graphs=graphs)
        before = GpuState.read(self._device)
        left_s = None if budget_s is None else budget_s - (time.monotonic() - started)
        timings = interleave(contenders, stopwatch, rounds=ROUNDS, budget_s=left_s)
        after = GpuState.read(self._device)
        base = timings.get(self._baseline.name) if self._baseline is not None else None
        measured = {
            number: Measured(
                check,
                difference,
                self._speed(timings[names[number]], shape, base) if number in names else None,
            )
            for number, (check, difference) in checks.items()
        }
        return MeasuredSize(
            measured,
            None if base is None else self._speed(base, shape, None),
            baseline_error,
            before,
            after,
            graphs,
        )

    def _result(self, contender: Contender, out: DeviceArray) -> NDArray[np.float32]:
        """The contender's product, computed into memory that was all NaN before."""
        out.poison()
        contender.work()
        return out.to_numpy()

    def _speed(self, timing: Timing, shape: Shape, base: Timing | None) -> Speed:
        tflops = timing.tflops(2.0 * math.prod(shape))
        check_rate(timing.name, tflops, self._spec.peak_fp32_tflops)
        return Speed(
            timing.rounds_ms,
            timing.repeats,
            tflops,
            timing.spread,
            None if base is None else timing.speed_over(base),
        )
