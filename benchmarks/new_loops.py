"""What new loops cost a user: the pass, the check on the GPU, and loading with the verdict known.

    python benchmarks/new_loops.py --out benchmarks/results/new_loops_h200.json --budget 120

Each kernel is loaded as a fresh process would load it, with an empty cache: first nothing is known, then the
pass's outcome, then the verdict too. Without a GPU (or with --no-gpu) only the pass is timed. The record is
written after every kernel; one that fails is told of and the others go on. Exits with 1 if one failed, or a
new loop its check. JSON out; a table last.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compile_kernels import compile_all
from tilewave.bench.environment import Environment
from tilewave.compiler import cache_directory, compiler_version, register_pass
from tilewave.compiler.sass import reemit
from tilewave.kernels.build import compile_instance
from tilewave.kernels.families import large_tile
from tilewave.kernels.instances import Instance
from tilewave.kernels.new_loops import instance_refusal, outcome_for
from tilewave.runtime.driver import Device, probe

ARCH = "sm_90"


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came out."""
    start = time.perf_counter()
    found = work()
    return time.perf_counter() - start, found


def outcome_row(instance: Instance) -> dict[str, Any]:
    """Seconds of the pass where nothing is kept, and of finding what was kept."""
    program, kernel = compile_instance(instance, ARCH)
    register_pass._outcomes.clear()
    begun_cpu_s = time.process_time()
    made_s, outcome = timed(lambda: outcome_for(instance, program, kernel))
    cpu_s = time.process_time() - begun_cpu_s
    register_pass._outcomes.clear()
    kept_s, _ = timed(lambda: outcome_for(instance, program, kernel))
    return {
        "pass_s": made_s,
        "pass_cpu_s": cpu_s,
        "kept_pass_s": kept_s,
        "reason": outcome.reason,
        "summary": outcome.summary,
    }


def gpu_row(instance: Instance) -> dict[str, Any]:
    """Seconds of loading a kernel without a verdict and with one; which loop it runs."""
    from tilewave.runtime.kernels import gpu_state

    state = gpu_state(0)
    seconds = []
    for _ in range(2):
        state._kernels.pop(instance.name, None)
        state._loops.pop(instance.name, None)
        seconds.append(timed(lambda: state.kernel(instance, 0))[0])
    loop = state.loop_of(instance.name)
    assert loop is not None
    return {"checked_load_s": seconds[0], "load_s": seconds[1], "new": loop.new, "why": loop.why}


def link_programs(cache: Path, empty: Path) -> None:
    """Let an empty cache have the compiled programs of another one, and nothing else that is kept there."""
    for program in cache.glob("*.program"):
        try:
            os.link(program, empty / program.name)  # the cache follows no symbolic links
        except OSError:
            shutil.copyfile(program, empty / program.name)


def line(name: str, row: dict[str, Any]) -> str:
    """A kernel's times in columns, and the loop that it runs."""
    of_loads = [f"{row[key]:.4f}" if key in row else "-" for key in ("checked_load_s", "load_s")]
    loop = row["reason"] or ("new" if row.get("new") else row.get("why", row.get("error", "not loaded")))
    of_pass = f"{row['pass_s']:7.3f} {row['kept_pass_s']:8.4f}"
    return f"{name:28} {of_pass} {of_loads[0]:>11} {of_loads[1]:>8}  {loop}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds")
    parser.add_argument("--no-gpu", action="store_true")
    options = parser.parse_args()
    started = time.monotonic()
    gpu = None if options.no_gpu or not probe().usable else Device()
    rows: dict[str, dict[str, Any]] = {}
    programs = [one for one in large_tile.instances() if instance_refusal(one) is None]
    # Compiling is not what is timed, nor are imports; a third of the budget at most is for them.
    compile_all([(one, ARCH) for one in programs], os.cpu_count() or 1, started + options.budget / 3)
    reemit(*_another(programs))
    compile_s = time.monotonic() - started
    print(f"compiled after {compile_s:.0f} s", flush=True)
    record = {
        "command": "python benchmarks/new_loops.py --out FILE --budget SECONDS",
        "environment": Environment.capture(device=gpu, compiler=compiler_version()).to_json(),
        "compile_s": compile_s,
        "kernels": rows,
    }

    def keep() -> None:
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory(dir=cache_directory().parent) as directory:
        link_programs(cache_directory(), Path(directory))
        os.environ["TILEWAVE_CACHE_DIR"] = directory
        for instance in programs:
            if time.monotonic() - started > options.budget:
                print("budget spent")
                break
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                rows[instance.name] = row = outcome_row(instance)
                try:
                    row |= {} if gpu is None else gpu_row(instance)
                except Exception as error:  # the others are loaded all the same
                    row["error"] = f"{type(error).__name__}: {error}"[:500]
            row["warnings"] = [str(one.message) for one in caught]
            print(line(instance.name, row), flush=True)
            keep()
    keep()
    print(f"{'':28} {'pass':>7} {'kept':>8} {'check+load':>11} {'load':>8}  loop")
    print(*(line(name, row) for name, row in rows.items()), sep="\n")
    for key in ("pass_s", "pass_cpu_s", "kept_pass_s", "checked_load_s", "load_s"):
        if values := [row[key] for row in rows.values() if key in row]:
            print(f"{key}: median {statistics.median(values):.4f} s, most {max(values):.4f} s")
    sys.exit(gpu is not None and not all(row.get("new") for row in rows.values()))


def _another(instances: list[Instance]) -> tuple[Any, str]:
    """A kernel that is not among these."""
    other = next(one for one in large_tile.instances() if one not in instances)
    program, kernel = compile_instance(other, ARCH)
    return program, kernel.symbol


if __name__ == "__main__":
    main()
