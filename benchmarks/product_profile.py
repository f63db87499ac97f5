"""What Nsight Compute reads of the library's large products beside cuBLAS: how busy the FMA pipe is.

    PYTHONPATH=src:benchmarks python3 benchmarks/product_profile.py --out FILE [--budget 60] [--size 4096]

Products of N(0,1) data in all four layouts, ours and cuBLAS's, and one in fp16x3, each warmed up first and
then launched once under ncu; clocks are left alone. A product that fails is told and left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilewave.bench.environment import Environment
from tilewave.compiler import compiler_version
from tilewave.errors import ToolchainError
from tilewave.lab import ncu
from tilewave.lab.profile.metrics import reading_of, wanted_metrics
from tilewave.runtime.driver import Device

LAYOUTS = ("nn", "nt", "tn", "tt")
WANTED_PERCENT = 88.0
PIPES = {
    "fma_cycles_percent": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "fma_heavy_cycles_percent": "sm__pipe_fmaheavy_cycles_active.avg.pct_of_peak_sustained_active",
    "tensor_cycles_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "tensor_hmma_percent": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "active_cycles": "sm__cycles_active.avg",
}
"""Asked for beside the metrics of `tilewave profile`, as far as this GPU's profiler has them."""


def labelled(launches: Sequence[ncu.KernelCounters], layouts: Sequence[str]) -> dict[str, list[int]]:
    """Which launches belong to which product: of each layout ours, then cuBLAS's, at last those of fp16x3.

    A product may take several launches: ours are told from others' by their names.
    """
    found: dict[str, list[int]] = {}
    waiting, layout, ours_before = list(layouts), "", False
    for place, launch in enumerate(launches):
        mode = "fp16x3_" in launch.kernel
        ours = not mode and any(word in launch.kernel for word in ("tilewave", "large_tile", "_tile<"))
        if ours and not ours_before:
            layout = waiting.pop(0) if waiting else "?"
        name = "fp16x3" if mode else f"{layout} {'ours' if ours else 'cublas'}"
        found.setdefault(name, []).append(place)
        ours_before = ours
    return found


def readings(launches: Sequence[ncu.KernelCounters], layouts: Sequence[str], size: int) -> dict[str, Any]:
    """For every product its launches: kernel, figures, shares of stalls."""
    found: dict[str, Any] = {}
    for name, places in labelled(launches, layouts).items():
        found[name] = []
        for launch in (launches[place] for place in places):
            reading = asdict(reading_of(launch, size))
            pipes = {key: launch.metrics[metric] for key, metric in PIPES.items() if metric in launch.metrics}
            reading["figures"] |= pipes
            if len(places) > 1:
                reading["figures"].pop("tflops", None)  # one launch of several is not the whole product
            found[name].append({"kernel": launch.kernel, **reading})
    return found


def launch(size: int, layouts: Sequence[str], told: Path) -> None:
    """What runs under ncu: warm all products up, then launch each once where the profiler looks."""
    import torch

    import tilewave
    from tilewave.device.driver import bindings

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_grad_enabled(False)

    def draw(letter: str) -> Any:
        values = torch.randn((size, size), device="cuda")
        return values.t() if letter == "t" else values

    works: dict[str, Any] = {}
    for layout in layouts:
        a, b = draw(layout[0]), draw(layout[1])
        out = torch.empty((size, size), device="cuda")
        works[f"{layout} ours"] = lambda a=a, b=b, out=out: tilewave.matmul(a, b, out=out)
        works[f"{layout} cublas"] = lambda a=a, b=b, out=out: torch.matmul(a, b, out=out)
        if layout == layouts[-1]:
            works["fp16x3"] = lambda a=a, b=b, out=out: tilewave.gemm(a, b, out=out, precision="fp16x3")
    failed, plans = {}, {}
    for name in list(works):
        try:
            works[name]()
            torch.cuda.synchronize()
        except Exception as error:  # the others are profiled all the same
            failed[name] = f"{type(error).__name__}: {error}"[:500]
            del works[name]
    for layout in layouts:
        a, b = (torch.empty((size, size), device="cuda") for _ in range(2))
        a, b = a.t() if layout[0] == "t" else a, b.t() if layout[1] == "t" else b
        plans[layout] = [f"{plan.instance} {plan.schedule}" for plan in tilewave.plan_for(a, b)]
    # A layout whose product failed on one side would shift the names of the others.
    whole = [one for one in layouts if f"{one} ours" in works and f"{one} cublas" in works]
    told.write_text(json.dumps({"layouts": whole, "failed": failed, "plans": plans}))
    driver = bindings()
    driver.cuProfilerStart()
    for name, work in works.items():
        if name == "fp16x3" or name.split()[0] in whole:
            work()
            torch.cuda.synchronize()
    driver.cuProfilerStop()


def table(found: dict[str, Any]) -> str:
    """A line a launch."""
    lines = []
    for name, launches in found.items():
        for one in launches:
            figures = one["figures"]
            shown = [
                f"{key} {figures[key]:.1f}"
                for key in ("fma_pipe_percent", "fma_cycles_percent", "issue_percent", "tflops")
                if key in figures
            ]
            lines.append(f"{name:10} {', '.join(shown)}  {one['kernel'][:70]}")
    return "\n".join(lines)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds")
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--launch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    layouts = options.layouts.split(",")
    if options.launch is not None:
        launch(options.size, layouts, options.launch)
        return 0
    begun = time.monotonic()
    told = options.out.with_suffix(".told")
    record: dict[str, Any] = {
        "command": "python3 benchmarks/product_profile.py --out FILE --budget SECONDS",
        "environment": Environment.capture(device=Device(), compiler=compiler_version()).to_json(),
        "size": options.size,
        "wanted_fma_percent": WANTED_PERCENT,
        "products": {},
    }

    def write() -> None:
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    write()
    command = [sys.executable, __file__, "--out", str(options.out), "--size", str(options.size)]
    command += ["--launch", str(told)]
    try:
        tool = ncu.find_ncu()
        # Once without ncu: kernels are compiled and their loops checked, which would count as launches there.
        warm = subprocess.run(
            [*command, "--layouts", options.layouts],
            capture_output=True,
            text=True,
            timeout=max(1.0, options.budget - 5),
        )
        print(f"warmed up after {time.monotonic() - begun:.0f} s: exit code {warm.returncode}", flush=True)
        if warm.returncode:
            raise ToolchainError(warm.stderr[-2000:])
        record |= json.loads(told.read_text())
        layouts = record["layouts"]
        write()
        known, missing = ncu.split_known([*wanted_metrics(), *PIPES.values()], ncu.available_metrics(tool))
        left = max(1.0, options.budget - (time.monotonic() - begun))
        launches, refused = ncu.profile(
            tool, [*command, "--layouts", ",".join(layouts)], known, timeout=left, only_started=True
        )
        record["lacking"] = [*missing, *refused]
        record["products"] = readings(launches, layouts, options.size)
    except (ToolchainError, OSError, subprocess.TimeoutExpired) as error:
        record["error"] = f"{type(error).__name__}: {error}"[:3000]
        print(record["error"], flush=True)
    write()
    told.unlink(missing_ok=True)
    print(table(record["products"]))
    print(f"{time.monotonic() - begun:.0f} s")
    return int("error" in record or bool(record.get("failed")) or not record["products"])


if __name__ == "__main__":
    sys.exit(main())
