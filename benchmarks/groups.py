"""Groups of products on a GPU in one budgeted run: one launch against one a product, ours and cuBLAS's.

    PYTHONPATH=src python3 benchmarks/groups.py --out groups.json --budget 200 [--only TEXT ...] [--rounds 7]

Each contender is captured into a CUDA graph, so that host time counts for none of them, and they take turns:
the group in one launch as planned, with every other tile, one `gemm` a product, and one PyTorch product after
the other (cuBLAS in float32). Beside the device's time stands the host's, of a call outside any graph. Every
result is checked against PyTorch's in float64. The record is written after every group; a group or contender
that fails is told of and leaves the others as they are. The exit code is 1 where one failed or was wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tilewave
from tilewave.bench.environment import Environment
from tilewave.compiler import compiler_version
from tilewave.device import query_device
from tilewave.kernels.families import grouped
from tilewave.kernels.instances import Instance
from tilewave.planner.gemm.group import GroupPlanner
from tilewave.planner.gemm.options import PlanOptions
from tilewave.runtime import group as runtime_group
from tilewave.runtime.driver import Device

REPLAYS = 5
LEAST_S = 3.0
"""No group is begun with less time left."""


def triples(rng: np.random.Generator, least: int, most: int, count: int) -> list[tuple[int, int, int]]:
    """So many sizes (m, n, k)."""
    return [(int(m), int(n), int(k)) for m, n, k in rng.integers(least, most + 1, (count, 3))]


def groups(rng: np.random.Generator) -> dict[str, list[tuple[int, int, int]]]:
    """Named groups: experts with few and many tokens, blocks of sparse matrices, mixtures, one long chain."""
    tokens = rng.multinomial(8192, rng.dirichlet(np.ones(64)))
    few = rng.integers(0, 17, 64)
    return {
        "64 experts, 8192 tokens, 4096 x 1024": [(int(m), 4096, 1024) for m in tokens],
        "64 experts, 0 to 16 tokens each, 4096 x 1024": [(int(m), 4096, 1024) for m in few],
        "8 experts, 1024 tokens each, 4096 x 4096": [(1024, 4096, 4096)] * 8,
        "1000 blocks, 3 to 64": triples(rng, 3, 64, 1000),
        "20000 blocks of 16": [(16, 16, 16)] * 20000,
        "200 of 100 to 500": triples(rng, 100, 500, 200),
        "64 x 64 x 200000 and 30 small": [(64, 64, 200_000), *([(100, 100, 100)] * 30)],
    }


@contextmanager
def tile(instance: Instance | None) -> Iterator[None]:
    """Groups are planned with this tile alone inside, or freely for None."""
    if instance is None:
        yield
        return
    planner = GroupPlanner(query_device())
    patches = (
        (grouped, "instances", lambda: (instance,)),
        (runtime_group, "plan_group", lambda problems, spec, options: planner.plan(problems, options)),
    )
    before = [getattr(module, name) for module, name, _ in patches]
    for module, name, stand_in in patches:
        setattr(module, name, stand_in)
    try:
        yield
    finally:
        for (module, name, _), real in zip(patches, before, strict=True):
            setattr(module, name, real)


def captured(work: Callable[[], object], plans: Any) -> torch.cuda.CUDAGraph:
    """The work as a graph, after it ran once."""
    work()
    torch.cuda.synchronize()
    tilewave.prepare(plans)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Of one replay, by events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / REPLAYS


def measure(sizes: list[tuple[int, int, int]], rounds: int, deadline: float) -> dict[str, Any]:
    """The readings of one group."""
    pairs = [(torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda")) for m, n, k in sizes]
    outs = [torch.full((m, n), torch.nan, device="cuda") for m, n, _ in sizes]
    given = [{"a": a, "b": b, "out": out} for (a, b), out in zip(pairs, outs, strict=True)]
    spec = query_device()
    (plan,) = tilewave.plan_grouped(given)

    def check() -> float:
        worst = 0.0
        for (a, b), out in list(zip(pairs, outs, strict=True))[:: max(1, len(pairs) // 50)]:
            if out.numel():
                exact = a.double() @ b.double()
                size = (a.double().abs() @ b.double().abs()).max()
                error = float((out - exact).abs().max() / size)
                worst = max(worst, float("inf") if np.isnan(error) else error)
            out.fill_(torch.nan)
        return worst

    contenders: dict[str, tuple[torch.cuda.CUDAGraph, float]] = {}
    refused: dict[str, str] = {}

    def add(name: str, work: Callable[[], object], plans: Any) -> None:
        if time.monotonic() > deadline:
            return
        try:
            graph = captured(work, plans)
        except Exception as error:  # what a contender cannot do is a reading too
            refused[name] = str(error)[:200]
            return
        graph.replay()
        torch.cuda.synchronize()
        contenders[name] = graph, check()

    predictions = {}
    for instance in (None, *grouped.instances()):
        name = "one launch" if instance is None else f"one launch, {instance}"
        with tile(instance):
            planner = GroupPlanner(spec)
            mine = planner.plan(plan.problems, PlanOptions())
            predictions[name] = mine.estimate.total
            add(name, lambda: tilewave.grouped_gemm(given), [mine])
    add(
        "a gemm each",
        lambda: [tilewave.gemm(**one) for one in given],
        [each for one in given[:2000] for each in tilewave.plan_for(**one)] if len(given) <= 2000 else (),
    )
    add(
        "cuBLAS, one after another",
        lambda: [torch.matmul(a, b, out=out) for (a, b), out in zip(pairs, outs, strict=True)],
        (),
    )
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, (graph, _) in contenders.items():
            times[name].append(microseconds(graph))
        if time.monotonic() > deadline:
            break
    host = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        tilewave.grouped_gemm(given)
        host.append((time.perf_counter() - begin) * 1e6)
    flops = 2.0 * sum(m * n * k for m, n, k in sizes)
    return {
        "products": len(sizes),
        "plan": str(plan),
        "flops": flops,
        "host_us": statistics.median(host),
        "refused": refused,
        # Of a sum in any order, in units of the largest |A| |B|; half as much again for the epilogue.
        "error_limit": 1.5 * (max(k for *_, k in sizes) + 1) * 2.0**-24,
        "contenders": {
            name: {
                "us": statistics.median(values),
                "all": values,
                "predicted_us": predictions.get(name),
                "worst_error": contenders[name][1],
            }
            for name, values in times.items()
            if values
        },
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=200, help="seconds for everything")
    parser.add_argument("--only", nargs="*", default=[], help="groups whose name holds one of these")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    begin = time.monotonic()
    torch.backends.cuda.matmul.allow_tf32 = False
    record: dict[str, Any] = {
        "environment": Environment.capture(device=Device(), compiler=compiler_version()).to_json(),
        "groups": {},
    }
    chosen = {
        name: sizes
        for name, sizes in groups(np.random.default_rng(6)).items()
        if not options.only or any(text in name for text in options.only)
    }
    for place, (name, sizes) in enumerate(chosen.items()):
        left = begin + options.budget - time.monotonic()
        if left < LEAST_S:
            record["left_out"] = list(chosen)[place:]
            break
        deadline = time.monotonic() + left / (len(chosen) - place)
        try:
            found = measure(sizes, options.rounds, deadline)
        except Exception as error:  # memory, or a lost context: the other groups are tried all the same
            found = {"error": f"{type(error).__name__}: {error}"[:1000]}
        record["groups"][name] = found
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print("\n".join(lines(name, found)), flush=True)
        torch.cuda.empty_cache()
    print(f"left out: {', '.join(record.get('left_out', [])) or 'nothing'}")
    sys.exit(any(faults(found) for found in record["groups"].values()))


def faults(found: dict[str, Any]) -> list[str]:
    """What went wrong with a group, in words."""
    if "error" in found:
        return [found["error"]]
    limit = found["error_limit"]
    wrong = [name for name, row in found["contenders"].items() if not row["worst_error"] <= limit]
    refused = [f"{name}: {why}" for name, why in found["refused"].items()]
    return [*refused, *(f"{name}: off by {found['contenders'][name]['worst_error']:.2g}" for name in wrong)]


def lines(name: str, found: dict[str, Any]) -> list[str]:
    """What to print of a group."""
    shown = [f"{name}: " + (f"host {found['host_us']:.0f} us a call" if "host_us" in found else "failed")]
    for contender, row in found.get("contenders", {}).items():
        predicted = f", predicted {row['predicted_us']:.1f}" if row["predicted_us"] else ""
        rate = found["flops"] / row["us"] / 1e6
        shown.append(
            f"  {contender:42} {row['us']:10.1f} us{predicted}, {rate:6.2f} TFLOP/s, "
            f"error {row['worst_error']:.1e}"
        )
    return [*shown, *(f"  FAULT {fault}" for fault in faults(found))]


if __name__ == "__main__":
    main()
