"""The selftest of the register-file pass: new loops beside the compiler's, bit for bit, on fresh data.

On a GPU that the pass is for such kernels are checked as when they are first loaded, whatever the cache
remembers. Without one, one of them runs in the interpreter of machine code, which also finds latencies and
scoreboards that are not minded.
"""

from __future__ import annotations

import numpy as np

from tilewave.compiler import choose_arch
from tilewave.compiler.register_pass import architecture_refusal, switched_off
from tilewave.device import DeviceSpec
from tilewave.emulator import Memory
from tilewave.emulator.sass import Cubin, run_blocks
from tilewave.errors import CompileError, DeviceError, EmulationError
from tilewave.kernels.build import compile_instance
from tilewave.kernels.families import FAMILIES
from tilewave.kernels.instances import Instance
from tilewave.kernels.new_loops import instance_refusal, outcome_for
from tilewave.lab.ladder import Progress
from tilewave.lab.selftest_library import LibraryOutcome
from tilewave.lab.workers import Budget
from tilewave.planner.gemm.resources import residency
from tilewave.runtime.driver import Device
from tilewave.runtime.loop_check import Bits, Verdict, compare
from tilewave.runtime.loop_products import LoopProduct, loop_products

NEW_LOOPS = "new loops"
_HOW = "beside the compiler's loop"
_EMULATED_ARCH = "sm_90"
_LARGEST_EMULATED = 128 * 64
"""Outputs of a tile: larger ones take the interpreter many seconds."""


def candidates(spec: DeviceSpec) -> list[Instance]:
    """The kernels that run with new loops and fit the GPU."""
    every = (instance for family in FAMILIES for instance in family.instances())
    return [one for one in every if instance_refusal(one) is None and residency(one, spec)[0] > 0]


def run_loops(
    spec: DeviceSpec,
    *,
    seed: int,
    gpu: Device | None,
    budget: Budget,
    progress: Progress,
    most: int | None = None,
) -> tuple[list[LibraryOutcome], list[str], list[str]]:
    """Compare new loops with the compiler's; also returns what time did not suffice for, and notes.

    ``most``: so many kernels, drawn by the seed, instead of all that there are.
    """
    if (reason := switched_off()) is not None:
        return [], [], [reason]
    if gpu is not None and (reason := architecture_refusal(choose_arch(spec.compute_capability).arch)):
        return [], [], [f"no new loops to test: {reason}"]
    rng = np.random.default_rng([seed, *NEW_LOOPS.encode()])
    instances = candidates(spec)
    if gpu is None:
        small = [one for one in instances if one.bm * one.bn <= _LARGEST_EMULATED]
        instances = [small[rng.integers(len(small))]] if small else []
    order = [instances[i] for i in rng.permutation(len(instances))[:most]]
    progress.start("testing new loops", len(order))
    outcomes, notes = [], []
    done = 0
    for instance in order:
        if budget.left <= 0:
            break
        outcome, note = _outcome(instance, spec, seed, gpu)
        outcomes += [] if outcome is None else [outcome]
        notes += [] if note is None else [note]
        done += 1
        progress.step(instance.name)
    return outcomes, [f"{instance} {_HOW}" for instance in order[done:]], notes


def _outcome(
    instance: Instance, spec: DeviceSpec, seed: int, gpu: Device | None
) -> tuple[LibraryOutcome | None, str | None]:
    """What came of one kernel, or a note where there is nothing to compare."""
    arch = _EMULATED_ARCH if gpu is None else choose_arch(spec.compute_capability).arch
    try:
        program, kernel = compile_instance(instance, arch, machine_code_only=True)
        new = outcome_for(instance, program, kernel)
        if new.cubin is None:
            return None, f"{instance} keeps the compiler's loop: {new.reason}"
        if gpu is None:
            verdict = interpreted(instance, program.cubin, new.cubin, kernel.symbol, seed)
        else:
            from tilewave.runtime.kernels import gpu_state
            from tilewave.runtime.loop_choice import check_on_gpu

            gpu.activate()
            handle = gpu_state(gpu.ordinal).handle
            verdict = check_on_gpu(instance, program.cubin, new.cubin, kernel, spec, handle, seed)
    except (CompileError, DeviceError, EmulationError) as error:
        verdict = Verdict(False, f"failed: {error}")
    findings = () if verdict.same else (verdict.words,)
    return LibraryOutcome(NEW_LOOPS, instance.name, _HOW, "fresh products", None, findings), None


def interpreted(instance: Instance, compilers: bytes, new: bytes, symbol: str, seed: int) -> Verdict:
    """Compare both machine codes in the interpreter, on one of the check's products."""
    rng = np.random.default_rng([seed, *instance.name.encode()])
    every = list(loop_products(instance, rng, sms=2, resident=0))
    chosen = [every[rng.integers(len(every))]]
    hazards: list[str] = []

    def by_pass(product: LoopProduct) -> Bits:
        bits, found = interpret(product, new, symbol)
        hazards.extend(found)
        return bits

    verdict = compare(chosen, lambda product: interpret(product, compilers, symbol)[0], by_pass)
    return Verdict(False, f"a hazard: {hazards[0]}") if hazards else verdict


def interpret(product: LoopProduct, image: bytes, symbol: str) -> tuple[Bits, list[str]]:
    """The bits of a product's result by a cubin's machine code, and the hazards met."""
    memory, problem = Memory(), product.problem
    a, b = (memory.put(array, name=name) for name, array in (("a", product.a), ("b", product.b)))
    out = memory.empty((problem.m, problem.n), np.float32, name="out")
    partials = memory.empty((max(4, product.partials),), np.float32, name="partials")
    tickets = memory.put(np.zeros(max(1, product.tickets), np.uint32), name="tickets")
    packed = product.arguments(a.address, b.address, out.address, partials.address, tickets.address)
    results = run_blocks(
        Cubin(image),
        symbol,
        grid=(product.cut.blocks, 1, 1),
        block=(product.instance.threads, 1, 1),
        args=[packed],
        memory=memory,
        dynamic_shared_bytes=product.instance.shared_bytes,
    )
    return memory.get(out).view(np.uint32), [str(hazard) for result in results for hazard in result.hazards]
