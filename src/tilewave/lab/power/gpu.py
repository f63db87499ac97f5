"""The contenders of a power run on a GPU: a rung, cuBLAS and a loop of multiply-adds, each checked first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewave.bench.gpu import EventStopwatch, can_capture
from tilewave.bench.timing import Contender, interleave
from tilewave.compiler import Source, choose_arch, compile_source
from tilewave.device import DeviceSpec
from tilewave.errors import MeasurementError
from tilewave.lab import emulate
from tilewave.lab.ladder import Gpu
from tilewave.lab.measure import CHECKED_ROWS, FULLY_CHECKED, Candidate, prepare
from tilewave.lab.power.records import CUBLAS, FFMA, OURS, RANDOM, REGISTERS, ZEROS
from tilewave.lab.power.rounds import Load
from tilewave.lab.registry import Rung, load_rungs
from tilewave.lab.workers import Budget, run_tasks
from tilewave.precision import error_in_bounds
from tilewave.runtime.driver import DeviceArray, Module, PreparedLaunch, Stream

FFMA_SOURCE = "lab/power/ffma.cu"
FFMA_ENTRY = "ffma_loop"
FFMA_THREADS = 256
FFMA_BLOCKS_PER_SM = 8
FFMA_PER_LOOP = 2 * 8 * 32
"""Multiply-adds of a thread in one pass of the loop of ffma.cu: two for each of PAIRS, UNROLL times."""
FFMA_TURN = 0.7
"""How far (about, in radians) one step of the loop turns its points."""

_FIRST_SIZE = 2048
"""All rungs are timed at this size first: at larger ones the slow ones would take seconds a call."""
_FINALISTS = 4


@dataclass(frozen=True)
class Stage:
    """Everything that the run needs on the GPU. Loads hold on to their memory."""

    loads: tuple[Load, ...]
    stopwatch: EventStopwatch
    notes: tuple[str, ...]


def ffma_loops(size: int, sms: int) -> int:
    """Passes of the loop after which the multiply-adds are about those of a product of this size."""
    threads = sms * FFMA_BLOCKS_PER_SM * FFMA_THREADS
    return max(1, round(size**3 / (threads * FFMA_PER_LOOP)))


def ffma_load(gpu: Gpu, spec: DeviceSpec, stream: Stream, size: int) -> Load:
    """The loop of multiply-adds, about as many as a product of this size has."""
    choice = choose_arch(spec.compute_capability)
    program = compile_source(Source.packaged(FFMA_SOURCE), [FFMA_ENTRY], choice.arch)
    kernel = program.kernels[FFMA_ENTRY]
    blocks, loops = spec.sms * FFMA_BLOCKS_PER_SM, ffma_loops(size, spec.sms)
    sink = DeviceArray.empty(gpu.device, (1,))
    launch = (
        Module(gpu.device, choice.image_of(program))
        .function(kernel.symbol)
        .prepare((blocks, 1, 1), (FFMA_THREADS, 1, 1), [sink, FFMA_TURN, loops], stream)
    )
    return Load(FFMA, REGISTERS, launch, 2.0 * blocks * FFMA_THREADS * FFMA_PER_LOOP * loops)


def set_stage(gpu: Gpu, spec: DeviceSpec, rung: Rung, size: int, rng: np.random.Generator) -> Stage:
    """Data, kernels and a stopwatch for N = M = K = ``size``; every contender's product is checked.

    Raises ``MeasurementError`` for a contender that does not compute the product in FP32.
    """
    stream = Stream(gpu.device)
    arch = choose_arch(spec.compute_capability).arch
    program, kernel, _ = emulate.build(rung, spec, arch, size)
    candidate = Candidate(rung, program, kernel, spec)
    random = tuple(rng.standard_normal((size, size), dtype=np.float32) for _ in range(2))
    zeros = tuple(np.zeros((size, size), np.float32) for _ in range(2))
    out = DeviceArray.empty(gpu.device, (size, size))
    rows = None if size <= FULLY_CHECKED else np.sort(rng.choice(size, CHECKED_ROWS, replace=False))
    flops = 2.0 * size**3
    loads: list[Load] = []
    for data, (a, b) in ((RANDOM, random), (ZEROS, zeros)):
        left, right = DeviceArray.from_numpy(gpu.device, a), DeviceArray.from_numpy(gpu.device, b)
        works: dict[str, Callable[[], None]] = {
            OURS: prepare(candidate, gpu.device, stream, left, right, out)
        }
        if gpu.baseline is not None:
            works[CUBLAS] = gpu.baseline.prepare(left, right, out, stream)
        for contender, work in works.items():
            allowed = rung.tolerance if contender == OURS else 1.0
            _check(f"{contender} on {data} data", work, out, a, b, rows, allowed)
            loads.append(Load(contender, data, work, flops))
    loads.append(ffma_load(gpu, spec, stream, size))
    loads[-1].work()
    stream.synchronize()
    graphs = can_capture(stream, [load.work for load in loads])
    notes = () if gpu.baseline is not None else ("no cuBLAS was found: the rung ran without a rival",)
    return Stage(tuple(loads), EventStopwatch(gpu.device, stream, graphs=graphs), notes)


def _check(
    what: str,
    work: Callable[[], None],
    out: DeviceArray,
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    rows: NDArray[np.intp] | None,
    allowed: float,
) -> None:
    out.poison()
    work()
    error = error_in_bounds(out.to_numpy(), a, b, rows)
    if not error <= allowed:
        raise MeasurementError(
            f"{what}: the product is off by {error:.3g} times what FP32 may be off by (TF32 switched on?); "
            "nothing was measured"
        )


def fastest_rung(gpu: Gpu, spec: DeviceSpec, size: int, jobs: int) -> Rung:
    """The rung that is the fastest on this GPU at this size, found by timing all of them briefly."""
    arch = choose_arch(spec.compute_capability).arch
    for _ in run_tasks(_compile, [(rung.number, arch) for rung in load_rungs()], jobs, Budget(None)):
        pass  # the compiled programs are in the cache now
    first = min(size, _FIRST_SIZE)
    finalists = _ranked(gpu, spec, load_rungs(), arch, first)
    if first == size:
        return finalists[0]
    return _ranked(gpu, spec, finalists[:_FINALISTS], arch, size)[0]


def _compile(task: tuple[int, str]) -> None:
    number, arch = task
    rung = next(rung for rung in load_rungs() if rung.number == number)
    compile_source(rung.source(), rung.entries, arch)


def _ranked(
    gpu: Gpu, spec: DeviceSpec, rungs: tuple[Rung, ...] | list[Rung], arch: str, size: int
) -> list[Rung]:
    """The rungs, fastest first. Their results are not looked at: the one that is chosen is checked later."""
    stream = Stream(gpu.device)
    a, b, c = (DeviceArray.empty(gpu.device, (size, size)) for _ in range(3))
    for matrix in (a, b, c):
        matrix.poison()
    launches: dict[str, PreparedLaunch] = {}
    for rung in rungs:
        program, kernel, _ = emulate.build(rung, spec, arch, size)
        launches[rung.title] = prepare(Candidate(rung, program, kernel, spec), gpu.device, stream, a, b, c)
    contenders = [Contender(title, launch) for title, launch in launches.items()]
    timings = interleave(
        contenders, EventStopwatch(gpu.device, stream), rounds=3, minimum_sample_ms=5.0, warm_up_ms=20.0
    )
    return sorted(rungs, key=lambda rung: timings[rung.title].median_ms)
