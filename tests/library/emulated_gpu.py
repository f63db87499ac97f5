"""An executor that runs the product's own kernels in the emulator, on memory of this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from host_gpu import matrix_at

from tilewave.device import DeviceSpec, get_spec
from tilewave.emulator import Memory
from tilewave.kernels.arguments import Pointers
from tilewave.kernels.group_table import Operands
from tilewave.planner.gemm import GemmPlan, PlanOptions, plan_gemm
from tilewave.planner.gemm.group import GroupPlan, plan_group, portions
from tilewave.problem import GemmProblem
from tilewave.runtime.emulated import Placed, place, run_group_plan, run_plan

ROLES = ("a", "b", "out", "c", "bias", "preactivation")


@dataclass(repr=False)
class EmulatedExecutor:
    """Plans each problem for a GPU model, runs the plan in the emulator, and remembers it.

    Every operand lies in emulated memory at an address with the same remainder by 16 as its own, with NaN
    around it, so that what the problem claims about alignment is put to the test.
    """

    spec: DeviceSpec = field(default_factory=lambda: get_spec("H200"))
    plans: list[GemmPlan] = field(default_factory=list)
    groups: list[GroupPlan] = field(default_factory=list)

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
        memory = Memory()
        operands = _Copies(plan.covers, pointers, memory)
        run_plan(plan, operands.pointers, memory, alpha=alpha, beta=beta, count=False)
        operands.bring_back(memory)
        return plan

    def group(
        self,
        problems: Sequence[GemmProblem],
        operands: Sequence[Operands],
        *,
        device: int,
        stream: int,
        options: PlanOptions,
        workspace: tuple[int, int] | None = None,
    ) -> None:
        """The same for a group, in one launch."""
        for begin, end in portions(problems, options.workspace_limit):
            plan = plan_group(problems[begin:end], self.spec, options)
            self.groups.append(plan)
            memory = Memory()
            copies = [
                _Copies(problem, given.pointers, memory)
                for problem, given in zip(plan.problems, operands[begin:end], strict=True)
            ]
            run_group_plan(
                plan,
                [
                    Operands(copy.pointers, given.alpha, given.beta)
                    for copy, given in zip(copies, operands[begin:end], strict=True)
                ],
                memory,
                count=False,
            )
            for copy in copies:
                copy.bring_back(memory)


class _Copies:
    """The operands of a problem in emulated memory."""

    def __init__(self, seen: GemmProblem, pointers: Pointers, memory: Memory) -> None:
        self.placed: dict[str, Placed] = {}
        self.real: dict[str, np.ndarray[Any, Any]] = {}
        sizes = {"a": (seen.m, seen.k), "b": (seen.k, seen.n)}
        for role in ROLES:
            layout = getattr(seen, role)
            if layout is None or (role in sizes and not seen.product):
                continue
            extents = sizes.get(role, (seen.m, seen.n))
            address = getattr(pointers, role)
            self.real[role] = matrix_at(address, layout, *extents, seen.batch)
            below = sum(
                (extent - 1) * stride
                for extent, stride in zip(
                    (*seen.batch, *extents), (*layout.batch, layout.row, layout.column), strict=True
                )
                if stride < 0
            )
            self.placed[role] = place(memory, self.real[role], role, (address // 4 + below) % 4)
            assert (self.placed[role].address - address) % 16 == 0
        self.before = {role: memory.get(item.buffer) for role, item in self.placed.items()}
        self.pointers = Pointers(
            **({"a": 0, "b": 0} | {role: item.address for role, item in self.placed.items()})
        )

    def bring_back(self, memory: Memory) -> None:
        """Take over results; neither another operand nor a gap between the rows of out may have changed."""
        for role, item in self.placed.items():
            before, after = self.before[role], memory.get(item.buffer)
            if role in ("out", "preactivation"):
                self.real[role][...] = item.view(after)
                item.view(before)[...] = item.view(after)
            assert np.array_equal(before.view(np.uint32), after.view(np.uint32)), role
