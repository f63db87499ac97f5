"""The selecting rungs 22 and 23 against the best of the variants that they may choose, at 40 products.

On a machine with a GPU:

    PYTHONPATH=src python3 benchmarks/selection.py --budget 240

The products are drawn from a seed that the result file keeps. Results are written after every product, and a
later call with the same file goes on from there, as long as kernels, compiler, GPU and planner are the same.
The exit code is 0 only if all products have been measured.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from functools import partial
from pathlib import Path

import numpy as np

from tilewave.bench.environment import Environment
from tilewave.compiler import choose_arch, compiler_version
from tilewave.lab.command import open_gpu
from tilewave.lab.measure import Candidate, Measurer
from tilewave.lab.options import check_budget, check_jobs, check_writable
from tilewave.lab.selection import Selection, compile_contenders, summary
from tilewave.lab.workers import Budget
from tilewave.runtime.driver import require_gpu

OUT = Path("benchmarks/results/selection_h200.json")


def select(out: Path, budget_s: float, seed: int | None) -> bool:
    """Measure what ``out`` lacks; True if nothing is missing now."""
    budget = Budget(check_budget(budget_s))
    check_writable(out)
    require_gpu()
    gpu, spec, notice = open_gpu()
    print(notice, flush=True)
    arch = choose_arch(spec.compute_capability).arch
    programs = compile_contenders(arch, check_jobs(None), budget)
    print(f"{len(programs)} rungs compiled, {budget.left:.0f} s left", flush=True)
    details = {"sms": spec.sms, "clock_mhz": spec.clock_mhz, "arch": spec.arch}
    environment = Environment.capture(device=gpu.device, compiler=compiler_version(), gpu_details=details)
    name = "" if gpu.baseline is None else gpu.baseline.name
    seed = secrets.randbits(32) if seed is None else seed
    selection = Selection(out, spec, arch, name, seed, environment.to_json())
    measurer = Measurer(gpu.device, spec, gpu.baseline)
    rng = np.random.default_rng()

    def measure(shape, rungs, share_s):
        candidates = [
            Candidate(rung, programs[rung.number], programs[rung.number].kernels[rung.entry], spec)
            for rung in rungs
        ]
        return measurer.measure_shape(shape, candidates, rng, share_s)

    complete = selection.run(measure, budget, partial(print, flush=True))
    print("\n".join(summary(selection.data)))
    print(f"{'complete' if complete else f'{len(selection.left())} products left'}: {out}", flush=True)
    return complete


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--budget", type=float, default=240.0, help="seconds")
    parser.add_argument("--seed", type=int, help="of the products; a new file takes a fresh one")
    options = parser.parse_args()
    os.environ.setdefault("TILEWAVE_CACHE_DIR", str(Path(".cache/programs").resolve()))
    sys.exit(0 if select(options.out, options.budget, options.seed) else 1)


if __name__ == "__main__":
    main()
