"""A run of a minute without rest: ieee, fp16x3 and cuBLAS in turn at N = 8192, with power and energy.

    PYTHONPATH=src:benchmarks python3 benchmarks/product_power.py --out FILE [--budget 100] [--size 8192]

Contenders take turns of two seconds, in opposite order every other round, as in `tilewave power`; NVML tells
clocks, power and throttling ten times a second, and the first second of each turn counts in no figure. Data
is N(0,1), and every answer is checked first. Energy of a product is the median power times its time. Rounds
are written as they end: a run that is cut off has left those before. `product_power_page.py` makes the table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilewave.bench.timing import Stopwatch
from tilewave.lab.power.records import RANDOM, Repeat
from tilewave.lab.power.rounds import Load, run_rounds
from tilewave.lab.power.watch import Watch

PART_S = 6.0
"""A part of the run for each contender: three turns of two seconds, then the record is written."""
LEAST_PART_S = 1.0
RESERVE_S = 3.0
"""What is left for the end of the last turn and for the summary."""


def summary(repeats: Sequence[Repeat], baseline: str) -> dict[str, dict[str, Any]]:
    """Medians over each contender's turns; ratios to the baseline turn by turn, so that drift cancels."""
    theirs = [one for one in repeats if one.contender == baseline]
    found = {}
    for name in dict.fromkeys(one.contender for one in repeats):
        turns = [one for one in repeats if one.contender == name]
        pairs = list(zip(turns, theirs, strict=False))
        energies = [
            (ours.joules_per_call, other.joules_per_call)
            for ours, other in pairs
            if ours.joules_per_call and other.joules_per_call
        ]
        throttled = [one.throttled.get("power cap", 0.0) for one in turns]
        found[name] = {
            "turns": len(turns),
            "seconds": round(sum(one.end_s - one.start_s for one in turns), 1),
            "tflops": median(one.tflops for one in turns),
            "ratio": median(ours.tflops / other.tflops for ours, other in pairs),
            "watts": median(one.median_w for one in turns),
            "joules": median(one.joules_per_call for one in turns),
            "joules_ratio": median(ours / other for ours, other in energies),
            "mhz": median(one.sm_clock_mhz for one in turns),
            "celsius": median(one.temperature_c for one in turns),
            "power_cap_share": median(throttled),
        }
    return found


def median(values: Any) -> float | None:
    """Of those that are known, to five digits."""
    known = [value for value in values if value is not None]
    return float(f"{statistics.median(known):.5g}") if known else None


def run(
    loads: Sequence[Load],
    stopwatch: Stopwatch,
    watch: Watch,
    now: Callable[[], float],
    end: float,
    keep: Callable[[list[Repeat]], None],
) -> list[Repeat]:
    """Turns until ``end`` (by ``now``), handed to ``keep`` part by part, numbered on."""
    repeats: list[Repeat] = []
    spent = 0.0
    while (seconds := min(PART_S * len(loads), end - now() - spent)) >= LEAST_PART_S * len(loads):
        begun = now()
        rounds = 1 + max((one.round for one in repeats), default=-1)
        part = run_rounds(loads, stopwatch, watch, now, seconds)
        repeats += [Repeat(**{**vars(one), "round": rounds + one.round}) for one in part]
        spent = max(spent, now() - begun - seconds)  # what starting a part takes beside its turns
        keep(repeats)
    return repeats


def table(found: dict[str, dict[str, Any]]) -> str:
    """A line for each contender."""
    lines = []
    for name, one in found.items():
        power = (
            "no power" if one["watts"] is None else f"{one['watts']:.0f} W, {one['joules']:.2f} J a product"
        )
        more = "" if one["joules_ratio"] is None else f" (x{one['joules_ratio']:.3f})"
        ratio = "" if one["ratio"] is None else f" x{one['ratio']:.3f}"
        lines.append(
            f"{name:18} {one['tflops']:6.2f} TFLOP/s{ratio}, {power}{more}, {one['mhz']} MHz, "
            f"{one['celsius']} C, power cap in {one['power_cap_share']:.0%}, {one['seconds']} s"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=100.0, help="seconds, data and checks included")
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--only", action="append", help="contenders besides cuBLAS; may be repeated")
    options = parser.parse_args()
    begun = time.monotonic()

    import numpy as np

    import fp16x3
    from tilewave.bench.baseline import find_baseline
    from tilewave.bench.environment import Environment
    from tilewave.bench.gpu import EventStopwatch
    from tilewave.compiler import compiler_version
    from tilewave.device import query_device
    from tilewave.lab.power.watch import Blind, SamplingThread, open_nvml
    from tilewave.runtime.driver import Device, Stream

    device, spec = Device(), query_device()
    stream = Stream(device)
    baseline, said = find_baseline()
    print(f"{spec.name}, {said}", flush=True)
    record: dict[str, Any] = {
        "command": "python3 benchmarks/product_power.py --out FILE --budget SECONDS",
        "environment": Environment.capture(device=device, compiler=compiler_version()).to_json(),
        "size": options.size,
        "names": {fp16x3.CUBLAS: said},
        "contenders": {},
        "turns": [],
        "failed": {},
    }
    cell = fp16x3.Cell(*[options.size] * 3)
    stage = fp16x3.Stage(cell, spec, stream, np.random.default_rng(), baseline)
    wanted = options.only or [fp16x3.IEEE, fp16x3.SPLIT]
    errors = {}
    for name in (fp16x3.CUBLAS, *wanted):
        if name not in stage.works:
            record["failed"][name] = "not there: " + said
            continue
        try:
            errors[name] = stage.error_of(name, np.random.default_rng())
        except Exception as error:  # the others run all the same
            record["failed"][name] = f"{type(error).__name__}: {error}"[:500]
            print(f"{name}: {error}", flush=True)
            continue
        if not errors[name] <= 1:
            record["failed"][name] = f"the error is {errors[name]:.3g} times the bound"
            del errors[name]
    record["errors_in_bounds"] = errors
    loads = [Load(name, RANDOM, stage.works[name], cell.flops) for name in errors]
    read, close, telemetry = open_nvml(device.pci_bus_id)
    record["telemetry"] = telemetry
    print(f"{', '.join(errors)} after {time.monotonic() - begun:.0f} s; {telemetry}", flush=True)

    def keep(repeats: list[Repeat]) -> None:
        record["contenders"] = summary(repeats, fp16x3.CUBLAS)
        record["turns"] = [
            {name: value for name, value in asdict(one).items() if not name.startswith("batch")}
            for one in repeats
        ]
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(table(record["contenders"]), flush=True)

    def now() -> float:
        return time.monotonic() - begun

    try:
        record["limit_w"] = None if read is None else read().power_limit_w
        keep([])
        with Blind() if read is None else SamplingThread(read, now) as watch:
            stopwatch = EventStopwatch(device, stream)
            repeats = run(loads, stopwatch, watch, now, options.budget - RESERVE_S, keep) if loads else []
            if isinstance(watch, SamplingThread) and watch.failure is not None:
                record["failed"]["NVML"] = watch.failure
                keep(repeats)
    finally:
        close()
    sys.exit(bool(record["failed"]) or not record["turns"])


if __name__ == "__main__":
    main()
