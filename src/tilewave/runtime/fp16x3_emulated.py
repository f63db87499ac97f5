"""A product in precision ``fp16x3`` in the emulator: the same kernels and arguments as on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tilewave.emulator import Memory, launch
from tilewave.emulator.launch import LaunchResult
from tilewave.emulator.memory import Buffer
from tilewave.emulator.tensor_maps import encode_for_emulator
from tilewave.errors import EmulationError
from tilewave.kernels import fp16x3
from tilewave.kernels.arguments import Pointers
from tilewave.kernels.build import compile_instance
from tilewave.planner.gemm.records import GemmPlan
from tilewave.runtime.emulated import Floats, place
from tilewave.runtime.fp16x3_steps import Step, packing_steps, steps


def run_step(step: Step, memory: Memory, **options: Any) -> LaunchResult:
    """Run one launch; ``options`` are the emulator's."""
    program, kernel = compile_instance(step.instance, fp16x3.ARCHITECTURE)
    return launch(
        program.ptx,
        kernel.symbol,
        (step.blocks, 1, 1),
        (step.threads, 1, 1),
        list(step.arguments),
        memory,
        dynamic_shared_bytes=step.instance.shared_bytes,
        cluster=(step.cluster, 1, 1),
        **options,
    )


def pack(
    operand: fp16x3.UnpackedOperand, address: int, memory: Memory, **options: Any
) -> tuple[Buffer, fp16x3.PackedAddresses]:
    """Pack an operand in emulated memory; the buffer that holds it, and where in it what lies."""
    packed = memory.empty((operand.packed_bytes,), np.uint8, name="packed")
    scratch = memory.empty((max(1, operand.scratch_bytes),), np.uint8, name="scratch")
    target = fp16x3.PackedAddresses.at(packed.address, operand)
    for step in packing_steps([(operand, address, target, scratch.address)]):
        run_step(step, memory, **options)
    return packed, target


def emulate_fp16x3(
    plan: GemmPlan,
    operands: Mapping[str, Floats],
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    misalignment: int = 0,
    kept: str = "",
    **options: Any,
) -> list[LaunchResult]:
    """Run a plan on NumPy arrays: ``a``, ``b``, ``out`` and, where the plan has them, the others, in place.

    What each of its launches did, the main kernel's last. ``kept`` names operands ("a", "b" or "ab") that are
    packed ahead. Raises ``EmulationError`` when anything but out and preactivation was written, the elements
    between their rows included.
    """
    memory = Memory()
    placed = {name: place(memory, array, name, misalignment) for name, array in operands.items()}
    before = {name: memory.get(item.buffer) for name, item in placed.items()}
    pointers = Pointers(**{name: item.address for name, item in placed.items()})
    ahead: dict[str, int] = {}
    for name, operand in zip("ab", fp16x3.operands_of(plan.problem), strict=True):
        if name in kept:
            ahead[name] = pack(operand, placed[name].address, memory)[0].address
    needed = fp16x3.workspace_bytes(plan.problem, "a" in kept, "b" in kept)
    workspace = memory.empty((needed,), np.uint8, name="workspace")
    launches = steps(
        plan,
        pointers,
        alpha,
        beta,
        memory=workspace.address,
        encode=encode_for_emulator,
        kept_a=ahead.get("a"),
        kept_b=ahead.get("b"),
    )
    results = [run_step(step, memory, **options) for step in launches]
    for name, item in placed.items():
        after = memory.get(item.buffer)
        if name in ("out", "preactivation"):
            operands[name][...] = item.view(after)
            item.view(before[name])[...] = item.view(after)
        if not np.array_equal(before[name].view(np.uint32), after.view(np.uint32)):
            raise EmulationError(f"{'between the rows of ' if name == 'out' else ''}{name} was written")
    return results
