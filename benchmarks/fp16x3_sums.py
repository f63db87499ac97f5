"""Error of fp16x3 by how the tensor core's sums are promoted, beside float32 chains of a K cut in pieces.

    python benchmarks/fp16x3_sums.py --json FILE [--seed N] [--size N]

By models (`tilewave.precision.fp16x3`, and chains of fused multiply-adds), no GPU: relative error in the
Frobenius norm on N(0,1) and U(0,1), whose sums all have one sign. A library cuts K where an output has too
few tiles for the GPU; its pieces are added in order, in float32. Prints the table of docs/precision.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewave.bench.accuracy.contenders import chain
from tilewave.bench.environment import Environment
from tilewave.precision import fp16x3
from tilewave.precision.data_sets import draw

Float32 = NDArray[np.float32]

LENGTHS = (1024, 1536, 2048, 4096, 8192, 16384)
KINDS = {
    "64": fp16x3.COARSE,
    "32": fp16x3.Sums(32),
    "16": fp16x3.Sums(16),
    "32, runs": fp16x3.Sums(32, 8),
    "16, runs": fp16x3.FINE,
}
"""What is added to float32 sums every so many of K; with runs, to a sum of a run first."""
PIECES = (1, 2, 4, 8, 16, 32, 64)


def cut_chains(a: Float32, b: Float32, pieces: int) -> Float32:
    """The product with K in ``pieces``: a chain of each, added in order."""
    ends = [a.shape[1] * i // pieces for i in range(pieces + 1)]
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for first, end in itertools.pairwise(ends):
        total += chain(a[:, first:end], b[first:end])
    return total


def errors(name: str, k: int, size: int, rng: np.random.Generator) -> dict[str, float]:
    """Relative errors of one product, by kinds of sums and numbers of pieces."""
    a, b = draw(name, rng, size, k, size)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    rows, columns = fp16x3.split_rows(a), fp16x3.split_rows(np.ascontiguousarray(b.T))
    assert not fp16x3.must_recompute(rows.guard, columns.guard, k).any()
    found: dict[str, Float32] = {}
    for kind, sums in KINDS.items():
        total = fp16x3.sum_products(rows, columns, sums)
        found[kind] = fp16x3.unscale(total, rows.shift, columns.shift)
    for pieces in PIECES:
        found[f"K / {pieces}"] = cut_chains(a, b, pieces)
    return {key: float(np.linalg.norm(c - exact) / np.linalg.norm(exact)) for key, c in found.items()}


def table(record: dict[str, Any]) -> str:
    """The record in Markdown: errors in units of 1e-7."""
    names = [*KINDS, *(f"K / {pieces}" for pieces in PIECES)]
    lines = [f"| data | K | {' | '.join(names)} |", "|---|---:|" + "---:|" * len(names)]
    for one in record["products"]:
        cells = " | ".join(f"{one['errors'][name] * 1e7:.2f}" for name in names)
        lines.append(f"| {one['data']} | {one['k']:,} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="where the record goes")
    parser.add_argument("--seed", type=int, default=10)
    parser.add_argument("--size", type=int, default=96, help="rows and columns of the outputs")
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    record: dict[str, Any] = {
        "environment": Environment.capture().to_json(),
        "seed": options.seed,
        "size": options.size,
        "products": [
            {"data": name, "k": k, "errors": errors(name, k, options.size, rng)}
            for name in ("normal", "uniform")
            for k in LENGTHS
        ],
    }
    options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(table(record))


if __name__ == "__main__":
    main()
