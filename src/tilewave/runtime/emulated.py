"""Running a plan in the emulator: the same kernel, the same argument block, no GPU.

Operands are NumPy arrays of any strides. Each is laid out in emulated memory exactly as in its own, and the
elements between its rows, which belong to somebody else, hold NaN and must not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from tilewave.emulator import LaunchResult, Memory, launch
from tilewave.emulator.memory import Buffer
from tilewave.errors import EmulationError
from tilewave.kernels.arguments import Pointers, pack_arguments
from tilewave.kernels.build import compile_instance
from tilewave.kernels.group_table import Operands, pack_group, pack_table, table_parts, table_writer
from tilewave.planner.gemm.edges import pointers_of
from tilewave.planner.gemm.group import GroupPlan
from tilewave.planner.gemm.records import GemmPlan

Floats = NDArray[np.float32]

#: A quiet NaN with a payload that no kernel makes.
GAP = 0x7FC0BEEF


@dataclass(frozen=True)
class Placed:
    """An array in emulated memory; ``address`` is that of its element (0, ..., 0)."""

    buffer: Buffer
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def address(self) -> int:
        """Byte address of the element with all indices 0."""
        return self.buffer.address + 4 * self.first

    def view(self, storage: Floats) -> Floats:
        """The array within a copy of its buffer."""
        strides = tuple(4 * stride for stride in self.strides)
        return as_strided(storage[self.first :], self.shape, strides)


def storage_of(array: Floats, misalignment: int = 0) -> tuple[Floats, int]:
    """Memory that holds ``array`` with its own strides, and the index of its first element; gaps are NaN.

    The lowest address used is ``misalignment`` elements past the beginning.
    """
    reach = [(extent - 1) * (stride // 4) for extent, stride in zip(array.shape, array.strides, strict=True)]
    if array.size == 0:
        reach = []
    below = -sum(distance for distance in reach if distance < 0)
    above = sum(distance for distance in reach if distance > 0)
    storage = np.full(misalignment + below + above + 1, GAP, np.uint32).view(np.float32)
    first = misalignment + below
    if array.size:
        as_strided(storage[first:], array.shape, array.strides)[...] = array
    return storage, first


def place(memory: Memory, array: Floats, name: str, misalignment: int = 0) -> Placed:
    """Lay ``array`` out in ``memory``; its lowest address is ``misalignment`` elements past 256 bytes."""
    storage, first = storage_of(array, misalignment)
    strides = tuple(stride // 4 for stride in array.strides)
    return Placed(memory.put(storage, name=name), first, array.shape, strides)


def run_plan(
    plan: GemmPlan,
    pointers: Pointers,
    memory: Memory,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    arch: str = "sm_90",
    **options: Any,
) -> LaunchResult | None:
    """Run a plan on operands in emulated memory; None when there is nothing to launch.

    Its edges are run too; the result is of its tiles. ``options`` are the emulator's (``resident``,
    ``order``, ``exact_fma``, ``blocks``, ...). The workspace is made here, poisoned; that the tickets are 0
    afterwards is checked.
    """
    if plan.blocks == 0:
        return None
    instance = plan.instance
    program, kernel = compile_instance(instance, arch)
    partials = memory.empty((max(4, plan.partial_bytes // 4),), np.float32, name="partials")
    tickets = memory.put(np.zeros(max(1, plan.cut.counters), np.uint32), name="tickets")
    bound = Pointers(
        pointers.a,
        pointers.b,
        pointers.out,
        pointers.c,
        pointers.bias,
        pointers.preactivation,
        partials.address if plan.partial_bytes else 0,
        tickets.address if plan.ticket_bytes else 0,
    )
    result = launch(
        program.ptx,
        kernel.symbol,
        (plan.blocks, 1, 1),
        (instance.threads, 1, 1),
        [pack_arguments(plan.problem, plan.cut, plan.raster, bound, alpha, beta, depth=instance.bk)],
        memory,
        dynamic_shared_bytes=instance.shared_bytes,
        **options,
    )
    complete = options.get("blocks") is None and options.get("values", True)
    if complete and memory.get(tickets).any():
        raise EmulationError(f"{instance} left tickets behind that are not 0")
    for edge in plan.edges:
        moved = pointers_of(edge, plan.covers, pointers)
        run_plan(edge.plan, moved, memory, alpha=alpha, beta=beta, arch=arch, **options)
    return result


def run_group_plan(
    plan: GroupPlan,
    operands: Sequence[Operands],
    memory: Memory,
    *,
    arch: str = "sm_90",
    **options: Any,
) -> LaunchResult | None:
    """Run the plan of a group on operands in emulated memory; None when there is nothing to launch.

    ``operands`` belong to the plan's problems. A table that does not fit the kernel's argument is written by
    the launches that write it on a GPU. The workspace is made here, poisoned; that the tickets are 0
    afterwards is checked.
    """
    if plan.blocks == 0:
        return None
    instance = plan.instance
    program, kernel = compile_instance(instance, arch)
    table = pack_table(plan.table, operands)
    address = 0
    if plan.table_launches:
        address = memory.empty((len(table) // 4,), np.float32, name="table").address
        writer = table_writer(len(table))
        by, writing = compile_instance(writer, arch)
        for part in table_parts(table, address):
            launch(by.ptx, writing.symbol, (1, 1, 1), (writer.threads, 1, 1), [part], memory, count=False)
    partials = memory.empty((max(4, plan.partial_bytes // 4),), np.float32, name="partials")
    tickets = memory.put(np.zeros(max(1, plan.ticket_bytes // 4), np.uint32), name="tickets")
    argument = pack_group(
        table,
        len(plan.problems),
        plan.table.items,
        address=address,
        partials=partials.address if plan.partial_bytes else 0,
        tickets=tickets.address if plan.ticket_bytes else 0,
    )
    result = launch(
        program.ptx,
        kernel.symbol,
        (plan.blocks, 1, 1),
        (instance.threads, 1, 1),
        [argument],
        memory,
        dynamic_shared_bytes=instance.shared_bytes,
        **options,
    )
    complete = options.get("blocks") is None and options.get("values", True)
    if complete and memory.get(tickets).any():
        raise EmulationError(f"{instance} left tickets behind that are not 0")
    return result


def emulate_plan(
    plan: GemmPlan,
    operands: Mapping[str, Floats],
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    misalignment: int = 0,
    **options: Any,
) -> LaunchResult | None:
    """Run a plan on NumPy arrays: ``a``, ``b``, ``out`` and, where the plan has them, the others, in place.

    ``operands`` lie as ``plan.covers`` says. Raises ``EmulationError`` when anything but out and
    preactivation was written, the elements between their rows included.
    """
    memory = Memory()
    placed = {name: place(memory, array, name, misalignment) for name, array in operands.items()}
    before = {name: memory.get(item.buffer) for name, item in placed.items()}
    pointers = Pointers(**{name: item.address for name, item in placed.items()})
    result = run_plan(plan, pointers, memory, alpha=alpha, beta=beta, **options)
    for name, item in placed.items():
        after = memory.get(item.buffer)
        if name in ("out", "preactivation"):
            operands[name][...] = item.view(after)
            item.view(before[name])[...] = item.view(after)
        if not np.array_equal(before[name].view(np.uint32), after.view(np.uint32)):
            raise EmulationError(
                f"{plan.instance} wrote {'between the rows of ' if name == 'out' else ''}{name}"
            )
    return result
