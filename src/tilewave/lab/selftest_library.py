"""The selftest of the library's kernels: a few of them, drawn afresh, at ragged sizes against float64.

Each family is dealt in every way that it can be on a GPU, in one way in the emulator. What runs follows from
the seed alone. The emulator runs them as compiled for sm_90, whatever GPU is asked for: that is the code
whose every instance the tests run in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from tilewave.device import DeviceSpec
from tilewave.errors import CompileError, DeviceError, EmulationError
from tilewave.kernels.arguments import Pointers
from tilewave.kernels.families import FAMILIES
from tilewave.kernels.instances import Instance
from tilewave.lab.guarded import CANARY, GUARD, differing
from tilewave.lab.ladder import Progress
from tilewave.lab.product_samples import Dealing, Sample, dealings, make_sample
from tilewave.lab.workers import Budget, run_tasks
from tilewave.planner.gemm.resources import residency
from tilewave.runtime.driver import Device, DeviceArray, Stream

Results = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Task:
    """A kernel and how its tiles are dealt."""

    instance: Instance
    dealing: Dealing
    seed: int

    def sample(self) -> Sample:
        """What is computed."""
        return make_sample(self.instance, self.dealing, self.seed)

    def __str__(self) -> str:
        return f"{self.instance} {self.dealing}"


@dataclass(frozen=True)
class LibraryOutcome:
    """One product and what is wrong with it, in words; ``error_in_bounds`` is None where there is none."""

    family: str
    kernel: str
    dealing: str
    product: str
    error_in_bounds: float | None
    findings: tuple[str, ...] = ()
    compared_bits: bool = False


class SampleRunner(Protocol):
    """Where samples are computed."""

    def results(self, sample: Sample) -> tuple[Results, tuple[str, ...]]:
        """What the outputs hold, and in words what the kernel did that it should not."""
        ...


class GpuSamples:
    """Samples on a GPU by the library's own launcher, between guard zones, each launched twice."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = Stream(device)

    def results(self, sample: Sample) -> tuple[Results, tuple[str, ...]]:
        """See `SampleRunner`."""
        from tilewave.runtime.execute import launch_plan

        wholes, arrays, addresses = {}, {}, {}
        for name, operand in sample.operands.items():
            whole = np.full(operand.storage.size + 2 * GUARD, CANARY, np.uint32).view(np.float32)
            whole[GUARD:-GUARD] = operand.storage
            wholes[name], arrays[name] = whole, DeviceArray.from_numpy(self._device, whole)
            addresses[name] = arrays[name].address + 4 * (GUARD + operand.offset)
        seen: list[Results] = []
        damage: list[str] = []
        for _ in range(2):
            for name in sample.outputs:
                arrays[name].copy_from(wholes[name])
            launch_plan(
                sample.plan,
                Pointers(**addresses),
                sample.alpha,
                sample.beta,
                device=self._device.ordinal,
                stream=self._stream.handle,
            )
            self._stream.synchronize()
            seen.append({})
            for name, operand in sample.operands.items():
                after, view = arrays[name].to_numpy(), operand.view
                if name in sample.outputs:
                    written = as_strided(after[GUARD + operand.offset :], view.shape, view.strides)
                    seen[-1][name] = written.copy()
                    written[...] = view  # as before the launch: then nothing may be left that has changed
                if not np.array_equal(after.view(np.uint32), wholes[name].view(np.uint32)):
                    damage.append(f"wrote {'outside' if name in sample.outputs else 'into'} {name}")
        if any(differing(seen[0][name], seen[1][name]).any() for name in sample.outputs):
            damage.append("gave other bits when launched again")
        return seen[1], tuple(dict.fromkeys(damage))


def tasks_for(spec: DeviceSpec, seed: int, *, thorough: bool) -> list[Task]:
    """What to run: an instance of every family in one way, or ``thorough`` one for every way."""
    rng = np.random.default_rng(seed)
    tasks = []
    for family in FAMILIES:
        fitting = [one for one in family.instances() if residency(one, spec)[0] > 0]
        if not thorough:  # the emulator takes its time for large tiles
            fitting.sort(key=lambda one: one.bm * one.bn * one.items)
            fitting = fitting[: max(1, len(fitting) // 3)]
        ways = dealings(fitting[0]) if thorough else [Dealing(rng.choice(dealings(fitting[0])))]
        for dealing in ways:
            tasks.append(Task(fitting[rng.integers(len(fitting))], dealing, seed))
    return tasks


def run_library(
    spec: DeviceSpec,
    *,
    seed: int,
    gpu: SampleRunner | None,
    budget: Budget,
    jobs: int,
    progress: Progress,
) -> tuple[list[LibraryOutcome], list[Task]]:
    """Test kernels of the library on ``gpu``, or in the emulator; also returns what time did not suffice for.

    What a GPU gave must be the emulator's result bit for bit, as far as the time goes.
    """
    tasks = tasks_for(spec, seed, thorough=gpu is not None)
    outcomes: dict[Task, LibraryOutcome] = {}
    given: dict[Task, Results] = {}
    if gpu is not None:
        progress.start("testing the library", len(tasks))
        for task in tasks:
            if budget.left <= 0:
                break
            sample = task.sample()
            try:
                given[task], damage = gpu.results(sample)
                outcomes[task] = _judged(task, sample, given[task], damage)
            except (CompileError, DeviceError) as error:
                outcomes[task] = _failed(task, f"failed: {error}")
                if isinstance(error, DeviceError):
                    break  # the GPU is lost to this process
            progress.step(str(task))
    emulated = [task for task in tasks if gpu is None or task in given]
    progress.start("emulating the library", len(emulated))
    for task, results in run_tasks(_emulate, emulated, jobs, budget):
        progress.step(str(task))
        if gpu is None:
            judged = _judged(task, task.sample(), results) if isinstance(results, dict) else None
            outcomes[task] = judged or _failed(task, str(results))
        else:
            outcomes[task] = _compared(outcomes[task], given[task], results)
    return list(outcomes.values()), [task for task in tasks if task not in outcomes]


def _emulate(task: Task) -> Results | str:
    """The results in the emulator, or what went wrong there."""
    from tilewave.runtime.emulated import emulate_plan

    sample = task.sample()
    views = {name: operand.view for name, operand in sample.operands.items()}
    try:
        emulate_plan(sample.plan, views, alpha=sample.alpha, beta=sample.beta, exact_fma=True, count=False)
    except CompileError as error:
        return f"does not compile: {error}"
    except EmulationError as error:
        return f"failed in the emulator: {error}"
    return {name: np.array(views[name]) for name in sample.outputs}


def _judged(task: Task, sample: Sample, results: Results, damage: Sequence[str] = ()) -> LibraryOutcome:
    error = sample.error_in_bounds(results["out"], results.get("preactivation"))
    findings = list(damage)
    if not error <= 1:
        findings.append(f"wrong value: an error of {error:.4g} bounds")
    problem = str(sample.plan.problem)
    instance = task.instance
    return LibraryOutcome(instance.family, instance.name, task.dealing, problem, error, tuple(findings))


def _failed(task: Task, what: str) -> LibraryOutcome:
    instance, problem = task.instance, str(task.sample().plan.problem)
    return LibraryOutcome(instance.family, instance.name, task.dealing, problem, None, (what,))


def _compared(outcome: LibraryOutcome, given: Results, emulated: Results | str) -> LibraryOutcome:
    """With the bits of the emulator beside what a GPU gave."""
    if isinstance(emulated, str):
        return replace(outcome, findings=(*outcome.findings, emulated))
    wrong = sum(int(differing(given[name], emulated[name]).sum()) for name in given)
    if not wrong or outcome.findings:
        return replace(outcome, compared_bits=True)
    what = f"other bits: {wrong:,} elements are not the emulator's bit for bit"
    return replace(outcome, findings=(what,), compared_bits=True)
