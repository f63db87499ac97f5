"""Every kernel instance of the library, dealt in every way, under the tools of NVIDIA's compute-sanitizer.

Kernels for groups and for fp16x3, which are in no family, run as the library runs them (`whole_samples`).

`prepare_products` compiles into a folder and lists the launches, `run_products` is what runs under a tool,
and `sweep` runs all tools over chunks of the list, side by side.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewave.compiler import Program, compile_source
from tilewave.kernels.arguments import Pointers, pack_arguments
from tilewave.kernels.instances import Instance
from tilewave.lab.product_samples import Dealing, Sample, dealings, make_sample
from tilewave.lab.sanitizers import COMMON_OPTIONS, TOOL_OPTIONS, TOOLS, Sanitizer, ToolRun
from tilewave.lab.whole_samples import launch_whole, make_whole

LIST = "products.json"


@dataclass(frozen=True)
class Launch:
    """An instance dealt in one way; ``fault`` names the planted fault that its cubin has, if any.

    With ``whole`` it is the sample of `whole_samples` of the name ``instance``, whose kernels the library
    loads; ``cubin`` and ``symbol`` are empty then.
    """

    instance: str
    dealing: Dealing
    cubin: str
    symbol: str
    fault: str | None = None
    whole: bool = False

    def __str__(self) -> str:
        return self.instance if self.whole else f"{self.instance} {self.dealing}"


@dataclass(frozen=True)
class Launches:
    """What there is to launch; samples are drawn from ``seed``."""

    arch: str
    compiler: str
    digest: str
    seed: int
    launches: tuple[Launch, ...]

    def sound(self) -> list[int]:
        """Indices of the launches of kernels as they are."""
        return [index for index, launch in enumerate(self.launches) if launch.fault is None]

    def of_fault(self, name: str) -> list[int]:
        """Indices of the launches of a planted fault."""
        return [index for index, launch in enumerate(self.launches) if launch.fault == name]

    def save(self, folder: Path) -> None:
        """Write them as JSON."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LIST).write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(folder: Path) -> Launches:
        """Read what `save` wrote."""
        data = json.loads((folder / LIST).read_text())
        launches = tuple(
            Launch(**entry | {"dealing": Dealing(entry["dealing"])}) for entry in data["launches"]
        )
        return Launches(data["arch"], data["compiler"], data["digest"], data["seed"], launches)


def prepare_products(
    folder: Path,
    arch: str,
    seed: int,
    instances: Sequence[Instance],
    jobs: int | None = None,
    wholes: Sequence[str] = (),
) -> Launches:
    """Compile instances and faults into ``folder``; list the launches, ``wholes`` before instances."""
    from tilewave.kernels import fp16x3
    from tilewave.kernels.families import grouped
    from tilewave.kernels.ship import compile_all
    from tilewave.lab.product_faults import FAULTS
    from tilewave.lab.workers import Budget, run_tasks

    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(repr((COMMON_OPTIONS, TOOL_OPTIONS, seed)).encode())
    launches: list[Launch] = []
    compilers = set()

    def add(name: str, cubin: bytes, instance: Instance, symbol: str, ways: Iterable[Dealing]) -> None:
        path = (folder / f"{name}.cubin").resolve()
        path.write_bytes(cubin)
        digest.update(name.encode() + cubin)
        fault = name if name.startswith("fault") else None
        launches.extend(Launch(instance.name, way, str(path), symbol, fault) for way in ways)

    if wholes:
        of_groups = (*grouped.instances(), *grouped.TABLE_WRITERS)
        of_mode = fp16x3.every_fp16x3_instance() if any(one.startswith("fp16x3") for one in wholes) else ()
        for kernels, target in ((of_groups, arch), (of_mode, fp16x3.ARCHITECTURE)):
            for _, _, program in compile_all(kernels, [target], jobs):
                digest.update(program.cubin)
        launches.extend(Launch(name, Dealing.DATA_PARALLEL, "", "", whole=True) for name in wholes)
    for instance, _, program in compile_all(instances, [arch], jobs):
        compilers.add(program.compiler)
        symbol = program.kernels[instance.entry].symbol
        add(instance.name, program.cubin, instance, symbol, dealings(instance))
    tasks = [(number, arch) for number in range(len(FAULTS))]
    programs = dict(run_tasks(_compile_fault, tasks, jobs or os.cpu_count() or 1, Budget(None)))
    for number, fault in enumerate(FAULTS):
        instance, program = fault.instance, programs[number, arch]
        symbol = program.kernels[instance.entry].symbol
        add(fault_name(number), program.cubin, instance, symbol, [fault.dealing])
    compiler = ", ".join(sorted(compilers))
    return Launches(arch, compiler, digest.hexdigest()[:16], seed, tuple(launches))


def _compile_fault(task: tuple[int, str]) -> Program:
    from tilewave.lab.product_faults import FAULTS

    number, arch = task
    fault = FAULTS[number]
    return compile_source(fault.source(), [fault.instance.entry], arch)


def fault_name(number: int) -> str:
    """What the launch of the ``number``-th planted fault is listed under."""
    return f"fault{number}"


def run_products(folder: Path, indices: Iterable[int], results: Path, *, poison: bool) -> None:
    """Launch in order; after each, add a line with its index and error in bounds to ``results``.

    Without ``poison`` nothing that a kernel must write is filled beforehand, so that initcheck sees what
    never was.
    """
    from tilewave.kernels.ship import every_instance
    from tilewave.runtime.driver import Device, Module, Stream

    listed = Launches.load(folder)
    instances = {instance.name: instance for instance in every_instance()}
    device = Device()
    stream = Stream(device)
    modules: dict[str, Module] = {}
    with results.open("a", encoding="utf-8") as lines:
        for index in indices:
            launch = listed.launches[index]
            if launch.whole:
                whole = make_whole(launch.instance, listed.seed)
                error = launch_whole(device, stream, whole, poison=poison)
                lines.write(json.dumps({"index": index, "error_in_bounds": error}) + "\n")
                lines.flush()
                continue
            sample = make_sample(instances[launch.instance], launch.dealing, listed.seed)
            if launch.cubin not in modules:
                modules = {launch.cubin: Module(device, Path(launch.cubin).read_bytes())}
            function = modules[launch.cubin].function(launch.symbol)
            error = _launch(device, stream, function, sample, poison=poison)
            lines.write(json.dumps({"index": index, "error_in_bounds": error}) + "\n")
            lines.flush()


def _launch(device: Any, stream: Any, function: Any, sample: Sample, *, poison: bool) -> float:
    """Launch a sample's plan; every operand is an allocation of exactly its size."""
    from tilewave.runtime.driver import DeviceArray

    def unwritten(shape: Sequence[int]) -> Any:
        array = DeviceArray.empty(device, shape)
        if poison:
            array.poison()
        return array

    plan, memory = sample.plan, {}
    for name, operand in sample.operands.items():
        written = name in sample.outputs
        memory[name] = (
            unwritten(operand.storage.shape) if written else DeviceArray.from_numpy(device, operand.storage)
        )
    addresses = {name: array.address + 4 * sample.operands[name].offset for name, array in memory.items()}
    partials = unwritten((max(1, plan.partial_bytes // 4),))
    tickets = DeviceArray.from_numpy(device, np.zeros(max(1, plan.cut.counters), np.uint32))
    if plan.workspace_bytes:
        addresses |= {"partials": partials.address, "tickets": tickets.address}
    packed = pack_arguments(
        plan.problem,
        plan.cut,
        plan.raster,
        Pointers(**addresses),
        sample.alpha,
        sample.beta,
        depth=plan.instance.bk,
    )
    block = ctypes.create_string_buffer(packed, len(packed))
    # Static memory counts too towards what a kernel must be allowed first.
    function.allow_dynamic_shared(plan.instance.shared_bytes)
    function.prepare(
        (plan.blocks, 1, 1), (plan.instance.threads, 1, 1), [block], stream, plan.instance.shared_bytes
    )()
    stream.synchronize()
    found = {}
    for name in sample.outputs:
        operand = sample.operands[name]
        operand.storage[...] = memory[name].to_numpy()
        found[name] = operand.view
    if tickets.to_numpy().any():
        return float("inf")  # the next launch would go wrong
    return sample.error_in_bounds(found["out"], found.get("preactivation"))


def chunks(indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Runs of at most ``size`` of them."""
    for begin in range(0, len(indices), size):
        yield indices[begin : begin + size]


@dataclass(frozen=True)
class Job:
    """One run of a tool over some launches."""

    tool: str
    indices: tuple[int, ...]
    fault: str | None = None


def jobs_for(listed: Launches, faults: Sequence[tuple[str, str]], size: int) -> list[Job]:
    """The runs to make: (tool, name) of the faults first, then all launches, the slowest tool first."""
    order = sorted(TOOLS, key=lambda tool: tool != "racecheck")
    planted = [Job(tool, tuple(listed.of_fault(name)), name) for tool, name in faults]
    return planted + [Job(tool, tuple(part)) for tool in order for part in chunks(listed.sound(), size)]


def sweep(
    jobs: Sequence[Job],
    sanitizer_in: Callable[[Path], Sanitizer],
    listed: Launches,
    folder: Path,
    *,
    left: Callable[[], float],
    limit_s: float,
    workers: int,
) -> Iterator[tuple[Job, ToolRun]]:
    """Make the runs side by side and yield them as they end; none is begun when no time is ``left``."""

    def run(numbered: tuple[int, Job]) -> ToolRun | None:
        number, job = numbered
        place = folder / f"job{number}"
        listed.save(place)
        seconds = min(limit_s, left())
        return sanitizer_in(place).run(job.tool, job.indices, seconds) if seconds >= 1 else None

    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(run, numbered): numbered[1] for numbered in enumerate(jobs)}
        for future in as_completed(futures):
            done = future.result()
            if done is not None:
                yield futures[future], done


def judge_chunk(listed: Launches, job: Job, run: ToolRun) -> dict[str, Any]:
    """The result of a tool on some launches as plain data; `clean` if it ended and found nothing."""
    unfinished = [index for index in job.indices if index not in run.errors_in_bounds]
    wrong = [index for index, error in run.errors_in_bounds.items() if not error <= 1]
    clean = run.exit_code == 0 and run.report.total == 0 and not (run.report.records or unfinished or wrong)
    return {
        "clean": clean,
        "errors": run.report.total,
        "launches": len(job.indices),
        "seconds": run.seconds,
        "largest_error_in_bounds": max(run.errors_in_bounds.values(), default=None),
        "errors_by_family": run.report.by_kernel(),
        "unfinished": [str(listed.launches[index]) for index in unfinished[:20]],
        "wrong_results": [str(listed.launches[index]) for index in wrong[:20]],
        "first_reports": list(run.report.records[:5]),
        "exit_code": run.exit_code,
        "output": "" if run.exit_code == 0 else run.output,
    }


def judge_planted(listed: Launches, job: Job, says: str, run: ToolRun) -> dict[str, Any]:
    """Whether a tool found a planted fault in the kernel that has it, as plain data."""
    launch = listed.launches[job.indices[0]]
    report = run.report.says(says)
    named = set(run.report.by_kernel()) - {""}
    found = report is not None and any(launch.instance.startswith(name) for name in named)
    return {
        "found": found,
        "launch": str(launch),
        "tool": run.tool,
        "errors": run.report.total,
        "report": report,
        "other_reports": [] if found else list(run.report.records[:5]),
        "exit_code": run.exit_code,
        "seconds": run.seconds,
    }
