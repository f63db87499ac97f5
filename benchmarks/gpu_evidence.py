"""Everything that must be measured on a GPU, in one time-boxed run.

Runs the GPU tests, then the ladder against cuBLAS, then draws the picture and the Markdown table from it:

    PYTHONPATH=src python3 benchmarks/gpu_evidence.py --out benchmarks/results --name h200

Each step writes its output to a file beside the results and has a limit of its own; a step that fails does
not keep the others from running. The exit code is 0 only if all of them succeeded.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewave.runtime.driver import probe

ROOT = Path(__file__).resolve().parents[1]
SIZES = "1024,1025,2048,2049,4096"


@dataclass(frozen=True)
class Step:
    """One command, its limit in seconds, and the file that takes its output."""

    name: str
    command: Sequence[str]
    limit_s: float


def steps(out: Path, name: str, sizes: str, budget_s: float, tests_limit_s: float) -> list[Step]:
    python = sys.executable
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "--timeout=120"]
    tilewave = [python, "-m", "tilewave"]
    ladder = out / f"ladder-{name}.json"
    timing = "tests/gpu/test_timing_on_gpu.py"
    return [
        # Several processes may share the GPU for answers, but nothing else may run while it is timed.
        Step("gpu-tests", [*pytest, "-n", "8", "tests/gpu", f"--ignore={timing}"], tests_limit_s),
        Step("gpu-timing-tests", [*pytest, "-n", "0", timing], 120),
        Step(
            "ladder",
            [*tilewave, "ladder", "--sizes", sizes, "--budget", f"{budget_s:g}", "--json", str(ladder)],
            budget_s + 60,
        ),
        Step(
            "picture",
            [*tilewave, "picture", str(ladder), "--out", str(out / f"ladder-{name}.png"), "--markdown"],
            60,
        ),
    ]


def run(step: Step, out: Path, environment: dict[str, str]) -> bool:
    log = out / f"{step.name}.txt"
    print(f"== {step.name} (at most {step.limit_s:.0f} s)", flush=True)
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as stream:
        try:
            code = subprocess.run(
                step.command,
                cwd=ROOT,
                env=environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=step.limit_s,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:]
    print("\n".join(tail))
    outcome = "stopped at its limit" if code is None else "succeeded" if code == 0 else f"exit code {code}"
    print(f"== {step.name}: {outcome} after {time.monotonic() - started:.1f} s", flush=True)
    return code == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--name", default="gpu", help="what the result files are named after")
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--budget", type=float, default=150.0, help="seconds for the ladder")
    parser.add_argument("--tests-limit", type=float, default=240.0, help="seconds for the GPU tests")
    parser.add_argument("--only", help="names of steps, with commas between them")
    options = parser.parse_args()
    found = probe()
    if found.reason is not None:
        sys.exit(f"no evidence without a GPU: {found.reason}")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    environment = {
        "TILEWAVE_CACHE_DIR": str(ROOT / ".cache" / "programs"),
        "COLUMNS": "110",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])),
    }
    chosen = steps(out, options.name, options.sizes, options.budget, options.tests_limit)
    if options.only:
        chosen = [step for step in chosen if step.name in options.only.split(",")]
    results = [run(step, out, environment) for step in chosen]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
