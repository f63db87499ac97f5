"""What tilewave costs a PyTorch program on the host: calls without and with gradients, compiled, overridden.

    python benchmarks/torch_overhead.py --json FILE [--budget SECONDS]   # PyTorch and a GPU
    python benchmarks/torch_overhead.py --stand-in --json FILE           # PyTorch and a C compiler

Products of 64 x 64 x 64, so that the host's time is all there is, by wall clock, in turn with PyTorch's own
in one process, in rounds too short to fill the stream's queue; medians. Compiled code is held against the
same code with PyTorch's operators, compiled the same way; ``graphs`` counts the pieces that torch.compile
made, of which 1 means no graph break. A step of examples/torch_training.py is timed without and with its
line, under PyTorch's own switches (no TF32). With ``--stand-in`` the driver does nothing, tensors are of the
CPU and pretend to be on a GPU (see host_time.py), and compiling and training are left out: what is left is
tilewave's own work, which compares with itself only. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import contextlib
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

import host_time

SIZE = 64
CALLS = 100
TARGETS = {"eager": 0.6, "eager, gradients": 1.0, "compiled": 1.0, "compiled, gradients": 1.0}
"""The most that tilewave's time may be in units of PyTorch's."""

Call = Callable[[], Any]


def pairs(stand_in: bool) -> dict[str, tuple[Call, Call | None]]:
    """Calls by name: tilewave's, and PyTorch's for the same result (None with the stand-in)."""
    import torch

    import tilewave

    device = "cpu" if stand_in else "cuda"
    a, b, bias = (torch.randn(*shape, device=device) for shape in ((SIZE, SIZE), (SIZE, SIZE), (SIZE,)))
    x, w = a.clone().requires_grad_(), b.clone().requires_grad_()
    incoming = torch.ones(SIZE, SIZE, device=device)
    layer, theirs = tilewave.torch.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE)
    layer, theirs = layer.to(device), theirs.to(device)

    def overridden() -> Any:
        with tilewave.torch.override():
            return a @ b

    found: dict[str, tuple[Call, Call | None]] = {
        "eager": (lambda: tilewave.matmul(a, b), lambda: torch.matmul(a, b)),
        "eager, gradients": (lambda: tilewave.matmul(x, w), lambda: torch.matmul(x, w)),
        "forward and backward": (
            lambda: torch.autograd.grad(tilewave.matmul(x, w), (x, w), incoming),
            lambda: torch.autograd.grad(torch.matmul(x, w), (x, w), incoming),
        ),
        "linear module, gradients": (lambda: layer(a), lambda: theirs(a)),
        "override around one product": (overridden, lambda: a @ b),
    }
    if stand_in:
        return {name: (ours, None) for name, (ours, _) in found.items()}

    def step(x: Any, w: Any) -> Any:
        return tilewave.gemm(x, w, bias=bias) * 2

    def their_step(x: Any, w: Any) -> Any:
        return torch.addmm(bias, x, w) * 2

    compiled, their_compiled = (torch.compile(code, fullgraph=True) for code in (step, their_step))
    found["compiled"] = lambda: compiled(a, b), lambda: their_compiled(a, b)
    found["compiled, gradients"] = lambda: compiled(x, w), lambda: their_compiled(x, w)
    return found


def graphs() -> int:
    """Pieces into which torch.compile cuts a function around a product."""
    import torch

    import tilewave

    a = torch.randn(SIZE, SIZE, device="cuda")
    seen: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        seen.append(graph)
        return graph

    torch.compile(lambda v: tilewave.gemm(v.sin(), a, activation="gelu").cos(), backend=keep)(a)
    return len(seen)


def training() -> dict[str, Any]:
    """Milliseconds of a step of examples/torch_training.py before and after its line, and the loss curves."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import torch_training

    import tilewave

    sizes = (4096, 8192, 30)
    blocks = {"before": contextlib.nullcontext(), "after": tilewave.torch.override()}
    runs = {name: torch_training.train(*sizes, "cuda", block) for name, block in blocks.items()}
    found: dict[str, Any] = {"width": sizes[0], "batch": sizes[1]}
    for name, (losses, seconds) in runs.items():
        found |= {f"{name}_ms": 1e3 * seconds, f"{name}_losses": losses}
    return found


def medians(calls: dict[str, Call], wait: Call, clock: Callable[[], float], until: float) -> dict[str, float]:
    """Microseconds a call, over interleaved rounds of all, until the clock on the wall says ``until``."""
    for call in calls.values():
        for _ in range(20):
            call()
    wait()
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    while time.monotonic() < until or min(map(len, rounds.values())) < 5:
        for name, call in calls.items():
            begin = clock()
            for _ in range(CALLS):
                call()
            rounds[name].append(1e6 * (clock() - begin) / CALLS)
            wait()
    return {name: statistics.median(times) for name, times in rounds.items()}


def child(stand_in: bool, budget: float) -> dict[str, Any]:
    """All readings of one process, which take about ``budget`` seconds."""
    until = time.monotonic() + budget
    import torch

    if stand_in:
        torch.set_num_threads(1)
        host_time.pretend(torch)
        from tilewave import api, arrays, tensors
        from tilewave.torch import compute, front

        arrays._viewers[torch.nn.Parameter] = arrays._viewers[torch.Tensor]
        compute.computed_by_torch = lambda a, recipe: False
        api.front_for = tensors.front_for
        front.ordinary = lambda *given: front.is_plain(*given) and not front.wants_gradient(*given)
    found = pairs(stand_in)
    calls = {f"ours: {name}": ours for name, (ours, _) in found.items()}
    calls |= {f"torch: {name}": theirs for name, (_, theirs) in found.items() if theirs is not None}
    clock = time.thread_time if stand_in else time.perf_counter
    wait: Call = (lambda: None) if stand_in else torch.cuda.synchronize
    steps = {} if stand_in else {"training": training()}  # first, so that the rest has what time is left
    times = medians(calls, wait, clock, until)
    record: dict[str, Any] = {"torch": torch.__version__, "microseconds": times, **steps}
    if not stand_in:
        record["gpu"] = torch.cuda.get_device_name()
        record["graphs"] = graphs()
        record["ratios"] = {name: times[f"ours: {name}"] / times[f"torch: {name}"] for name in found}
    return record


def table(record: dict[str, Any]) -> str:
    """The readings, a line each."""
    times, ratios = record["microseconds"], record.get("ratios", {})
    lines = [f"{'':30}{'tilewave':>10}{'PyTorch':>10}{'ratio':>8}{'target':>8}  (us of host time)"]
    for key, ours in times.items():
        if key.startswith("ours: "):
            name = key.removeprefix("ours: ")
            theirs = f"{times[f'torch: {name}']:10.1f}{ratios[name]:8.2f}" if name in ratios else 18 * " "
            target = f"{TARGETS[name]:8.1f}" if name in TARGETS and name in ratios else ""
            lines.append(f"{name:30}{ours:10.1f}{theirs}{target}")
    if "training" in record:
        one = record["training"]
        speed = one["before_ms"] / one["after_ms"]
        lines.append(
            f"training step, width {one['width']}, batch {one['batch']}: {one['before_ms']:.2f} ms before, "
            f"{one['after_ms']:.2f} ms after the line, {speed:.3f} times as fast"
        )
    if "graphs" in record:
        lines.append(f"graphs made of one function: {record['graphs']} (1: no graph break)")
    return "\n".join(lines)


def main() -> None:
    """Measure in a process of its own, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=90.0, help="seconds for all of it")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.stand_in, options.budget)))
        return
    command = [sys.executable, __file__, "--child", "--budget", str(options.budget)]
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if options.stand_in:
            environment |= host_time.stand_in_driver(Path(folder))
            command.append("--stand-in")
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    record = {
        "what": f"host time of {SIZE} x {SIZE} x {SIZE} in PyTorch"
        + (", stand-in for the driver" if options.stand_in else ""),
        "python": platform.python_version(),
        **json.loads(done.stdout.splitlines()[-1]),
    }
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(table(record))


if __name__ == "__main__":
    main()
