"""Candidates of the product's planner timed on a GPU: what a calibration rests on.

A problem's operands are rotated through memory beyond L2, so that every launch finds them cold; launches are
replayed from CUDA graphs and contenders take turns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from tilewave.bench.gpu import EventStopwatch
from tilewave.bench.timing import Contender, interleave
from tilewave.kernels.arguments import GEMM_ARGS_BYTES, Pointers, pack_arguments
from tilewave.planner.gemm import GemmCandidate, GemmPlan, GemmPlanner
from tilewave.planner.gemm.fit import Reading
from tilewave.problem import GemmProblem, MatrixLayout
from tilewave.runtime import driver
from tilewave.runtime.driver import Device, DeviceArray, Stream
from tilewave.runtime.kernels import gpu_state

OPERANDS = 2**29
"""Floats that operands are rotated through."""

OUTPUTS = 2**28
"""Floats that outputs are rotated through."""

PARTIALS = 2**26
"""Floats of workspace: the planner's limit of 256 MiB."""

TICKETS = 2**22
"""Most counters of a plan that is timed."""

_ROUNDS = 3
_SAMPLE_MS = 2.0
_WARM_UP_MS = 15.0  # the clock sinks while the host prepares contenders


class Memory:
    """Random operands, outputs and a workspace on a GPU."""

    def __init__(self, device: Device) -> None:
        chunk = np.random.default_rng().standard_normal(2**26, dtype=np.float32)
        self.operands = DeviceArray.empty(device, (OPERANDS,))
        for begin in range(0, OPERANDS, chunk.size):
            self.operands.view(begin, (chunk.size,)).copy_from(chunk)
        self.outputs = DeviceArray.empty(device, (OUTPUTS,))
        self.partials = DeviceArray.empty(device, (PARTIALS,))
        self.tickets = DeviceArray.from_numpy(device, np.zeros(TICKETS, np.uint32))

    def places(self, problem: GemmProblem, l2_bytes: int) -> list[Pointers] | None:
        """Addresses for launches in turn, together more than twice L2; None where a problem does not fit."""
        a = _reach(problem.a, problem.m, problem.k, problem.batch)
        b = _reach(problem.b, problem.k, problem.n, problem.batch)
        out = _reach(problem.out, problem.m, problem.n, problem.batch)
        room = min(OPERANDS // (a + b), OUTPUTS // out)
        if room == 0:
            return None
        count = min(room, 64, 2 * l2_bytes // (4 * (a + b + out)) + 1)
        return [
            Pointers(
                a=self.operands.address + 4 * i * (a + b) + problem.a.alignment % 16,
                b=self.operands.address + 4 * (i * (a + b) + a) + problem.b.alignment % 16,
                out=self.outputs.address + 4 * i * out + problem.out.alignment % 16,
                partials=self.partials.address,
                tickets=self.tickets.address,
            )
            for i in range(count)
        ]


def _reach(layout: MatrixLayout, rows: int, columns: int, batch: tuple[int, ...]) -> int:
    """Elements from an operand's first to its last and to spare for a misaligned address; whole 256 bytes."""
    axes = ((rows, layout.row), (columns, layout.column), *zip(batch, layout.batch, strict=True))
    last = sum((extent - 1) * stride for extent, stride in axes)
    return -(-(last + 4) // 64) * 64


class Submit:
    """Launches a plan, each time on the next operands; arguments are packed ahead."""

    def __init__(self, plan: GemmPlan, places: list[Pointers], stream: Stream) -> None:
        state = gpu_state(stream.device.ordinal)
        self._kernel = state.kernel(plan.instance, stream.handle)
        self._stream = stream.handle
        self._plan = plan
        self._next = 0
        self._blocks = [
            ctypes.create_string_buffer(
                pack_arguments(plan.problem, plan.cut, plan.raster, place, depth=plan.instance.bk),
                GEMM_ARGS_BYTES,
            )
            for place in places
        ]
        self._parameters = [(ctypes.c_void_p * 1)(ctypes.addressof(block)) for block in self._blocks]

    def __call__(self) -> None:
        """Submit one launch."""
        parameters = self._parameters[self._next]
        self._next = (self._next + 1) % len(self._parameters)
        instance = self._plan.instance
        grid, block = (self._plan.blocks, 1, 1), (instance.threads, 1, 1)
        address = ctypes.addressof(parameters)
        driver._call(
            "cuLaunchKernel", self._kernel, *grid, *block, instance.shared_bytes, self._stream, address, 0
        )


def measure(
    planner: GemmPlanner,
    problem: GemmProblem,
    candidates: Sequence[GemmCandidate],
    memory: Memory,
    stream: Stream,
) -> list[Reading]:
    """What candidates of a problem took; none where the problem does not fit into memory."""
    places = memory.places(problem, planner.spec.l2_bytes)
    if places is None:
        return []
    found: dict[str, GemmCandidate] = {}
    contenders = []
    state = gpu_state(stream.device.ordinal)
    for candidate in candidates:
        if state.lacks_loop(candidate.instance, stream.handle):
            continue  # the planner will not choose it here
        plan = planner.plan_with(problem, candidate.instance, candidate.schedule)
        if plan.cut.counters <= TICKETS:
            found[str(candidate)] = candidate
            contenders.append(Contender(str(candidate), Submit(plan, places, stream)))
    stopwatch = EventStopwatch(stream.device, stream, graphs=True)
    timings = interleave(
        contenders, stopwatch, rounds=_ROUNDS, minimum_sample_ms=_SAMPLE_MS, warm_up_ms=_WARM_UP_MS
    )
    return [
        Reading(problem, one.instance.name, one.schedule, round(1e3 * timings[name].median_ms, 3))
        for name, one in found.items()
    ]
