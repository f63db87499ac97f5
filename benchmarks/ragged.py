"""Why rungs 07 to 17 are slower at N = 2049 than at 2048: scalar loads, tiles, and where tiles run.

Without a GPU, what the emulator counts of each kernel:

    python benchmarks/ragged.py --counts benchmarks/results/ragged_counts.json

On a machine with a GPU, the times of all cases, taken in turn, and where the blocks of each kernel ran:

    PYTHONPATH=src python3 benchmarks/ragged.py --budget 120
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from tilewave.bench.environment import Environment
from tilewave.compiler import choose_arch, compile_source, compiler_version
from tilewave.device import get_spec
from tilewave.lab import ragged
from tilewave.lab.options import check_budget, check_jobs, check_writable
from tilewave.lab.records import write_json
from tilewave.lab.registry import get_rung
from tilewave.lab.truth import digest_of
from tilewave.lab.workers import Budget, run_tasks

OUT = Path("benchmarks/results/ragged_h200.json")
COUNTED_ON = "H200"
FORMAT = 1
WARM_UPS = 30


def count(out: Path, jobs: int) -> None:
    """Write what the emulator counts."""
    check_writable(out)
    spec = get_spec(COUNTED_ON)
    arch = choose_arch(spec.compute_capability).arch
    cases = [case for case in ragged.CASES if len(set(case.shape)) == 1]
    tasks = [(number, case) for case in cases for number in ragged.RUNGS]
    found: dict[str, dict[str, object]] = {case.key: {} for case in cases}
    for (number, case), counted in run_tasks(partial(_count, spec, arch), tasks, jobs, Budget(None)):
        found[case.key][str(number)] = counted
    ordered = {
        key: dict(sorted(rungs.items(), key=lambda item: int(item[0]))) for key, rungs in found.items()
    }
    record = {"format": FORMAT, "device": spec.name, "compiler": compiler_version(), "counts": ordered}
    record["sources"] = {str(number): digest_of(get_rung(number).source().text) for number in ragged.RUNGS}
    write_json(record, out)
    print(f"{len(tasks)} kernels counted: {out}")


def _count(spec, arch, task):
    number, case = task
    return ragged.counts(number, case, spec, arch)


def _compile(arch, task):
    number, stamped = task
    rung = ragged.stamped(number) if stamped else get_rung(number)
    return compile_source(rung.source(), rung.entries, arch)


def measure(out: Path, budget_s: float) -> bool:
    """Time all cases and note where blocks ran; True if nothing was left out and nothing was wrong."""
    from tilewave.lab.command import open_gpu
    from tilewave.lab.measure import Candidate, Measurer, prepare
    from tilewave.runtime.driver import DeviceArray, Stream, require_gpu

    budget = Budget(check_budget(budget_s))
    check_writable(out)
    require_gpu()
    gpu, spec, notice = open_gpu()
    print(notice, flush=True)
    arch = choose_arch(spec.compute_capability).arch
    tasks = [(number, stamped) for stamped in (False, True) for number in ragged.RUNGS]
    programs = dict(run_tasks(partial(_compile, arch), tasks, check_jobs(None), budget))
    print(f"{len(programs)} kernels compiled, {budget.left:.0f} s left", flush=True)
    details = {"sms": spec.sms, "clock_mhz": spec.clock_mhz, "arch": spec.arch}
    environment = Environment.capture(device=gpu.device, compiler=compiler_version(), gpu_details=details)
    record = {"format": FORMAT, "device": spec.name, "environment": environment.to_json(), "times": {}}
    record |= {"placements": {}, "complete": False}
    rng = np.random.default_rng()

    def candidate(rung, stamped=False):
        program = programs[rung.number % ragged.FORCED, stamped]
        return Candidate(rung, program, program.kernels[rung.entry], spec)

    stream = Stream(gpu.device)
    for key, (m, n, k) in ragged.PLACED.items():
        a, b = (rng.standard_normal(extent, dtype=np.float32) for extent in ((m, k), (k, n)))
        left, right = (DeviceArray.from_numpy(gpu.device, matrix) for matrix in (a, b))
        c = DeviceArray.empty(gpu.device, (m, n))
        found = record["placements"][key] = {}
        for number in ragged.RUNGS:
            rung = ragged.stamped(number)
            launch = prepare(candidate(rung, True), gpu.device, stream, left, right, c)
            c.poison()
            for _ in range(WARM_UPS):
                launch()
            stream.synchronize()
            where = ragged.placement(c.to_numpy(), rung.tile.bm, rung.tile.bn)
            found[str(number)] = asdict(where)
            print(f"{key:7} {number:2} {where}", flush=True)
    write_json(record, out)

    measurer = Measurer(gpu.device, spec, gpu.baseline)
    for index, case in enumerate(ragged.CASES):
        if budget.left <= 0:
            break
        share = budget.left / (len(ragged.CASES) - index)
        candidates = [candidate(rung) for rung in ragged.contenders(case)]
        found = measurer.measure_shape(case.shape, candidates, rng, share)
        record["times"][case.key] = {str(number): asdict(rung) for number, rung in found.rungs.items()}
        record.setdefault("baseline", {})[case.key] = asdict(found.baseline) if found.baseline else None
        write_json(record, out)
    done = record["complete"] = len(record["times"]) == len(ragged.CASES)
    wrong = ragged.wrong_rungs(record["times"])
    write_json(record, out)
    if done and not wrong:
        print(f"{'rung':>4}" + "".join(f"{case.key:>12}" for case in ragged.CASES))
        for number in ragged.RUNGS:
            cells = [f"x {ragged.slowdown(record['times'], case.key, number):.3f}" for case in ragged.CASES]
            print(f"{number:4}" + "".join(f"{cell:>12}" for cell in cells))
    print(f"{'complete' if done else 'NOT complete'}{', WRONG: ' + ', '.join(wrong) if wrong else ''}: {out}")
    return done and not wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds")
    parser.add_argument("--counts", type=Path, help="count in the emulator instead, into this file")
    parser.add_argument("--jobs", type=int, help="processes for counting")
    options = parser.parse_args()
    os.environ.setdefault("TILEWAVE_CACHE_DIR", str(Path(".cache/programs").resolve()))
    if options.counts is not None:
        count(options.counts, check_jobs(options.jobs))
        return
    sys.exit(0 if measure(options.out, options.budget) else 1)


if __name__ == "__main__":
    main()
