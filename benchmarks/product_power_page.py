"""The tables of the library's products in docs/power-and-profile.md, from the records of an H200.

    python benchmarks/product_power_page.py            # needs no GPU

`product_power.py` makes the one record, `product_profile.py` the other; a page without one says so.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "power-and-profile.md"
RESULTS = ROOT / "benchmarks" / "results"
SUSTAINED, PROFILED = "product_power_h200.json", "product_profile_h200.json"


def cell(value: float | None, digits: int) -> str:
    """A figure, or nothing where there is none."""
    return "" if value is None else f"{value:.{digits}f}"


def sustained(record: dict[str, Any]) -> str:
    """A line for each contender of the long run."""
    lines = [
        f"At N = {record['size']}:",
        "",
        "| contender | turns | TFLOP/s | times cuBLAS | W | J a call | of cuBLAS's | MHz | °C | power cap |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, one in record["contenders"].items():
        cells = [
            record["names"].get(name, name),
            f"{one['turns']}",
            cell(one["tflops"], 2),
            cell(one["ratio"], 3),
            cell(one["watts"], 0),
            cell(one["joules"], 2),
            cell(one["joules_ratio"], 3),
            cell(one["mhz"], 0),
            cell(one["celsius"], 0),
            "" if one["power_cap_share"] is None else f"{one['power_cap_share']:.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"\n* {name}: {why}" for name, why in record["failed"].items()]
    return "\n".join(lines) + "\n"


def profiled(record: dict[str, Any]) -> str:
    """A line for each launch that the profiler saw."""
    lines = [
        f"At N = {record['size']}, wanted of ours: {record['wanted_fma_percent']:.0f} % of the FMA pipe:",
        "",
        "| product | kernel | FMA pipe, % | its cycles, % | issue slots, % | tensor pipe, % | ms |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, launches in record["products"].items():
        for one in launches:
            figures = one["figures"]
            kernel = one["kernel"].partition("(")[0].removeprefix("void ")
            keys = ("fma_pipe_percent", "fma_cycles_percent", "issue_percent", "tensor_cycles_percent")
            cells = [name, f"`{kernel}`", *(cell(figures.get(key), 1) for key in keys)]
            cells.append(cell(figures.get("milliseconds"), 3))
            lines.append(f"| {' | '.join(cells)} |")
    if "error" in record:
        lines.append(f"\n* {record['error'].splitlines()[0]}")
    return "\n".join(lines) + "\n"


def part(step: str, path: Path, made: Any) -> str:
    """What the page says of a record, or that there is none."""
    if not path.exists():
        return f"Not measured yet (step `{step}` of `benchmarks/gpu_evidence.py`).\n"
    return str(made(json.loads(path.read_text(encoding="utf-8"))))


def page(text: str, results: Path = RESULTS) -> str:
    """The page's text with both tables between their markers."""
    parts = {
        "products sustained": part("product-power", results / SUSTAINED, sustained),
        "products profiled": part("product-profile", results / PROFILED, profiled),
    }
    for name, table in parts.items():
        between = re.compile(f"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        text, found = between.subn(lambda match, table=table: f"{match[1]}{table}{match[2]}", text)
        if found != 1:
            sys.exit(f"the page has {found} places for {name}; one is needed")
    return text


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
