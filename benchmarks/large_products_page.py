"""The table of large products in docs/register-file.md, from the record of `benchmarks/large_products.py`.

python benchmarks/large_products_page.py            # needs no GPU
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "large_products_h200.json"
PAGE = ROOT / "docs" / "register-file.md"
BEGIN, END = "<!-- large products -->\n", "<!-- end of large products -->"
_OLD_LOOP = ", compiler's loop"


def row(product: str, reading: dict[str, Any]) -> str:
    """The planner's choice, which comes first in a reading, beside cuBLAS, its prediction and the fastest."""
    kernels = reading["kernels"]
    chosen = next(iter(kernels))
    one = kernels[chosen]
    fastest = max(
        (name for name in kernels if not name.endswith(_OLD_LOOP)), key=lambda name: kernels[name]["tflops"]
    )
    old = kernels.get(chosen + _OLD_LOOP)
    best = "the same" if fastest == chosen else f"{fastest}: {kernels[fastest]['tflops']:.1f}"
    cells = [
        product,
        f"{reading['cuBLAS']:.1f}",
        chosen,
        f"{one['tflops']:.1f}",
        f"{one['over cuBLAS']:.3f}",
        f"{one['predicted']:.1f}",
        f"{old['tflops']:.1f}" if old else "",
        best,
    ]
    return f"| {' | '.join(cells)} |"


def table(record: dict[str, Any]) -> str:
    """A line for every product; those that compare spacings of the loop's instructions are left out."""
    lines = [
        "| product | cuBLAS | planner's choice | TFLOP/s | times cuBLAS | predicted "
        "| with the compiler's loop | fastest of all |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    products = record["products"].items()
    lines += [
        row(name, reading)
        for name, reading in products
        if not name.endswith("spacing") and "error" not in reading
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    PAGE.write_text(head + BEGIN + table(record) + END + tail, encoding="utf-8")


if __name__ == "__main__":
    main()
