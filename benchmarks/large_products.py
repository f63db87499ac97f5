"""Large products on an H200 in one budgeted run: kernels with new loops under their schedules against cuBLAS.

    PYTHONPATH=src timeout 330 python3 benchmarks/large_products.py --out large.json --budget 300
        [--only TEXT ...] [--rounds 7] [--top 3] [--jobs 8]

At each product (squares in all layouts, shapes of other sorts, spacing of the loop's instructions) the large
tiles that the planner likes best, with their loops from the register-file pass, run with a block a tile, as a
walk behind whole waves, and as one long walk; the compiler's own loop runs beside the best of them. They take
turns with cuBLAS (through PyTorch, operands in the same layout). The planner's prediction stands beside each
reading. Every output is checked against float64 on some of its rows, and the compiler's loop must give the
same bits as the new one. The record is written after every product; one that fails is told of and the others
go on. A later call with the same file goes on where this one ended, and measures anew what would now run with
other machine code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from reemitted import Kernel, Pair, TorchStopwatch, by_name, draw, made, raw_problem
from tilewave.bench.environment import Environment
from tilewave.bench.timing import Contender, interleave
from tilewave.compiler import compiler_version
from tilewave.device import get_spec, query_device
from tilewave.errors import UsageError
from tilewave.kernels.families import large_tile
from tilewave.planner.gemm import GemmPlan, GemmPlanner
from tilewave.planner.schedules import DATA_PARALLEL, STREAM_K_WALK, Schedule
from tilewave.problem import GemmProblem, MatrixLayout
from tilewave.runtime.driver import Device

LAYOUTS = ("nn", "nt", "tn", "tt")
SHAPES = (
    (3000, 3000, 3000),
    (3072, 3072, 3072),
    (4097, 4097, 4097),
    (6144, 6144, 6144),
    (7000, 1760, 1760),
    (8192, 3072, 768),
    (2048, 14336, 4096),
)
SPACINGS = (
    "loads=20",
    "loads=14",
    "loads=12",
    "first_load=2",
    "first_load=16",
    "barrier=12",
    "barrier=24,behind_barrier=12",
    "behind_barrier=10",
    "stores=4",
    "others=20",
    "loads=18,first_load=4,others=16",
)
"""The distances between a loop's instructions that are tried beside the emitter's own."""
_SPACED = (("nn", 4096), ("tn", 8192))
_LONG = ", long"
"""Ends the name of a walk without whole waves before it."""
_LARGEST = 2.0 * 16384**3
_CHECKED_ROWS = 48


@dataclass(frozen=True)
class Product:
    """Layout as BLAS names it, and sizes; `spaced`: loops with other spacings run, not other tiles."""

    layout: str
    m: int
    n: int
    k: int
    spaced: bool = False

    def __str__(self) -> str:
        return f"{self.layout} {self.m}x{self.n}x{self.k}" + (" spacing" if self.spaced else "")

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    def problem(self) -> GemmProblem:
        """With contiguous operands."""

        def stored(rows: int, columns: int, letter: str) -> MatrixLayout:
            strides = (columns, 1) if letter == "n" else (1, rows)
            return MatrixLayout(*strides, (), 16)

        m, n, k = self.m, self.n, self.k
        a, b = stored(m, k, self.layout[0]), stored(k, n, self.layout[1])
        return GemmProblem(m, n, k, (), a, b, MatrixLayout(n, 1, (), 16))


def products() -> list[Product]:
    """All of them, what matters most first."""
    squares = [Product(layout, size, size, size) for size in (4096, 8192, 2048) for layout in LAYOUTS]
    spaced = [Product(layout, size, size, size, spaced=True) for layout, size in _SPACED]
    shapes = [Product("nn", *shape) for shape in SHAPES]
    huge = [Product(layout, 16384, 16384, 16384) for layout in LAYOUTS]
    return [*squares, *shapes, *spaced, *huge, *(Product(one, *s) for one in LAYOUTS[1:] for s in SHAPES)]


def long_walk(plan: GemmPlan) -> GemmPlan:
    """The same walk without whole waves before it."""
    return replace(plan, cut=replace(plan.cut, whole_tiles=0))


def plans_of(planner: GemmPlanner, product: Product, top: int) -> dict[str, GemmPlan]:
    """Plans worth timing by a name: the planner's first ones, and the first tile under each schedule."""
    problem = product.problem()
    ranked = sorted(
        (one for one in planner.candidates(problem) if one.estimate is not None),
        key=lambda one: one.estimate.total if one.estimate else 0.0,
    )
    first = ranked[0].instance
    wanted: list[tuple[Any, Schedule]] = [(one.instance, one.schedule) for one in ranked[:top]]
    others = [one.instance for one in ranked if one.instance is not first][:1]
    if product.spaced:
        wanted, others = [(first, ranked[0].schedule)], []
    else:
        wanted += [(one, way) for one in (first, *others) for way in (DATA_PARALLEL, STREAM_K_WALK)]
    found: dict[str, GemmPlan] = {}
    for instance, schedule in wanted:
        try:
            plan = planner.plan_with(problem, instance, schedule)
        except UsageError:
            continue
        name = f"{instance.name.removeprefix('large_tile_')} {plan.schedule}"
        found[name] = plan
        if plan.cut.walkers and plan.cut.whole_tiles and instance is first and not product.spaced:
            found[name + _LONG] = long_walk(plan)
    return found


def right(a: Any, b: Any, out: Any) -> bool:
    """Whether some rows of the output lie within the bound of float32 sums."""
    (m, k), device = a.shape, a.device
    rows = torch.randint(0, m, (_CHECKED_ROWS,), device=device)
    exact = torch.zeros((_CHECKED_ROWS, b.shape[1]), dtype=torch.float64, device=device)
    size = torch.zeros_like(exact)
    for begin in range(0, k, 2048):
        part_a, part_b = a[rows, begin : begin + 2048].double(), b[begin : begin + 2048].double()
        exact += part_a @ part_b
        size += part_a.abs() @ part_b.abs()
    return bool(((out[rows].double() - exact).abs() <= size * (k + 8) * 2.0**-24).all())


def timed(
    product: Product, plans: dict[str, GemmPlan], pairs: dict[str, Pair], rounds: int
) -> dict[str, Any]:
    """Readings of all contenders, and what was wrong with their outputs."""
    a = draw("normal", product.m, product.k, product.layout[0] == "t", 0)
    b = draw("normal", product.k, product.n, product.layout[1] == "t", 0)
    out = torch.empty((product.m, product.n), device="cuda")
    problem = raw_problem(a, b, out)
    first = next(iter(plans))
    contenders, groups = [], []
    for name, plan in plans.items():
        pair, instance = pairs[plan.instance.name], plan.instance
        images = {name: pair.reemitted or pair.cubin}
        if name == first:
            images |= {f"{name}, compiler's loop": pair.cubin}
            images |= {
                f"{name}, {spacing}": cubin for spacing, cubin in pair.variants.items() if product.spaced
            }
        groups.append(list(images))
        bound = replace(plan, problem=problem)
        for label, image in images.items():
            contenders.append(Contender(label, Kernel(image, pair.symbol, instance).call(bound, a, b, out)))
    wrong = []
    for group in groups:
        seen: list[Any] = []
        for contender in (one for one in contenders if one.name in group):
            out.fill_(float("nan"))
            contender.work()
            torch.cuda.synchronize()
            if not seen and not right(a, b, out):
                wrong.append(f"{contender.name}: off by more than the bound")
            seen.append(out.clone() if len(group) > 1 and not seen else out)
            if not torch.equal(seen[0].view(torch.int32), out.view(torch.int32)):
                wrong.append(f"{contender.name}: other bits")
    everyone = [*contenders, Contender("cuBLAS", lambda: torch.matmul(a, b, out=out))]
    timings = interleave(everyone, TorchStopwatch(), rounds=rounds)
    cublas = timings["cuBLAS"]
    row: dict[str, Any] = {"cuBLAS": round(cublas.tflops(product.flops), 2), "wrong": wrong, "kernels": {}}
    for contender in contenders:
        timing = timings[contender.name]
        row["kernels"][contender.name] = {
            "tflops": round(timing.tflops(product.flops), 2),
            "over cuBLAS": round(timing.speed_over(cublas), 4),
            "spread": round(timing.spread, 4),
        }
    for name, plan in plans.items():
        row["kernels"][name] |= {"whole tiles": plan.cut.whole_tiles, "walkers": plan.cut.walkers}
        if not name.endswith(_LONG):  # its estimate is the shorter walk's
            row["kernels"][name]["predicted"] = round(product.flops / plan.estimate.total * 1e-6, 2)
    return row


def lines(name: str, row: dict[str, Any]) -> list[str]:
    """What to print of a product: cuBLAS, then every kernel, the fastest first."""
    if "error" in row:
        return [f"{name}: FAILED {row['error']}"]
    found = [f"{name}: cuBLAS {row['cuBLAS']:.1f}" + "".join(f"  WRONG {one}" for one in row["wrong"])]
    for kernel, one in sorted(row["kernels"].items(), key=lambda pair: -pair[1]["tflops"]):
        predicted = f"  predicted {one['predicted']:.1f}" if "predicted" in one else ""
        found.append(f"    {one['tflops']:5.1f} x{one['over cuBLAS']:.3f} {kernel}{predicted}")
    return found


def digest_of(ways: dict[str, GemmPlan], pairs: dict[str, Pair]) -> str:
    """Of what a product runs: its plans and their machine code."""
    used = {name: pairs[plan.instance.name].digest for name, plan in ways.items()}
    return hashlib.sha256(json.dumps(used, sort_keys=True).encode()).hexdigest()[:16]


def is_done(row: dict[str, Any] | None, digest: str) -> bool:
    """Whether a product has been measured as it would be now."""
    return row is not None and "error" not in row and row.get("digest") == digest


def compiled(names: Sequence[str], spaced: set[str], jobs: int) -> dict[str, Pair]:
    """Both loops of every kernel, and the variants of those that are spaced."""
    with ProcessPoolExecutor(jobs) as pool:  # before CUDA is initialised, as it forks
        spacings = [list(SPACINGS) if name in spaced else [] for name in names]
        return {pair.name: pair for pair in pool.map(made, names, spacings)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds, compiling included")
    parser.add_argument("--only", nargs="*", help="parts of names of products")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--top", type=int, default=3, help="candidates of the planner at each product")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--list", action="store_true", help="only print what would run; needs no GPU")
    options = parser.parse_args()
    started = time.monotonic()
    record: dict[str, Any] = {"products": {}}
    if options.out.exists():
        record = json.loads(options.out.read_text(encoding="utf-8"))
    left = [
        product
        for product in products()
        if not options.only or any(part in str(product) for part in options.only)
    ]
    # Plans are made for the record: workers are forked before CUDA is initialised.
    planner = GemmPlanner(get_spec("H200"), [large_tile], new_loops=True)
    plans = {product: plans_of(planner, product, options.top) for product in left}
    if options.list:
        for product, ways in plans.items():
            print(product)
            for name, plan in ((name, plan) for name, plan in ways.items() if not name.endswith(_LONG)):
                print(f"    {name}: predicted {product.flops / plan.estimate.total * 1e-6:.1f} TFLOP/s")
        return
    names = sorted({plan.instance.name for ways in plans.values() for plan in ways.values()})
    spaced = {plan.instance.name for p, ways in plans.items() if p.spaced for plan in ways.values()}
    pairs = compiled([name for name in names if name in by_name()], spaced, options.jobs)
    digests = {product: digest_of(ways, pairs) for product, ways in plans.items()}
    left = [one for one in left if not is_done(record["products"].get(str(one)), digests[one])]
    print(f"{len(pairs)} kernels after {time.monotonic() - started:.0f} s", flush=True)
    if "H200" not in (name := query_device().name):
        sys.exit(f"the plans are for an H200, and this is an {name}")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_grad_enabled(False)
    torch.zeros(1, device="cuda")
    record["command"] = "python3 benchmarks/large_products.py --out FILE --budget SECONDS"
    record["environment"] = Environment.capture(device=Device(), compiler=compiler_version()).to_json()
    record["loops"] = {name: pair.reason or pair.report for name, pair in pairs.items()}
    for product in left:
        if time.monotonic() - started > options.budget:
            print("budget spent")
            break
        ways = plans[product]
        rounds = options.rounds
        if product.flops >= _LARGEST:
            # The planner's choice, and the same tile with a block a tile: each call takes long.
            ways, rounds = dict(list(ways.items())[:1] + [w for w in ways.items() if "data" in w[0]][:1]), 5
        try:
            row = timed(product, ways, pairs, rounds)
        except Exception as error:  # memory, or a kernel that a GPU refuses: the others go on
            row = {"error": f"{type(error).__name__}: {error}"[:1000], "wrong": ["failed"]}
        record["products"][str(product)] = row | {"digest": digests[product]}
        print("\n".join(lines(str(product), row)), flush=True)
        torch.cuda.empty_cache()
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("\nproduct: cuBLAS, the fastest kernel and its ratio")
    for name, row in record["products"].items():
        if "error" in row:
            continue
        kernel, one = max(row["kernels"].items(), key=lambda pair: pair[1]["tflops"])
        print(f"{name:24} {row['cuBLAS']:5.1f}  {one['tflops']:5.1f} x{one['over cuBLAS']:.3f}  {kernel}")
    sys.exit(any(row["wrong"] for row in record["products"].values()))


if __name__ == "__main__":
    main()
