"""Suites of products to measure: real workloads, and squares with their awkward neighbours."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class SuiteProduct:
    """One product of a suite: C (m x n) = A (m x k) B (k x n), ``batch`` times.

    A transposed operand is stored with its other axis contiguous. ``shared_a`` and ``shared_b``: one matrix
    for the whole batch.
    """

    name: str
    family: str
    m: int
    n: int
    k: int
    transposed_a: bool = False
    transposed_b: bool = False
    batch: int = 1
    shared_a: bool = False
    shared_b: bool = False
    source: str = ""

    def __str__(self) -> str:
        letters = ("T" if self.transposed_a else "N") + ("T" if self.transposed_b else "N")
        times = f"{self.batch} times " if self.batch > 1 else ""
        shared = " shared A" if self.shared_a else " shared B" if self.shared_b else ""
        return f"{times}{self.m} x {self.n} x {self.k} {letters}{shared}"

    @property
    def flops(self) -> int:
        """Operations: two a multiply-add."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def nbytes(self) -> int:
        """Bytes that must move at least: every operand once."""
        a = self.m * self.k * (1 if self.shared_a else self.batch)
        b = self.k * self.n * (1 if self.shared_b else self.batch)
        return 4 * (a + b + self.m * self.n * self.batch)


def workloads() -> list[SuiteProduct]:
    """Forty products of real programs, each with where it was found (`suites/workloads.csv`)."""
    text = resources.files("tilewave.bench").joinpath("suites/workloads.csv").read_text(encoding="utf-8")
    return [
        SuiteProduct(
            row["id"],
            row["family"],
            int(row["M"]),
            int(row["N"]),
            int(row["K"]),
            row["transA"] == "T",
            row["transB"] == "T",
            int(row["batch"]),
            row["strideA0"] == "0",
            row["strideB0"] == "0",
            row["source"],
        )
        for row in csv.DictReader(text.splitlines())
    ]


def squares() -> list[SuiteProduct]:
    """Squares from 256 to 8192 and their neighbours one larger."""
    sizes = [256, 512, 768, 1024, 1536, 2048, 3000, 3072, 4096, 6144, 8192]
    return [
        SuiteProduct(f"n{n}", "square", n, n, n)
        for size in sizes
        for n in ((size, size + 1) if size % 256 == 0 else (size,))
    ]
