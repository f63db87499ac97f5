"""What planning a product costs on this machine: from cold, from the cache. Needs no GPU.

    python benchmarks/planner_speed.py [--budget SECONDS] [--out FILE]

Cold: a problem that the planner has not seen, with the kernels' models at hand (a process works them out
once, listed apart). Cached: the same problem again, as an equal record of its own. Both over random problems
of all layouts and batches. Prints a table and writes benchmarks/results/planner_speed.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tilewave.device import get_spec
from tilewave.errors import UsageError
from tilewave.planner.gemm import PlanOptions
from tilewave.planner.gemm.select import GemmPlanner, planner_of
from tilewave.problem import GemmProblem, MatrixLayout

RESULT = Path(__file__).parent / "results" / "planner_speed.json"
DEVICE = "H200"
SEED = 6
LOOPS = 2000  # of the cached look-up, per sample


def random_problem(draw: random.Random) -> GemmProblem:
    """Log-uniform sizes, all layouts, sometimes a batch or an odd leading dimension."""
    m, n, k = (round(2 ** draw.uniform(0, 13)) for _ in range(3))
    batch = draw.choice(((), (), (), (8,), (1000,), (4, 12)))

    def layout(rows: int, columns: int) -> MatrixLayout:
        transposed = draw.random() < 0.5
        lead = (rows if transposed else columns) + draw.choice((0, 0, 0, 1))
        row, column = (1, lead) if transposed else (lead, 1)
        item = lead * (columns if transposed else rows)
        strides = [item]
        for extent in reversed(batch[1:]):
            strides.insert(0, strides[0] * extent)
        return MatrixLayout(row, column, tuple(strides[: len(batch)]), draw.choice((16, 16, 4)))

    out = layout(m, n)
    return GemmProblem(m, n, k, batch, layout(m, k), layout(k, n), replace(out, row=n, column=1))


def seconds(action: Callable[[], object]) -> float:
    """Time of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def copied(problem: GemmProblem) -> GemmProblem:
    """An equal problem that shares no record with the first, as every call makes its own."""
    return replace(problem, a=replace(problem.a), b=replace(problem.b), out=replace(problem.out))


def cold_and_cached(planner: GemmPlanner, problem: GemmProblem, options: PlanOptions) -> tuple[float, float]:
    """Best of three each, in seconds."""
    cold = min(seconds(lambda: planner.plan_afresh(copied(problem), options)) for _ in range(3))
    planner.plan(problem, options)
    again = copied(problem)

    def look_up() -> None:
        for _ in range(LOOPS):
            planner.plan(again, options)

    return cold, min(seconds(look_up) for _ in range(3)) / LOOPS


def summary(values: list[float]) -> dict[str, float]:
    """Microseconds: median, 95th percentile, most."""
    ordered = sorted(1e6 * value for value in values)
    return {
        "median": round(statistics.median(ordered), 3),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 3),
        "most": round(ordered[-1], 3),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds to measure for")
    parser.add_argument("--out", type=Path, default=RESULT, help="the JSON file to write")
    arguments = parser.parse_args()
    deadline = time.perf_counter() + arguments.budget
    draw, options, spec = random.Random(SEED), PlanOptions(), get_spec(DEVICE)
    start = time.perf_counter()
    planner = planner_of(spec)
    for family in planner.families:
        for instance in family.instances():
            planner.model(instance)
    models = time.perf_counter() - start
    cold, cached, weighed, refused = [], [], [], 0
    while time.perf_counter() < deadline and len(cold) < 1000:
        problem = random_problem(draw)
        try:
            first, later = cold_and_cached(planner, problem, options)
        except UsageError:
            refused += 1
            continue
        cold.append(first)
        cached.append(later)
        weighed.append(len(planner.candidates(problem, options)))
    record = {
        "what": f"planning random problems for an {DEVICE}, best of three each, microseconds",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "problems": len(cold),
        "refused": refused,
        "candidates": {"median": statistics.median(weighed), "most": max(weighed)},
        "models_once": round(1e6 * models, 1),
        "cold": summary(cold),
        "cached": summary(cached),
    }
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{len(cold)} problems, {statistics.median(weighed):.0f} candidates in the median; microseconds")
    print(f"{'':10}{'median':>10}{'p95':>10}{'most':>10}")
    for name in ("cold", "cached"):
        print(f"{name:10}" + "".join(f"{value:10.2f}" for value in record[name].values()))  # type: ignore[attr-defined]
    print(f"models of all kernels, once a process: {models * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
