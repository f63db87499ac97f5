"""Every probe on the GPU at hand, in one time-boxed run.

    PYTHONPATH=src python3 benchmarks/probe_evidence.py --out benchmarks/results/probes_h200.json --budget 120

Times come first, then the profiler (where ncu works), then the emulator's counts: what a short budget leaves
out is said in the file's notes. Also prints what `tilewave probe all` prints.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tilewave.lab.probe_command import probe_command
from tilewave.runtime.driver import probe

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "probes_gpu.json")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for everything")
    parser.add_argument("--jobs", type=int, help="processes that emulate; one a core by default")
    parser.add_argument("--no-profile", action="store_true", help="leave the profiler out")
    parser.add_argument("--only", default="all", help="names of probes, with commas between them")
    options = parser.parse_args()
    found = probe()
    if found.reason is not None:
        sys.exit(f"no evidence without a GPU: {found.reason}")
    os.environ.setdefault("TILEWAVE_CACHE_DIR", str(ROOT / ".cache" / "programs"))
    os.environ.setdefault("COLUMNS", "150")
    probe_command(
        options.only.split(","),
        sizes=None,
        device=None,
        emulate=False,
        budget=options.budget,
        path=options.out,
        jobs=options.jobs,
        profile=not options.no_profile,
    )


if __name__ == "__main__":
    main()
