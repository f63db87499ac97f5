"""The steps of `benchmarks/gpu_evidence.py`: what each runs and leaves, how long it may take, in which order.

`ROUNDS` is the plan for about 1,500 seconds of one H200, dealt to three calls of less than ten minutes each,
so that little is lost where a machine goes away. Within a round what others rest on comes first: kernels are
compiled once, for all steps; then tests, then readings by their weight. What is in no round has been measured
or rests on nothing new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "--timeout=120")
ALONE = ("warm", "probes", "bench", "timing", "profile", "power")
"""Tests that measure: nothing else may run beside them. First those that have not run since they changed."""
HAND_WRITTEN = ("hopper_instructions",)
"""Tests of PTX that no compiler has checked: what they may do to a GPU befalls no other test."""

ROUNDS: tuple[tuple[tuple[str, float], ...], ...] = (
    (
        ("compile", 75),
        ("instance-tests", 75),
        ("other-tests", 150),
        ("lone-tests", 110),
        ("hopper-tests", 45),
        ("host-time", 50),
        ("torch-overhead", 75),
    ),
    (
        ("suite", 130),
        ("fp16x3", 120),
        ("product-power", 95),
        ("product-profile", 45),
        ("fp16x3-bits", 40),
        ("accuracy", 30),
        ("new-loops", 45),
        ("calibrate", 80),
    ),
    (
        ("large-products", 125),
        ("groups", 55),
        ("product-sanitizers", 90),
        ("reemitted", 60),
    ),
)
"""Steps and their seconds, call by call."""


@dataclass(frozen=True)
class Step:
    """One measurement.

    `command`: what Python is given; `{out}` and `{seconds}` are filled in. `seconds`: how long it may
    measure; it is stopped a little later. `record`: the file that it leaves. `pages`: what Python is given,
    without a GPU, to renew what is made from the record. `outcomes`: whether it leaves those of tests.
    """

    name: str
    command: Sequence[str]
    seconds: float
    record: str | None = None
    pages: Sequence[Sequence[str]] = ()
    outcomes: bool = False


def tests(name: str, files: Sequence[str], workers: int, seconds: float) -> Step:
    """Tests of these files; failures go to files as they occur (tests/gpu/outcome_log.py)."""
    paths = [f"tests/gpu/test_{file}_on_gpu.py" for file in files]
    # A worker that waits for a kernel without end sees no signal; a thread ends it, and another one goes on,
    # as it does behind each test that loses its context.
    method = ("--timeout-method=thread", "--max-worker-restart=1000") if workers else ()
    logs = (f"--failures-file={{out}}/failures-{name}.txt", f"--outcomes-file={{out}}/outcomes-{name}.txt")
    command = (*PYTEST, *method, *logs, "-n", str(workers), *paths)
    return Step(name, command, seconds, outcomes=True)


def script(
    name: str, record: str, seconds: float, pages: Sequence[Sequence[str]] = (), *, option: str = "--out"
) -> Step:
    """A script of this folder that takes a budget, and the record's name as `option`."""
    command = (f"benchmarks/{name}.py", option, f"{{out}}/{record}", "--budget", "{seconds}")
    return Step(name.replace("_", "-"), command, seconds, record, pages)


def tilewave(
    name: str, record: str, seconds: float, arguments: Sequence[str], pages: Sequence[Sequence[str]] = ()
) -> Step:
    """A command of tilewave that takes a budget."""
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
    """All steps."""
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
    power_page = ("benchmarks/product_power_page.py",)
    return [
        Step("compile", ("benchmarks/compile_kernels.py", "--budget", "{seconds}"), 90),
        tests("instance-tests", ["instances"], 14, 90),
        tests("other-tests", every_other_test(), 8, 240),
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
        script(
            "host_time",
            "host_time_h200.json",
            60,
            [("benchmarks/host_time.py", "--render")],
            option="--json",
        ),
        script("torch_overhead", "torch_overhead_h200.json", 90, option="--json"),
        script("groups", "groups_h200.json", 120),
        script("product_sanitizers", "product_sanitizers_h200.json", 150),
        script("new_loops", "new_loops_h200.json", 90),
        script("product_power", "product_power_h200.json", 100, [power_page]),
        script("product_profile", "product_profile_h200.json", 60, [power_page]),
        tilewave("register-file-probe", "register_file_probe_h200.json", 30, ["probe", "register-file"]),
        tilewave(
            "accuracy",
            "accuracy_h200.json",
            120,
            ["accuracy", *accuracy, "--contenders", "gpu-ieee,gpu-fp16x3,cublas"],
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
