"""What the model of the register file says of every large tile, before and after the pass. Needs no GPU.

    python benchmarks/register_file_page.py        # with the compiler of this environment and those given
    python benchmarks/register_file_page.py --nvrtc .cache/nvrtc-13.0.88/nvidia/cu13/lib

Writes benchmarks/results/register_file.json and from it the table in docs/register-file.md; with --check it
only compares the page with the JSON, and with --render only writes the page.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "register_file.json"
PAGE = ROOT / "docs" / "register-file.md"
MEASURED = ROOT / "benchmarks" / "results" / "reemitted_h200.json"
BEGIN, END = "<!-- predictions -->\n", "<!-- end of predictions -->"
BEGIN_MEASURED, END_MEASURED = "<!-- measured -->\n", "<!-- end of measured -->"
BEGIN_SPLIT, END_SPLIT = "<!-- split -->\n", "<!-- end of split -->"
Row = dict[str, Any]

# An H200, on which MEASURED was made.
_SMS, _CLOCK_MHZ, _LANES = 132, 1980, 128
_SPLIT_TILES = ("128x256", "256x128", "128x128")
_SPLIT_SIZES = (2048, 4096)
_DEPTH = 8


def measured() -> list[Row]:
    """A row for every instance, by this process's compiler."""
    from tilewave.compiler.sass import reemit
    from tilewave.kernels.build import compile_instance
    from tilewave.kernels.families import large_tile

    rows = []
    for instance in large_tile.instances():
        program, kernel = compile_instance(instance, "sm_90a")
        outcome = reemit(program, kernel.symbol)
        row: Row = {"compiler": program.compiler, "instance": instance.name, "reason": outcome.reason}
        if outcome.report is not None:
            before, after = outcome.report.before, outcome.report.after
            row |= {
                "multiply_adds": before.multiply_adds,
                "others": after.others,
                "slots_before": before.cycles,
                "slots_after": after.cycles,
                "registers": outcome.report.registers,
            }
        rows.append(row)
        print(instance.name, outcome.reason or outcome.report, file=sys.stderr, flush=True)
    return rows


def table(rows: list[Row]) -> str:
    """One line for every instance, with the figures of each compiler side by side."""
    compilers = list(dict.fromkeys(row["compiler"] for row in rows))
    lines = [
        "| kernel | " + " | ".join(f"others, before, after ({compiler})" for compiler in compilers) + " |",
        "| --- |" + " --- |" * len(compilers),
    ]
    for name in dict.fromkeys(row["instance"] for row in rows):
        cells = []
        for compiler in compilers:
            row = next(r for r in rows if (r["instance"], r["compiler"]) == (name, compiler))
            if row["reason"]:
                cells.append(row["reason"])
                continue
            each = [row[key] / row["multiply_adds"] for key in ("slots_before", "slots_after")]
            cells.append(f"{row['others']}, {each[0]:.3f}, {each[1]:.3f}")
        lines.append(f"| `{name.removeprefix('large_tile_')}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def measured_table(record: dict[str, Any]) -> str:
    """TFLOP/s on an H200: the compiler's loop, the new one, and its ratio to cuBLAS."""
    instances = record["instances"]
    sizes = sorted({size for row in instances.values() for size in row.get("rates", {})}, key=int)
    lines = ["| kernel | " + " | ".join(sizes) + " |", "| --- |" + " --- |" * len(sizes)]
    for name in sorted(instances, key=lambda name: not name.endswith("_16")):
        row, rates = instances[name], instances[name].get("rates", {})
        cells = [
            f"{rates[size]['compiler']:.1f}, {rates[size]['reemitted']:.1f}, "
            f"{rates[size]['reemitted/cuBLAS']:.3f}x"
            if size in rates
            else "not emitted then"
            if row["reason"]
            else "not timed"
            for size in sizes
        ]
        lines.append(f"| `{name.removeprefix('large_tile_')}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def split_table(record: dict[str, Any]) -> str:
    """Slots per FFMA and clocks beside the loop, from two sizes whose tiles differ only in their depth."""
    lines = [
        "| kernel | predicted slots per FFMA | measured | clocks of a tile beside its slices |",
        "| --- | --- | --- | --- |",
    ]
    for name, row in record["instances"].items():
        _, _, tile, *_ = name.split("_")
        if tile not in _SPLIT_TILES or not {str(size) for size in _SPLIT_SIZES} <= set(row.get("rates", {})):
            continue
        bm, bn = (int(extent) for extent in tile.split("x"))
        clocks = []
        for size in _SPLIT_SIZES:
            rates = row["rates"][str(size)]
            whole = "reemitted" if rates["schedule"] == "data-parallel" else "data-parallel"
            tiles_of_busiest = -(-(size // bm) * (size // bn) // _SMS)
            clocks.append(2e-6 * size**3 / rates[whole] * _CLOCK_MHZ / tiles_of_busiest)
        slices = [size // _DEPTH for size in _SPLIT_SIZES]
        a_slice = (clocks[1] - clocks[0]) / (slices[1] - slices[0])
        beside = clocks[0] - slices[0] * a_slice
        measured = a_slice / (bm * bn * _DEPTH / _LANES)
        predicted = row["report"].split("->")[1].split(";")[0].strip()
        label = name.removeprefix("large_tile_")
        lines.append(f"| `{label}` | {predicted} | {measured:.3f} | {beside:,.0f} |")
    return "\n".join(lines) + "\n"


def with_table(page: str, rows: list[Row]) -> str:
    """The page with its tables made anew."""
    readings = json.loads(MEASURED.read_text(encoding="utf-8"))
    for begin, end, text in (
        (BEGIN, END, table(rows)),
        (BEGIN_MEASURED, END_MEASURED, measured_table(readings)),
        (BEGIN_SPLIT, END_SPLIT, split_table(readings)),
    ):
        head, rest = page.split(begin)
        page = head + begin + text + end + rest.split(end)[1]
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvrtc", action="append", default=[], help="another NVRTC to compile with")
    parser.add_argument("--print", action="store_true", help="only compile, and print the rows as JSON")
    parser.add_argument("--check", action="store_true", help="only compare page and JSON")
    parser.add_argument("--render", action="store_true", help="only write the page from the JSON")
    options = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    if options.check:
        rows = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
        sys.exit("docs/register-file.md differs from its JSON" if with_table(page, rows) != page else 0)
    if options.render:
        PAGE.write_text(with_table(page, json.loads(RECORD.read_text(encoding="utf-8"))["rows"]), "utf-8")
        return
    if options.print:
        json.dump(measured(), sys.stdout)
        return
    rows = measured()
    for path in options.nvrtc:  # a process has one NVRTC: others need a process of their own
        command = [sys.executable, __file__, "--print"]
        environment = os.environ | {"TILEWAVE_NVRTC": path}
        answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        rows += json.loads(answer.stdout)
    record = {"command": "python benchmarks/register_file_page.py", "rows": rows}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(with_table(page, rows), encoding="utf-8")


if __name__ == "__main__":
    main()
