"""Every kernel of the library, dealt in every way, under compute-sanitizer's four tools.

On a machine with a GPU and the CUDA toolkit:

    PYTHONPATH=src python3 benchmarks/product_sanitizers.py --budget 90

Each (instance, way of dealing its tiles) is launched at a small ragged size, behind groups and products in
fp16x3 for the kernels that are in no family. Chunks of launches run side by
side, each under a tool in a process of its own; results go to `--out` as chunks end, and a later call with
the same kernels, options and seed goes on from there. Faults planted in the kernels must be found. The exit
code is 0 only if all of that came out as it should.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tilewave.lab.product_sanitizers import (
    Job,
    Launches,
    fault_name,
    jobs_for,
    judge_chunk,
    judge_planted,
    prepare_products,
    run_products,
    sweep,
)
from tilewave.lab.sanitizers import TOOLS, Sanitizer
from tilewave.lab.whole_samples import whole_names

OUT = Path("benchmarks/results/product_sanitizers_h200.json")
LIMIT_S = 60.0
CHUNK = 48
SEED = 6


def launch(arguments: list[str]) -> None:
    """The program under a tool."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--targets", required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--poison", action="store_true")
    options = parser.parse_args(arguments)
    indices = [int(word) for word in options.targets.split(",")]
    run_products(options.folder, indices, options.results, poison=options.poison)


def summary(listed: Launches, chunks: dict[str, Any], faults: dict[str, Any]) -> dict[str, Any]:
    """What the tools said, added up."""
    from tilewave.lab.product_faults import FAULTS

    tools = {}
    for tool in TOOLS:
        found = [chunk for key, chunk in chunks.items() if key.startswith(f"{tool} ")]
        errors = [chunk["largest_error_in_bounds"] for chunk in found]
        tools[tool] = {
            "launches": sum(chunk["launches"] for chunk in found if chunk["clean"]),
            "clean": all(chunk["clean"] for chunk in found),
            "seconds": round(sum(chunk["seconds"] for chunk in found), 1),
            "largest_error_in_bounds": max((e for e in errors if e is not None), default=None),
        }
    wanted = len(listed.sound())
    return {
        "tools": tools,
        "complete": all(tool["launches"] == wanted for tool in tools.values()) and len(faults) == len(FAULTS),
        "clean": all(tool["clean"] for tool in tools.values()),
        "all_faults_found": all(fault["found"] for fault in faults.values()),
    }


def check(options: argparse.Namespace) -> bool:
    """Run what is missing; returns whether everything is there and as it should be."""
    from tilewave.bench.environment import Environment
    from tilewave.compiler import choose_arch
    from tilewave.device import query_device
    from tilewave.kernels.ship import every_instance
    from tilewave.lab.options import check_writable
    from tilewave.lab.product_faults import FAULTS
    from tilewave.lab.records import write_json
    from tilewave.runtime.driver import Device, require_gpu

    started = time.monotonic()
    require_gpu()
    check_writable(options.out)
    device, spec, instances = Device(), query_device(), every_instance()
    executable, program = Sanitizer.find(), (sys.executable, __file__, "launch")
    arch = choose_arch(spec.compute_capability).arch
    wholes = whole_names(spec)
    listed = prepare_products(options.folder / "cubins", arch, options.seed, instances, wholes=wholes)
    version = Sanitizer(executable, program, options.folder).version()
    print(
        f"compute-sanitizer {version}, {spec.name}, {listed.compiler}: {len(instances)} instances and "
        f"{len(wholes)} samples of groups and fp16x3, "
        f"{len(listed.sound())} launches, {len(FAULTS)} faults; compiled in "
        f"{time.monotonic() - started:.1f} s",
        flush=True,
    )
    record: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    key = f"{version} {listed.digest} {options.chunk}"
    if record.get("key") != key:
        record = {"key": key, "chunks": {}, "faults": {}}
    environment = Environment.capture(device=device, compiler=listed.compiler)
    record |= {"sanitizer": version, "arch": arch, "seed": options.seed, "instances": len(instances)}
    record |= {"launches": len(listed.sound()), "environment": environment.to_json()}

    def key_of(job: Job) -> str:
        return f"{job.tool} {job.indices[0]}"

    def is_done(job: Job) -> bool:
        if job.fault is not None:
            return bool(record["faults"].get(by_name[job.fault].name, {}).get("found"))
        return bool(record["chunks"].get(key_of(job), {}).get("clean"))

    by_name = {fault_name(number): fault for number, fault in enumerate(FAULTS)}
    planted = [(fault.tool, name) for name, fault in by_name.items()]
    jobs = [job for job in jobs_for(listed, planted, options.chunk) if not is_done(job)]
    runs = sweep(
        jobs,
        lambda place: Sanitizer(executable, program, place),
        listed,
        options.folder,
        left=lambda: options.budget - (time.monotonic() - started),
        limit_s=LIMIT_S,
        workers=options.workers,
    )
    for job, run in runs:
        if job.fault is not None:
            fault = by_name[job.fault]
            result = record["faults"][fault.name] = judge_planted(listed, job, fault.says, run)
            print(f"{'found' if result['found'] else 'MISSED'}: {fault.name}, {run.seconds} s", flush=True)
        else:
            result = record["chunks"][key_of(job)] = judge_chunk(listed, job, run)
            if not result["clean"]:
                print(f"{key_of(job)}: {json.dumps(result, indent=1)[:3000]}", flush=True)
        record |= summary(listed, record["chunks"], record["faults"])
        write_json(record, options.out)
    record |= summary(listed, record["chunks"], record["faults"]) | {
        "seconds": round(time.monotonic() - started, 1)
    }
    write_json(record, options.out)
    for tool, result in record["tools"].items():
        verdict = "clean" if result["clean"] else "NOT clean"
        print(f"{tool:<10} {result['launches']:>5} launches, {verdict}, {result['seconds']} s of processes")
    succeeded = bool(record["complete"] and record["clean"] and record["all_faults_found"])
    print(f"{'all as it should be' if succeeded else 'NOT all as it should be'}: {options.out}", flush=True)
    return succeeded


def main() -> None:
    if sys.argv[1:2] == ["launch"]:
        launch(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--folder", type=Path, default=Path("build/product_sanitizers"), help="for files")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="launches a process")
    parser.add_argument("--workers", type=int, default=max(2, (os.cpu_count() or 2) * 3 // 4))
    parser.add_argument("--seed", type=int, default=SEED, help="of sizes and data")
    options = parser.parse_args()
    os.environ.setdefault("TILEWAVE_CACHE_DIR", str(Path(".cache/programs").resolve()))
    sys.exit(0 if check(options) else 1)


if __name__ == "__main__":
    main()
