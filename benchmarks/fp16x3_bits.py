"""Compare the fp16x3 kernels of a Hopper GPU with the mode's NumPy model: bits, bounds, agreement.

    python benchmarks/fp16x3_bits.py [--budget SECONDS] [--out FILE] [--seed N]

Products of every standard data set and of many K are computed on the GPU and by the model, with fine sums and
with coarse ones. Equal bits would confirm the model of the tensor core (`tilewave.precision.tensor_core`);
what must hold in any case is that both keep the mode's bound and differ by no more than it allows. Elements
that are recomputed as ieee are compared with the bound only, because their order of sums is the kernel's own.

Prints a table; the last line says what was found. Exit code 1 where a bound is exceeded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tilewave.bench.accuracy import contenders
from tilewave.bench.environment import Environment
from tilewave.kernels import fp16x3 as kernels
from tilewave.precision import error_in_mode_bounds, fp16x3, fp16x3_bound
from tilewave.precision.data_sets import DATA_SETS, draw
from tilewave.runtime.driver import Device

LENGTHS = (1, 16, 17, 64, 65, 128, 200, 1000, 4096)
ROWS, COLUMNS = 33, 41
KINDS = {"fine": (fp16x3.FINE, kernels.SMALL), "coarse": (fp16x3.COARSE, kernels.LARGE)}
"""Kinds of sums, and a kernel that has them."""


def compare(name: str, kind: str, k: int, rng: np.random.Generator) -> dict[str, Any]:
    """One product on the GPU and by the model."""
    a, b = draw(name, rng, ROWS, k, COLUMNS)
    sums, instance = KINDS[kind]
    model = fp16x3.multiply(a, b, sums=sums)
    gpu = contenders.by_kernel(a, b, instance)
    kept = ~model.recomputed
    equal = (gpu.view(np.uint32) == model.values.view(np.uint32))[kept]
    with np.errstate(all="ignore"):
        apart = np.abs(gpu.astype(float) - model.values)[kept] / fp16x3_bound(a, b)[kept]
    finite = apart[np.isfinite(apart)]
    return {
        "data": name,
        "sums": kind,
        "k": k,
        "kept": int(kept.sum()),
        "equal": int(equal.sum()),
        "apart_in_bounds": float(finite.max(initial=0.0)),
        "gpu_in_bounds": error_in_mode_bounds("fp16x3", gpu, a, b),
        "model_in_bounds": error_in_mode_bounds("fp16x3", model.values, a, b),
    }


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=120.0, help="seconds; what does not fit is left out")
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--seed", type=int, default=20261130)
    options = parser.parse_args()
    end = time.monotonic() + options.budget
    device = Device()
    rng = np.random.default_rng(options.seed)
    found: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    record = {
        "environment": Environment.capture(device=device).to_json(),
        "seed": options.seed,
        "products": found,
        "failed": failed,
    }
    left_out = len(LENGTHS) * len(DATA_SETS) * len(KINDS)
    for k in LENGTHS:
        for name, kind in itertools.product(DATA_SETS, KINDS):
            if time.monotonic() >= end:
                break
            left_out -= 1
            try:
                found.append(compare(name, kind, k, rng))
            except Exception as error:  # the other products are compared all the same
                failed[f"{name} {kind} {k}"] = f"{type(error).__name__}: {error}"[:500]
                print(f"{name} {kind} {k}: {error}", flush=True)
        record["left_out"] = left_out
        if options.out is not None:
            options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        kept, equal = (sum(one[key] for one in found) for key in ("kept", "equal"))
        print(f"K up to {k}: {equal:,} of {kept:,} elements have the model's bits", flush=True)
    heads = f"{'apart':>9} {'GPU':>9} {'model':>9}  (of the bound)"
    print(f"{'data':>18} {'sums':>6} {'K':>6} {'equal bits':>14} {heads}")
    for one in found:
        share = f"{one['equal']}/{one['kept']}"
        print(
            f"{one['data']:>18} {one['sums']:>6} {one['k']:>6} {share:>14} {one['apart_in_bounds']:>9.2g} "
            f"{one['gpu_in_bounds']:>9.2g} {one['model_in_bounds']:>9.2g}"
        )
    kept, equal = (sum(one[key] for one in found) for key in ("kept", "equal"))
    worst = max((one["gpu_in_bounds"] for one in found), default=0.0)
    print(
        f"{equal:,} of {kept:,} elements have the model's bits; the GPU's largest error is {worst:.3g} of "
        f"the bound; {record['left_out']} products were left out"
    )
    return int(not worst <= 1 or bool(failed))


if __name__ == "__main__":
    sys.exit(main())
