"""The truth table: hardware counters of known accesses and of every rung, beside the emulator's.

Without a GPU:      python benchmarks/truth_table.py prepare --bundle build/truth
On the GPU machine: python benchmarks/truth_table.py profile --bundle build/truth --out DIR --budget 60
Without a GPU:      python benchmarks/truth_table.py merge --bundle build/truth --hardware DIR/hardware.json

`prepare` plans what the committed table lacks: named maps and rungs (as they are now) that it does not have,
and fresh random maps (`--random`: that many percent of the usual number). `profile` needs ncu, numpy and
cuda-bindings only; it saves after every run of ncu, and resumes from there. `merge` adds the readings to the
table; without `--hardware` it only makes the page anew.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import time
from pathlib import Path

from tilewave.errors import ToolchainError
from tilewave.lab import ncu as profiler
from tilewave.lab.probes.maps import LaneMap
from tilewave.lab.truth import (
    METRICS,
    Plan,
    Planned,
    digest_of,
    group_of,
    plan_maps,
    readings,
    run_launches,
    select_metrics,
)

RANDOM_MAPS = {"shared_load": 120, "shared_store": 45, "global_load": 45, "global_store": 24, "copy": 80}
RUNG_SHAPES = ((256, 256, 256), (201, 333, 77))
LAUNCHES_PER_RUN = {"rung": 13}
TABLE = Path("benchmarks/results/truth_table_h200.json")


def prepare(bundle: Path, seed: int, random_percent: float) -> None:
    """Compile probes and rungs and write the plan of what the table lacks."""
    from tilewave.compiler import compile_source
    from tilewave.device import get_spec
    from tilewave.lab.launches import launch_of
    from tilewave.lab.registry import load_rungs
    from tilewave.lab.truth_emulated import ARCH, GPU, compile_probes

    bundle.mkdir(parents=True, exist_ok=True)
    probes = compile_probes()
    (bundle / "access.cubin").write_bytes(probes.cubin)
    maps: list[LaneMap] = []
    planned: list[tuple[int, Planned]] = []
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {"maps": [], "rungs": []}
    known = {(entry["kind"], entry["name"]) for entry in table["maps"]}
    known_rungs = {(entry["rung"], entry["source"], tuple(entry["shape"])) for entry in table["rungs"]}
    counts = {group: round(count * random_percent / 100) for group, count in RANDOM_MAPS.items()}
    for priority, batch in plan_maps(seed, counts, known):
        kind = batch[0].kind
        indices = tuple(range(len(maps), len(maps) + len(batch)))
        maps += batch
        launch = Planned(
            0, group_of(kind), "access.cubin", f"probe_{kind}", (len(batch), 1, 1), (32, 1, 1), kind, indices
        )
        planned.append((priority, launch))
    for rung in load_rungs():
        digest = digest_of(rung.source().text)
        shapes = [shape for shape in RUNG_SHAPES if (rung.title, digest, shape) not in known_rungs]
        if not shapes:
            continue
        program = compile_source(rung.source(), rung.entries, ARCH)
        cubin = f"{rung.file}bin"
        (bundle / cubin).write_bytes(program.cubin)
        for m, n, k in shapes:
            found = launch_of(rung, m, n, k, get_spec(GPU))
            launch = Planned(
                0,
                "rung",
                cubin,
                program.kernels[found.entry].symbol,
                found.grid,
                found.block,
                rung.title,
                (),
                (m, n, k),
                digest,
                None if found.cut is None else found.integers,
                found.partial_floats,
                found.tickets,
            )
            planned.append((0, launch))
    planned.sort(key=lambda pair: pair[0])
    launches = tuple(Planned(**{**vars(launch), "index": index}) for index, (_, launch) in enumerate(planned))
    Plan(probes.compiler, ARCH, seed, tuple(maps), launches).save(bundle / "plan.json")
    print(f"{len(maps)} lane maps and {len(launches)} launches in {bundle} (seed {seed})")


def profile(bundle: Path, out: Path, budget: float) -> None:
    """Read the counters of as many launches as the budget allows; resume from an earlier file."""
    started = time.monotonic()
    plan = Plan.load(bundle / "plan.json")
    out.mkdir(parents=True, exist_ok=True)
    file = out / "hardware.json"
    record = json.loads(file.read_text()) if file.exists() else {"readings": {}, "missing": {}, "errors": []}
    executable = profiler.find_ncu()
    available = profiler.available_metrics(executable)
    interesting = sorted(
        name
        for name in available
        if any(
            word in name for word in ("lsu", "ldgsts", "inst_executed", "shared", "data_bank", "xbar2l1tex")
        )
    )
    (out / "metrics.txt").write_text("\n".join(interesting) + "\n")
    print(f"{executable}: {len(available)} metrics; {time.monotonic() - started:.1f} s", flush=True)
    record |= {"seed": plan.seed, "compiler": plan.compiler, "machine": machine(executable)}
    chosen = {}
    for group in METRICS:
        chosen[group], record["missing"][group] = select_metrics(group, available)
    record["metrics"] = chosen
    seconds: dict[str, float] = {}
    for chunk in chunks(plan, set(record["readings"])):
        group = chunk[0].group
        expected = seconds.get(group, 0.2) * len(chunk) + 5
        left = budget - (time.monotonic() - started)
        if left < expected:
            print(
                f"budget spent: {left:.0f} s left, {expected:.0f} s needed for the next {len(chunk)} launches"
            )
            break
        begun = time.monotonic()
        numbers = ",".join(str(planned.index) for planned in chunk)
        command = [sys.executable, __file__, "launch", "--bundle", str(bundle), "--launches", numbers]
        try:
            counters, refused = profiler.profile(
                executable, command, list(chosen[group].values()), timeout=max(left, 10)
            )
            if len(counters) != len(chunk):
                raise ToolchainError(f"{len(chunk)} launches gave {len(counters)} rows")
            for planned, row in zip(chunk, counters, strict=True):
                record["readings"][str(planned.index)] = readings(planned, row, chosen[group])
        except (ToolchainError, subprocess.TimeoutExpired, ValueError, KeyError) as error:
            record["errors"].append(f"launches {numbers}: {type(error).__name__}: {error}"[:3000])
            print(record["errors"][-1], flush=True)
            refused = []
        chosen[group] = {figure: name for figure, name in chosen[group].items() if name not in refused}
        record["missing"][group] += refused
        seconds[group] = (time.monotonic() - begun) / len(chunk)
        temporary = file.with_suffix(".new")
        temporary.write_text(json.dumps(record))
        temporary.replace(file)
        print(f"{group:13} {len(chunk):3} launches, {seconds[group]:.3f} s each", flush=True)
    done = len(record["readings"])
    print(f"{done} of {len(plan.launches)} launches read in {time.monotonic() - started:.0f} s: {file}")


def chunks(plan: Plan, done: set[str]) -> list[list[Planned]]:
    """Launches that remain, in the order of their priority, by what one run of ncu reads."""
    parts: list[list[Planned]] = []
    for planned in plan.launches:
        if str(planned.index) in done:
            continue
        size = LAUNCHES_PER_RUN.get(planned.group, 40)
        if parts and parts[-1][0].group == planned.group and len(parts[-1]) < size:
            parts[-1].append(planned)
        else:
            parts.append([planned])
    return parts


def machine(executable: str) -> dict[str, str]:
    """What the readings depend on."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answers = {}
    for name, command in (("gpu", query), ("ncu", [executable, "--version"])):
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
        except OSError as error:
            text = f"unknown ({error})"
        answers[name] = text.splitlines()[-1] if text else "unknown"
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("prepare", "profile", "launch", "merge"):
        command = commands.add_parser(name)
        command.add_argument("--bundle", type=Path, default=Path("build/truth"))
        if name == "prepare":
            command.add_argument("--seed", type=int, default=secrets.randbits(31))
            command.add_argument("--random", type=float, default=100.0, help="percent")
        elif name == "profile":
            command.add_argument("--out", type=Path, required=True)
            command.add_argument("--budget", type=float, default=240, help="seconds")
        elif name == "launch":
            command.add_argument("--launches", required=True, help="indices, separated by commas")
        else:
            command.add_argument("--hardware", type=Path)
    options = parser.parse_args()
    if options.command == "prepare":
        prepare(options.bundle, options.seed, options.random)
    elif options.command == "profile":
        profile(options.bundle, options.out, options.budget)
    elif options.command == "launch":
        plan = Plan.load(options.bundle / "plan.json")
        chosen = map(int, options.launches.split(","))
        run_launches(options.bundle, plan, [plan.launches[index] for index in chosen])
    else:
        from truth_report import merge

        merge(TABLE, options.bundle, options.hardware)


if __name__ == "__main__":
    main()
