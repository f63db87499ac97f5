"""How long the emulator takes for Hopper's instructions: one wgmma, products in precision fp16x3. No GPU.

    python benchmarks/emulator_hopper_speed.py

Prints a table and writes benchmarks/results/emulator_hopper_speed.json: the least of several rounds, in
milliseconds of wall clock and of CPU time (the two differ on a machine that is busy otherwise).
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tilewave.device import get_spec
from tilewave.emulator import Memory, launch, parse_ptx
from tilewave.kernels import fp16x3
from tilewave.kernels.instances import Instance
from tilewave.planner.fp16x3 import plan_on
from tilewave.problem import GemmProblem, MatrixLayout, Precision
from tilewave.runtime.fp16x3_emulated import emulate_fp16x3

RESULT = Path(__file__).parent / "results" / "emulator_hopper_speed.json"
ROUNDS, PRODUCTS = 5, 64


def one_wgmma(columns: int) -> Callable[[], None]:
    """A warpgroup that makes `PRODUCTS` products of 64 x `columns` x 16, of operands that it has stored."""
    registers = ", ".join(f"%f{n}" for n in range(columns // 2))
    zeros = "".join(f"mov.f32 %f{n}, 0f00000000;\n" for n in range(columns // 2))
    ptx = f""".version 8.0\n.target sm_90a\n.address_size 64
    .visible .entry products() {{
    .reg .f32 %f<{columns // 2}>; .reg .b32 %r<9>; .reg .b64 %d<4>; .reg .pred %p<3>;
    .shared .align 1024 .b8 data[49152];
    mov.u32 %r0, %tid.x; mov.u32 %r1, data; shl.b32 %r2, %r0, 2; add.u32 %r2, %r2, %r1; mov.u32 %r3, 0;
    F: xor.b32 %r4, %r3, %r0; and.b32 %r4, %r4, 0x03ff03ff; or.b32 %r4, %r4, 0x3c003c00;
    st.shared.u32 [%r2], %r4; add.u32 %r2, %r2, 512; add.u32 %r3, %r3, 512;
    setp.lt.u32 %p0, %r3, 49152; @%p0 bra F;
    fence.proxy.async; bar.sync 0; {zeros} setp.eq.u32 %p1, %r3, %r3; mov.u32 %r3, 0;
    mov.u64 %d0, 0x4000004000010000; mov.u64 %d1, 0x4000004000010200;
    wgmma.fence.sync.aligned;
    L: wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16 {{{registers}}}, %d0, %d1, %p1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned; add.u32 %r3, %r3, 1; setp.lt.u32 %p0, %r3, {PRODUCTS}; @%p0 bra L;
    wgmma.wait_group.sync.aligned 0;
    ret;\n}}"""
    module = parse_ptx(ptx)

    def run() -> None:
        launch(module, "products", (1,), (128,), [], Memory())

    return run


def product(instance: Instance, size: int, **options: Any) -> Callable[[], None]:
    """A square product, splitting included, without counters."""
    rng = np.random.default_rng()
    layout = MatrixLayout(size, 1)
    problem = GemmProblem(size, size, size, (), layout, layout, layout, precision=Precision.FP16X3)
    plan = plan_on(problem, instance, get_spec("H200"), 132)
    operands = {name: rng.standard_normal((size, size), np.float32) for name in ("a", "b", "out")}

    def run() -> None:
        emulate_fp16x3(plan, operands, count=False, **options)

    return run


def measure(run: Callable[[], None]) -> dict[str, float]:
    """The least wall-clock and CPU time of several rounds; the first one, which compiles, does not count."""
    wall, cpu = [], []
    for _ in range(ROUNDS + 1):
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        run()
        wall.append(time.perf_counter() - wall_start)
        cpu.append(time.process_time() - cpu_start)
    return {"wall_ms": 1e3 * min(wall[1:]), "cpu_ms": 1e3 * min(cpu[1:])}


def main() -> None:
    """Measure, print, write."""
    figures = {}
    for columns in (64, 128, 256):
        found = measure(one_wgmma(columns))
        figures[f"one wgmma m64n{columns}k16"] = {name: x / PRODUCTS for name, x in found.items()}
    figures["fp16x3, N = 256"] = measure(product(fp16x3.LARGE, 256))
    figures["fp16x3, N = 512"] = measure(product(fp16x3.LARGE, 512))
    figures["fp16x3, N = 256, random order, races detected"] = measure(
        product(fp16x3.LARGE, 256, order=1, detect_races=True)
    )
    figures = {name: {k: round(x, 2) for k, x in found.items()} for name, found in figures.items()}
    environment = {
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "rounds": ROUNDS,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({"environment": environment, "milliseconds": figures}, indent=2) + "\n")
    for name, figure in figures.items():
        print(f"{name:48} {figure['wall_ms']:9.2f} ms   {figure['cpu_ms']:9.2f} ms of CPU")


if __name__ == "__main__":
    main()
