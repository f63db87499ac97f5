"""Running a plan on a GPU: the kernel is loaded, workspace taken, the argument block packed and launched."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from tilewave.errors import UsageError
from tilewave.kernels.arguments import GEMM_ARGS_BYTES, Pointers, pack_arguments
from tilewave.planner.gemm import PlanOptions, plan_gemm
from tilewave.planner.gemm.edges import pointers_of
from tilewave.planner.gemm.records import GemmPlan
from tilewave.problem import GemmProblem, Precision
from tilewave.runtime import driver
from tilewave.runtime.kernels import gpu_state
from tilewave.runtime.workspace import workspace_pool

if TYPE_CHECKING:
    from tilewave.packed import Packed


def run(
    problem: GemmProblem,
    pointers: Pointers,
    alpha: float,
    beta: float,
    *,
    device: int,
    stream: int,
    options: PlanOptions,
    workspace: tuple[int, int] | None = None,
    packed: Sequence[Packed] = (),
) -> GemmPlan:
    """Plan a problem for GPU ``device`` and submit it to ``stream``; nothing waits for it.

    ``workspace`` is the address and size in bytes of memory of the caller's, used in place of the pool's;
    ``packed`` holds operands packed ahead for precision ``fp16x3``.
    """
    if problem.precision is Precision.FP16X3:
        from tilewave.runtime.fp16x3 import run as run_fp16x3  # most processes do without

        return run_fp16x3(
            problem,
            pointers,
            alpha,
            beta,
            device=device,
            stream=stream,
            options=options,
            workspace=workspace,
            packed=packed,
        )
    plan = with_its_loops(plan_gemm(problem, gpu_state(device).spec, options), device, stream, options)
    launch_plan(plan, pointers, alpha, beta, device=device, stream=stream, workspace=workspace)
    return plan


def launch_plan(
    plan: GemmPlan,
    pointers: Pointers,
    alpha: float = 1.0,
    beta: float = 0.0,
    *,
    device: int,
    stream: int,
    workspace: tuple[int, int] | None = None,
) -> None:
    """Submit a plan to a stream (a raw handle; 0 is the legacy default stream), its edges after its tiles.

    What keeps one launch from being submitted is raised before the first is.
    """
    if plan.blocks == 0:
        return
    if plan.edges:
        _require_all(plan, device, stream, workspace)
    given = pointers
    state = gpu_state(device)
    with state.context():
        kernel = state.kernel(plan.instance, stream)
        with workspace_pool(state).submitting if plan.ticket_bytes else nullcontext():
            if plan.ticket_bytes:
                tickets, partials = workspace_of_plan(plan, device, stream, workspace)
                pointers = replace(pointers, tickets=tickets, partials=partials)
            block = ctypes.create_string_buffer(
                pack_arguments(
                    plan.problem, plan.cut, plan.raster, pointers, alpha, beta, depth=plan.instance.bk
                ),
                GEMM_ARGS_BYTES,
            )
            parameters = (ctypes.c_void_p * 1)(ctypes.addressof(block))
            instance = plan.instance
            driver._call(
                "cuLaunchKernel",
                kernel,
                plan.blocks,
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
    for edge in plan.edges:
        launch_plan(
            edge.plan,
            pointers_of(edge, plan.covers, given),
            alpha,
            beta,
            device=device,
            stream=stream,
            workspace=workspace,
        )


def prepare_plan(plan: GemmPlan, *, device: int, branches: int = 1) -> None:
    """Load a plan's kernel and set workspace aside, so that it can be launched inside a capture.

    ``branches`` is the number of streams that take part in the capture side by side.
    """
    state = gpu_state(device)
    if plan.blocks == 0:
        return
    if plan.problem.precision is Precision.FP16X3:
        from tilewave.runtime.fp16x3 import prepare_fp16x3

        prepare_fp16x3(plan, device=device, branches=branches)
        return
    plan = with_its_loops(plan, device, 0, getattr(plan.considered, "options", PlanOptions()))
    parts = list(_parts(plan))
    with state.context():
        for part in parts:
            state.kernel(part.instance, 0)
        if ticket_bytes := max(part.ticket_bytes for part in parts):
            partial_bytes = max(part.partial_bytes for part in parts)
            workspace_pool(state).reserve(ticket_bytes, partial_bytes, branches)


def with_its_loops(plan: GemmPlan, device: int, stream: int, options: PlanOptions) -> GemmPlan:
    """The plan, or another one in place of one whose kernels need loops that this GPU does not run."""
    while lacks_loops(plan, device, stream):
        plan = plan_gemm(plan.covers, gpu_state(device).spec, options)
    return plan


def lacks_loops(plan: GemmPlan, device: int, stream: int) -> bool:
    """Whether kernels of a plan need loops that this GPU does not run; no plan from then on has these."""
    if not plan.edges and not plan.instance.needs_new_loop:
        return False
    state = gpu_state(device)
    return any(state.lacks_loop(part.instance, stream) for part in _parts(plan))


def _parts(plan: GemmPlan) -> Iterator[GemmPlan]:
    """A plan and those of its edges: a launch each."""
    yield plan
    for edge in plan.edges:
        yield from _parts(edge.plan)


def _require_all(plan: GemmPlan, device: int, stream: int, workspace: tuple[int, int] | None) -> None:
    """Load and find what all launches of a plan need: a capture would keep the first ones of a refused call,
    and out would be written in part.
    """
    state = gpu_state(device)
    parts = list(_parts(plan))
    with state.context():
        for part in parts:
            state.kernel(part.instance, stream)
        cut = [part for part in parts if part.ticket_bytes]
        if workspace is not None:
            for part in cut:
                _placed(part, workspace)
        elif cut:
            pool = workspace_pool(state)
            with pool.submitting:
                pool.take(
                    stream,
                    max(part.ticket_bytes for part in cut),
                    max(part.partial_bytes for part in cut),
                )


def workspace_of_plan(
    plan: GemmPlan, device: int, stream: int, given: tuple[int, int] | None
) -> tuple[int, int]:
    """Addresses of tickets and partial sums."""
    if given is None:
        arena = workspace_pool(gpu_state(device)).take(stream, plan.ticket_bytes, plan.partial_bytes)
        return arena.address, arena.partials
    tickets, partials = _placed(plan, given)
    if plan.ticket_bytes:  # else their address may be the one behind the memory
        driver._call("cuMemsetD8Async", tickets, 0, plan.ticket_bytes, stream)
    return tickets, partials


def _placed(plan: GemmPlan, given: tuple[int, int]) -> tuple[int, int]:
    """Where tickets and partial sums lie in memory of the caller's, which must be large enough."""
    address, nbytes = given
    # The caller's memory may begin anywhere; partial sums are written in vectors of 16 bytes.
    partials = -(-address // 16) * 16
    tickets = partials + plan.partial_bytes
    needed = tickets + plan.ticket_bytes - address
    if needed > nbytes:
        raise UsageError(
            f"workspace has {nbytes:,} bytes; this plan needs {needed:,} "
            f"({plan.partial_bytes:,} of partial sums and {plan.ticket_bytes:,} of tickets)"
        )
    return tickets, partials
