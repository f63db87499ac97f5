"""The register-file pass on an H200: the same bits as the compiler's kernels, and how much faster.

    PYTHONPATH=src timeout 400 python3 benchmarks/reemitted.py --out reemitted.json --budget 300
        [--only TEXT ...] [--sizes 4096 8192 2048] [--rounds 7] [--no-timing]
        [--spacing loads=20 --spacing loads=12,behind_barrier=12 ...]

Every instance of the family `large_tile` is compiled here and put through the pass. Compiler's cubin and
re-emitted one compute the same products (random, all-positive, small-integer, with NaN and infinities;
ragged sizes, padded rows, every kind of schedule): all bits of the outputs must agree, before the timing and
after. When all have been compared, both and cuBLAS (through PyTorch, operands in the same layout) take turns
at square sizes. The record is written after every reading, a kernel that fails is told of and the others go
on, and a later call with the same file goes on where this one ended, except for kernels whose machine code
is another one by then. `--spacing` adds loops with other distances between their instructions
(`tilewave.compiler.sass.Spacing`) to the contenders, to find better ones.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilewave.bench.environment import Environment
from tilewave.bench.timing import Contender, interleave
from tilewave.compiler import compiler_version
from tilewave.compiler.sass import Spacing, reemit
from tilewave.device import query_device
from tilewave.device.driver import bindings
from tilewave.errors import UsageError
from tilewave.kernels.arguments import GEMM_ARGS_BYTES, Pointers, pack_arguments
from tilewave.kernels.build import compile_instance
from tilewave.kernels.families import FAMILIES, large_tile
from tilewave.kernels.instances import Contiguous, Instance
from tilewave.kernels.new_loops import instance_refusal
from tilewave.planner.gemm import GemmPlan, GemmPlanner
from tilewave.planner.schedules import DATA_PARALLEL, STREAM_K_WALK, Schedule, split_k
from tilewave.problem import GemmProblem, MatrixLayout
from tilewave.runtime import driver
from tilewave.runtime.driver import Device

ARCH = "sm_90"
"""What the library runs on an H200: its kernels use nothing of sm_90a."""
SCHEDULES = (DATA_PARALLEL, split_k(3), STREAM_K_WALK)
KINDS = ("normal", "positive", "integers", "special")


class TorchStopwatch:
    """CUDA events on PyTorch's current stream."""

    def __init__(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def elapsed_ms(self, work: Callable[[], None], repeats: int) -> float:
        """Milliseconds of ``repeats`` calls."""
        self._start.record()
        for _ in range(repeats):
            work()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end))


def layout_of(tensor: Any) -> MatrixLayout:
    """How a tensor lies in memory."""
    address = tensor.data_ptr()
    alignment = 16 if address % 16 == 0 else 8 if address % 8 == 0 else 4
    *batch, row, column = tensor.stride()
    return MatrixLayout(row, column, tuple(batch), alignment)


@dataclass(frozen=True)
class Pair:
    """An instance with the compiler's cubin and the re-emitted one, or the reason why there is none."""

    name: str
    symbol: str
    cubin: bytes
    reemitted: bytes | None
    reason: str | None
    report: str
    seconds: float
    variants: dict[str, bytes]

    @property
    def digest(self) -> str:
        """Of all machine code: readings of other code say nothing about this."""
        images = (self.cubin, self.reemitted or b"", *self.variants.values())
        return hashlib.sha256(b"".join(hashlib.sha256(image).digest() for image in images)).hexdigest()[:16]


def made(name: str, spacings: Sequence[str]) -> Pair:
    """Compile an instance and put it through the pass."""
    instance = by_name()[name]
    program, kernel = compile_instance(instance, ARCH)
    start = time.monotonic()
    outcome = reemit(program, kernel.symbol)
    seconds = time.monotonic() - start
    variants = {}
    for text in spacings:
        fields = {key: int(value) for key, value in (part.split("=") for part in text.split(","))}
        variant = reemit(program, kernel.symbol, Spacing(**fields))
        if variant.cubin is None:
            print(f"{name} {text}: {variant.reason}", flush=True)
        elif variant.cubin != outcome.cubin:
            variants[text] = variant.cubin
    return Pair(
        name,
        kernel.symbol,
        program.cubin,
        outcome.cubin,
        outcome.reason,
        str(outcome.report),
        seconds,
        variants,
    )


def by_name() -> dict[str, Instance]:
    return {instance.name: instance for instance in large_tile.instances()}


class Kernel:
    """A kernel of a cubin, loaded, with workspace of its own."""

    def __init__(self, image: bytes, symbol: str, instance: Instance) -> None:
        library = driver._call("cuLibraryLoadData", image, [], [], 0, [], [], 0)
        kernel = driver._call("cuLibraryGetKernel", library, symbol.encode())
        self._kernel = bindings().CUfunction(int(kernel))
        self._instance = instance
        self._keep: list[Any] = [library]

    def call(self, plan: GemmPlan, a: Any, b: Any, out: Any) -> Any:
        """What submits the plan once."""
        partials = torch.empty(max(4, plan.partial_bytes // 4), device="cuda")
        tickets = torch.zeros(max(1, plan.ticket_bytes // 4), dtype=torch.int32, device="cuda")
        pointers = Pointers(
            a.data_ptr(),
            b.data_ptr(),
            out.data_ptr(),
            partials=partials.data_ptr() if plan.partial_bytes else 0,
            tickets=tickets.data_ptr() if plan.ticket_bytes else 0,
        )
        packed = pack_arguments(plan.problem, plan.cut, plan.raster, pointers, depth=self._instance.bk)
        block = ctypes.create_string_buffer(packed, GEMM_ARGS_BYTES)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(block))
        stream = torch.cuda.current_stream().cuda_stream
        threads, shared = self._instance.threads, self._instance.shared_bytes

        def submit(keep: Any = (partials, tickets, block, parameters)) -> None:
            address = ctypes.addressof(keep[3])
            driver._call(
                "cuLaunchKernel", self._kernel, plan.blocks, 1, 1, threads, 1, 1, shared, stream, address, 0
            )

        return submit


def draw(kind: str, rows: int, columns: int, by_columns: bool, padding: int) -> Any:
    """A matrix of the kind, its rows (or columns) lying `padding` elements apart from one another."""
    shape = (columns, rows + padding) if by_columns else (rows, columns + padding)
    if kind == "integers":
        values = torch.randint(-8, 9, shape, device="cuda").float()
    else:
        values = torch.randn(shape, device="cuda")
    if kind == "positive":
        values = values.abs()
    if kind == "special":
        specials = [float("inf"), float("-inf"), float("nan"), 3e38, -1e-42, -0.0]
        where = torch.randint(0, values.numel(), (60,), device="cuda")
        picked = torch.randint(0, len(specials), (60,), device="cuda")
        values.view(-1)[where] = torch.tensor(specials, device="cuda")[picked]
    values = values[:, : shape[1] - padding]
    return values.t() if by_columns else values


def operands(instance: Instance, kind: str, m: int, n: int, k: int, padding: int = 0) -> tuple[Any, Any]:
    assert instance.a is not None
    assert instance.b is not None
    a = draw(kind, m, k, instance.a.contiguous is Contiguous.OTHER, padding)
    b = draw(kind, k, n, instance.b.contiguous is Contiguous.K, padding)
    return a, b


def best_plan(planner: GemmPlanner, problem: GemmProblem, instance: Instance) -> GemmPlan:
    """The instance under the schedule that the planner likes best."""
    plans = [
        plan for s in (DATA_PARALLEL, STREAM_K_WALK) if (plan := plan_or_none(planner, problem, instance, s))
    ]
    return min(plans, key=lambda plan: plan.estimate.total)


def plan_or_none(
    planner: GemmPlanner, problem: GemmProblem, instance: Instance, schedule: Schedule
) -> GemmPlan | None:
    try:
        return planner.plan_with(problem, instance, schedule)
    except UsageError:
        return None


def same_bits(planner: GemmPlanner, instance: Instance, kernels: dict[str, Kernel]) -> dict[str, Any]:
    """How many products were compared, and what differed."""
    compared, wrong = 0, []
    for kind in KINDS:
        for _ in range(2):
            m, n, k = (int(torch.randint(low, high, ())) for low, high in ((257, 900), (257, 900), (1, 700)))
            padding = int(torch.randint(0, 5, ()))
            if instance.a is not None and instance.a.width == 16:
                m, n, k, padding = m // 4 * 4, n // 4 * 4, -(-k // 4) * 4, 4 * padding
            a, b = operands(instance, kind, m, n, k, padding)
            for schedule in SCHEDULES:
                # The kernels see the problem as it stands: the instance is given, so nothing is transposed.
                out = torch.full((m, n), float("nan"), device="cuda")
                problem = raw_problem(a, b, out)
                plan = plan_or_none(planner, problem, instance, schedule)
                if plan is None:
                    continue
                results = []
                for kernel in kernels.values():
                    out.fill_(float("nan"))
                    kernel.call(plan, a, b, out)()
                    torch.cuda.synchronize()
                    results.append(out.clone().view(torch.int32))
                compared += 1
                where = f"{kind} {m}x{n}x{k} {schedule}"
                if not all(torch.equal(results[0], other) for other in results[1:]):
                    wrong.append(where)
                if kind in ("normal", "positive"):
                    exact = a.double() @ b.double()
                    limit = (a.double().abs() @ b.double().abs()) * (k + 8) * 2.0**-24
                    if not bool(((out.double() - exact).abs() <= limit).all()):
                        wrong.append(f"{where}: off by more than the bound")
    return {"compared": compared, "wrong": wrong}


def raw_problem(a: Any, b: Any, out: Any) -> GemmProblem:
    """The problem in the layout that it has, not transposed."""
    (m, k), n = a.shape, b.shape[1]
    return GemmProblem(m, n, k, (), layout_of(a), layout_of(b), layout_of(out))


def timed(
    planner: GemmPlanner, instance: Instance, kernels: dict[str, Kernel], size: int, rounds: int
) -> dict[str, Any]:
    """Medians of compiler's kernel, re-emitted one and cuBLAS in turn.

    Where the planner likes another schedule, the re-emitted one also runs as "data-parallel", a block a tile.
    """
    a, b = operands(instance, "normal", size, size, size)
    out = torch.empty((size, size), device="cuda")
    plan = best_plan(planner, raw_problem(a, b, out), instance)
    contenders = [Contender(name, kernel.call(plan, a, b, out)) for name, kernel in kernels.items()]
    others = [Contender("cuBLAS", lambda: torch.matmul(a, b, out=out))]
    if plan.schedule != DATA_PARALLEL:
        whole = planner.plan_with(plan.problem, instance, DATA_PARALLEL)
        others.append(Contender(str(DATA_PARALLEL), kernels["reemitted"].call(whole, a, b, out)))
    timings = interleave([*contenders, *others], TorchStopwatch(), rounds=rounds)
    flops = 2.0 * size**3
    row: dict[str, Any] = {name: round(timing.tflops(flops), 2) for name, timing in timings.items()}
    row["schedule"] = str(plan.schedule)
    for name in kernels:
        row[f"{name}/cuBLAS"] = round(timings[name].speed_over(timings["cuBLAS"]), 4)
    results = []
    for contender in contenders:
        out.fill_(float("nan"))
        contender.work()
        torch.cuda.synchronize()
        results.append(out.clone().view(torch.int32))
    row["same bits"] = all(torch.equal(results[0], other) for other in results[1:])
    return row


class Session:
    """Kernels loaded on the GPU, with what is measured of them."""

    def __init__(self, planner: GemmPlanner) -> None:
        self._planner = planner

    def kernels(self, pair: Pair) -> dict[str, Kernel]:
        """The compiler's kernel, the re-emitted one and its variants."""
        assert pair.reemitted is not None
        images = {"compiler": pair.cubin, "reemitted": pair.reemitted, **pair.variants}
        instance = by_name()[pair.name]
        return {name: Kernel(image, pair.symbol, instance) for name, image in images.items()}

    def compared(self, pair: Pair) -> dict[str, Any]:
        """What the pass made of a kernel, and whether it gives the compiler's bits."""
        row = {"reason": pair.reason, "report": pair.report, "seconds": round(pair.seconds, 2)}
        row["digest"] = pair.digest
        if pair.reemitted is None:
            return row
        return row | same_bits(self._planner, by_name()[pair.name], self.kernels(pair))

    def rate(self, pair: Pair, size: int, rounds: int) -> dict[str, Any]:
        """Rates at one size."""
        return timed(self._planner, by_name()[pair.name], self.kernels(pair), size, rounds)


def run(
    pairs: Sequence[Pair],
    record: dict[str, Any],
    compared: Callable[[Pair], dict[str, Any]],
    rate: Callable[[Pair, int], dict[str, Any]],
    sizes: Sequence[int],
    end: float,
    keep: Callable[[], None],
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Compare all kernels, then time them, until ``end``; ``keep`` is called after every reading.

    Rows go into ``record["instances"]``. Those of the same machine code stay; sizes that they lack are added.
    """
    rows = record["instances"]
    for pair in pairs:
        if now() > end:
            print("budget spent", flush=True)
            return
        old = rows.get(pair.name)
        if old is not None and old.get("digest") == pair.digest and "error" not in old:
            continue
        try:
            row = compared(pair)
        except Exception as error:  # the others are compared all the same
            row = {"reason": None, "digest": pair.digest, "error": f"{type(error).__name__}: {error}"[:800]}
        rows[pair.name] = row
        print(line(pair.name, row), flush=True)
        keep()
    for size in sizes:
        for pair in pairs:
            row = rows[pair.name]
            rates = row.setdefault("rates", {})
            if row["reason"] or row.get("wrong") or "error" in row or str(size) in rates:
                continue
            if now() > end:
                print("budget spent", flush=True)
                return
            try:
                rates[str(size)] = rate(pair, size)
            except Exception as error:  # a later call tries again
                row["error"] = f"{size}: {type(error).__name__}: {error}"[:800]
            print(line(pair.name, row), flush=True)
            keep()


def line(name: str, row: dict[str, Any]) -> str:
    if row["reason"] or "compared" not in row:
        return f"{name:28} {row['reason'] or row.get('error')}"
    bits = f"{row['compared']} same" if not row["wrong"] else f"{len(row['wrong'])} WRONG"
    rates = "  ".join(
        f"{size}: {r['compiler']:.1f} -> {r['reemitted']:.1f} x{r['reemitted/cuBLAS']:.3f}"
        + "".join(f" [{key} {r[key]:.1f}]" for key in r if "=" in key and "/" not in key)
        + ("" if r["same bits"] else " BITS DIFFER")
        for size, r in row.get("rates", {}).items()
    )
    return f"{name:28} {bits}  {rates}" + (f"  FAILED {row['error']}" if "error" in row else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds")
    parser.add_argument("--only", nargs="*", help="parts of names of instances")
    parser.add_argument("--sizes", nargs="*", type=int, default=[4096, 8192, 2048])
    parser.add_argument("--spacing", action="append", default=[], help="a variant: FIELD=N,FIELD=N")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-timing", dest="timing", action="store_false")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1))
    options = parser.parse_args()
    started = time.monotonic()
    names = [n for n in by_name() if not options.only or any(part in n for part in options.only)]
    record: dict[str, Any] = {"instances": {}}
    if options.out.exists():
        record = json.loads(options.out.read_text(encoding="utf-8"))
    with ProcessPoolExecutor(options.jobs) as pool:  # before CUDA is initialised, as it forks
        pairs = list(pool.map(made, names, [options.spacing] * len(names)))
    print(f"{len(pairs)} kernels after {time.monotonic() - started:.0f} s", flush=True)
    # First what the library does not run yet for want of this reading.
    pairs.sort(key=lambda pair: instance_refusal(by_name()[pair.name]) is None)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_grad_enabled(False)
    torch.zeros(1, device="cuda")
    record["command"] = "python3 benchmarks/reemitted.py --out FILE --budget SECONDS"
    record["environment"] = Environment.capture(device=Device(), compiler=compiler_version()).to_json()
    session = Session(GemmPlanner(query_device(), FAMILIES))

    def keep() -> None:
        torch.cuda.empty_cache()
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    run(
        pairs,
        record,
        session.compared,
        lambda pair, size: session.rate(pair, size, options.rounds),
        options.sizes if options.timing else (),
        started + options.budget,
        keep,
    )
    print("\nTFLOP/s of the compiler's loop -> the re-emitted one, and its ratio to cuBLAS")
    for name, row in record["instances"].items():
        print(line(name, row))
    sys.exit(any(row.get("wrong") or "error" in row for row in record["instances"].values()))


if __name__ == "__main__":
    main()
