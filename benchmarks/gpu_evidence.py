"""Everything that is measured on a GPU, step by step, and the pages that are made from it.

    PYTHONPATH=src:benchmarks python3 benchmarks/gpu_evidence.py --list
    PYTHONPATH=src:benchmarks python3 benchmarks/gpu_evidence.py [STEP ...] --out DIR [--budget 600]
    python benchmarks/gpu_evidence.py [STEP ...] --pages

Without names, every step runs, in the order of the list. A step has a limit of its own; one that fails does
not keep the others from running, and one that no longer fits into the budget is left out. Its output goes to
DIR/STEP.txt, its record to DIR; a record that `benchmarks/results` has already is put there first, so that
its measurement goes on where it ended (`--anew`: it is not). `--pages` needs no GPU: it makes anew what is
drawn from the records in `benchmarks/results`. The exit code is 0 only if every chosen step has succeeded.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "--timeout=120")
ALONE = ("timing", "power", "profile", "bench", "probes", "warm")
"""Tests that measure: nothing else may run beside them."""
HAND_WRITTEN = ("hopper_instructions",)
"""Tests of PTX that no compiler has checked: what they may do to a GPU befalls no other test."""


@dataclass(frozen=True)
class Step:
    """One measurement.

    `command`: what Python is given; `{out}` and `{seconds}` are filled in. `seconds`: how long it may
    measure; it is stopped a minute later. `record`: the file that it leaves. `pages`: what Python is given,
    without a GPU, to renew what is made from the record.
    """

    name: str
    command: Sequence[str]
    seconds: float
    record: str | None = None
    pages: Sequence[Sequence[str]] = ()


def tests(name: str, files: Sequence[str], workers: int, seconds: float) -> Step:
    paths = [f"tests/gpu/test_{file}_on_gpu.py" for file in files]
    # A worker that waits for a kernel without end sees no signal; a thread ends it, and another one goes on,
    # as it does behind each test that loses its context.
    method = ("--timeout-method=thread", "--max-worker-restart=1000") if workers else ()
    return Step(name, (*PYTEST, *method, "-n", str(workers), *paths), seconds)


def script(
    name: str, record: str, seconds: float, pages: Sequence[Sequence[str]] = (), *, option: str = "--out"
) -> Step:
    """A script of this folder that takes a budget, and the record's name as `option`."""
    command = (f"benchmarks/{name}.py", option, f"{{out}}/{record}", "--budget", "{seconds}")
    return Step(name.replace("_", "-"), command, seconds, record, pages)


def tilewave(
    name: str, record: str, seconds: float, arguments: Sequence[str], pages: Sequence[Sequence[str]] = ()
) -> Step:
    command = ("-m", "tilewave", *arguments, "--budget", "{seconds}", "--json", f"{{out}}/{record}")
    return Step(name, command, seconds, record, pages)


def every_other_test() -> list[str]:
    """The files of GPU tests that no step of their own names, and that may share the GPU."""
    named = {"instances", *ALONE, *HAND_WRITTEN}
    found = [
        path.name.removeprefix("test_") for path in sorted((ROOT / "tests/gpu").glob("test_*_on_gpu.py"))
    ]
    return [name for name in (file.removesuffix("_on_gpu.py") for file in found) if name not in named]


def steps() -> list[Step]:
    report = ("benchmarks/report_pictures.py",)
    article = ("benchmarks/article_page.py",)
    calibration = "benchmarks/results/gemm_calibration_h200.json"
    accuracy = [
        "--data",
        "normal,uniform",
        "--k",
        "16,64,256,1024,4096,16384",
        "--size",
        "256",
        "--seed",
        "10",
    ]
    return [
        tests("instance-tests", ["instances"], 14, 90),
        tests("other-tests", every_other_test(), 6, 240),
        tests("lone-tests", ALONE, 0, 200),
        tests("hopper-tests", HAND_WRITTEN, 8, 90),
        tilewave(
            "ladder",
            "ladder-h200.json",
            300,
            ["ladder", "--sizes", "1024,1025,2048,2049,4096,8192"],
            [("benchmarks/ladder_page.py",), article, report],
        ),
        script("reemitted", "reemitted_h200.json", 300, [("benchmarks/register_file_page.py", "--render")]),
        tilewave(
            "calibrate",
            "gemm_calibration_h200.json",
            200,
            ["calibrate", "--no-fit"],
            [("-m", "tilewave", "calibrate", "--from", calibration), ("benchmarks/calibration_page.py",)],
        ),
        tilewave(
            "suite",
            "suite_h200.json",
            150,
            ["bench", "workloads", "squares", "--mode", "cold"],
            [("benchmarks/suite_page.py",)],
        ),
        script("large_products", "large_products_h200.json", 300, [("benchmarks/large_products_page.py",)]),
        script("fp16x3_bits", "fp16x3_bits_h200.json", 120),
        script("fp16x3", "fp16x3_h200.json", 270, option="--json"),
        script("host_time", "host_time_h200.json", 25, option="--json"),
        script("torch_overhead", "torch_overhead_h200.json", 90, option="--json"),
        script("groups", "groups_h200.json", 120),
        script("product_sanitizers", "product_sanitizers_h200.json", 150),
        script("new_loops", "new_loops_h200.json", 90),
        tilewave("register-file-probe", "register_file_probe_h200.json", 30, ["probe", "register-file"]),
        tilewave(
            "accuracy",
            "accuracy_h200.json",
            120,
            ["accuracy", *accuracy, "--seed", "10", "--contenders", "gpu-ieee,gpu-fp16x3,cublas"],
        ),
        tilewave(
            "probes",
            "probes_h200.json",
            190,
            ["probe", "all", "--profile"],
            [("benchmarks/probe_report.py",), article],
        ),
        script("selection", "selection_h200.json", 240),
        script("ragged", "ragged_h200.json", 120),
        script("sanitizers", "sanitizers_h200.json", 200),
        Step(
            "power-and-profile",
            (
                "benchmarks/power_and_profile.py",
                *["measure", "--out", "{out}", "--name", "h200", "--budget", "{seconds}"],
            ),
            150,
            pages=[("benchmarks/power_and_profile.py", "page", "--name", "h200"), report],
        ),
    ]


def environment() -> dict[str, str]:
    here = [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    return {
        "TILEWAVE_CACHE_DIR": str(ROOT / ".cache" / "programs"),
        "COLUMNS": "150",
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, here)),
    }


def measure(step: Step, out: Path, seconds: float, anew: bool) -> bool:
    """Run a step; whether it has succeeded."""
    if step.record and not anew and (RESULTS / step.record).exists() and not (out / step.record).exists():
        shutil.copyfile(RESULTS / step.record, out / step.record)
    command = [part.format(out=out, seconds=f"{seconds:g}") for part in step.command]
    print(f"== {step.name} (at most {seconds:.0f} s): {' '.join(command)}", flush=True)
    started = time.monotonic()
    log = out / f"{step.name}.txt"
    with log.open("w", encoding="utf-8") as stream:
        try:
            code = subprocess.run(
                [sys.executable, *command],
                cwd=ROOT,
                env=environment(),
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=seconds + 60,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    print("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:]))
    outcome = "stopped at its limit" if code is None else "succeeded" if code == 0 else f"exit code {code}"
    print(f"== {step.name}: {outcome} after {time.monotonic() - started:.1f} s", flush=True)
    return code == 0


def make_pages(chosen: Sequence[Step]) -> bool:
    """Make anew what is drawn from the records of the chosen steps, each page once; whether all could be."""
    commands = dict.fromkeys(tuple(page) for step in chosen for page in step.pages)
    failed = []
    for command in commands:
        print("==", *command, flush=True)
        if subprocess.run([sys.executable, *command], cwd=ROOT, env=environment()).returncode:
            failed.append(command)
    for command in failed:
        print("failed:", *command)
    return not failed


def main(arguments: Sequence[str] | None = None) -> int:
    known = steps()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help="one of --list")
    parser.add_argument("--out", type=Path, help="where records and outputs go")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for all steps together")
    parser.add_argument(
        "--anew", action="store_true", help="measure everything, whatever benchmarks/results has already"
    )
    parser.add_argument(
        "--pages", action="store_true", help="only make the pages of these steps, without a GPU"
    )
    parser.add_argument("--list", action="store_true", help="only say what the steps are")
    options = parser.parse_args(arguments)
    names = [step.name for step in known]
    if unknown := [name for name in options.steps if name not in names]:
        parser.error(f"no step is named {', '.join(unknown)}; there are {', '.join(names)}")
    chosen = [step for step in known if not options.steps or step.name in options.steps]
    if options.list:
        for step in chosen:
            print(f"{step.name:20} {step.seconds:4.0f} s  {' '.join(step.command)}")
        return 0
    if options.pages:
        return 0 if make_pages(chosen) else 1
    if options.out is None:
        parser.error("--out says where the records go")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.budget
    outcomes = {}
    for step in chosen:
        left = end - time.monotonic()
        if left < step.seconds / 2:
            print(f"== {step.name}: left out, {left:.0f} s are left", flush=True)
            outcomes[step.name] = False
            continue
        outcomes[step.name] = measure(step, out, min(step.seconds, left), options.anew)
    print(*(f"{name}: {'succeeded' if good else 'not done'}" for name, good in outcomes.items()), sep="\n")
    return 0 if all(outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
