"""Registers of rungs in other spellings: prints the tables of docs/tried-in-vain.md (Markdown).

Each spelling is the rung's own file with a few texts replaced, compiled for the GB10's and the H200's
architecture; nothing runs. Usage: python benchmarks/rung_spellings.py
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewave.compiler import Source, compile_source, compiler_version
from tilewave.lab.registry import get_rung

Change = tuple[str, str]

ARCHITECTURES = ("sm_121", "sm_90")

COPY_LOOPS = "#pragma unroll\n    for (int i = tid"
SLICE_LOOP = "#pragma unroll\n    for (int k = 0"
TRIP_COUNT = "  __builtin_assume(0 <= tid && tid < THREADS);  // lets the compiler unroll the copies\n"
READ_A = "      for (int i = 0; i < TM; ++i) a[i] = As[ty * TM + i][k];\n"
READ_B = "      for (int j = 0; j < TN; ++j) b[j] = Bs[k][tx * TN + j];\n"
ORIGIN = "row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;"

COURSE: dict[str, Sequence[Change]] = {
    "as it is": [],
    "A read before B": [(READ_B + READ_A, READ_A + READ_B)],
    "no parentheses around `k0 + c` and `col0 + c`": [("(k0 + c)]", "k0 + c]"), ("(col0 + c)]", "col0 + c]")],
    "trip count of the copies left unknown": [(TRIP_COUNT, "")],
    "copies not unrolled": [(COPY_LOOPS, COPY_LOOPS.replace("unroll", "unroll 1"))],
    "loop over the slice not unrolled": [(SLICE_LOOP, SLICE_LOOP.replace("unroll", "unroll 1"))],
    "row and column of a copy counted separately": [
        (
            "for (int i = tid; i < BM * BK; i += THREADS) {\n      const int r = i / BK, c = i % BK;",
            "for (int s = 0; s < BM; s += THREADS / BK) {\n      const int r = s + tid / BK, c = tid % BK;",
        ),
        (
            "for (int i = tid; i < BK * BN; i += THREADS) {\n      const int r = i / BN, c = i % BN;",
            "for (int s = 0; s < BK; s += THREADS / BN) {\n      const int r = s + tid / BN, c = tid % BN;",
        ),
    ],
    "shared arrays `__align__(16)`": [("__shared__ float", "__shared__ __align__(16) float")],
    "linear block index": [
        (ORIGIN, "n = (N + BN - 1) / BN, row0 = blockIdx.x / n * BM, col0 = blockIdx.x % n * BN;")
    ],
    "32-bit offsets": [("(size_t)", "")],
    "no tests at the edges of A and B (right only where tiles fit)": [
        ("(row0 + r < M && k0 + c < K) ? ", ""),
        ("(k0 + c)] : 0.0f", "(k0 + c)]"),
        ("(k0 + r < K && col0 + c < N) ? ", ""),
        ("(col0 + c)] : 0.0f", "(col0 + c)]"),
    ],
    "`__restrict__`": [(f"float* {name}", f"float* __restrict__ {name}") for name in "ABC"],
}

PRODUCTS = """      for (int j = 0; j < TN; ++j)
        for (int i = 0; i < TM; ++i) sum[i][j] += a[i] * b[j];"""
ROWS_OUTSIDE = """      for (int i = 0; i < TM; ++i)
        for (int j = 0; j < TN; ++j) sum[i][j] += a[i] * b[j];"""
PATCH_A = "      for (int i = 0; i < TM; ++i) a[i] = As[stage][k][patch_row(wy, ly, i)];\n"
PATCH_B = "      for (int j = 0; j < TN; ++j) b[j] = Bs[stage][k][patch_col(wx, lx, j)];\n"
ONE_BLOCK = ("__launch_bounds__(THREADS, 1)", "__launch_bounds__(THREADS)")
A_FIRST = (PATCH_B + PATCH_A, PATCH_A + PATCH_B)
SKIP = ("    copy((stage + STAGES - 1)", "    if (k0 + (STAGES - 1) * BK < K) copy((stage + STAGES - 1)")
MAP_OF_A = "const int r = i / 4 % BM, c = i / (4 * BM) * 4 + i % 4;"

LARGE: dict[str, Sequence[Change]] = {
    "as it is": [],
    "rows in the outer loop of the products": [(PRODUCTS, ROWS_OUTSIDE)],
    "no second launch bound": [ONE_BLOCK],
    "A read before B": [A_FIRST],
    "copies behind the last slice skipped": [SKIP],
    "neighbours copy 16 floats of one row": [(MAP_OF_A, "const int r = i / BK, c = i % BK;")],
    "the same, copies behind the last slice skipped, rows in the outer loop": [
        (MAP_OF_A, "const int r = i / BK, c = i % BK;"),
        SKIP,
        (PRODUCTS, ROWS_OUTSIDE),
    ],
    "neighbours copy neighbouring rows": [(MAP_OF_A, "const int r = i % BM, c = i / BM;")],
    "the same, rows in the outer loop, A read before B, no second launch bound": [
        (MAP_OF_A, "const int r = i % BM, c = i / BM;"),
        (PRODUCTS, ROWS_OUTSIDE),
        A_FIRST,
        ONE_BLOCK,
    ],
}

PLAIN: dict[str, Sequence[Change]] = {
    "as it is": [],
    "second launch bound 1": [("__launch_bounds__(THREADS, 2)", "__launch_bounds__(THREADS, 1)")],
    "loop over the slice unrolled by eight": [(SLICE_LOOP, SLICE_LOOP.replace("unroll", "unroll 8"))],
    "loop over the slice unrolled by four": [(SLICE_LOOP, SLICE_LOOP.replace("unroll", "unroll 4"))],
}


def figures(number: int, changes: Sequence[Change], entry: str, arch: str) -> str:
    """Registers and bytes of spill stores of one kernel in one spelling."""
    rung = get_rung(number)
    text = rung.source().text
    for old, new in changes:
        if old not in text:
            raise SystemExit(f"{rung.file} has no {old!r}")
        text = text.replace(old, new)
    resources = compile_source(Source.from_text(rung.file, text), [entry], arch).kernels[entry].resources
    return f"{resources.registers} / {resources.spill_store_bytes}"


def table(spellings: dict[str, Sequence[Change]], columns: dict[str, tuple[int, str]]) -> None:
    """Print one table: a row a spelling; each column is a rung and one of its entries."""
    heads = [f"{head}, {arch}" for head in columns for arch in ARCHITECTURES]
    print("| spelling | " + " | ".join(heads) + " |")
    print("|---|" + "---|" * len(heads))
    for spelling, changes in spellings.items():
        cells = [
            figures(number, changes, entry, arch)
            for number, entry in columns.values()
            for arch in ARCHITECTURES
        ]
        print(f"| {spelling} | " + " | ".join(cells) + " |")
    print()


if __name__ == "__main__":
    print(f"Compiler: {compiler_version()}\n")
    table(COURSE, {"rung 05": (5, get_rung(5).entry), "rung 06": (6, get_rung(6).entry)})
    table(LARGE, {"rung 15": (15, get_rung(15).entry)})
    plain = get_rung(17)
    table(PLAIN, {"wide": (17, plain.entry), "ragged": (17, str(plain.ragged_entry))})
