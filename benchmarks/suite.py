"""tilewave.matmul against cuBLAS (through PyTorch) over the suites, on one GPU.

    PYTHONPATH=src python3 benchmarks/suite.py --out suite.json --budget 240 [--only NAME ...]

Both are replayed from CUDA graphs, interleaved, with TF32 off; operands are fresh N(0,1) draws in buffers
that rotate until together they exceed twice the L2 cache, so that each call finds its own cold. Answers are
checked on random rows against float64 under the bound that grows with K. Results are written after every
product, and a later call with the same file goes on from there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tilewave
from tilewave.bench.environment import Environment
from tilewave.bench.suite import SuiteProduct, squares, workloads
from tilewave.bench.timing import Contender, Timing, interleave
from tilewave.compiler import compiler_version
from tilewave.device import query_device
from tilewave.precision import error_in_bounds
from tilewave.runtime.driver import Device

CHECKED_ROWS = 4
CALLS = 8
"""At least so many calls in a graph."""


class TorchStopwatch:
    """CUDA events around replays of a graph of calls."""

    def __init__(self, calls: int) -> None:
        self._calls = calls
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def elapsed_ms(self, work: Callable[[], None], repeats: int) -> float:
        self._start.record()
        for _ in range(repeats):
            work()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / self._calls


def operands(product: SuiteProduct) -> tuple[Any, Any, Any]:
    def draw(rows: int, columns: int, transposed: bool, shared: bool) -> Any:
        items = 1 if shared else product.batch
        shape = (items, columns, rows) if transposed else (items, rows, columns)
        made = torch.randn(shape, device="cuda")
        made = made.transpose(1, 2) if transposed else made
        if product.batch == 1:
            return made[0]
        return made.expand(product.batch, rows, columns) if shared else made

    a = draw(product.m, product.k, product.transposed_a, product.shared_a)
    b = draw(product.k, product.n, product.transposed_b, product.shared_b)
    shape = (product.m, product.n) if product.batch == 1 else (product.batch, product.m, product.n)
    return a, b, torch.full(shape, float("nan"), device="cuda")


def graph_of(call: Callable[[Any, Any, Any], None], sets: list[tuple[Any, Any, Any]], calls: int) -> Any:
    for a, b, out in sets:
        call(a, b, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(*sets[index % len(sets)])
    graph.replay()
    torch.cuda.synchronize()
    return graph


def wrong(product: SuiteProduct, a: Any, b: Any, out: Any) -> str | None:
    item = int(torch.randint(product.batch, ()))
    if product.batch > 1:
        a, b, out = a[item], b[item], out[item]
    rows = torch.randint(product.m, (CHECKED_ROWS,), device="cuda")
    columns = torch.randperm(product.n, device="cuda")[: max(1, min(product.n, 10**9 // (8 * product.k)))]
    bounds = error_in_bounds(
        out[rows][:, columns].cpu().numpy(), a[rows].cpu().numpy(), b[:, columns].cpu().numpy()
    )
    if not bounds <= 1:
        return f"wrong: {bounds:.3g} of the bound"
    return "NaN left" if bool(torch.isnan(out).any()) else None


def measure(product: SuiteProduct, rounds: int, l2_bytes: int) -> dict[str, Any]:
    first = operands(product)
    copies = max(1, min(64, -(-2 * l2_bytes // product.nbytes)))
    sets = [first] + [operands(product) for _ in range(copies - 1)]
    calls = max(CALLS if product.flops < 1e11 else 1, len(sets))
    plans = tilewave.plan_for(*first[:2], out=first[2])
    tilewave.prepare(plans)

    def ours(a: Any, b: Any, out: Any) -> None:
        tilewave.matmul(a, b, out=out)

    def theirs(a: Any, b: Any, out: Any) -> None:
        torch.matmul(a, b, out=out)

    mine = graph_of(ours, sets, calls)
    problem = wrong(product, *sets[-1])
    for _, _, out in sets:
        out.fill_(float("nan"))
    cublas = graph_of(theirs, sets, calls)
    times: dict[str, Timing] = interleave(
        [Contender("tilewave", mine.replay), Contender("cuBLAS", cublas.replay)],
        TorchStopwatch(calls),
        rounds=rounds,
        minimum_sample_ms=10.0 / calls,
        warm_up_ms=20.0 / calls,
    )
    ours_ms, theirs_ms = times["tilewave"].median_ms, times["cuBLAS"].median_ms
    return {
        "product": asdict(product),
        "title": str(product),
        "microseconds": 1e3 * ours_ms,
        "cublas_microseconds": 1e3 * theirs_ms,
        "ratio": times["tilewave"].speed_over(times["cuBLAS"]),
        "spread": times["tilewave"].spread,
        "predicted_microseconds": plans[0].estimate.total,
        "plan": f"{plans[0].instance} {plans[0].schedule}",
        "tflops": product.flops / ours_ms * 1e-9,
        "buffers": len(sets),
        "problem": problem,
    }


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['product']['name']:6} {row['title']:36} {row['microseconds']:10.1f} "
        f"{row['cublas_microseconds']:10.1f} {row['ratio']:7.3f} {row['predicted_microseconds']:10.1f} "
        f"{row['roofline']:5.2f} {row['plan']} {row['problem'] or ''}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=240.0, help="seconds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="names of products")
    options = parser.parse_args()
    started = time.monotonic()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(int(np.random.default_rng().integers(1 << 31)))
    torch.set_grad_enabled(False)
    spec = query_device()
    record: dict[str, Any] = {"rows": []}
    if options.out.exists():
        record = json.loads(options.out.read_text())
    record["command"] = "python3 benchmarks/suite.py --out FILE --budget SECONDS"
    record["environment"] = Environment.capture(device=Device(), compiler=compiler_version()).to_json()
    done = {row["product"]["name"] for row in record["rows"]}
    products = [p for p in workloads() + squares() if not options.only or p.name in options.only]
    print(f"{'':6} {'product':36} {'us':>10} {'cuBLAS us':>10} {'ratio':>7} {'predicted':>10} {'roof':>5}")
    for product in products:
        if product.name in done:
            continue
        if time.monotonic() - started > options.budget:
            print("budget spent")
            break
        row = measure(product, options.rounds, spec.l2_bytes)
        ideal = max(product.flops / (spec.peak_fp32_tflops * 1e6), product.nbytes / 4.3e6)
        row["roofline"] = ideal / row["microseconds"]
        record["rows"].append(row)
        print(line(row), flush=True)
        torch.cuda.empty_cache()
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    ratios = [row["ratio"] for row in record["rows"]]
    if ratios:
        mean = statistics.geometric_mean(ratios)
        print(f"{len(ratios)} products: geometric mean {mean:.3f} times cuBLAS, least {min(ratios):.3f}")
    sys.exit(any(row["problem"] for row in record["rows"]))


if __name__ == "__main__":
    main()
