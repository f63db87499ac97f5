"""Adds the profiler's readings to the committed table; makes the tables of docs/truth-table.md from it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilewave.lab.probes.maps import KINDS
from tilewave.lab.registry import load_rungs
from tilewave.lab.truth import Plan, comparable, digest_of, map_from_json, map_to_json
from tilewave.lab.truth_emulated import emulate_maps, emulate_rung
from truth_rivals import rivals

PAGE = Path("docs/truth-table.md")

FIGURES = ("instructions", "passes", "conflicts", "sectors")

RUNG_FIGURES = (
    "thread_fma",
    "shared_loads",
    "shared_load_passes",
    "shared_load_conflicts",
    "shared_stores",
    "shared_store_passes",
    "shared_store_conflicts",
    "copies",
    "copy_conflicts",
    "global_load_requests",
    "global_load_sectors",
    "global_store_requests",
    "global_store_sectors",
)
"""The profiler's figures of a rung that the emulator counts too."""


def merge(table_path: Path, bundle: Path, hardware: Path | None) -> None:
    """Add readings to the table (JSON), then make the page's tables anew."""
    table: dict[str, Any] = {"readings": [], "maps": [], "rungs": []}
    if table_path.exists():
        table = json.loads(table_path.read_text())
    if hardware is not None:
        _add(table, Plan.load(bundle / "plan.json"), json.loads(hardware.read_text()))
        table_path.parent.mkdir(parents=True, exist_ok=True)
        table_path.write_text(one_entry_a_line(table))
    text = PAGE.read_text()
    for name, lines in (
        ("readings", _readings(table)),
        ("maps", _maps(table["maps"])),
        ("rivals", rivals(table["maps"])),
        ("rungs", _rungs(table["rungs"])),
        ("instructions", _instructions(table["rungs"])),
    ):
        text = replace_part(text, name, "\n".join(lines))
    PAGE.write_text(text)
    print(f"{len(table['maps'])} lane maps and {len(table['rungs'])} launches of rungs: {table_path}, {PAGE}")


def _add(table: dict[str, Any], plan: Plan, record: dict[str, Any]) -> None:
    if record["seed"] != plan.seed:
        raise SystemExit(f"read with seed {record['seed']}, but the bundle has {plan.seed}")
    if any(reading["seed"] == plan.seed for reading in table["readings"]):
        raise SystemExit(f"the readings with seed {plan.seed} are in the table already")
    number = len(table["readings"])
    names = ("machine", "compiler", "seed", "metrics", "missing")
    table["readings"].append({name: record[name] for name in names})
    rungs = {rung.title: rung for rung in load_rungs()}
    for planned in plan.launches:
        entries = record["readings"].get(str(planned.index))
        if entries is None:
            continue
        if planned.shape is None:
            for index, figures in zip(planned.maps, entries, strict=True):
                entry = {**map_to_json(plan.maps[index]), "reading": number, "hardware": figures}
                table["maps"].append(entry)
            continue
        rung = rungs[planned.label]
        if digest_of(rung.source().text) != planned.source:
            print(f"{planned.label} has changed since it was read: left out")
            continue
        emulated = emulate_rung(rung, planned.shape)
        shape = [*planned.shape]
        kept = [e for e in table["rungs"] if (e["rung"], e["shape"]) != (planned.label, shape)]
        kept.append(
            {
                "rung": planned.label,
                "shape": shape,
                "source": planned.source,
                "reading": number,
                "hardware": entries[0],
                "emulator": {name: count for name, count in emulated.counts.items() if count},
                "classes": emulated.classes,
                "spills": emulated.spills,
            }
        )
        table["rungs"] = sorted(kept, key=lambda e: (e["rung"], -e["shape"][0]))


def one_entry_a_line(table: dict[str, Any]) -> str:
    """JSON in which each reading, each lane map and each rung has a line of its own."""
    parts = []
    for name, value in table.items():
        rows = ",\n  ".join(json.dumps(entry) for entry in value)
        parts.append(f'"{name}": [\n  {rows}\n ]')
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def replace_part(text: str, name: str, part: str) -> str:
    """A page with the part between its two comments of that name replaced."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{PAGE} has no part {name}")
    return pattern.sub(lambda found: f"{found[1]}{part}\n{found[2]}", text)


def _readings(table: dict[str, Any]) -> Iterator[str]:
    yield "| set | GPU, driver | ncu | NVRTC | lane maps | launches of rungs |"
    yield "|---|---|---|---|---|---|"
    maps = Counter(entry["reading"] for entry in table["maps"])
    rungs = Counter(entry["reading"] for entry in table["rungs"])
    for number, reading in enumerate(table["readings"]):
        machine = reading["machine"]
        version = machine["ncu"].removeprefix("Version ").split(" ")[0]
        compiler = reading["compiler"].removeprefix("NVRTC ")
        cells = (number + 1, machine["gpu"], version, compiler, f"{maps[number]:,}", rungs[number])
        yield f"| {' | '.join(map(str, cells))} |"


def _maps(maps: list[dict[str, Any]]) -> Iterator[str]:
    yield f"| access | lane maps | {' | '.join(FIGURES)} |"
    yield "|---|---|" + "---|" * len(FIGURES)
    for kind in KINDS:
        entries = [entry for entry in maps if entry["kind"] == kind]
        compared: Counter[str] = Counter()
        equal: Counter[str] = Counter()
        for entry in entries:
            lane_map = map_from_json(entry)
            emulator = emulate_maps([lane_map])
            for figure, value in comparable(lane_map, entry["hardware"]).items():
                if figure in emulator:
                    compared[figure] += 1
                    equal[figure] += value == emulator[figure]
        cells = [f"{equal[name]} of {compared[name]}" if compared[name] else "" for name in FIGURES]
        if entries:
            yield f"| {kind.replace('_', ' ')} | {len(entries)} | {' | '.join(cells)} |"


def _rungs(rungs: list[dict[str, Any]]) -> Iterator[str]:
    yield f"| rung | M x N x K | {' | '.join(name.replace('_', ' ') for name in RUNG_FIGURES)} |"
    yield "|---|---|" + "---|" * len(RUNG_FIGURES)
    for entry in rungs:
        hardware, emulator = entry["hardware"], entry["emulator"]
        counts = dict(emulator)
        for name in ("load", "store"):
            counts[f"global_{name}_requests"] = emulator.get(f"global_{name}s", 0)
        counts["global_load_sectors"] = emulator.get("global_load_sectors", 0) + emulator.get(
            "copy_sectors", 0
        )
        cells = []
        for name in RUNG_FIGURES:
            if name not in hardware:  # set 1 did not read conflicts of copies, which none of its rungs has
                cells.append("")
                continue
            ours, theirs = counts.get(name, 0), hardware[name]
            other = ours
            if name == "copy_conflicts":
                other = emulator.get("copy_hit_conflicts", 0)
            elif name == "global_load_requests":  # those of copies with an active lane are among them
                other += emulator.get("copies", 0)
            span = f"{ours:,}" if other == ours else f"{min(ours, other):,} to {max(ours, other):,}"
            cells.append(f"{theirs:,}" if ours == other == theirs else f"**{theirs:,} / {span}**")
        yield f"| {entry['rung']} | {' x '.join(map(str, entry['shape']))} | {' | '.join(cells)} |"


def _instructions(rungs: list[dict[str, Any]]) -> Iterator[str]:
    yield (
        "| rung | M x N x K | all: machine / PTX | ratio | FMA | shared and global "
        "| global and copies without a lane | local | the rest: machine / PTX |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for entry in rungs:
        hardware, emulator = entry["hardware"], entry["emulator"]
        total, ours = hardware["warp_instructions"], emulator["warp_instructions"]
        memory = ("shared_loads", "shared_stores", "global_loads", "global_stores", "copies")
        theirs_memory = sum(hardware.get(name, 0) for name in memory)
        our_memory = sum(emulator.get(name, 0) for name in memory)
        # Requests of copies are counted among those of loads.
        idle = hardware.get("copies", 0) + sum(
            hardware[f"global_{way}s"] - hardware[f"global_{way}_requests"] for way in ("load", "store")
        )
        local = hardware["local_loads"] + hardware["local_stores"]
        fma = hardware["thread_fma"] // 32
        memory_of_ptx = sum(
            count
            for name, count in entry["classes"].items()
            if name.split("_")[0] in ("shared", "global", "copy")
        )
        rest = total - fma - theirs_memory - local, ours - emulator["thread_fma"] // 32 - memory_of_ptx
        cells = (
            f"{total:,} / {ours:,}",
            f"{total / ours:.2f}",
            f"{fma:,}",
            f"{our_memory:,}"
            if our_memory == theirs_memory - idle
            else f"{theirs_memory - idle:,} / {our_memory:,}",
            f"{idle:,}",
            f"{local:,}",
            f"{rest[0]:,} / {rest[1]:,}",
        )
        yield f"| {entry['rung']} | {' x '.join(map(str, entry['shape']))} | {' | '.join(cells)} |"
