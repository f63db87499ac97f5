"""Skinny, deep, shallow and tiny products, candidate by candidate, against cuBLAS (through PyTorch).

    PYTHONPATH=src python3 benchmarks/stream_rates.py --out stream_rates.json --budget 200 [--only TEXT ...]

For each product every instance of the families `tiny`, `dot_stream`, `column_stream` and `small_k` that the
planner would weigh is timed under some schedules (the best by prediction, and those of about one, two and
four blocks an SM) in turn with cuBLAS. All are replayed from CUDA graphs, with operands that rotate until
they exceed twice the L2 cache. Answers are checked on random rows against float64. A later call with the
same file goes on where this one ended.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tilewave.bench.environment import Environment
from tilewave.bench.suite import SuiteProduct
from tilewave.bench.timing import Contender, interleave
from tilewave.compiler import choose_arch, compiler_version
from tilewave.device import query_device
from tilewave.kernels.arguments import Pointers
from tilewave.kernels.families import FAMILIES
from tilewave.kernels.ship import compile_all, every_instance
from tilewave.normalise import Normalised, normalise
from tilewave.planner.gemm import GemmPlan, GemmPlanner
from tilewave.precision import error_in_bounds
from tilewave.problem import GemmProblem, MatrixLayout
from tilewave.runtime.driver import Device
from tilewave.runtime.execute import launch_plan, prepare_plan

OURS = ("tiny", "dot_stream", "column_stream", "small_k")
BEST, BLOCKS_PER_SM = 2, (1, 2, 4)
"""Schedules of an instance that are timed: the best by prediction, and the nearest to so many blocks."""
CALLS = 16
"""Calls in a graph, at least."""
CHECKED_ROWS = 4
BYTES_PER_SECOND = 4.3e12
"""What an H200's memory delivers, measured: for the share of the roofline."""


def _products() -> list[SuiteProduct]:
    """Name, m, n, k, letters, batch and what is shared, one a line."""
    rows = """
        skinny  1 7680 2560 NN
        skinny  1 4096 4096 NT
        skinny  4096 1 4096 NN
        skinny  4096 1 4096 TN
        skinny  5 4096 14336 NT
        skinny  5 4096 14336 NN
        skinny  4096 5 14336 NN
        skinny  14336 5 4096 TN
        skinny  16 4096 4096 NN
        skinny  16 4096 4096 NT
        skinny  4096 16 4096 NN
        skinny  4096 16 4096 TT
        skinny  11 5000 3001 NN
        skinny  13 777 5003 NT
        deep    8 512 500000 NN
        deep    512 8 500000 TT
        deep    2 8 8000000 NN
        deep    8 2 8000000 TT
        deep    16 56 150352 TT
        deep    3 40 1000000 NN
        deep    1 1 10000000 NN
        deep    16 16 500000 NT
        shallow 1000000 16 2 NT
        shallow 16 1000000 2 TN
        shallow 2048 512 13 NT
        shallow 5120 5120 16 NN
        shallow 5120 5120 16 TT
        shallow 26496 50 25 NN
        shallow 3000 4001 7 NN
        shallow 3 1000000 3 NN
        shallow 500000 7 11 NN
        batch   3 1 3 NN 6451200 A
        batch   9 1 4 NN 8192
        batch   32 1 3 NN 10240
        batch   16 16 8 NN 65536
        batch   23 23 23 NN 30000
        batch   23 23 23 TN 30000
        batch   64 64 64 NN 4096
        batch   3 3 3 NN 1000000
        batch   4 4 4 NN 1000000
        batch   6 6 6 NT 500000
        batch   8 8 8 NN 262144
        batch   10 12 14 NN 50000
        batch   32 32 32 NN 16384
        batch   4 4 4 NN 1000000 B
    """
    found = []
    for line in rows.split("\n"):
        if not (words := line.split()):
            continue
        family, m, n, k, letters, *rest = words
        batch = int(rest[0]) if rest else 1
        shared = rest[1] if len(rest) > 1 else ""
        a, b = (letter == "T" for letter in letters)
        m, n, k = int(m), int(n), int(k)
        found.append(
            SuiteProduct(" ".join(words), family, m, n, k, a, b, batch, shared == "A", shared == "B")
        )
    return found


class TorchStopwatch:
    """CUDA events around replays of a graph of calls."""

    def __init__(self, calls: int) -> None:
        self._calls = calls
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def elapsed_ms(self, work: Callable[[], None], repeats: int) -> float:
        """Milliseconds of a call, times ``repeats``."""
        self._start.record()
        for _ in range(repeats):
            work()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / self._calls


def operands(product: SuiteProduct) -> tuple[Any, Any, Any]:
    """Fresh A and B, laid out as the product says, and an out of NaN."""

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
    """A graph of calls on the sets of operands in turn, replayed once."""
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
    """What is wrong with some rows of one item, or with any element; None where nothing is."""
    if bool(torch.isnan(out).any()):
        return "NaN left"
    if product.batch > 1:
        item = int(torch.randint(product.batch, ()))
        a, b, out = a[item], b[item], out[item]
    rows = torch.randint(product.m, (CHECKED_ROWS,), device="cuda")
    columns = torch.randperm(product.n, device="cuda")[: max(1, min(product.n, 10**9 // (8 * product.k)))]
    bounds = error_in_bounds(
        out[rows][:, columns].cpu().numpy(), a[rows].cpu().numpy(), b[:, columns].cpu().numpy()
    )
    return None if bounds <= 1 else f"wrong: {bounds:.3g} of the bound"


def layout_of(tensor: Any) -> MatrixLayout:
    """How a tensor lies in memory."""
    address = tensor.data_ptr()
    alignment = 16 if address % 16 == 0 else 8 if address % 8 == 0 else 4
    *batch, row, column = tensor.stride()
    return MatrixLayout(row, column, tuple(batch), alignment)


def problem_of(a: Any, b: Any, out: Any) -> Normalised:
    """The problem that the kernels see."""
    m, n, k = out.shape[-2], out.shape[-1], a.shape[-1]
    return normalise(GemmProblem(m, n, k, tuple(out.shape[:-2]), layout_of(a), layout_of(b), layout_of(out)))


def plans_of(planner: GemmPlanner, problem: GemmProblem, families: Sequence[str] = OURS) -> list[GemmPlan]:
    """Of each instance of these families the best schedules by prediction, and others of other depths."""
    by_instance: dict[str, list[GemmPlan]] = {}
    for candidate in planner.candidates(problem):
        if candidate.estimate is not None and candidate.instance.family in families:
            plan = planner.plan_with(problem, candidate.instance, candidate.schedule)
            by_instance.setdefault(candidate.instance.name, []).append(plan)
    chosen: dict[str, GemmPlan] = {}
    for plans in by_instance.values():
        plans.sort(key=lambda plan: plan.estimate.total)
        nearest = [
            min(plans, key=lambda plan: abs(plan.blocks - depth * planner.spec.sms))
            for depth in BLOCKS_PER_SM
        ]
        chosen.update({f"{plan.instance} {plan.schedule}": plan for plan in plans[:BEST] + nearest})
    return list(chosen.values())


class Submit:
    """Launches one plan on torch's current stream."""

    def __init__(self, plan: GemmPlan, normalised: Normalised) -> None:
        self._plan, self._normalised = plan, normalised
        prepare_plan(plan, device=0)

    def __call__(self, a: Any, b: Any, out: Any) -> None:
        given = Pointers(a.data_ptr(), b.data_ptr(), out.data_ptr())
        for pointers in self._normalised.pointers(given):
            stream = torch.cuda.current_stream().cuda_stream
            launch_plan(self._plan, pointers, device=0, stream=stream)


def measure(
    product: SuiteProduct, planner: GemmPlanner, rounds: int, families: Sequence[str] = OURS
) -> dict[str, Any]:
    """What every candidate and cuBLAS took for one product."""
    first = operands(product)
    copies = max(1, min(64, -(-2 * planner.spec.l2_bytes // product.nbytes)))
    sets = [first] + [operands(product) for _ in range(copies - 1)]
    calls = max(CALLS if product.nbytes < 2e8 else 2, len(sets))
    normalised = problem_of(*first)
    problem = normalised.problem
    contenders, found, problems = [], {}, {}
    for plan in plans_of(planner, problem, families):
        graph = graph_of(Submit(plan, normalised), sets, calls)
        name = f"{plan.instance} {plan.schedule}"
        if (trouble := wrong(product, *sets[-1])) is not None:
            problems[name] = trouble
        for _, _, out in sets:
            out.fill_(float("nan"))
        found[name] = {"blocks": plan.blocks, "predicted": plan.estimate.total}
        contenders.append(Contender(name, graph.replay))
    contenders.append(
        Contender("cuBLAS", graph_of(lambda a, b, out: torch.matmul(a, b, out=out), sets, calls).replay)
    )
    timings = interleave(
        contenders,
        TorchStopwatch(calls),
        rounds=rounds,
        minimum_sample_ms=4.0 / calls,
        warm_up_ms=20.0 / calls,
    )
    for name, row in found.items():
        row["us"] = round(1e3 * timings[name].median_ms, 2)
        row["ratio"] = round(timings[name].speed_over(timings["cuBLAS"]), 3)
    return {
        "product": asdict(product),
        "kernel_problem": str(problem),
        "cublas_us": round(1e3 * timings["cuBLAS"].median_ms, 2),
        "roofline_us": max(
            product.nbytes / BYTES_PER_SECOND, product.flops / (planner.spec.peak_fp32_tflops * 1e12)
        )
        * 1e6,
        "planned": str(planner.plan(problem).instance),
        "candidates": found,
        "problems": problems,
    }


def line(row: dict[str, Any]) -> str:
    """The best candidate of a product, and the one that the planner would have taken among these."""
    found = row["candidates"]
    if not found:
        return f"{row['product']['name']:28} none fits; planned {row['planned']}"
    best = min(found, key=lambda name: found[name]["us"])
    us = found[best]["us"]
    picked = min(found, key=lambda name: found[name]["predicted"])
    lost = found[picked]["us"] / us
    return (
        f"{row['product']['name']:28} {us:9.2f} {row['cublas_us']:9.2f} {found[best]['ratio']:7.3f} "
        f"{row['roofline_us'] / us:5.2f} {lost:5.2f}  {best} ({found[best]['blocks']} blocks) "
        f"{row['problems'] or ''}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=200.0, help="seconds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="parts of names of products")
    options = parser.parse_args()
    started = time.monotonic()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_grad_enabled(False)
    spec = query_device()
    ours = [instance for instance in every_instance() if instance.family in OURS]
    arch = choose_arch(spec.compute_capability).arch
    compiled = sum(1 for _ in compile_all(ours, [arch]))
    print(f"{compiled} kernels for {arch} after {time.monotonic() - started:.0f} s", flush=True)
    planner = GemmPlanner(spec, FAMILIES)
    record: dict[str, Any] = {"rows": []}
    if options.out.exists():
        record = json.loads(options.out.read_text(encoding="utf-8"))
    record["command"] = "python3 benchmarks/stream_rates.py --out FILE --budget SECONDS"
    record["environment"] = Environment.capture(device=Device(), compiler=compiler_version()).to_json()
    done = {row["product"]["name"] for row in record["rows"]}
    for product in _products():
        wanted = not options.only or any(part in product.name for part in options.only)
        if product.name in done or not wanted:
            continue
        if time.monotonic() - started > options.budget:
            print("budget spent")
            break
        record["rows"].append(measure(product, planner, options.rounds))
        torch.cuda.empty_cache()
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{'':28} {'best us':>9} {'cuBLAS us':>9} {'ratio':>7} {'roof':>5} {'lost':>5}")
    for row in record["rows"]:
        print(line(row))
    sys.exit(any(row["problems"] for row in record["rows"]))


if __name__ == "__main__":
    main()
