"""Time precision fp16x3 against cuBLAS FP32 on a Hopper GPU, hot and rested, and read the energy.

    python benchmarks/fp16x3.py --json FILE [--budget SECONDS] [--rounds N] [--only WORD ...]

Contenders of a cell, in one process, on the same random data N(0,1): cuBLAS FP32 (through PyTorch or CuPy),
`tilewave` in ieee, fp16x3 with both operands split in every product, with B packed ahead, and with both (its
main kernel alone). *Hot*: without rest, each sample of 20 ms follows one of the same contender that is thrown
away. *Rested*: 0.15 s of idleness before each sample. Figures are medians over the rounds of TFLOP/s =
2 M N K / time; ratios are medians of each round's ratio to cuBLAS. Short calls are replayed from CUDA graphs,
where all contenders of a cell can be recorded: else small cells would show the host's time. Every answer is
checked against float64 within the mode's bound before it is timed: a contender that is wrong or fails is
told of and left out, and the exit code is 1. Cells that do not fit the budget are left out and named; the
record is written after every cell. The last table holds each cell against its target. (`product_power.py` has
the long run, with energy.)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import tilewave
from tilewave.bench.baseline import Baseline, find_baseline
from tilewave.bench.environment import Environment
from tilewave.bench.gpu import EventStopwatch, can_capture
from tilewave.bench.timing import Contender, calibrate, interleave, measure
from tilewave.device import DeviceSpec, query_device
from tilewave.kernels import fp16x3
from tilewave.kernels.arguments import Pointers
from tilewave.planner.fp16x3 import plan_fp16x3, plan_in_mode
from tilewave.planner.gemm import plan_gemm
from tilewave.precision import error_in_mode_bounds
from tilewave.problem import Precision
from tilewave.runtime.driver import Device, DeviceArray, Stream
from tilewave.runtime.execute import launch_plan
from tilewave.runtime.fp16x3 import launch_fp16x3, pack_on_gpu

REST_S = 0.15
CUBLAS, IEEE, SPLIT, PACKED, MAIN = "cublas", "ieee", "fp16x3", "fp16x3, B packed", "fp16x3, both packed"
CHECKED = 48
"""Rows and columns of the answer that are checked."""
CELL_S = 6.0
"""No cell is begun with less time left: the larger ones take about so long."""


@dataclass(frozen=True)
class Cell:
    """A product and what is asked of it: least ratios to cuBLAS by (regime, contender)."""

    m: int
    n: int
    k: int
    batch: int = 1
    layouts: str = "NN"
    targets: tuple[tuple[str, str, float], ...] = ()
    rested: bool = True

    def __str__(self) -> str:
        items = f"{self.batch} x " if self.batch > 1 else ""
        return f"{items}{self.m} x {self.n} x {self.k} {self.layouts}"

    @property
    def flops(self) -> float:
        """Operations of the product."""
        return 2.0 * self.batch * self.m * self.n * self.k


def _square(n: int, hot: float, rested: float | None, packed: float) -> Cell:
    targets = [("hot", SPLIT, hot), ("hot", PACKED, packed)]
    if rested is not None:
        targets.append(("rested", SPLIT, rested))
    return Cell(n, n, n, targets=tuple(targets), rested=rested is not None)


CELLS = (
    _square(4096, 4.0, 4.5, 4.2),
    _square(8192, 4.25, 4.85, 4.3),
    _square(2048, 3.4, 3.6, 3.8),
    _square(16384, 4.05, None, 4.1),
    Cell(10000, 60000, 784, targets=(("hot", SPLIT, 3.5),), rested=False),
    Cell(4096, 4096, 4096, layouts="NT", rested=False),
    Cell(4096, 4096, 4096, layouts="TN", rested=False),
    Cell(4096, 4096, 4096, layouts="TT", rested=False),
    Cell(8192, 3072, 768, rested=False),
    Cell(2048, 14336, 4096, rested=False),
    Cell(256, 256, 256, batch=1024, rested=False),
    Cell(512, 512, 512, batch=1024, rested=False),
    Cell(1024, 1024, 1024, rested=False),
    Cell(512, 512, 512, rested=False),
)
"""In order of importance: the budget ends somewhere. The smallest ones tell where ieee is faster."""


class Stage:
    """The operands of a cell on the GPU, and what submits its product in each way."""

    def __init__(
        self,
        cell: Cell,
        spec: DeviceSpec,
        stream: Stream,
        rng: np.random.Generator,
        baseline: Baseline | None,
    ) -> None:
        self.cell = cell
        device = stream.device
        items = (cell.batch,) if cell.batch > 1 else ()

        def draw(rows: int, columns: int, transposed: bool) -> Any:
            return normal(rng, (*items, *((columns, rows) if transposed else (rows, columns))))

        self._host = (
            draw(cell.m, cell.k, cell.layouts[0] == "T"),
            draw(cell.k, cell.n, cell.layouts[1] == "T"),
        )
        a, b = (DeviceArray.from_numpy(device, array) for array in self._host)
        self._out = DeviceArray.empty(device, (*items, cell.m, cell.n))
        problem = tilewave.plan(
            cell.m,
            cell.n,
            cell.k,
            batch=cell.batch,
            layouts=cell.layouts,
            device=spec,
            precision="fp16x3",
        ).covers
        plan = plan_in_mode(problem, spec)  # also where ieee is predicted to be faster
        self.notes = list(plan_fp16x3(problem, spec).notes)
        ieee = plan_gemm(replace(problem, precision=Precision.IEEE), spec)
        pointers = Pointers(a.address, b.address, self._out.address)
        submit = {"device": device.ordinal, "stream": stream.handle}
        kept, self._memory = [], []
        for operand, array in zip(fp16x3.operands_of(problem), (a, b), strict=True):
            nbytes = operand.packed_bytes + operand.scratch_bytes + fp16x3.PACKED_ALIGNMENT
            memory = DeviceArray.empty(device, (nbytes,), np.uint8)
            pack_on_gpu(operand, array.address, memory.address, **submit)
            self._memory.append(memory)
            kept.append(fp16x3.aligned(memory.address))
        self._operands = a, b

        def mode(packed: tuple[int | None, int | None]) -> Callable[[], None]:
            return lambda: launch_fp16x3(plan, pointers, **submit, kept=packed)

        self.works: dict[str, Callable[[], None]] = {
            SPLIT: mode((None, None)),
            PACKED: mode((None, kept[1])),
            MAIN: mode((kept[0], kept[1])),
            IEEE: lambda: launch_plan(ieee, pointers, **submit),
        }
        if baseline is not None and cell.layouts == "NN":
            self.works = {CUBLAS: baseline.prepare(a, b, self._out, stream), **self.works}

    def error_of(self, name: str, rng: np.random.Generator) -> float:
        """The error of a contender in units of its bound, in a sample of rows and columns."""
        a, b = (array if array.ndim == 3 else array[None] for array in self._host)
        a = a.swapaxes(1, 2) if self.cell.layouts[0] == "T" else a
        b = b.swapaxes(1, 2) if self.cell.layouts[1] == "T" else b
        item = int(rng.integers(self.cell.batch))
        rows, columns = (rng.integers(0, size, CHECKED) for size in (self.cell.m, self.cell.n))
        self._out.poison()
        self.works[name]()
        starts = (item * self.cell.m + rows) * self.cell.n
        sample = np.stack([self._out.view(int(s), (self.cell.n,)).to_numpy()[columns] for s in starts])
        mode = "ieee" if name in (CUBLAS, IEEE) else "fp16x3"
        return float(error_in_mode_bounds(mode, sample, a[item][rows], b[item][:, columns]))

    def check(self, rng: np.random.Generator) -> tuple[dict[str, float], dict[str, str]]:
        """Errors in units of the bounds, and in words what failed; what failed is no contender any more."""
        errors, failed = {}, {}
        for name in list(self.works):
            try:
                errors[name] = self.error_of(name, rng)
                if not errors[name] <= 1:
                    failed[name] = f"the error is {errors[name]:.3g} times the bound"
            except Exception as error:  # a kernel that fails: the others are timed all the same
                failed[name] = f"{type(error).__name__}: {error}"[:500]
            if name in failed:
                del self.works[name]
        return errors, failed


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """N(0,1) in float32, drawn by all cores: one alone takes seconds for the largest operands."""
    values = np.empty(shape, np.float32)
    parts = np.array_split(values.reshape(-1), min(32, os.cpu_count() or 1))
    with ThreadPoolExecutor(len(parts)) as pool:
        for _ in pool.map(
            lambda pair: pair[0].standard_normal(dtype=np.float32, out=pair[1]),
            zip(rng.spawn(len(parts)), parts, strict=True),
        ):
            pass
    return values


def rested(
    works: dict[str, Callable[[], None]], stopwatch: EventStopwatch, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of a call of each contender after a rest, round by round."""
    contenders = [Contender(name, work) for name, work in works.items()]
    repeats = {one.name: calibrate(one, stopwatch, 20.0) for one in contenders}
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for one in contenders:
            time.sleep(REST_S)
            found[one.name].append(measure(one, stopwatch, repeats[one.name]) / repeats[one.name])
    return found


def summary(
    cell: Cell, regime: str, rounds: dict[str, list[float]], *, graphs: bool = False
) -> dict[str, Any]:
    """Medians and ratios of one cell under one regime; whether short calls were replayed from graphs."""
    found = {}
    for name, times in rounds.items():
        ratios = [theirs / ours for theirs, ours in zip(rounds.get(CUBLAS, []), times, strict=False)]
        found[name] = {
            "us": 1e3 * statistics.median(times),
            "tflops": cell.flops / statistics.median(times) * 1e-9,
            "ratio": statistics.median(ratios) if ratios else None,
            "rounds_us": [1e3 * one for one in times],
        }
    return {"cell": str(cell), "regime": regime, "graphs": graphs, "contenders": found}


def verdicts(cells: list[tuple[Cell, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Each target of the cells that were measured, and whether it was reached; layouts against NN."""
    found = []
    for cell, result in cells:
        for regime, name, least in cell.targets:
            reading = result["contenders"].get(name, {}).get("ratio")
            if result["regime"] == regime and reading is not None:
                found.append(
                    {"cell": str(cell), "regime": regime, "contender": name, "least": least, "ratio": reading}
                )
    by_name = {(str(cell), result["regime"]): result for cell, result in cells}
    for cell, result in cells:
        plain = by_name.get((str(Cell(cell.m, cell.n, cell.k, cell.batch)), "hot"))
        both = plain is not None and SPLIT in plain["contenders"] and SPLIT in result["contenders"]
        if cell.layouts != "NN" and plain is not None and both:
            ratio = plain["contenders"][SPLIT]["us"] / result["contenders"][SPLIT]["us"]
            found.append(
                {"cell": str(cell), "regime": "hot", "contender": "fp16x3 NN", "least": 0.97, "ratio": ratio}
            )
    return [{**one, "reached": one["ratio"] >= one["least"]} for one in found]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="where the readings go")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds for all of it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", help="cells whose name holds this word; may be repeated")
    parser.add_argument("--seed", type=int, default=20261130)
    options = parser.parse_args()
    end = time.monotonic() + options.budget
    device, spec = Device(), query_device()
    stream = Stream(device)
    baseline, said = find_baseline()
    print(f"{device.name}, {said}", flush=True)
    rng = np.random.default_rng(options.seed)
    results: list[tuple[Cell, dict[str, Any]]] = []
    left_out: list[str] = []
    errors: dict[str, dict[str, float]] = {}
    notes: dict[str, list[str]] = {}
    failed: dict[str, dict[str, str]] = {}

    def write() -> list[dict[str, Any]]:
        """Keep what there is so far; the targets that it tells of."""
        reached = verdicts(results)
        record = {
            "environment": Environment.capture(device=device).to_json(),
            "baseline": said,
            "seed": options.seed,
            "cells": [result for _, result in results],
            "errors_in_bounds": errors,
            "failed": failed,
            "plans": notes,
            "targets": reached,
            "left_out": left_out,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return reached

    def measured(cell: Cell) -> None:
        """One cell under its regimes."""
        stage = Stage(cell, spec, stream, rng, baseline)
        errors[str(cell)], wrong = stage.check(rng)
        notes[str(cell)] = stage.notes
        if wrong:
            failed[str(cell)] = wrong
            print(f"{cell}: {wrong}", flush=True)
        if not stage.works:
            return
        graphs = can_capture(stream, stage.works.values())
        stopwatch = EventStopwatch(device, stream, graphs=graphs)
        timings = interleave(
            [Contender(name, work) for name, work in stage.works.items()],
            stopwatch,
            rounds=options.rounds,
            budget_s=max(1.0, end - time.monotonic()),
        )
        hot = {name: list(timing.rounds_ms) for name, timing in timings.items()}
        results.append((cell, summary(cell, "hot", hot, graphs=graphs)))
        _show(*results[-1])
        if cell.rested and time.monotonic() < end:
            times = rested(stage.works, stopwatch, options.rounds)
            results.append((cell, summary(cell, "rested", times, graphs=graphs)))
            _show(*results[-1])

    for cell in CELLS:
        if options.only and not any(word in str(cell) for word in options.only):
            continue
        if time.monotonic() + CELL_S > end:
            left_out.append(str(cell))
            continue
        try:
            measured(cell)
        except Exception as error:  # memory, say: the other cells are measured all the same
            failed.setdefault(str(cell), {})["cell"] = f"{type(error).__name__}: {error}"[:500]
            print(f"{cell}: {error}", flush=True)
        write()
    for one in write():
        print(
            f"{one['cell']:>26} {one['regime']:>6} {one['contender']:<18} {one['ratio']:.3f} of "
            f"{one['least']:.2f} {'reached' if one['reached'] else 'MISSED'}"
        )
    print(f"left out: {', '.join(left_out) or 'nothing'}")
    sys.exit(bool(failed))


def _show(cell: Cell, result: dict[str, Any]) -> None:
    parts = [
        f"{name} {one['us']:.1f} us {one['tflops']:.1f}" + (f" x{one['ratio']:.2f}" if one["ratio"] else "")
        for name, one in result["contenders"].items()
    ]
    print(f"{cell} {result['regime']}: " + "; ".join(parts), flush=True)


if __name__ == "__main__":
    main()
