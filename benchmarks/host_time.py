"""What a product costs on the host: warm calls beside the library's own, the first call, the import.

    python benchmarks/host_time.py --json FILE [--budget SECONDS]   # a GPU; PyTorch, CuPy or both
    python benchmarks/host_time.py --stand-in --json FILE           # no GPU; PyTorch and a C compiler

On a GPU: `tilewave.matmul` of 64 x 64 x 64, warm, in turn with ``torch.matmul`` and ``cupy.matmul`` in one
process, by wall clock in rounds too short to fill the stream's queue. With ``--stand-in`` the driver is
`stand_in_driver.c`, which does nothing, tensors are of the CPU and pretend to be on a GPU, and the clock is
the CPU's time for the process: what is left is the host work of Python, its allocation on a CPU, and nothing
of the driver's, so the figures compare with one another and with nothing else. The long way is the same call
with nothing kept. Prints a table and writes JSON; ``--render`` writes the stand-in's into docs/host-time.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZE = 64
CALLS = 200
"""Calls of a round: below the thousand or so launches after which a stream makes its host wait."""
PROCESSES = 5
HERE = Path(__file__)
DRIVER = HERE.with_name("stand_in_driver.c")

PAGE = HERE.parents[1] / "docs" / "host-time.md"
RECORD = HERE.parent / "results" / "host_time_stand_in.json"
BEGIN, END = "<!-- stand-in -->\n", "<!-- end of stand-in -->"

Call = Callable[[], Any]


def pretend(torch: Any) -> None:
    """Let tensors of the CPU pass for such on GPU 0, on a machine without one."""
    from tilewave import api, arrays
    from tilewave.semantics import Layout

    def view(array: Any, name: str, stream: int | None) -> arrays.ArrayView:
        layout = Layout(tuple(array.shape), tuple(array.stride()))
        return arrays.ArrayView(array, "torch", array.data_ptr(), layout, 0)

    empty = torch.empty
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch._C._cuda_getDevice = lambda: 0
    torch._C._dynamo.guards._empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cpu
    torch.empty = lambda shape, dtype, device: empty(shape, dtype=dtype)
    arrays._viewers[torch.Tensor] = view
    api.front_for = lambda *operands: None  # which would see that they are on the CPU


def stand_in_driver(folder: Path) -> dict[str, str]:
    """Build the driver that does nothing, and say what lets a process find it."""
    library = folder / "libcuda.so.1"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-w", "-o", str(library), str(DRIVER)], check=True)
    return {"LD_LIBRARY_PATH": str(folder)}


def first_call(library: str, stand_in: bool) -> dict[str, float]:
    """Milliseconds of the import and of the first product in this process; the library is there already.

    What pretends is put in place between the first product's imports and the rest, and its time left out.
    """
    clock = time.process_time if stand_in else time.perf_counter
    a, b = operands(library, stand_in)
    begin = clock()
    import tilewave

    imported = clock()
    product = tilewave.matmul  # imports what a product needs
    found = clock()
    if stand_in:
        pretend(__import__(library))
    again = clock()
    product(a, b)
    return {"import": 1e3 * (imported - begin), "first_call": 1e3 * (clock() - again + found - imported)}


def operands(library: str, stand_in: bool) -> tuple[Any, Any]:
    """Two square matrices in a library's memory on a GPU."""
    if library == "torch":
        import torch

        device = "cpu" if stand_in else "cuda"
        return torch.randn(SIZE, SIZE, device=device), torch.randn(SIZE, SIZE, device=device)
    import cupy

    return (cupy.random.standard_normal((SIZE, SIZE), dtype="float32") for _ in range(2))  # type: ignore[return-value]


def contenders(library: str, stand_in: bool) -> tuple[dict[str, Call], Call]:
    """Calls by name, and what waits for the GPU."""
    import tilewave
    from tilewave import warm

    a, b = operands(library, stand_in)
    out = a @ b

    def long_way() -> Any:
        for known in warm._libraries.values():
            if known is not None:
                known.launches.clear()
        return tilewave.matmul(a, b)

    calls: dict[str, Call] = {
        "matmul": lambda: tilewave.matmul(a, b),
        "matmul out=": lambda: tilewave.matmul(a, b, out=out),
        "gemm beta=1 in place": lambda: tilewave.gemm(a, b, out, beta=1.0, out=out),
        "matmul, nothing kept": long_way,
    }
    if stand_in:
        return calls, lambda: None
    module = __import__(library)
    calls[f"{library}.matmul"] = lambda: module.matmul(a, b)
    calls[f"{library}.matmul out="] = lambda: module.matmul(a, b, out=out)
    wait = module.cuda.synchronize if library == "torch" else module.cuda.Device().synchronize
    return calls, wait


def microseconds(
    calls: dict[str, Call], wait: Call, clock: Callable[[], float], until: float
) -> dict[str, float]:
    """The median time of each call over interleaved rounds, until the clock on the wall says ``until``."""
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(20):
            call()
    wait()
    while time.monotonic() < until or len(rounds["matmul"]) < 5:
        for name, call in calls.items():
            begin = clock()
            for _ in range(CALLS):
                call()
            rounds[name].append(1e6 * (clock() - begin) / CALLS)
            wait()
    return {name: round(statistics.median(times), 2) for name, times in rounds.items()}


def measure(library: str, budget: float, stand_in: bool, environment: dict[str, str]) -> dict[str, Any]:
    """Figures of one library, in processes of their own."""
    base = [sys.executable, str(HERE), "--child", library, *(["--stand-in"] if stand_in else [])]

    def run(*more: str) -> Any:
        done = subprocess.run([*base, *more], env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{library}: {done.stderr.strip().splitlines()[-1]}")
        return json.loads(done.stdout)

    run("--first")  # fills the cache of compiled kernels
    firsts = [run("--first") for _ in range(PROCESSES)]
    found: dict[str, Any] = {
        f"{name}_ms": round(statistics.median(first[name] for first in firsts), 1) for name in firsts[0]
    }
    return found | {"calls_us": run("--budget", str(budget))}


def child(options: argparse.Namespace) -> dict[str, float]:
    """What a process of `measure` does."""
    module = __import__(options.child)
    if options.stand_in:
        module.set_num_threads(1)
    else:
        operands(options.child, False)  # the library's own first use of the GPU is no part of it
    if options.first:
        return first_call(options.child, options.stand_in)
    if options.stand_in:
        pretend(module)
    calls, wait = contenders(options.child, options.stand_in)
    clock = time.thread_time if options.stand_in else time.perf_counter
    return microseconds(calls, wait, clock, time.monotonic() + options.budget)


def table(record: dict[str, Any]) -> str:
    """A record as the rows of a table of Markdown."""
    lines = [f"On {record['cpu']}, Python {record['python']}:", ""]
    for name, found in record["libraries"].items():
        theirs = found["calls_us"].get(f"{name}.matmul")
        share = "" if theirs is None else f" share of {name}.matmul |"
        lines += [f"| with {name} | time |{share}", "|---|---:|" + ("---:|" if share else "")]
        for call, ms in (("import tilewave", "import_ms"), ("first call", "first_call_ms")):
            lines.append(f"| {call} | {found[ms]} ms |" + (" |" if share else ""))
        for call, us in found["calls_us"].items():
            lines.append(f"| {call} | {us} us |" + (f" {us / theirs:.2f} |" if theirs else ""))
    return "\n".join(lines) + "\n"


def rendered(page: str, record: dict[str, Any]) -> str:
    """The page with the table between its marks made from a record."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table(record) + END + rest.partition(END)[2]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of measuring for each library")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--render", action="store_true", help="only write docs/host-time.md anew")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options)))
        return
    if options.render:
        PAGE.write_text(rendered(PAGE.read_text(), json.loads(RECORD.read_text())))
        return
    environment = dict(os.environ)
    record: dict[str, Any] = {
        "what": "host time of 64 x 64 x 64" + (", stand-in for the driver" if options.stand_in else ""),
        "python": platform.python_version(),
        "cpu": next(
            (
                line.partition(":")[2].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")
            ),
            platform.processor(),
        ),
        "libraries": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        environment["PYTHONPYCACHEPREFIX"] = f"{folder}/compiled"  # as an installed package has it
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        if options.stand_in:
            environment |= stand_in_driver(Path(folder))
        for name in ("torch",) if options.stand_in else ("torch", "cupy"):
            try:
                __import__(name)
            except ImportError:
                continue
            record["libraries"][name] = measure(name, options.budget, options.stand_in, environment)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    for name, found in record["libraries"].items():
        print(
            f"{name}: import tilewave {found['import_ms']:.1f} ms, first call {found['first_call_ms']:.1f} ms"
        )
        theirs = found["calls_us"].get(f"{name}.matmul")
        for call, time_us in found["calls_us"].items():
            share = "" if theirs is None else f"  {time_us / theirs:5.2f} of {name}.matmul"
            print(f"  {call:24} {time_us:8.2f} us{share}")


if __name__ == "__main__":
    main()
