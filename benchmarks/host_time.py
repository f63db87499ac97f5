"""What a product costs on the host: warm calls beside the library's own, the first call, the import.

    python benchmarks/host_time.py --json FILE [--budget SECONDS]   # a GPU; PyTorch, CuPy or both
    python benchmarks/host_time.py --stand-in --json FILE           # no GPU; PyTorch and a C compiler

On a GPU: `tilewave.matmul` of 64 x 64 x 64, warm, in turn with ``torch.matmul`` and ``cupy.matmul`` in one
process, by wall clock in rounds too short to fill the stream's queue. Import and first call are timed in
fresh processes whose caches are warm; the library and its context are there before. The record is written
after each process, and the budget holds them all. With ``--stand-in`` the driver is `stand_in_driver.c`,
which does nothing, tensors are of the CPU and pretend to be on a GPU, and the clock is the CPU's time for the
process: what is left is the host work of Python, its allocation on a CPU, and nothing of the driver's, so the
figures compare with one another and with nothing else. The long way is the same call with nothing kept.
Prints a table and writes JSON; ``--render`` writes both records into docs/host-time.md.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
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
"""Fresh processes of which the import and the first call are timed, as far as the budget goes."""
FIRST_SHARE = 0.5
"""The share of a library's time that is left to those."""
PROCESS_LIMIT_S, LAST_PROCESS_S = 60.0, 10.0
"""The most that a process may take, and how far behind the budget it may end."""
HERE = Path(__file__)
DRIVER = HERE.with_name("stand_in_driver.c")

PAGE = HERE.parents[1] / "docs" / "host-time.md"
RECORD = HERE.parent / "results" / "host_time_stand_in.json"
BEGIN, END = "<!-- stand-in -->\n", "<!-- end of stand-in -->"
GPU_RECORD = HERE.parent / "results" / "host_time_h200.json"
GPU_BEGIN, GPU_END = "<!-- h200 -->\n", "<!-- end of h200 -->"

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


def answer_of(arguments: list[str], environment: dict[str, str], limit_s: float) -> Any:
    """The JSON of a Python process's last line. Raises ``RuntimeError`` with its last words if it fails."""
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"took more than {limit_s:.0f} s") from None
    if done.returncode != 0:
        raise RuntimeError(" | ".join(done.stderr.strip().splitlines()[-3:]) or f"code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def run_child(
    library: str, stand_in: bool, environment: dict[str, str], limit_s: float, *more: str
) -> dict[str, Any]:
    """What a process of `child` says, as `answer_of`."""
    arguments = [str(HERE), "--child", library, *(["--stand-in"] if stand_in else []), *more]
    answer: dict[str, Any] = answer_of(arguments, environment, limit_s)
    return answer


def measure(
    run: Callable[..., dict[str, Any]],
    budget: float,
    keep: Callable[[dict[str, Any]], None],
    now: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Figures of one library, in processes of their own; ``keep`` is given them after each.

    ``run(limit_s, *options)`` runs one. What fails is told in ``failed`` and leaves the rest as it is.
    """
    end = now() + budget
    found: dict[str, Any] = {}
    longest = 0.0

    def attempt(what: str, *more: str) -> dict[str, Any] | None:
        nonlocal longest
        begun = now()
        try:
            answer = run(min(PROCESS_LIMIT_S, LAST_PROCESS_S + max(0.0, end - begun)), *more)
        except (RuntimeError, ValueError) as error:
            found.setdefault("failed", {})[what] = str(error)[:500]
            answer = None
        longest = max(longest, now() - begun)
        keep(found)
        return answer

    attempt("warming up", "--first")  # fills the caches of compiled kernels and of compiled Python
    # The other processes start as long as this one; warm calls have at least a second.
    left = end - now()
    warm_s = max(1.0, min((1 - FIRST_SHARE) * left, left - 4 * longest))
    if (calls := attempt("warm calls", "--budget", f"{warm_s:g}")) is not None:
        found["calls_us"] = calls
        keep(found)
    firsts: list[dict[str, float]] = []
    longest_first = 0.0
    for number in range(PROCESSES):
        if firsts and now() + longest_first > end:
            break
        begun = now()
        first = attempt(f"first call {number + 1}", "--first")
        longest_first = now() - begun
        if first is None:
            break
        firsts.append(first)
        found |= {f"{name}_ms": round(statistics.median(one[name] for one in firsts), 1) for name in first}
        found["first_calls_ms"] = [round(one["first_call"], 1) for one in firsts]
        keep(found)
    return found


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
        calls = found.get("calls_us", {})
        theirs = calls.get(f"{name}.matmul")
        share = "" if theirs is None else f" share of {name}.matmul |"
        lines += [f"| with {name} | time |{share}", "|---|---:|" + ("---:|" if share else "")]
        for call, ms in (("import tilewave", "import_ms"), ("first call", "first_call_ms")):
            if ms in found:
                lines.append(f"| {call} | {found[ms]} ms |" + (" |" if share else ""))
        for call, us in calls.items():
            lines.append(f"| {call} | {us} us |" + (f" {us / theirs:.2f} |" if theirs else ""))
        lines += [f"| {what} | failed: {why} |" for what, why in found.get("failed", {}).items()]
    return "\n".join(lines) + "\n"


def rendered(page: str, record: dict[str, Any], on_gpu: dict[str, Any] | None = None) -> str:
    """The page with the tables between their marks made from the records, the GPU's if there is one."""
    measured = "Not measured yet.\n" if on_gpu is None else table(on_gpu)
    for begin, end, text in ((BEGIN, END, table(record)), (GPU_BEGIN, GPU_END, measured)):
        before, _, rest = page.partition(begin)
        page = before + begin + text + end + rest.partition(end)[2]
    return page


def on_gpu() -> dict[str, Any] | None:
    """The committed record of a GPU, if there is one."""
    return json.loads(GPU_RECORD.read_text(encoding="utf-8")) if GPU_RECORD.exists() else None


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for all of it")
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
        PAGE.write_text(rendered(PAGE.read_text(), json.loads(RECORD.read_text()), on_gpu()))
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

    def keep(name: str, found: dict[str, Any]) -> None:
        record["libraries"][name] = found
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        done = {key: value for key, value in found.items() if key != "calls_us"}
        print(f"{name}: {done}", flush=True)

    end = time.monotonic() + options.budget
    # As a package that is installed: its compiled Python is there from the first process on.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    names = [name for name in ("torch", "cupy") if importlib.util.find_spec(name) is not None]
    if options.stand_in:
        names = ["torch"]
    with tempfile.TemporaryDirectory() as folder:
        if options.stand_in:
            environment |= stand_in_driver(Path(folder))
        for place, name in enumerate(names):
            measure(
                functools.partial(run_child, name, options.stand_in, environment),
                (end - time.monotonic()) / (len(names) - place),
                functools.partial(keep, name),
            )
    print(table(record))
    if not names or any("failed" in found for found in record["libraries"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
