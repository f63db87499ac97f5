"""Compile every instance for every architecture: the archives of a wheel, and the table of resources.

Beside the kernels of sm_90 an archive holds what the register-file pass made of them.

``python -m tilewave.kernels.ship --archives DIRECTORY`` writes what `compiler/shipped.py` reads;
``--resources FILE`` writes registers and spills of every instance, which the planner's occupancy rests on.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tilewave.compiler import ARCHITECTURES, DEFAULT_OPTIONS, Program, compiler_version, shipped
from tilewave.compiler.program import content_key
from tilewave.compiler.register_pass import encode, made_outcome, outcome_key, refusal
from tilewave.errors import ToolchainError
from tilewave.kernels.build import compile_instance, source_of
from tilewave.kernels.families import FAMILIES, grouped
from tilewave.kernels.instances import Instance
from tilewave.kernels.new_loops import instance_refusal

SHIPPED_ARCHITECTURES = tuple(arch for arch in ARCHITECTURES if not arch.endswith("a"))
"""Those that `choose_arch` can choose; code for sm_90a is for kernels that use what only Hopper has."""


def every_instance() -> tuple[Instance, ...]:
    """The instances of all families."""
    return tuple(instance for family in FAMILIES for instance in family.instances())


def every_kernel() -> tuple[Instance, ...]:
    """Those, the kernels that compute groups of products, and those that bring them their tables."""
    return (*every_instance(), *grouped.instances(), *grouped.TABLE_WRITERS)


def compile_all(
    instances: Sequence[Instance],
    architectures: Iterable[str],
    jobs: int | None = None,
    *,
    machine_code_only: bool = True,
) -> Iterator[tuple[Instance, str, Program]]:
    """Every (instance, architecture, program), compiled in processes side by side, in order.

    ``machine_code_only`` as in `compile_instance`.
    """
    compiling = functools.partial(_compile, machine_code_only=machine_code_only)
    pairs = [(instance, arch) for arch in architectures for instance in instances]
    # Spawned: the caller may have threads, or a GPU that a fork could not use.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs or os.cpu_count(), context) as pool:
        for (instance, arch), program in zip(pairs, pool.map(compiling, pairs, chunksize=4), strict=True):
            yield instance, arch, program


def shipped_key(instance: Instance, arch: str) -> str:
    """The key under which an instance's program lies in the archive of an architecture."""
    return content_key(source_of(instance.header), (instance.entry,), arch, DEFAULT_OPTIONS)


def write_archives(directory: Path, architectures: Sequence[str], jobs: int | None = None) -> list[Path]:
    """Write the archives of these architectures with all kernels in them."""
    programs: dict[str, list[tuple[str, Program]]] = {arch: [] for arch in architectures}
    with_new_loops: dict[str, list[tuple[Program, str]]] = {arch: [] for arch in architectures}
    for instance, arch, program in _compile_anew(architectures, jobs):
        programs[arch].append((shipped_key(instance, arch), program))
        symbol = program.kernels[instance.entry].symbol
        if instance_refusal(instance) is None and refusal(program, symbol) is None:
            with_new_loops[arch].append((program, symbol))
    return [
        shipped.write(directory, arch, found, new_loops(with_new_loops[arch], jobs))
        for arch, found in programs.items()
    ]


def new_loops(kernels: Sequence[tuple[Program, str]], jobs: int | None = None) -> list[tuple[str, bytes]]:
    """What the register-file pass makes of kernels, as entries of an archive: (name, entry)."""
    if not kernels:
        return []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs or os.cpu_count(), context) as pool:
        return list(pool.map(_new_loop, kernels))


def _new_loop(kernel: tuple[Program, str]) -> tuple[str, bytes]:
    program, symbol = kernel
    key = outcome_key(program.cubin, symbol)
    if key is None:
        raise ToolchainError("the source text of the register-file pass cannot be read")
    return key, encode(made_outcome(program, symbol))


def write_resources(path: Path, architectures: Sequence[str], jobs: int | None = None) -> None:
    """Write registers a thread, spilled bytes and static shared bytes of all instances as JSON."""
    table: dict[str, dict[str, list[int]]] = {arch: {} for arch in architectures}
    for instance, arch, program in _compile_anew(architectures, jobs):
        resources = program.kernels[instance.entry].resources
        spilled = resources.spill_store_bytes + resources.spill_load_bytes
        table[arch][instance.name] = [resources.registers, spilled, resources.static_shared_bytes]
    record = {
        "command": "python -m tilewave.kernels.ship --resources src/tilewave/kernels/resources.json",
        "compiler": compiler_version(),
        "columns": ["registers", "spilled_bytes", "static_shared_bytes"],
        "architectures": table,
    }
    lines = json.dumps(record, indent=1)
    path.write_text(_rows_on_one_line(lines) + "\n")


def _rows_on_one_line(text: str) -> str:
    """JSON whose lists of numbers take a line each."""
    return re.sub(r"\[\s+([\d,\s]+?)\s+\]", lambda match: "[" + " ".join(match[1].split()) + "]", text)


def _compile(pair: tuple[Instance, str], machine_code_only: bool) -> Program:
    return compile_instance(*pair, machine_code_only=machine_code_only)[0]


def _compile_anew(architectures: Sequence[str], jobs: int | None) -> Iterator[tuple[Instance, str, Program]]:
    """Every instance as the compiler of this process makes it, whatever came with the package."""
    return compile_all(every_kernel(), architectures, jobs, machine_code_only=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--archives", type=Path, help="write a wheel's archives into this directory")
    parser.add_argument("--resources", type=Path, help="write the table of resources to this file")
    parser.add_argument("--arch", action="append", help="only this architecture; may be repeated")
    parser.add_argument("--jobs", type=int, help="processes side by side; as many as CPUs by default")
    options = parser.parse_args(arguments)
    if options.archives is None and options.resources is None:
        parser.error("nothing to do: give --archives, --resources or both")
    architectures = tuple(options.arch or SHIPPED_ARCHITECTURES)
    if options.resources is not None:
        write_resources(options.resources, architectures, options.jobs)
    if options.archives is not None:
        for path in write_archives(options.archives, architectures, options.jobs):
            print(f"{path}: {path.stat().st_size:,} bytes")
        print(f"{len(every_kernel())} kernels for each, by {compiler_version()}")


if __name__ == "__main__":
    main()
