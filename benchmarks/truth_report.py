"""Merges the profiler's readings with the emulator's counts into the committed table and its page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilewave.lab.registry import load_rungs
from tilewave.lab.truth import Plan, combined, map_from_json, map_to_json
from tilewave.lab.truth_emulated import emulate_maps, emulate_rung

RESULT = Path("benchmarks/results/truth_table_h200.json")
PAGE = Path("docs/truth-table.md")
#: What each of the emulator's counters of a rung is called among the profiler's.
RUNG_FIGURES = (
    "thread_fma",
    "shared_loads",
    "shared_load_passes",
    "shared_load_conflicts",
    "shared_stores",
    "shared_store_passes",
    "shared_store_conflicts",
    "global_loads",
    "global_load_sectors",
    "global_stores",
    "global_store_sectors",
    "warp_instructions",
)


def merge(bundle: Path, hardware: Path) -> None:
    """Write the table (JSON) and the page made from it."""
    plan = Plan.load(bundle / "plan.json")
    record = json.loads(hardware.read_text())
    if record["seed"] != plan.seed:
        raise SystemExit(f"{hardware} was read with seed {record['seed']}, the bundle has {plan.seed}")
    rungs = {rung.title: rung for rung in load_rungs()}
    maps, ladder = [], []
    for planned in plan.launches:
        entries = record["readings"].get(str(planned.index))
        if entries is None:
            continue
        if planned.shape is not None:
            counts = emulate_rung(rungs[planned.label], planned.shape)
            emulator = {name: counts[name] for name in RUNG_FIGURES}
            ladder.append(
                {"rung": planned.label, "shape": planned.shape, "hardware": entries[0], "emulator": emulator}
            )
        else:
            for index, figures in zip(planned.maps, entries, strict=True):
                maps.append({**map_to_json(plan.maps[index]), "hardware": figures})
    table = {
        "machine": record["machine"],
        "compiler": record["compiler"],
        "seed": record["seed"],
        "metrics": record["metrics"],
        "missing": record["missing"],
        "maps": maps,
        "rungs": ladder,
    }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(one_entry_a_line(table))
    PAGE.write_text(page(table))
    print(f"{len(maps)} lane maps and {len(ladder)} launches of rungs: {RESULT}, {PAGE}")


def one_entry_a_line(table: dict[str, Any]) -> str:
    """JSON in which each lane map and each rung has a line of its own."""
    parts = []
    for name, value in table.items():
        if name in ("maps", "rungs"):
            rows = ",\n  ".join(json.dumps(entry) for entry in value)
            parts.append(f'"{name}": [\n  {rows}\n ]')
        else:
            parts.append(f'"{name}": {json.dumps(value)}')
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def page(table: dict[str, Any]) -> str:
    """The table for people, in Markdown."""
    return "\n".join([*_introduction(table), *_maps(table["maps"]), *_rungs(table["rungs"])]) + "\n"


def _introduction(table: dict[str, Any]) -> Iterator[str]:
    machine = table["machine"]
    yield "# What the hardware counts, and what the emulator counts"
    yield ""
    yield "Made by `benchmarks/truth_table.py` from `benchmarks/results/truth_table_h200.json`: do not edit."
    yield f"Hardware: {machine['gpu']} (driver), {machine['ncu']}; kernels compiled by {table['compiler']}."
    yield ""
    yield "A probe (`lab/probes/access.cu`) executes one access of a known lane map; the profiler's count"
    yield "stands beside the emulator's, which runs the same PTX."
    yield ""


def _maps(maps: list[dict[str, Any]]) -> Iterator[str]:
    compared: Counter[tuple[str, str]] = Counter()
    equal: Counter[tuple[str, str]] = Counter()
    different: dict[str, list[str]] = {}
    named: dict[str, list[str]] = {}
    for entry in maps:
        lane_map = map_from_json(entry)
        emulator = emulate_maps([lane_map])
        hardware = combined(entry["hardware"])
        for figure, value in emulator.items():
            if figure not in hardware:
                continue
            compared[lane_map.kind, figure] += 1
            equal[lane_map.kind, figure] += value == hardware[figure]
        if any(hardware.get(figure, value) != value for figure, value in emulator.items()):
            different.setdefault(lane_map.kind, []).append(_row(entry, emulator))
        if not lane_map.name.startswith("random") and ";" not in lane_map.name:
            named.setdefault(lane_map.kind, []).append(_row(entry, emulator))
    yield "## Summary of the lane maps"
    yield ""
    yield "| access | figure | maps | equal |"
    yield "|---|---|---|---|"
    for (kind, figure), count in compared.items():
        yield f"| {kind.replace('_', ' ')} | {figure} | {count} | {equal[kind, figure]} |"
    yield ""
    for title, groups in (("Maps that differ", different), ("Named maps", named)):
        yield f"## {title}"
        yield ""
        if not groups:
            yield "None."
            yield ""
        for kind, rows in groups.items():
            figures = [*emulate_maps([next(map_from_json(e) for e in maps if e["kind"] == kind)])]
            yield f"### {kind.replace('_', ' ')} bytes"
            yield ""
            yield f"| lane map | {' | '.join(figures)} |"
            yield "|---|" + "---|" * len(figures)
            yield from rows
            yield ""


def _row(entry: dict[str, Any], emulator: dict[str, int]) -> str:
    hardware = combined(entry["hardware"])
    cells = [_cell(hardware.get(figure), value) for figure, value in emulator.items()]
    return f"| {entry['name']} | {' | '.join(cells)} |"


def _cell(hardware: int | None, emulator: int) -> str:
    if hardware is None:
        return f"({emulator:,})"
    return f"{hardware:,}" if hardware == emulator else f"**{hardware:,}, emulator {emulator:,}**"


def _rungs(ladder: list[dict[str, Any]]) -> Iterator[str]:
    yield "## Rungs"
    yield ""
    yield "Hardware / emulator where they differ; one figure where they are equal."
    yield ""
    yield f"| rung | M x N x K | {' | '.join(name.replace('_', ' ') for name in RUNG_FIGURES)} |"
    yield "|---|---|" + "---|" * len(RUNG_FIGURES)
    for entry in ladder:
        cells = []
        for name in RUNG_FIGURES:
            hardware, emulator = entry["hardware"].get(name), entry["emulator"][name]
            if hardware is None:
                cells.append(f"- / {emulator:,}")
            elif hardware == emulator:
                cells.append(f"{hardware:,}")
            else:
                cells.append(f"{hardware:,} / {emulator:,}")
        yield f"| {entry['rung']} | {' x '.join(map(str, entry['shape']))} | {' | '.join(cells)} |"
