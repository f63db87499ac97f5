"""How long the emulator takes for a product of N = 1024 with a 128x256-tile kernel (rung 15). Needs no GPU.

    python benchmarks/emulator_speed.py

Prints a table and writes benchmarks/results/emulator_speed.json: the least of several rounds, in seconds of
wall clock and of CPU time (the two differ on a machine that is busy otherwise).
"""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

from tilewave.compiler import compile_source
from tilewave.emulator import Memory, launch, parse_ptx
from tilewave.lab.registry import get_rung

RESULT = Path(__file__).parent / "results" / "emulator_speed.json"
RUNG, ARCH, ROUNDS = 15, "sm_90", 5
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "whole product, all counters": (1024, {}),
    "whole product, no counters": (1024, {"count": False}),
    "whole product, exact FMA, no counters": (1024, {"count": False, "exact_fma": True}),
    "counters only": (1024, {"values": False}),
    "counters only, N = 4096, sampled": (4096, {"values": False, "blocks": 4}),
}


def measure(size: int, options: dict[str, Any]) -> dict[str, float]:
    """The least wall-clock and CPU time of several rounds, translation of the PTX not included."""
    rung = get_rung(RUNG)
    program = compile_source(rung.source(), rung.entries, ARCH)
    module = parse_ptx(program.ptx)
    symbol = program.kernels[rung.entry_for(size, size, size)].symbol
    rng = np.random.default_rng()
    wall, cpu = [], []
    for _ in range(ROUNDS + 1):
        memory = Memory()
        a, b = (memory.put(rng.standard_normal((size, size), np.float32)) for _ in range(2))
        args = [a, b, memory.empty((size, size)), size, size, size]
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        launch(module, symbol, rung.grid(size, size), rung.block, args, memory, **options)
        wall.append(time.perf_counter() - wall_start)
        cpu.append(time.process_time() - cpu_start)
    return {"wall_s": round(min(wall[1:]), 3), "cpu_s": round(min(cpu[1:]), 3)}


def main() -> None:
    figures = {name: measure(size, options) for name, (size, options) in RUNS.items()}
    environment = {
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "rung": RUNG,
        "arch": ARCH,
        "rounds": ROUNDS,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({"environment": environment, "seconds": figures}, indent=2) + "\n")
    for name, figure in figures.items():
        print(f"{name:40} {figure['wall_s']:7.3f} s   {figure['cpu_s']:7.3f} s of CPU")


if __name__ == "__main__":
    main()
