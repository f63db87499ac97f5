"""What the tests of the SASS decoder and interpreter share: kernels, nvdisasm, runs of whole grids."""

from __future__ import annotations

import functools
import importlib.util
import re
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilewave.compiler import Program, Source, compile_source
from tilewave.emulator import Buffer, Memory, launch
from tilewave.emulator.sass import BlockResult, Cubin, run_blocks
from tilewave.lab.registry import get_rung

HERE = Path(__file__).parent
INSTRUCTION_KERNELS = (
    "integers",
    "quotients",
    "floats",
    "diverging",
    "local_memory",
    "copies",
    "lanes",
    "widths",
)


@functools.cache
def instruction_program(arch: str) -> Program:
    """The kernels of instructions.cu."""
    source = Source.from_text("instructions.cu", (HERE / "instructions.cu").read_text())
    return compile_source(source, INSTRUCTION_KERNELS, arch)


@functools.cache
def rung_program(number: int, arch: str) -> Program:
    """All kernels of a rung."""
    rung = get_rung(number)
    return compile_source(rung.source(), rung.entries, arch)


@functools.cache
def rung_cubin(number: int, arch: str) -> Cubin:
    return Cubin(rung_program(number, arch).cubin)


def nvdisasm() -> Path | None:
    """The disassembler of the nvidia-cuda-nvdisasm wheel, if it is installed."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(place).glob("cu*/bin/nvdisasm"):
            return path
    return None


@dataclass(frozen=True)
class Line:
    """One instruction as nvdisasm prints it, branch targets as addresses within the kernel."""

    address: int
    text: str


def disassemble(cubin: bytes, path: Path) -> dict[str, list[Line]]:
    """nvdisasm's listing of every kernel; `path` is where it may write the cubin."""
    path.write_bytes(cubin)
    tool = nvdisasm()
    assert tool is not None
    listing = subprocess.run([tool, "-hex", "-c", path], capture_output=True, text=True, check=True).stdout
    kernels: dict[str, list[tuple[int, str]]] = {}
    labels: dict[tuple[str, str], int] = {}
    current, waiting = "", []
    for line in listing.splitlines():
        if match := re.match(r"\.text\.(\S+):", line):
            current = match[1]
            kernels[current] = []
        elif match := re.match(r"([.$]?\w\S*):\s*$", line):
            waiting.append(match[1])
        elif match := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;?\s+/\* 0x[0-9a-f]{16} \*/", line):
            address = int(match[1], 16)
            labels.update({(current, label): address for label in waiting})
            waiting = []
            # Spills carry a note that is no part of the instruction.
            kernels[current].append((address, re.sub(r"\(\*.*?\*\)", "", match[2])))
    found = {}
    for kernel, lines in kernels.items():
        labels[kernel, kernel] = 0

        def resolved(match: re.Match[str], kernel: str = kernel) -> str:
            return hex(labels[kernel, match[1]])

        found[kernel] = [Line(a, normalised(re.sub(r"`\(([^)]*)\)", resolved, text))) for a, text in lines]
    return found


def normalised(text: str) -> str:
    """One space between words, and floating-point constants rewritten from their value."""
    words = []
    for word in text.replace(",", " , ").split():
        try:
            number = float(word.replace("QNAN", "NAN")) if not word.lstrip("-").startswith("0x") else None
        except ValueError:
            number = None
        if number is not None:
            word = repr(struct.unpack("<f", struct.pack("<f", number))[0])
        words.append(word)
    return " ".join(words)


def both(
    program: Program,
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    make_args: Callable[[Memory], Sequence[Buffer | int | float]],
    *,
    cubin: Cubin | None = None,
    dynamic_shared_bytes: int = 0,
) -> tuple[list[np.ndarray], list[np.ndarray], list[BlockResult]]:
    """All buffers after a launch by the SASS interpreter and by the PTX emulator, and the blocks' results."""
    symbol = program.kernels[kernel].symbol
    machine_code = cubin or Cubin(program.cubin)
    sass, ptx = Memory(), Memory()
    results = run_blocks(
        machine_code,
        symbol,
        grid=grid,
        block=block,
        args=make_args(sass),
        memory=sass,
        dynamic_shared_bytes=dynamic_shared_bytes,
    )
    launch(
        program.ptx,
        symbol,
        grid,
        block,
        make_args(ptx),
        ptx,
        dynamic_shared_bytes=dynamic_shared_bytes,
        exact_fma=True,
        count=False,
    )
    return [sass.get(b) for b in sass.buffers], [ptx.get(b) for b in ptx.buffers], results


def same_numbers(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two arrays hold the same bits but for the payloads of NaN, which PTX leaves open."""
    nan = np.isnan(first)
    return bool((nan == np.isnan(second)).all()) and same_bits(first[~nan], second[~nan])


def same_bits(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two arrays hold the same bits, NaN included."""
    return first.tobytes() == second.tobytes()
