"""The planner's candidates at the suite's products, timed: is the chosen one the best, and by how much not.

    PYTHONPATH=src python benchmarks/suite_candidates.py [--out FILE] [--budget 90] [--products S06,n513]

For every product the fastest instances by prediction, the best of them under every kind of schedule. Operands
are cold, launches come from CUDA graphs, contenders take turns, as in `tilewave calibrate`; the readings are
for looking at and go into no fit. The file is renewed after every product, and a later call goes on from it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from tilewave.bench.suite import SuiteProduct, squares, workloads
from tilewave.errors import TilewaveError
from tilewave.normalise import normalise
from tilewave.planner.gemm import GemmCandidate, GemmPlanner
from tilewave.problem import GemmProblem, MatrixLayout

INSTANCES = 14
"""Instances that are timed for a product, by prediction the fastest."""

ALL_KINDS = 4
"""So many of them under the best schedule of every kind, the others under their best."""

WITHIN = 2.5
"""Times the least prediction; what is predicted to take longer is left out."""


def problem_of(product: SuiteProduct) -> GemmProblem:
    """The product as kernels see it: dense, 16-byte aligned."""
    batch = (product.batch,) if product.batch > 1 else ()

    def layout(rows: int, columns: int, transposed: bool, shared: bool) -> MatrixLayout:
        row, column = (1, rows) if transposed else (columns, 1)
        return MatrixLayout(row, column, (0 if shared else rows * columns,) if batch else (), 16)

    m, n, k = product.m, product.n, product.k
    a = layout(m, k, product.transposed_a, product.shared_a)
    b = layout(k, n, product.transposed_b, product.shared_b)
    normalised = normalise(GemmProblem(m, n, k, batch, a, b, layout(m, n, False, False)))
    assert not normalised.loops
    return normalised.problem


def predicted(candidate: GemmCandidate) -> float:
    return candidate.estimate.total if candidate.estimate is not None else float("inf")


def candidates_of(planner: GemmPlanner, problem: GemmProblem) -> list[GemmCandidate]:
    """The candidates to time, the planner's first choice first."""
    able = sorted((c for c in planner.candidates(problem) if c.estimate is not None), key=predicted)
    close = [c for c in able if predicted(c) <= WITHIN * predicted(able[0])]
    kinds: dict[str, dict[Any, GemmCandidate]] = {}
    for candidate in close:
        kinds.setdefault(candidate.instance.name, {}).setdefault(candidate.schedule.kind, candidate)
    found: list[GemmCandidate] = []
    for rank, schedules in enumerate(list(kinds.values())[:INSTANCES]):
        found += list(schedules.values())[: None if rank < ALL_KINDS else 1]
    return sorted(found, key=predicted)


def measure_product(planner: GemmPlanner, problem: GemmProblem, memory: Any, stream: Any) -> dict[str, Any]:
    """Readings of a product's candidates, the fastest first, and where the planner's choice stands."""
    from tilewave.bench.candidates import measure

    candidates = candidates_of(planner, problem)
    estimates = {(c.instance.name, c.schedule): predicted(c) for c in candidates}
    readings = measure(planner, problem, candidates, memory, stream)
    if not readings:
        raise TilewaveError("its operands do not fit into the memory that is rotated through")
    rows = [
        {
            "instance": reading.instance,
            "schedule": str(reading.schedule),
            "us": reading.microseconds,
            "predicted": round(estimates[reading.instance, reading.schedule], 2),
        }
        for reading in readings
    ]
    chosen = rows[0]
    rows.sort(key=lambda row: row["us"])
    return {"chosen": chosen, "loss": round(chosen["us"] / rows[0]["us"], 3), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("suite_candidates_h200.json"))
    parser.add_argument("--budget", type=float, default=90.0, metavar="SECONDS")
    parser.add_argument("--products", default="", help="names such as S06,n513; all by default")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.budget

    from tilewave.bench.candidates import Memory
    from tilewave.bench.environment import Environment
    from tilewave.compiler import choose_arch, compiler_version
    from tilewave.compiler.register_pass import architecture_refusal, switched_off
    from tilewave.kernels.families import FAMILIES
    from tilewave.runtime.driver import Device, Stream
    from tilewave.runtime.kernels import gpu_state

    device = Device()
    spec = gpu_state(device.ordinal).spec
    arch = choose_arch(spec.compute_capability).arch
    new_loops = switched_off() is None and architecture_refusal(arch) is None
    planner = GemmPlanner(spec, FAMILIES, new_loops=new_loops)
    record: dict[str, Any] = {"device": spec.name, "products": {}}
    if arguments.out.exists():
        record = json.loads(arguments.out.read_text())
    record["environment"] = Environment.capture(device=device, compiler=compiler_version()).to_json()
    names = set(filter(None, arguments.products.split(",")))
    stream, memory = Stream(device), Memory(device)
    for product in sorted(workloads() + squares(), key=lambda product: product.flops):
        if product.name in record["products"] or (names and product.name not in names):
            continue
        if time.monotonic() > deadline:
            print("the budget is spent", flush=True)
            break
        try:
            found = measure_product(planner, problem_of(product), memory, stream)
        except TilewaveError as error:
            print(f"{product.name} {product}: {error}", flush=True)
            continue
        record["products"][product.name] = {"product": str(product), **found}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
        chosen, best = found["chosen"], found["rows"][0]
        print(
            f"{product.name:6} {product!s:40} {found['loss']:.2f}  {chosen['us']:9.1f} us"
            f" {chosen['instance']} {chosen['schedule']}; best {best['us']:.1f} us (predicted"
            f" {best['predicted']:.1f}) {best['instance']} {best['schedule']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
