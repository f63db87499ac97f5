"""Candidates of the product's planner timed at random products, and the constants fitted to what they took.

On a machine with a GPU:

    PYTHONPATH=src python3 benchmarks/gemm_calibration.py --budget 420

Each problem's operands are rotated through memory beyond L2, so that every launch finds them cold; launches
are replayed from CUDA graphs and contenders take turns. Two thirds of the problems are for the fit, the
others say what the calibrated choice loses against the best candidate that was measured. Readings are
written after every problem, and a later call with the same file goes on from there. Without a GPU,
``--fit`` fits the readings again. Writes the readings, and the calibration that the planner then uses.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import secrets
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from planner_speed import random_problem
from tilewave.bench.environment import Environment
from tilewave.bench.gpu import EventStopwatch
from tilewave.bench.timing import Contender, interleave
from tilewave.compiler import choose_arch, compiler_version
from tilewave.device import DeviceSpec, get_spec
from tilewave.device.catalog import find_spec
from tilewave.errors import TilewaveError
from tilewave.kernels.arguments import GEMM_ARGS_BYTES, Pointers, pack_arguments
from tilewave.kernels.families import FAMILIES
from tilewave.kernels.ship import compile_all, every_instance
from tilewave.normalise import normalise
from tilewave.planner.gemm import GemmCandidate, GemmPlan, GemmPlanner
from tilewave.planner.gemm.costs import THEORY
from tilewave.planner.gemm.fit import Fit, Reading, calibration_record, losses
from tilewave.problem import GemmProblem, MatrixLayout
from tilewave.runtime import driver
from tilewave.runtime.driver import Device, DeviceArray, Stream
from tilewave.runtime.kernels import gpu_state

OUT = Path("benchmarks/results/gemm_calibration_h200.json")
CALIBRATIONS = Path("src/tilewave/planner/gemm/calibration")
OPERANDS = 2**29  # floats that operands are rotated through
OUTPUTS = 2**28  # floats that outputs are rotated through
PARTIALS = 2**26  # floats of workspace: the planner's limit of 256 MiB
TICKETS = 2**22
MOST_WORK = 3e11  # multiply-adds of a problem: some 10 ms
FASTEST, RANDOM, SCHEDULES = (
    7,
    3,
    3,
)  # candidates of a problem: by prediction, at random, of the best instance
ROUNDS = 3
SAMPLE_MS = 2.0


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
        parameters = self._parameters[self._next]
        self._next = (self._next + 1) % len(self._parameters)
        instance = self._plan.instance
        grid, block = (self._plan.blocks, 1, 1), (instance.threads, 1, 1)
        address = ctypes.addressof(parameters)
        driver._call(
            "cuLaunchKernel", self._kernel, *grid, *block, instance.shared_bytes, self._stream, address, 0
        )


def contenders_of(planner: GemmPlanner, problem: GemmProblem, draw: random.Random) -> list[GemmCandidate]:
    """The best schedules of the fastest instances by prediction, more of the first's, some at random."""
    able = [c for c in planner.candidates(problem) if c.estimate is not None]
    able.sort(key=lambda candidate: candidate.estimate.total if candidate.estimate else 0.0)
    by_instance: dict[str, GemmCandidate] = {}
    for candidate in able:
        by_instance.setdefault(candidate.instance.name, candidate)
    first = next(iter(by_instance))
    chosen = list(by_instance.values())[:FASTEST]
    chosen += [candidate for candidate in able if candidate.instance.name == first][1:SCHEDULES]
    chosen += draw.sample(able, min(RANDOM, len(able)))
    return list({str(candidate): candidate for candidate in chosen}.values())


def measure(
    planner: GemmPlanner, problem: GemmProblem, memory: Memory, stream: Stream, draw: random.Random
) -> list[Reading]:
    """What the candidates of a problem took."""
    places = memory.places(problem, planner.spec.l2_bytes)
    if places is None:
        return []
    found: dict[str, GemmCandidate] = {}
    contenders = []
    for candidate in contenders_of(planner, problem, draw):
        plan = planner.plan_with(problem, candidate.instance, candidate.schedule)
        if plan.cut.tickets <= TICKETS:
            found[str(candidate)] = candidate
            contenders.append(Contender(str(candidate), Submit(plan, places, stream)))
    stopwatch = EventStopwatch(stream.device, stream, graphs=True)
    timings = interleave(
        contenders, stopwatch, rounds=ROUNDS, minimum_sample_ms=SAMPLE_MS, warm_up_ms=2 * SAMPLE_MS
    )
    return [
        Reading(problem, one.instance.name, one.schedule, round(1e3 * timings[name].median_ms, 3))
        for name, one in found.items()
    ]


def draw_problem(draw: random.Random) -> GemmProblem:
    """A random problem as kernels see it, of bounded work and one launch."""
    while True:
        normalised = normalise(random_problem(draw))
        problem = normalised.problem
        if problem.multiply_adds <= MOST_WORK and problem.product and not normalised.loops:
            return problem


def read(out: Path) -> dict[str, Any]:
    """The record of readings so far; a new one with a fresh seed where there is none."""
    if out.exists():
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found
    return {"seed": secrets.randbits(32), "device": None, "environment": None, "problems": 0, "readings": []}


def write(record: dict[str, Any], out: Path) -> None:
    """A reading a line; the old file stays whole until the new one is."""
    readings = record["readings"]
    head = json.dumps({**record, "readings": []}, indent=1).removesuffix("[]\n}")
    lines = ",\n".join(" " + json.dumps(reading) for reading in readings)
    beside = out.with_suffix(".part")
    beside.write_text(f"{head}[\n{lines}\n]\n}}\n", encoding="utf-8")
    beside.replace(out)


def measure_all(out: Path, budget_s: float, now: Callable[[], float] = time.monotonic) -> dict[str, Any]:
    """Add readings to ``out`` until the budget is spent."""
    deadline = now() + budget_s
    record = read(out)
    device = Device()
    state = gpu_state(device.ordinal)
    spec = state.spec
    arch = choose_arch(spec.compute_capability).arch
    compiled = sum(1 for _ in compile_all(every_instance(), [arch]))
    print(f"{compiled} kernels compiled for {arch}, {deadline - now():.0f} s left", flush=True)
    known = find_spec(spec.name)
    record["device"] = known.name if known else spec.name
    record["environment"] = Environment.capture(device=device, compiler=compiler_version()).to_json()
    planner = GemmPlanner(spec, FAMILIES)
    stream, memory = Stream(device), Memory(device)
    while now() < deadline:
        # Every problem has a seed of its own, so that a later call goes on where this one ended.
        draw = random.Random(record["seed"] * 1_000_003 + record["problems"])
        problem = draw_problem(draw)
        record["problems"] += 1
        try:
            readings = measure(planner, problem, memory, stream, draw)
        except TilewaveError as error:
            print(f"{problem}: {error}", flush=True)
            continue
        record["readings"] += [reading.to_json() for reading in readings]
        write(record, out)
        if record["problems"] % 25 == 0:
            print(f"{record['problems']} problems, {len(record['readings'])} readings", flush=True)
    write(record, out)
    return record


def fit_all(record: dict[str, Any], out: Path, calibrations: Path) -> None:
    """Fit two thirds of the problems, judge the choice on the rest, write the calibration and the table."""
    spec: DeviceSpec = get_spec(record["device"])
    readings = [Reading.from_json(one) for one in record["readings"]]
    problems = list(dict.fromkeys(reading.problem for reading in readings))
    held_out = set(problems[2::3])
    fitted = Fit([one for one in readings if one.problem not in held_out], spec, FAMILIES)
    costs = fitted.run()
    judged = [one for one in readings if one.problem in held_out]
    source = f"benchmarks/results/{out.name}: {len(readings)} readings at {len(problems)} random products"
    calibration = calibration_record(fitted, source)
    path = calibrations / f"{spec.name.replace(' ', '_')}.json"
    path.write_text(json.dumps(calibration, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {len(calibration['factors'])} factors, {len(calibration['constants'])} constants")
    record["held_out"] = {}
    for name, used in (("theory", THEORY), ("calibrated", costs)):
        lost = losses(judged, spec, FAMILIES, used)
        ratios = sorted(loss.ratio for loss in lost)
        errors = Fit(judged, spec, FAMILIES, used).errors()
        summary = {
            "problems": len(lost),
            "median": statistics.median(ratios),
            "p95": ratios[int(0.95 * (len(ratios) - 1))],
            "error": statistics.fmean(error * error for error in errors) ** 0.5,
            "worst": [
                {
                    "problem": str(loss.problem),
                    "chosen": f"{loss.chosen.instance} {loss.chosen.schedule}",
                    "us": loss.chosen.microseconds,
                    "predicted": round(loss.predicted, 2),
                    "best": f"{loss.best.instance} {loss.best.schedule}",
                    "best_us": loss.best.microseconds,
                }
                for loss in lost[:20]
            ],
        }
        record["held_out"][name] = summary
        print(
            f"{name:10} held out {summary['problems']} problems: chosen over best measured, median "
            f"{summary['median']:.3f}, 95th percentile {summary['p95']:.3f}; rms error {summary['error']:.3f}"
        )
    for worst in record["held_out"]["calibrated"]["worst"][:8]:
        print(
            f"  {worst['problem']:28} {worst['chosen']} {worst['us']} us; {worst['best']} {worst['best_us']}"
        )
    write(record, out)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT, help="the file of readings")
    parser.add_argument("--calibrations", type=Path, default=CALIBRATIONS, help="where the calibration goes")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds to measure for")
    parser.add_argument("--fit", action="store_true", help="fit the readings of the file; needs no GPU")
    options = parser.parse_args()
    os.environ.setdefault("TILEWAVE_CACHE_DIR", str(Path(".cache/programs").resolve()))
    record = read(options.out) if options.fit else measure_all(options.out, options.budget)
    if len(record["readings"]) < 10:
        sys.exit(f"{len(record['readings'])} readings are too few to fit")
    fit_all(record, options.out, options.calibrations)


if __name__ == "__main__":
    main()
