"""An executor that runs the product's own kernels in the emulator, on memory of this process."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from host_gpu import matrix_at

from tilewave.device import DeviceSpec, get_spec
from tilewave.emulator import Memory
from tilewave.kernels.arguments import Pointers
from tilewave.planner.gemm import GemmPlan, PlanOptions, plan_gemm
from tilewave.problem import GemmProblem
from tilewave.runtime.emulated import place, run_plan

ROLES = ("a", "b", "out", "c", "bias", "preactivation")


@dataclass(repr=False)
class EmulatedExecutor:
    """Plans each problem for a GPU model, runs the plan in the emulator, and remembers it.

    Every operand lies in emulated memory at an address with the same remainder by 16 as its own, with NaN
    around it, so that what the problem claims about alignment is put to the test.
    """

    spec: DeviceSpec = field(default_factory=lambda: get_spec("H200"))
    plans: list[GemmPlan] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"EmulatedExecutor({self.spec.name})"

    def __call__(
        self,
        problem: GemmProblem,
        pointers: Pointers,
        alpha: float,
        beta: float,
        *,
        device: int,
        stream: int,
        options: PlanOptions,
        workspace: tuple[int, int] | None = None,
    ) -> GemmPlan:
        plan = plan_gemm(problem, self.spec, options)
        self.plans.append(plan)
        seen = plan.problem
        memory = Memory()
        placed, real = {}, {}
        sizes = {"a": (seen.m, seen.k), "b": (seen.k, seen.n)}
        for role in ROLES:
            layout = getattr(seen, role)
            if layout is None or (role in sizes and not seen.product):
                continue
            extents = sizes.get(role, (seen.m, seen.n))
            address = getattr(pointers, role)
            real[role] = matrix_at(address, layout, *extents, seen.batch)
            below = sum(
                (extent - 1) * stride
                for extent, stride in zip(
                    (*seen.batch, *extents), (*layout.batch, layout.row, layout.column), strict=True
                )
                if stride < 0
            )
            placed[role] = place(memory, real[role], role, (address // 4 + below) % 4)
            assert (placed[role].address - address) % 16 == 0
        before = {role: memory.get(item.buffer) for role, item in placed.items()}
        run_plan(
            plan,
            Pointers(**({"a": 0, "b": 0} | {role: item.address for role, item in placed.items()})),
            memory,
            alpha=alpha,
            beta=beta,
            count=False,
        )
        for role, item in placed.items():
            after = memory.get(item.buffer)
            if role in ("out", "preactivation"):
                real[role][...] = item.view(after)
                item.view(before[role])[...] = item.view(after)
            # Neither another operand nor a gap between the rows of out may have changed.
            assert np.array_equal(before[role].view(np.uint32), after.view(np.uint32)), role
        return plan
