"""A whole run: products in order, within a budget, going on from what a file holds already."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from tilewave.bench.products.measure import Setting, measure
from tilewave.bench.products.records import BenchRun, Result
from tilewave.bench.suite import SuiteProduct
from tilewave.compiler import choose_arch
from tilewave.device import DeviceSpec, driver_cuda_version
from tilewave.errors import UsageError


def check_same(before: BenchRun, now: BenchRun) -> None:
    """Refuse to add to a file that was measured otherwise: its figures could not stand side by side."""
    for what, one, other in (
        ("on", before.device, now.device),
        ("in mode", before.mode, now.mode),
        ("with contenders", ", ".join(before.contenders), ", ".join(now.contenders)),
        ("with names", before.names, now.names),
        ("at commit", before.environment.get("commit"), now.environment.get("commit")),
    ):
        if one != other:
            raise UsageError(
                f"the file was measured {what} {one}, this run would be {what} {other}; accepted are the "
                "same, or another --json"
            )


def run_products(
    products: Sequence[SuiteProduct],
    run: BenchRun,
    measure_one: Callable[[SuiteProduct], Result],
    *,
    budget_s: float | None,
    keep: Callable[[BenchRun], None],
    show: Callable[[Result], None],
    now: Callable[[], float] = time.monotonic,
) -> tuple[BenchRun, int]:
    """Measure what ``run`` does not hold yet; returns the run and how many products the budget left out.

    No product starts that would probably outlast the budget: each is expected to take as long as the longest
    so far. ``keep`` is given the run after every product.
    """
    began, longest, left = now(), 0.0, 0
    for product in products:
        if run.find(product) is not None:
            continue
        start = now()
        if budget_s is not None and start - began + longest > budget_s:
            left += 1
            continue
        result = measure_one(product)
        longest = max(longest, now() - start)
        run = replace(run, results=(*run.results, result))
        keep(run)
        show(result)
    return run, left


def measure_with(setting: Setting, rng: np.random.Generator) -> Callable[[SuiteProduct], Result]:
    """What measures a product under a setting."""
    return lambda product: measure(product, setting, rng)


def compile_ahead(products: Sequence[SuiteProduct], spec: DeviceSpec, jobs: int) -> int:
    """Compile the kernels that plans of these products name, several at a time; returns how many.

    They land in the program cache: otherwise each product would pay for its own within the budget.
    """
    import tilewave
    from tilewave.kernels.build import compile_instance

    plans = [
        tilewave.plan(
            one.m,
            one.n,
            one.k,
            batch=one.batch if one.batch > 1 else (),
            layouts=("T" if one.transposed_a else "N") + ("T" if one.transposed_b else "N"),
            device=spec,
        )
        for one in products
    ]
    instances = list({plan.instance.name: plan.instance for plan in plans}.values())
    arch = choose_arch(spec.compute_capability, driver_cuda_version()).arch
    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(lambda instance: compile_instance(instance, arch), instances):
            pass
    return len(instances)
