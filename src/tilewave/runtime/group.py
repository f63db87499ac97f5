"""Running a group of products on a GPU in one launch; its table is the launch's argument, or comes before."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tilewave.errors import UsageError
from tilewave.kernels.group_table import Operands, pack_group, pack_table, table_parts, table_writer
from tilewave.kernels.instances import Instance
from tilewave.planner.gemm.group import GroupPlan, plan_group, portions
from tilewave.problem import GemmProblem
from tilewave.runtime import driver
from tilewave.runtime.kernels import GpuState, gpu_state
from tilewave.runtime.workspace import group_pool

if TYPE_CHECKING:
    from tilewave.planner.gemm.options import PlanOptions


def run_group(
    problems: Sequence[GemmProblem],
    operands: Sequence[Operands],
    *,
    device: int,
    stream: int,
    options: PlanOptions,
    workspace: tuple[int, int] | None = None,
) -> list[GroupPlan]:
    """Plan a group for GPU ``device`` and submit it to ``stream``; nothing waits for it.

    All problems have elements. ``workspace`` is the address and size in bytes of memory of the caller's, used
    in place of the pool's. A group whose table would need more workspace than may be used is launched in
    parts; all of them are planned, and workspace found for them, before the first is launched.
    """
    state = gpu_state(device)
    if workspace is not None:
        limit = max(0, workspace[1] - _lost(workspace[0]))
        options = replace(options, workspace_limit=min(options.workspace_limit, limit))
    parts = portions(problems, options.workspace_limit)
    plans = [plan_group(problems[begin:end], state.spec, options) for begin, end in parts]
    with state.context():
        kernels = {one.name: state.kernel(one, stream) for plan in plans for one in _kernels_of(plan)}
        with group_pool(state).submitting:
            tickets, partials = _workspace(plans, state, stream, workspace)
            for plan, (begin, end) in zip(plans, parts, strict=True):
                _submit(plan, operands[begin:end], kernels, tickets, partials, stream)
    return plans


def launch_group(
    plan: GroupPlan,
    operands: Sequence[Operands],
    *,
    device: int,
    stream: int,
    tickets: int,
    memory: int,
) -> None:
    """Submit a group's plan with memory of the caller's: tickets, which are 0, and `untouched_bytes` more."""
    state = gpu_state(device)
    with state.context():
        kernels = {one.name: state.kernel(one, stream) for one in _kernels_of(plan)}
        _submit(plan, operands, kernels, tickets, memory, stream)


def prepare_group(plan: GroupPlan, *, device: int, branches: int = 1) -> None:
    """Load a group's kernels and set workspace aside, so that it can be launched inside a capture.

    ``branches`` is the number of streams that take part in the capture side by side.
    """
    if plan.blocks == 0:
        return
    state = gpu_state(device)
    with state.context():
        for instance in _kernels_of(plan):
            state.kernel(instance, 0)
        if plan.workspace_bytes:
            group_pool(state).reserve(plan.ticket_bytes, untouched_bytes(plan), branches)


def _workspace(
    plans: Sequence[GroupPlan], state: GpuState, stream: int, given: tuple[int, int] | None
) -> tuple[int, int]:
    """Addresses of tickets, all 0, and of partial sums, for launches that follow one another."""
    ticket_bytes = max((plan.ticket_bytes for plan in plans), default=0)
    untouched = max((untouched_bytes(plan) for plan in plans), default=0)
    if ticket_bytes + untouched == 0:
        return 0, 0
    if given is None:
        arena = group_pool(state).take(stream, ticket_bytes, untouched)
        return arena.address, arena.partials
    address, nbytes = given
    partials = address + _lost(address)
    needed = _lost(address) + untouched + ticket_bytes
    if needed > nbytes:
        raise UsageError(f"workspace has {nbytes:,} bytes; this group needs {needed:,}")
    tickets = partials + untouched
    if ticket_bytes:
        driver._call("cuMemsetD8Async", tickets, 0, ticket_bytes, stream)
    return tickets, partials


def _submit(
    plan: GroupPlan,
    operands: Sequence[Operands],
    kernels: Mapping[str, object],
    tickets: int,
    partials: int,
    stream: int,
) -> None:
    if plan.blocks == 0:
        return
    table = pack_table(plan.table, operands)
    address = partials + plan.partial_bytes if plan.table_launches else 0
    if address:
        writer = table_writer(len(table))
        for part in table_parts(table, address):
            _launch(kernels[writer.name], writer, 1, part, stream)
    argument = pack_group(
        table, len(plan.problems), plan.table.items, address=address, partials=partials, tickets=tickets
    )
    _launch(kernels[plan.instance.name], plan.instance, plan.blocks, argument, stream)


def _kernels_of(plan: GroupPlan) -> tuple[Instance, ...]:
    return (plan.instance, table_writer(plan.table.nbytes)) if plan.table_launches else (plan.instance,)


def untouched_bytes(plan: GroupPlan) -> int:
    """Workspace that need not be 0 beforehand: partial sums, and the table behind them."""
    return plan.partial_bytes + plan.table_workspace_bytes


def _lost(address: int) -> int:
    """Bytes of the caller's memory, which may begin anywhere, before partial sums may: at 16."""
    return -address % 16


def _launch(kernel: object, instance: Instance, blocks: int, argument: bytes, stream: int) -> None:
    block = ctypes.create_string_buffer(argument, len(argument))
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(block))
    driver._call(
        "cuLaunchKernel",
        kernel,
        blocks,
        1,
        1,
        instance.threads,
        1,
        1,
        instance.shared_bytes,
        stream,
        ctypes.addressof(parameters),
        0,
    )
