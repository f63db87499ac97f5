"""What every rung takes of an SM, on every architecture, by every compiler: one table in the repository.

``benchmarks/resource_table.py`` writes it; a test compiles again and shows what changed.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from tilewave.compiler import ARCHITECTURES, compile_source, occupancy
from tilewave.device import DeviceSpec, get_spec, spec_names
from tilewave.errors import UsageError
from tilewave.lab.registry import Rung, load_rungs


@dataclass(frozen=True, order=True)
class Row:
    """One kernel, compiled for one architecture by one compiler.

    Registers, stack and spills (bytes) are a thread's, shared memory (bytes) and barriers a block's;
    ``blocks_per_sm`` and what limits it follow from them for the rung's block.
    """

    compiler: str
    arch: str
    kernel: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int
    barriers: int
    threads: int
    blocks_per_sm: int
    limiting: str


def spec_of(arch: str) -> DeviceSpec:
    """A known GPU of this architecture; the limits of an SM are the same for all of them."""
    for name in spec_names():
        spec = get_spec(name)
        if spec.arch == arch.rstrip("af"):
            return spec
    raise UsageError(f"no known GPU has the architecture {arch}")


def measure(
    rungs: Sequence[Rung] | None = None, architectures: Sequence[str] = ARCHITECTURES
) -> Iterator[Row]:
    """Compile rungs (all of them by default) with this process's compiler, and yield their rows."""
    for rung in load_rungs() if rungs is None else rungs:
        for arch in architectures:
            program = compile_source(rung.source(), rung.entries, arch)
            for name, kernel in program.kernels.items():
                threads = rung.threads_of(name)
                fit = occupancy(kernel.resources, threads, spec_of(arch))
                yield Row(
                    compiler=program.compiler,
                    arch=arch,
                    kernel=name,
                    **asdict(kernel.resources),
                    threads=threads,
                    blocks_per_sm=fit.blocks_per_sm,
                    limiting=", ".join(fit.limiting),
                )


def _place(row: Row) -> tuple[str, str, int]:
    return row.compiler, row.kernel, ARCHITECTURES.index(row.arch)


def dump(rows: Sequence[Row]) -> str:
    """The table as JSON, one row a line, in a fixed order: a change shows as a small diff."""
    lines = (json.dumps(asdict(row)) for row in sorted(rows, key=_place))
    return "[\n" + ",\n".join(lines) + "\n]\n"


def loads(text: str) -> list[Row]:
    """The rows in what :func:`dump` wrote."""
    return [Row(**row) for row in json.loads(text)]


def changes(recorded: Sequence[Row], measured: Sequence[Row]) -> str:
    """What ``measured`` changes in ``recorded``, as a unified diff; empty when they agree.

    Only rows of the measured compiler, kernels and architectures are compared.
    """
    scope = {(row.compiler, row.kernel, row.arch) for row in measured}
    kept = [row for row in recorded if (row.compiler, row.kernel, row.arch) in scope]
    before, after = (dump(rows).splitlines(keepends=True) for rows in (kept, measured))
    return "".join(difflib.unified_diff(before, after, "recorded", "measured", n=0))


def markdown(rows: Sequence[Row]) -> str:
    """The table for readers: for each compiler, a line a kernel and a column an architecture."""
    parts = [
        "# Resources of every rung\n",
        "Made by `make resources` from `benchmarks/results/resources.json`; not edited by hand.\n",
        "Each cell: registers per thread × blocks that an SM holds at once (bold where it is one). Where "
        "the compiler spills: bytes stored + bytes loaded per thread. The blocks follow from a block's "
        "registers, shared memory and threads, for a GPU of that architecture.\n",
    ]
    for compiler in sorted({row.compiler for row in rows}):
        cells = {(row.kernel, row.arch): row for row in rows if row.compiler == compiler}
        parts.append(f"## {compiler}\n")
        header = ["kernel", "shared bytes", *ARCHITECTURES]
        lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
        for kernel in sorted({kernel for kernel, _ in cells}):
            found = [cells[kernel, arch] for arch in ARCHITECTURES]
            shared = sorted({row.static_shared_bytes for row in found})
            figures = [f"`{kernel}`", "–".join(f"{size:,}" for size in shared), *map(_cell, found)]
            lines.append("| " + " | ".join(figures) + " |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _cell(row: Row) -> str:
    blocks = f"**{row.blocks_per_sm}**" if row.blocks_per_sm <= 1 else str(row.blocks_per_sm)
    spills = ""
    if row.spill_store_bytes or row.spill_load_bytes:
        spills = f", spills {row.spill_store_bytes}+{row.spill_load_bytes}"
    return f"{row.registers} × {blocks}{spills}"
