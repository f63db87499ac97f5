"""What tilewave costs a PyTorch program on the host: calls without and with gradients, compiled, overridden.

    python benchmarks/torch_overhead.py --json FILE [--budget SECONDS]   # PyTorch and a GPU
    python benchmarks/torch_overhead.py --stand-in --json FILE           # PyTorch and a C compiler

Products of 64 x 64 x 64, so that the host's time is all there is, by wall clock, in turn with PyTorch's own
in one process, in rounds too short to fill the stream's queue; medians. Compiled code is held against the
same code with PyTorch's operators, compiled the same way; ``graphs`` counts the pieces that torch.compile
made, of which 1 means no graph break. A step of examples/torch_training.py is timed without and with its
line, under PyTorch's own switches (no TF32). Each part runs in a process of its own, within its share of the
budget, and is written when it ends: one that fails, as where nothing can be compiled, is told and leaves the
others as they are. With ``--stand-in`` the driver does nothing, tensors are of the
CPU and pretend to be on a GPU (see host_time.py), and compiling and training are left out: what is left is
tilewave's own work, which compares with itself only. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import statistics
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
PARTS = {"eager": 0.3, "compiled": 0.4, "graphs": 0.1, "training": 0.2}
"""What is measured, each with the share of the budget that it has; what one leaves the next ones may use."""
LAST_PART_S = 15.0
"""How far behind its share a part may end: starting and compiling are no part of its rounds."""

Call = Callable[[], Any]


def pairs(stand_in: bool) -> dict[str, tuple[Call, Call | None]]:
    """Calls by name: tilewave's, and PyTorch's for the same result (None with the stand-in)."""
    import torch

    import tilewave

    device = "cpu" if stand_in else "cuda"
    a, b = (torch.randn(SIZE, SIZE, device=device) for _ in range(2))
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

    return found


def compiled_pairs() -> dict[str, tuple[Call, Call | None]]:
    """The same of compiled code: a product with an epilogue and an elementwise operation behind it."""
    import torch

    import tilewave

    a, b, bias = (torch.randn(*shape, device="cuda") for shape in ((SIZE, SIZE), (SIZE, SIZE), (SIZE,)))
    x, w = a.clone().requires_grad_(), b.clone().requires_grad_()

    def step(x: Any, w: Any) -> Any:
        return tilewave.gemm(x, w, bias=bias) * 2

    def their_step(x: Any, w: Any) -> Any:
        return torch.addmm(bias, x, w) * 2

    compiled, their_compiled = (torch.compile(code, fullgraph=True) for code in (step, their_step))
    return {
        "compiled": (lambda: compiled(a, b), lambda: their_compiled(a, b)),
        "compiled, gradients": (lambda: compiled(x, w), lambda: their_compiled(x, w)),
    }


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


def timed(
    found: dict[str, tuple[Call, Call | None]], stand_in: bool, wait: Call, budget: float
) -> dict[str, Any]:
    """Times of the pairs and their ratios, in about ``budget`` seconds."""
    calls = {f"ours: {name}": ours for name, (ours, _) in found.items()}
    calls |= {f"torch: {name}": theirs for name, (_, theirs) in found.items() if theirs is not None}
    clock = time.thread_time if stand_in else time.perf_counter
    times = medians(calls, wait, clock, time.monotonic() + budget)
    record: dict[str, Any] = {"microseconds": times}
    if not stand_in:
        record["ratios"] = {name: times[f"ours: {name}"] / times[f"torch: {name}"] for name in found}
    return record


def child(part: str, stand_in: bool, budget: float) -> dict[str, Any]:
    """The readings of one part."""
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
        return {"torch": torch.__version__, **timed(pairs(True), True, lambda: None, budget)}
    record: dict[str, Any] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    if part == "eager":
        return record | timed(pairs(False), False, torch.cuda.synchronize, budget)
    if part == "compiled":
        return record | timed(compiled_pairs(), False, torch.cuda.synchronize, budget)
    if part == "graphs":
        return record | {"graphs": graphs()}
    return record | {"training": training()}


def merged(record: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """A record with the readings of one more part."""
    tables = {
        name: {**record.get(name, {}), **part[name]} for name in ("microseconds", "ratios") if name in part
    }
    return {**record, **part, **tables}


def measure(
    record: dict[str, Any],
    parts: dict[str, float],
    budget: float,
    run: Callable[[str, float, float], dict[str, Any]],
    keep: Callable[[dict[str, Any]], None],
    now: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """The record with all parts that could be measured, handed to ``keep`` after each.

    ``run(part, budget, limit)`` runs one.
    """
    end, shares = now() + budget, sum(parts.values())
    for part, share in parts.items():
        left = max(1.0, end - now())
        try:
            record = merged(record, run(part, left * share / shares, left * share / shares + LAST_PART_S))
        except (RuntimeError, ValueError) as error:
            record = {**record, "failed": {**record.get("failed", {}), part: str(error)[-1500:]}}
        shares -= share
        keep(record)
    return record


def run_part(part: str, budget: float, limit_s: float, *, environment: dict[str, str], stand_in: bool) -> Any:
    """What a process of `child` says, as `host_time.answer_of`."""
    arguments = [__file__, "--part", part, "--budget", f"{budget:g}", *(["--stand-in"] if stand_in else [])]
    return host_time.answer_of(arguments, environment, limit_s)


def table(record: dict[str, Any]) -> str:
    """The readings, a line each."""
    times, ratios = record.get("microseconds", {}), record.get("ratios", {})
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
    lines += [f"{part} failed: {why.splitlines()[-1]}" for part, why in record.get("failed", {}).items()]
    return "\n".join(lines)


def main() -> None:
    """Measure in processes of their own, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=90.0, help="seconds for all of it")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(child(options.part, options.stand_in, options.budget)))
        return
    record: dict[str, Any] = {
        "what": f"host time of {SIZE} x {SIZE} x {SIZE} in PyTorch"
        + (", stand-in for the driver" if options.stand_in else ""),
        "python": platform.python_version(),
    }

    def keep(record: dict[str, Any]) -> None:
        if options.json is not None:
            options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(table(record), flush=True)

    parts = {"eager": 1.0} if options.stand_in else PARTS
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if options.stand_in:
            environment |= host_time.stand_in_driver(Path(folder))
        run = functools.partial(run_part, environment=environment, stand_in=options.stand_in)
        record = measure(record, parts, options.budget, run, keep)
    if "failed" in record:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
