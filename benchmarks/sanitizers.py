"""Every rung under compute-sanitizer's four tools, and planted faults that the tools must find.

On a machine with a GPU and the CUDA toolkit:

    PYTHONPATH=src python3 benchmarks/sanitizers.py --budget 200

Results go to `--out` after every step, and a later call goes on from there if kernels, options and tool are
the same. The exit code is 0 only if all tools ran, found nothing in any rung, and found every planted fault
but those that they are known to be blind to.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tilewave.lab.sanitizers import TOOLS, Sanitizer, judge_fault, judge_rungs, prepare, run_targets

OUT = Path("benchmarks/results/sanitizers_h200.json")
LIMIT_S = 120.0
FAULT_LIMIT_S = 45.0


def launch(arguments: list[str]) -> None:
    """The program under a tool."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--targets", required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--poison", action="store_true")
    options = parser.parse_args(arguments)
    indices = [int(word) for word in options.targets.split(",")]
    run_targets(options.folder, indices, options.results, poison=options.poison)


def check(out: Path, folder: Path, budget: float) -> bool:
    """Run what is missing; returns whether everything is there and as it should be."""
    from tilewave.bench.environment import Environment
    from tilewave.compiler import choose_arch
    from tilewave.device import query_device
    from tilewave.lab.faults import FAULTS
    from tilewave.lab.options import check_jobs, check_writable
    from tilewave.lab.records import write_json
    from tilewave.runtime.driver import Device, require_gpu

    started = time.monotonic()
    require_gpu()
    check_writable(out)
    device, spec = Device(), query_device()
    sanitizer = Sanitizer(Sanitizer.find(), (sys.executable, __file__, "launch"), folder)
    targets = prepare(folder, spec, choose_arch(spec.compute_capability).arch, check_jobs(None))
    version = sanitizer.version()
    print(
        f"compute-sanitizer {version}, {spec.name}, {targets.compiler}: {len(targets.of_rungs())} launches "
        f"of rungs, {len(FAULTS)} faults; compiled in {time.monotonic() - started:.1f} s",
        flush=True,
    )
    record: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    key = f"{version} {targets.digest}"
    if record.get("key") != key:
        record = {"key": key, "tools": {}, "faults": {}}
    environment = Environment.capture(device=device, compiler=targets.compiler)
    record |= {"sanitizer": version, "arch": targets.arch, "environment": environment.to_json()}
    record["sizes"] = sizes = {}
    for index in targets.of_rungs():
        target = targets.launches[index]
        sizes.setdefault(target.title, []).append(f"{target.kernel} {' '.join(map(str, target.shape))}")

    def save() -> bool:
        tools, faults = record["tools"].values(), record["faults"]
        record["complete"] = len(tools) == len(TOOLS) and len(faults) == len(FAULTS)
        record["clean"] = all(tool["clean"] for tool in tools)
        record["all_faults_found"] = all(
            faults[fault.name]["found"] or fault.tool_is_blind for fault in FAULTS if fault.name in faults
        )
        record["tool_is_blind_to"] = [fault.name for fault in FAULTS if fault.tool_is_blind]
        write_json(record, out)
        return bool(record["complete"] and record["clean"] and record["all_faults_found"])

    def left() -> float:
        return budget - (time.monotonic() - started)

    for tool in TOOLS:
        if record["tools"].get(tool, {}).get("clean") or left() < 1:
            continue
        run = sanitizer.run(tool, targets.of_rungs(), min(LIMIT_S, left()))
        result = record["tools"][tool] = judge_rungs(targets, run)
        print(
            f"{tool:<10} {result['errors']} errors in {result['launches']} launches, {run.seconds} s",
            flush=True,
        )
        if not result["clean"]:
            print(json.dumps(result, indent=1)[:6000], flush=True)
        save()
    for fault in FAULTS:
        if record["faults"].get(fault.name, {}).get("found") or left() < 1:
            continue
        run = sanitizer.run(fault.tool, targets.of_fault(fault.name), min(FAULT_LIMIT_S, left()))
        result = record["faults"][fault.name] = judge_fault(targets, fault.name, fault.says, run)
        verdict = "found" if result["found"] else "blind to" if fault.tool_is_blind else "MISSED"
        print(f"{fault.tool:<10} {verdict}: {fault.name}, {run.seconds} s", flush=True)
        if verdict == "MISSED":
            print(json.dumps(result, indent=1)[:3000], run.output, flush=True)
        save()
    succeeded = save()
    print(f"{'all as it should be' if succeeded else 'NOT all as it should be'}: {out}", flush=True)
    return succeeded


def main() -> None:
    if sys.argv[1:2] == ["launch"]:
        launch(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--folder", type=Path, default=Path("build/sanitizers"), help="for cubins and logs")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds")
    options = parser.parse_args()
    os.environ.setdefault("TILEWAVE_CACHE_DIR", str(Path(".cache/programs").resolve()))
    sys.exit(0 if check(options.out, options.folder, options.budget) else 1)


if __name__ == "__main__":
    main()
